"""Which checkpoint is valid, which one a run goes on from, which ones go: on folders, without tensors."""

import errno
import itertools
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.config.checkpoint import CheckpointConfig
from pipeline.train.checkpoint.committed import Parent, changed
from pipeline.train.checkpoint.manager import Checkpoint, Checkpoints, Files, NotRemoved, record_of


def write(folder: Path) -> Files:
    (folder / "weights").write_bytes(folder.name.encode() * 100)
    return {"weights": record_of(folder / "weights")}


def save(checkpoints: Checkpoints, *steps: int) -> None:
    for step in steps:
        tmp = checkpoints.begin(step, 1)
        checkpoints.commit(tmp, step, write(tmp), {"note": step})


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints")


def silent(line: str) -> None:
    pass


def resume(checkpoints: Checkpoints, report: Callable[[str], None]) -> Checkpoint | None:
    """As a start does that goes on from the latest one."""
    found = checkpoints.resumable(report)
    if found is not None:
        checkpoints.resume_from(found, None, report)
    return found


def follow(checkpoints: Checkpoints, step: int, report: Callable[[str], None]) -> Checkpoint:
    """As a start does that is told to go on from a step."""
    found = checkpoints.follow(step, report)
    checkpoints.resume_from(found, step, report)
    return found


def test_save_commits_and_points_latest_to_it(checkpoints: Checkpoints) -> None:
    assert checkpoints.latest() is None
    save(checkpoints, 10, 20)
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.step == 20
    assert latest.problems() == []
    first = checkpoints.at(10)
    parent = {"step": 10, "name": "step-00000010", "fingerprint": first.fingerprint}
    assert latest.state() == {"note": 20, "step": 20, "parent": parent}
    assert first.state() == {"note": 10, "step": 10, "parent": None}
    assert latest.time >= first.time > 0
    assert sorted(p.name for p in checkpoints.folder.iterdir()) == ["latest", "step-00000010", "step-00000020"]


def test_what_is_being_written_is_no_checkpoint(checkpoints: Checkpoints) -> None:
    save(checkpoints, 10)
    write(checkpoints.begin(20, 1))
    assert checkpoints.at(None).step == 10
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [10]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "weights").unlink(), "weights is missing"),
        (lambda path: (path / "weights").write_bytes(b"x"), "1 bytes instead of"),
        (lambda path: (path / "COMMIT").unlink(), "COMMIT is missing"),
        (lambda path: (path / "COMMIT").write_bytes(b'{"files": 3}'), "COMMIT is damaged"),
        (lambda path: (path / "COMMIT").write_bytes(b'{"files": {"weights": 1}}'), "COMMIT is damaged"),
        (lambda path: (path / "COMMIT").write_bytes(b"[]"), "COMMIT is damaged"),
        (lambda path: (path / "COMMIT").write_bytes(b"{"), "not valid JSON"),
        (lambda path: (path / "state.json").write_bytes(b"{}"), "state.json has 2 bytes"),
    ],
)
def test_damage_is_named_and_passed_over(checkpoints: Checkpoints, damage: object, message: str) -> None:
    save(checkpoints, 10, 20)
    damage(checkpoints.folder / "step-00000020")  # type: ignore[operator]
    with pytest.raises(UserError, match=message):
        checkpoints.at(20)
    said: list[str] = []
    found = resume(checkpoints, said.append)
    assert found is not None
    assert found.step == 10
    assert message in said[0]
    assert (checkpoints.folder / "abandoned" / "step-00000020").is_dir()
    save(checkpoints, 20)  # the name is free again
    assert checkpoints.at(None).step == 20


def test_one_flipped_bit_is_found(checkpoints: Checkpoints) -> None:
    save(checkpoints, 10)
    path = checkpoints.folder / "step-00000010" / "weights"
    data = bytearray(path.read_bytes())
    data[37] ^= 4
    path.write_bytes(data)
    assert checkpoints.all()[0].problems(full=False) == []
    assert "has changed since it was written" in checkpoints.all()[0].problems()[0]


def test_all_damaged_is_an_error_and_never_a_start_from_random_weights(checkpoints: Checkpoints) -> None:
    save(checkpoints, 10, 20)
    for checkpoint in checkpoints.all():
        (checkpoint.path / "weights").unlink()
    with pytest.raises(UserError, match="random weights"):
        resume(checkpoints, silent)
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [10, 20]


def point_to(checkpoints: Checkpoints, step: int) -> None:
    (checkpoints.folder / "latest").write_text(f"step-{step:08d}\n")


