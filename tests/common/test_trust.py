"""Who may have written a file, by owners, modes, links and ACLs; and whose files a user trusts."""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.common.errors import UserError
from pipeline.common.trust import OPTION, TRUSTED, Writer, refuse_replaceable, refuse_untrusted, trust, writers

OTHER, OTHERS = 65534, 65533
USER, GROUP, EVERYONE = Writer("user", OTHER), Writer("group", OTHERS), Writer("everyone", 0)
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user, which only root may")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of this user that lies in one with the sticky bit, as /tmp has it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
def file(folder: Path) -> Path:
    (folder / "a" / "b").mkdir(parents=True)
    file = folder / "a" / "b" / "file"
    file.touch(0o644)
    return file


def given(path: Path, user: int = OTHER, group: int = -1) -> Path:
    os.chown(path, user, group, follow_symlinks=False)
    return path


def link(at: Path, to: Path) -> Path:
    at.symlink_to(to)
    return at


def acl(path: Path) -> None:
    """Give a user and a group the right to write, and the owning group none."""
    entries = [(0x01, 6, -1), (0x02, 6, OTHER), (0x04, 4, -1), (0x08, 6, OTHERS), (0x10, 6, -1), (0x20, 4, -1)]
    packed = b"".join(struct.pack("<HHi", *entry) for entry in entries)
    try:
        os.setxattr(path, "system.posix_acl_access", struct.pack("<I", 2) + packed)
    except OSError as error:
        pytest.skip(f"this file system has no ACLs ({error})")


def test_a_file_of_this_user_has_no_other_writers(file: Path) -> None:
    assert writers(file, Path("/bin/sh"), file.parent, file.with_name("missing")) == {}
    refuse_replaceable(file.parent, "")
    refuse_untrusted("key", [file], "")


CASES: dict[str, tuple[Callable[[Path], object], set[Writer]]] = {
    "owner": (given, {USER}),
    "owner of a folder": (lambda file: given(file.parent), {USER}),
    "owner of a folder above": (lambda file: given(file.parents[1]), {USER}),
    "group": (lambda file: (given(file, 0, OTHERS), file.chmod(0o664)), {GROUP}),
    "group of a folder above": (
        lambda file: (given(file.parents[1], 0, OTHERS), file.parents[1].chmod(0o2775)),
        {GROUP},
    ),
    "all of them": (lambda file: (given(file, OTHER, OTHERS), file.chmod(0o666)), {USER, GROUP, EVERYONE}),
    "everyone": (lambda file: file.chmod(0o646), {EVERYONE}),
    "a sticky folder above": (lambda file: file.parents[1].chmod(0o1777), set()),
    "files beside it": (lambda file: file.parent.chmod(0o1777), {EVERYONE}),
    "no right": (lambda file: (given(file, 0, OTHERS), file.chmod(0o644)), set()),
    "acl": (acl, {USER, GROUP}),
}


@as_root
@pytest.mark.parametrize("case", CASES)
def test_other_writers(case: str, file: Path) -> None:
    change, expected = CASES[case]
    change(file)
    assert set(writers(file)) == expected


@as_root
def test_links_on_the_way_are_followed(folder: Path, file: Path) -> None:
    theirs = folder / "theirs"
    theirs.mkdir()
    assert set(writers(link(folder / "mine", file))) == set()
    assert set(writers(given(link(folder / "own", file)))) == {USER}
    # Mine, to theirs, to mine: who owns the middle can turn it elsewhere.
    given(link(theirs / "middle", file.parent))
    assert set(writers(link(folder / "through", theirs / "middle") / file.name)) == {USER}
    given(theirs)
    assert set(writers(link(folder / "up", theirs / ".." / "a") / "b" / file.name)) == {USER}
    assert set(writers(link(folder / "round", folder / "round"))) == set()


@as_root
def test_a_missing_file_is_whose_folder_it_is(file: Path) -> None:
    given(file.parent)
    assert set(writers(file.with_name("missing"), file.parent / "no" / "file")) == {USER}


@as_root
def test_a_user_who_is_named_is_trusted(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(TRUSTED, raising=False)
    user, group = USER.name, GROUP.name
    given(file, OTHER, OTHERS)
    file.chmod(0o664)
    with pytest.raises(UserError) as refused:
        refuse_untrusted("some.key", [file], "or do this")
    for text in ("some.key", str(file), f"{OPTION} {user}", f"{OPTION} {group}", f"{TRUSTED}={user},{group}", "or do"):
        assert text in str(refused.value)
    trust([user])
    with pytest.raises(UserError, match=group) as refused:
        refuse_untrusted("some.key", [file], "")
    assert f"{OPTION} {user}" not in str(refused.value)
    trust([group])
    assert os.environ[TRUSTED] == f"{user},{group}"
    capsys.readouterr()
    refuse_untrusted("some.key", [file], "")
    said = capsys.readouterr()
    assert said.out == "" and all(each in said.err for each in ("some.key", user, group, str(file)))
    monkeypatch.setenv(TRUSTED, f"{OTHER} group:{OTHERS}")
    refuse_untrusted("some.key", [file], "")
    file.chmod(0o666)
    with pytest.raises(UserError, match="chmod o-w") as refused:
        refuse_untrusted("some.key", [file], "")
    assert OPTION not in str(refused.value)


def test_a_name_that_nobody_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TRUSTED, raising=False)
    for name in ("no-such-user-here", "group:no-such-group-here"):
        with pytest.raises(UserError, match=name):
            trust([name])
    assert TRUSTED not in os.environ
