"""Links that another user puts in the place of a folder, before and while things in the folder are removed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from pipeline.common import links, storage, trust
from pipeline.common.errors import UserError
from pipeline.common.file_lock import open_lock_file
from pipeline.common.links import held_folder, refuse_link_of_others
from pipeline.common.run_identity import take_id
from pipeline.train.checkpoint.manager import Checkpoint, Checkpoints

OTHER = 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="gives links to another user")


def link(at: Path, to: Path, owner: int) -> None:
    at.symlink_to(to)
    os.lchown(at, owner, owner)


def checkpoints(run: Path) -> Checkpoints:
    for step in (1, 2):
        folder = run / f"checkpoints/step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "weights").write_text("precious")
    return Checkpoints(run / "checkpoints")


def test_checkpoints_of_another_run_are_not_removed_through_a_link(tmp_path: Path) -> None:
    precious, shared = checkpoints(tmp_path / "precious"), checkpoints(tmp_path / "shared")
    before = sorted(precious.folder.rglob("*"))
    shutil.rmtree(shared.folder)
    link(shared.folder, precious.folder, OTHER)
    (precious.folder / "step-00000003.1.tmp").mkdir()
    with pytest.raises(UserError, match=f"belongs to the user {OTHER}"):
        shared.remove(shared.all())
    with pytest.raises(UserError, match="a link to"):
        shared.clean(print)
    with pytest.raises(UserError, match="a link to"):
        shared.begin(4, 1)
    assert sorted(precious.folder.rglob("*")) == sorted([*before, precious.folder / "step-00000003.1.tmp"])


def test_a_link_that_comes_during_the_removal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    precious, shared = checkpoints(tmp_path / "precious"), checkpoints(tmp_path / "shared")
    replace = os.replace

    def swapped(*arguments: object, **options: object) -> None:
        if not shared.folder.is_symlink():
            shared.folder.rename(tmp_path / "aside")
            link(shared.folder, precious.folder, OTHER)
        replace(*arguments, **options)  # type: ignore[arg-type]

    everything = shared.all()
    monkeypatch.setattr(os, "replace", swapped)
    with pytest.raises(UserError, match="a link to"):
        shared.remove(everything)
    assert [each.name for each in (tmp_path / "aside").iterdir()] == ["step-00000002"]
    assert len(precious.all()) == 2


def test_links_of_ones_own_are_followed(tmp_path: Path) -> None:
    elsewhere, run = checkpoints(tmp_path / "elsewhere"), tmp_path / "run"
    run.mkdir()
    link(run / "checkpoints", elsewhere.folder, os.geteuid())
    found = Checkpoints(run / "checkpoints")
    assert [each.step for each in found.remove(found.all())] == [1, 2]
    assert found.begin(3, 1).is_dir()
    # The owner of the folder decides what is in it, as in /tmp.
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, OTHER, OTHER)
    link(theirs / "checkpoints", elsewhere.folder, OTHER)
    with held_folder(theirs / "checkpoints") as descriptor:
        assert os.fstat(descriptor).st_ino == elsewhere.folder.stat().st_ino
    refuse_link_of_others(tmp_path / "nothing")


def test_a_checkpoint_that_is_a_link_goes_alone(tmp_path: Path) -> None:
    """The link is removed, and not what it leads to."""
    precious, shared = checkpoints(tmp_path / "precious"), checkpoints(tmp_path / "shared")
    shutil.rmtree(shared.folder / "step-00000001")
    link(shared.folder / "step-00000001", precious.folder / "step-00000001", OTHER)
    with pytest.raises(Exception, match="cannot be removed"):
        shared.remove([Checkpoint(shared.folder / "step-00000001", 1)])
    assert (precious.folder / "step-00000001/weights").read_text() == "precious"


OWNER, MEMBER, GROUP = 61001, 61002, 61000


def as_owner(does: Callable[[], object]) -> str:
    """The message of the error that a function ends with as a user who is not root, in a process of his own.

    It must import nothing there: that user need not be able to read the interpreter.
    """
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setresgid(GROUP, GROUP, GROUP)
            os.setresuid(OWNER, OWNER, OWNER)
            does()
            os.write(writing, b"done")
        except BaseException as error:
            os.write(writing, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as file:
        message = file.read()
    os.waitpid(child, 0)
    return message


@pytest.fixture
def folders() -> Iterator[tuple[Path, Path]]:
    """A shared and a private folder of the owner, below one that all users may pass."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        shared, private = Path(name, "shared"), Path(name, "private")
        for each in (shared, shared / "inner", private, private / "inner"):
            each.mkdir()
            os.chown(each, OWNER, GROUP)
            each.chmod(0o775)
        for path in (private / "file", private / "inner/file"):
            path.write_text("precious\n")
            os.chown(path, OWNER, GROUP)
        yield shared, private