def test_a_commit_that_latest_did_not_reach_counts_if_it_descends_from_there(checkpoints: Checkpoints) -> None:
    """A kill between the rename and the move of `latest`."""
    save(checkpoints, 10, 20, 30)
    point_to(checkpoints, 20)
    assert checkpoints.at(None).step == 30
    found = resume(checkpoints, silent)
    assert found is not None
    assert found.step == 30
    assert (checkpoints.folder / "latest").read_text() == "step-00000030\n"
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [10, 20, 30]


def test_a_newer_one_of_another_line_is_set_aside(checkpoints: Checkpoints, tmp_path: Path) -> None:
    other = Checkpoints(tmp_path / "other")
    save(other, 5, 20)
    save(checkpoints, 10)
    shutil.copytree(other.folder / "step-00000020", checkpoints.folder / "step-00000020")
    said: list[str] = []
    found = resume(checkpoints, said.append)
    assert found is not None
    assert found.step == 10
    assert "moving step-00000020 to" in said[0]
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [10]


def test_a_parent_that_is_not_the_one_it_was_is_passed_over(checkpoints: Checkpoints, tmp_path: Path) -> None:
    other = Checkpoints(tmp_path / "other")
    save(other, 5, 20)
    save(checkpoints, 10, 20, 30)
    shutil.rmtree(checkpoints.folder / "step-00000020")
    shutil.copytree(other.folder / "step-00000020", checkpoints.folder / "step-00000020")
    (checkpoints.folder / "step-00000030" / "weights").unlink()
    said: list[str] = []
    found = resume(checkpoints, said.append)
    assert found is not None
    assert found.step == 10
    assert "step-00000020 is not the checkpoint that step-00000030 descends from" in said[1]