def append(path: Path) -> None:
    with closing(storage.JsonLines(path)) as lines:
        lines.write({"a": 1})


WRITES: dict[str, Callable[[Path], object]] = {
    "put": lambda path: storage.put(path, b"new"),
    "json lines": append,
    "append": lambda path: storage.append_line(path, b"new"),
    "write at": lambda path: storage.write_at(path, 0, b"new"),
    "cut": lambda path: storage.cut(path, 0),
    "reserved": lambda path: storage.Reserved(path).write(b"new"),
    "new file": lambda path: storage.NewFile(path).__enter__(),
    "create": links.create,
    "remove": links.remove,
    "remove tree": lambda path: links.remove_tree(path.parent),
    "lock": open_lock_file,
    "run id": lambda path: take_id(path.parent),
    "make folder": lambda path: storage.make_below(path.parents[1], path.parent / "more"),
    "rename": lambda path: links.replace(path, path.with_name("other")),
}
IN_PLACE = ("json lines", "append", "write at", "cut", "reserved", "create")


@pytest.mark.parametrize("write", WRITES)
def test_nothing_is_written_through_folders_of_a_member_of_the_group(write: str, folders: tuple[Path, Path]) -> None:
    """A link in the place of a folder; and in a folder that the member has made, and owns, in its place."""
    shared, private = folders
    shutil.rmtree(shared / "inner")
    link(shared / "inner", private / "inner", MEMBER)
    inside = "inner/file/x" if write == "remove tree" else "inner/file"
    assert f"user {MEMBER}" in as_owner(lambda: WRITES[write](shared / inside))
    (shared / "made").mkdir(mode=0o777)
    os.chown(shared / "made", MEMBER, GROUP)
    link(shared / "made/inner", private / "inner", MEMBER)
    assert f"user {MEMBER}" in as_owner(lambda: WRITES[write](shared / "made" / inside))
    assert (private / "inner/file").read_text() == "precious\n"
    assert [each.name for each in (private / "inner").iterdir()] == ["file"]


@pytest.mark.parametrize("write", IN_PLACE)
def test_nothing_is_written_in_place_where_a_member_has_put_a_link_or_a_pipe(
    write: str, folders: tuple[Path, Path]
) -> None:
    shared, private = folders
    link(shared / "inner/file", private / "file", MEMBER)
    if write != "reserved":  # which makes it anew
        assert f"user {MEMBER}" in as_owner(lambda: WRITES[write](shared / "inner/file"))
    else:
        as_owner(lambda: WRITES[write](shared / "inner/file"))
    assert (private / "file").read_text() == "precious\n"
    os.mkfifo(shared / "pipe", 0o666)
    os.chmod(shared / "pipe", 0o666)
    as_owner(lambda: WRITES[write](shared / "pipe"))


def test_links_of_the_user_of_root_and_of_trusted_users_are_followed(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, private = folders
    link(shared / "mine", private / "inner", OWNER)
    link(shared / "roots", Path("../private"), 0)
    assert as_owner(lambda: storage.put(shared / "mine/file", b"1")) == "done"
    assert (private / "inner/file").read_bytes() == b"1"
    assert as_owner(lambda: storage.put(shared / "roots/inner/file", b"2")) == "done"
    assert (private / "inner/file").read_bytes() == b"2"
    link(shared / "theirs", private / "inner", MEMBER)
    link(shared / "loop", Path("loop"), OWNER)
    assert "levels of symbolic links" in as_owner(lambda: storage.put(shared / "loop/file", b"3"))
    assert "FileNotFoundError" in as_owner(lambda: storage.put(shared / "none/file", b"3"))
    monkeypatch.setenv(trust.TRUSTED, str(MEMBER))
    assert as_owner(lambda: storage.put(shared / "theirs/file", b"3")) == "done"
    assert (private / "inner/file").read_bytes() == b"3"


def test_a_way_above_the_folders_of_the_user_is_his_choice(folders: tuple[Path, Path]) -> None:
    shared, _ = folders
    above = shared.parent / "project"
    link(above, shared, MEMBER)
    assert as_owner(lambda: storage.put(above / "inner/file", b"1")) == "done"
    assert (shared / "inner/file").read_bytes() == b"1"


def test_pipes_and_links_in_a_folder_that_is_committed_hold_nothing_up(tmp_path: Path) -> None:
    tmp = tmp_path / "tmp"
    (tmp / "inner").mkdir(parents=True)
    (tmp / "inner/file").touch()
    os.mkfifo(tmp / "inner/pipe")
    (tmp / "inner/link").symlink_to("/dev/zero")
    storage.commit(tmp, tmp_path / "final")
    assert (tmp_path / "final/inner/file").exists()