def test_older_ones_that_it_does_not_descend_from_are_no_way_out(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """A folder with the first checkpoint of a run, that a foreign older one was copied into."""
    other = Checkpoints(tmp_path / "other")
    save(other, 5)
    save(checkpoints, 10)
    shutil.copytree(other.folder / "step-00000005", checkpoints.folder / "step-00000005")
    (checkpoints.folder / "step-00000010" / "weights").unlink()
    with pytest.raises(UserError, match="random weights"):
        resume(checkpoints, silent)


def test_where_the_parent_was_removed_the_one_before_it_counts(checkpoints: Checkpoints) -> None:
    save(checkpoints, 10, 20, 30)
    shutil.rmtree(checkpoints.folder / "step-00000020")
    (checkpoints.folder / "step-00000030" / "weights").unlink()
    found = resume(checkpoints, silent)
    assert found is not None
    assert found.step == 10


def test_the_parents_of_earlier_versions_are_names(checkpoints: Checkpoints) -> None:
    save(checkpoints, 10)
    tmp = checkpoints.begin(20, 1)
    files = write(tmp)
    storage.put_json(tmp / "state.json", {"step": 20, "parent": "step-00000010"})
    storage.put_json(tmp / "COMMIT", {"step": 20, "files": {**files, "state.json": record_of(tmp / "state.json")}})
    storage.commit(tmp, checkpoints.folder / "step-00000020")
    found = resume(checkpoints, silent)
    assert found is not None
    assert found.step == 20
    (found.path / "weights").unlink()
    found = resume(checkpoints, silent)
    assert found is not None
    assert found.step == 10


@pytest.mark.parametrize("latest", [b"step-00000010\n", b"", b"\xff"])
def test_a_latest_without_checkpoints_is_an_error_and_never_a_start_from_random_weights(
    checkpoints: Checkpoints, latest: bytes
) -> None:
    save(checkpoints, 10)
    shutil.rmtree(checkpoints.folder / "step-00000010")
    (checkpoints.folder / "latest").write_bytes(latest)
    with pytest.raises(UserError, match="random weights"):
        resume(checkpoints, silent)


def test_a_renamed_checkpoint_is_not_what_its_name_says(checkpoints: Checkpoints) -> None:
    save(checkpoints, 10)
    (checkpoints.folder / "step-00000010").rename(checkpoints.folder / "step-00000020")
    with pytest.raises(UserError, match="COMMIT is of step 10"):
        checkpoints.at(20)


@pytest.mark.parametrize("latest", [20, 30])
def test_a_copy_of_an_older_one_is_named_and_the_one_before_it_counts(checkpoints: Checkpoints, latest: int) -> None:
    save(checkpoints, 10, 20)
    shutil.copytree(checkpoints.folder / "step-00000010", checkpoints.folder / "step-00000030")
    point_to(checkpoints, latest)
    said: list[str] = []
    found = resume(checkpoints, said.append)
    assert found is not None
    assert found.step == 20
    assert "step-00000030/COMMIT is of step 10: the folder is a copy" in said[0]
    assert [each.step for each in checkpoints.all()] == [10, 20]


def test_going_back_moves_later_ones_away_and_begins_a_new_line(checkpoints: Checkpoints) -> None:
    save(checkpoints, 10, 20, 30, 40)
    damage(checkpoints, 20)
    said: list[str] = []
    found = checkpoints.rewind(25, said.append)
    assert found is not None
    assert found.step == 10
    assert "step-00000020 is damaged" in said[0]
    assert [c.step for c in checkpoints.all()] == [10]
    assert [c.step for c in checkpoints.abandoned()] == [20, 30, 40]
    save(checkpoints, 20)
    assert checkpoints.rewind(5, silent) is None
    assert checkpoints.at(None).parent() == Parent("step-00000010", 10, found.fingerprint)
    found = checkpoints.rewind(15, silent)
    assert found is not None
    assert [c.path.name for c in checkpoints.abandoned()] == [
        "step-00000020",
        "step-00000020.2",
        "step-00000030",
        "step-00000040",
    ]


def damage(checkpoints: Checkpoints, step: int) -> None:
    path = checkpoints.folder / f"step-{step:08d}" / "weights"
    data = bytearray(path.read_bytes())
    data[37] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("instant", range(6))
def test_a_kill_while_going_back_is_finished_by_the_next_start(checkpoints: Checkpoints, instant: int) -> None:
    """Renames of a process that goes back: the marker, `latest`, then each checkpoint."""
    save(checkpoints, 10, 20, 30, 40)
    process = multiprocessing.get_context("fork").Process(target=go_back_and_die, args=(checkpoints, instant))
    process.start()
    process.join()
    assert process.exitcode == (-signal.SIGKILL if instant < 5 else 0)
    checkpoints.clean(silent)
    found = resume(checkpoints, silent)
    assert found is not None
    # Before the first rename nothing was decided.
    assert found.step == (40 if instant == 0 else 10)
    assert [c.step for c in checkpoints.all()] == ([10, 20, 30, 40] if instant == 0 else [10])
    assert sorted(p.name for p in checkpoints.folder.iterdir() if p.is_file()) == ["latest"]


def go_back_and_die(checkpoints: Checkpoints, instant: int) -> None:
    dies_at_rename(instant)
    checkpoints.rewind(10, silent)


def dies_at_rename(instant: int) -> None:
    """From now on this process kills itself instead of renaming anything for the n-th time, from 0."""
    rename, count = os.replace, itertools.count()

    def replace(old: Path, new: Path, **folders: int) -> None:
        if next(count) == instant:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(old, new, **folders)

    os.replace = replace


def save_prune_and_die(checkpoints: Checkpoints, instant: int) -> None:
    dies_at_rename(instant)
    save(checkpoints, 40)
    checkpoints.prune(CheckpointConfig(keep=1))


@pytest.mark.parametrize("instant", range(8))
def test_a_kill_at_any_rename_of_a_save_leaves_the_old_or_the_new_one(checkpoints: Checkpoints, instant: int) -> None:
    """state.json, COMMIT, the checkpoint, `latest`, then one for each that is removed."""
    save(checkpoints, 10, 20, 30)
    process = multiprocessing.get_context("fork").Process(target=save_prune_and_die, args=(checkpoints, instant))
    process.start()
    process.join()
    assert process.exitcode == (-signal.SIGKILL if instant < 7 else 0)
    checkpoints.clean(silent)
    found = resume(checkpoints, silent)
    assert found is not None
    assert found.step == (30 if instant < 3 else 40)
    there = [10, 20, 30][max(0, instant - 4) :] + ([40] if instant >= 3 else [])
    assert [c.step for c in checkpoints.all()] == there
    assert all(c.problems() == [] for c in checkpoints.all())
    assert len(list(checkpoints.folder.iterdir())) == len(there) + 1
    save(checkpoints, 50)
    assert checkpoints.at(50).parent() == Parent(found.path.name, found.step, found.fingerprint)


def fails(name: str, function: Callable[..., None]) -> Callable[..., None]:
    """`function`, but on a full disk for the path of that name."""

    def full_disk(path: Path, *arguments: bytes) -> None:
        if path.name == name:
            raise OSError(errno.ENOSPC, "no space", str(path))
        function(path, *arguments)

    return full_disk


def test_a_checkpoint_that_latest_has_no_room_for_is_committed_all_the_same(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(checkpoints, 10)
    with monkeypatch.context() as patched:
        patched.setattr(storage, "put", fails("latest", storage.put))
        save(checkpoints, 20)
    assert (checkpoints.folder / "latest").read_text() == "step-00000010\n"
    assert checkpoints.at(None).step == 20
    assert [c.step for c in checkpoints.prune(CheckpointConfig(keep=1))] == [10]
    assert checkpoints.at(None).step == 20
    save(checkpoints, 30)
    assert (checkpoints.folder / "latest").read_text() == "step-00000030\n"
    assert checkpoints.at(None).parent() == Parent("step-00000020", 20, checkpoints.at(20).fingerprint)


def test_a_commit_that_failed_after_the_rename_is_done_by_the_next_try(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(checkpoints, 10)
    tmp = checkpoints.begin(20, 1)
    with monkeypatch.context() as patched, pytest.raises(OSError, match="no space"):
        patched.setattr(storage, "sync", fails("checkpoints", storage.sync))
        checkpoints.commit(tmp, 20, write(tmp), {"attempt": 1})
    first = checkpoints.at(None)
    assert first.step == 20
    tmp = checkpoints.begin(20, 1)
    again = checkpoints.commit(tmp, 20, write(tmp), {"attempt": 1})
    assert again.fingerprint == first.fingerprint
    assert sorted(p.name for p in checkpoints.folder.iterdir()) == ["latest", "step-00000010", "step-00000020"]
    assert (checkpoints.folder / "latest").read_text() == "step-00000020\n"
    assert again.parent() == Parent("step-00000010", 10, checkpoints.at(10).fingerprint)


def test_a_try_to_save_begins_with_an_empty_folder(checkpoints: Checkpoints) -> None:
    write(checkpoints.begin(10, 1))
    assert list(checkpoints.begin(10, 1).iterdir()) == []


def test_a_step_that_is_asked_for_is_followed_once(checkpoints: Checkpoints) -> None:
    """A job that is started again with the same run file must not go back each time."""
    save(checkpoints, 10, 20, 30)
    assert follow(checkpoints, 10, silent).step == 10
    assert [c.step for c in checkpoints.abandoned()] == [20, 30]
    assert follow(checkpoints, 10, silent).step == 10
    save(checkpoints, 15, 25)
    said: list[str] = []
    assert follow(checkpoints, 10, said.append).step == 25
    assert "resume.from=10 was applied before: resuming from step 25" in said[0]
    damage(checkpoints, 25)
    assert follow(checkpoints, 10, silent).step == 15
    resume(checkpoints, silent)
    assert follow(checkpoints, 10, silent).step == 10


def test_a_step_that_was_followed_may_be_gone_later(checkpoints: Checkpoints) -> None:
    """Retention removes it while the run goes on, and a rewind goes back to before it."""
    save(checkpoints, 10, 20)
    assert follow(checkpoints, 10, silent).step == 10
    save(checkpoints, 15, 25)
    checkpoints.remove([checkpoints.at(10)])
    said: list[str] = []
    assert follow(checkpoints, 10, said.append).step == 25
    assert "resume.from=10 was applied before, and its checkpoint is gone: resuming from step 25" in said[0]
    assert follow(checkpoints, 25, silent).step == 25
    checkpoints.rewind(15, silent)
    assert follow(checkpoints, 25, silent).step == 15
    with pytest.raises(UserError, match="step 10 .*steps there: 15"):
        follow(checkpoints, 10, silent)


def test_a_run_that_has_made_the_followed_step_anew_stays_where_it_is(checkpoints: Checkpoints) -> None:
    """A fault led it back to before that step, and it has come by since."""
    save(checkpoints, 10, 20, 30)
    follow(checkpoints, 20, silent)
    checkpoints.rewind(15, silent)
    for step in (20, 30):
        tmp = checkpoints.begin(step, 2)
        checkpoints.commit(tmp, step, write(tmp), {"attempt": 2})
    assert follow(checkpoints, 20, silent).step == 30
    assert [c.step for c in checkpoints.all()] == [10, 20, 30]


def test_a_step_that_is_asked_for_and_damaged_or_gone_is_an_error(checkpoints: Checkpoints) -> None:
    with pytest.raises(UserError, match="step 10 .*steps there: none"):
        follow(checkpoints, 10, silent)
    save(checkpoints, 10, 20, 30)
    checkpoints.rewind(20, silent)
    with pytest.raises(UserError, match="steps there: 10, 20.*abandoned has one"):
        follow(checkpoints, 30, silent)
    damage(checkpoints, 10)
    with pytest.raises(UserError, match="resume.from is 10, but .*\n.*has changed"):
        follow(checkpoints, 10, silent)
    assert [c.step for c in checkpoints.all()] == [10, 20]


def test_without_latest_the_newest_commit_counts(checkpoints: Checkpoints) -> None:
    save(checkpoints, 10, 20)
    (checkpoints.folder / "latest").unlink()
    found = resume(checkpoints, silent)
    assert found is not None
    assert found.step == 20


def test_a_latest_that_is_no_text_is_passed_over(checkpoints: Checkpoints) -> None:
    save(checkpoints, 10, 20)
    (checkpoints.folder / "latest").write_bytes(b"\xff\xfe")
    found = resume(checkpoints, silent)
    assert found is not None
    assert found.step == 20


def test_a_refusal_before_the_commit_makes_nothing_visible(checkpoints: Checkpoints) -> None:
    def refuse() -> None:
        raise UserError("not yours")

    tmp = checkpoints.begin(10, 1)
    with pytest.raises(UserError, match="not yours"):
        checkpoints.commit(tmp, 10, write(tmp), {}, refuse)
    assert list(checkpoints.folder.iterdir()) == [tmp]


def test_prune_keeps_the_newest_and_the_permanent_ones(checkpoints: Checkpoints) -> None:
    save(checkpoints, 10, 20, 30, 40, 50)
    config = CheckpointConfig(keep=2, keep_every=20)
    assert [c.step for c in checkpoints.prune(config, dry_run=True)] == [10, 30]
    assert [c.step for c in checkpoints.prune(config)] == [10, 30]
    assert [c.step for c in checkpoints.all()] == [20, 40, 50]


def test_prune_never_removes_the_last_one_that_can_be_trusted(checkpoints: Checkpoints) -> None:
    save(checkpoints, 10, 20, 30, 40)
    for step in (30, 40):
        (checkpoints.folder / f"step-{step:08d}" / "weights").unlink()
    assert [c.step for c in checkpoints.prune(CheckpointConfig(keep=1))] == [10, 30]
    damage(checkpoints, 20)
    save(checkpoints, 50)
    damage(checkpoints, 50)
    assert [c.step for c in checkpoints.prune(CheckpointConfig(keep=1), full=True)] == [20, 40]


def test_what_cannot_be_removed_is_said_after_the_others_are_gone(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(checkpoints, 10, 20, 30, 40)
    original = os.replace

    def replace(old: Path, new: Path, **folders: int) -> None:
        if Path(old).name == "step-00000010":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        original(old, new, **folders)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(NotRemoved, match=r"^step-00000010 cannot be removed \(Read-only file system\)$") as raised:
        checkpoints.prune(CheckpointConfig(keep=2))
    assert [each.step for each in raised.value.gone] == [20]
    assert [each.step for each in checkpoints.all()] == [10, 30, 40]


def test_files_that_stay_after_the_rename_are_said(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    save(checkpoints, 10, 20)

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "unlink", refused)
    with pytest.raises(NotRemoved, match=r"step-00000010 cannot be removed \(Operation not permitted\)"):
        checkpoints.prune(CheckpointConfig(keep=1))
    assert [each.step for each in checkpoints.all()] == [20], "half of one is no checkpoint"


def test_what_another_process_has_removed_meanwhile_is_no_failure(checkpoints: Checkpoints) -> None:
    save(checkpoints, 10, 20)
    old = checkpoints.all()[:1]
    assert [each.step for each in checkpoints.remove(old)] == [10]
    assert checkpoints.remove(old) == []


def test_clean_removes_what_a_killed_attempt_left(checkpoints: Checkpoints) -> None:
    save(checkpoints, 10)
    (checkpoints.folder / "step-00000020.1.tmp").mkdir()
    (checkpoints.folder / "step-00000020.1.tmp" / "weights").write_bytes(b"half")
    said: list[str] = []
    checkpoints.clean(said.append)
    assert "step-00000020.1.tmp" in said[0]
    assert sorted(p.name for p in checkpoints.folder.iterdir()) == ["latest", "step-00000010"]


def test_a_step_that_is_not_there_is_an_error_with_those_that_are(checkpoints: Checkpoints) -> None:
    with pytest.raises(UserError, match="steps there: none"):
        checkpoints.at(None)
    save(checkpoints, 10, 20)
    with pytest.raises(UserError, match="step 15 .*steps there: 10, 20"):
        checkpoints.at(15)


def test_a_file_of_another_size_is_not_read(tmp_path: Path) -> None:
    """A sparse file of a terabyte takes no room on the disk, and hashing it many minutes."""
    file = tmp_path / "model.safetensors"
    file.touch()
    os.truncate(file, 2**40)
    problem = changed(file, "0" * 16, lambda _: pytest.fail("it was read"), size=5)
    assert problem == f"{file} has 1,099,511,627,776 bytes instead of 5"
