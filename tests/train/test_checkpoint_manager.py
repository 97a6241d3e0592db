"""Which checkpoint is valid, which one a run goes on from, which ones go: on folders, without tensors."""

from pathlib import Path

import pytest

from pipeline.errors import UserError
from pipeline.train.checkpoint.manager import Checkpoints, Files, record_of


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


def test_save_commits_and_points_latest_to_it(checkpoints: Checkpoints) -> None:
    assert checkpoints.latest() is None
    save(checkpoints, 10, 20)
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.step == 20
    assert latest.problems() == []
    assert latest.state() == {"note": 20, "step": 20, "parent": "step-00000010"}
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
        (lambda path: (path / "COMMIT").write_bytes(b"{"), "not readable JSON"),
        (lambda path: (path / "state.json").write_bytes(b"{}"), "state.json has 2 bytes"),
    ],
)
def test_damage_is_named_and_passed_over(checkpoints: Checkpoints, damage: object, message: str) -> None:
    save(checkpoints, 10, 20)
    damage(checkpoints.folder / "step-00000020")  # type: ignore[operator]
    with pytest.raises(UserError, match=message):
        checkpoints.at(20)
    said: list[str] = []
    found = checkpoints.resumable(said.append)
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
        checkpoints.resumable(silent)
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [10, 20]


def test_a_commit_that_latest_did_not_reach_is_set_aside(checkpoints: Checkpoints) -> None:
    save(checkpoints, 10, 20)
    (checkpoints.folder / "latest").write_text("step-00000010\n")
    found = checkpoints.resumable(silent)
    assert found is not None
    assert found.step == 10
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [10]


def test_without_latest_the_newest_commit_counts(checkpoints: Checkpoints) -> None:
    save(checkpoints, 10, 20)
    (checkpoints.folder / "latest").unlink()
    found = checkpoints.resumable(silent)
    assert found is not None
    assert found.step == 20


def test_a_latest_that_is_no_text_is_passed_over(checkpoints: Checkpoints) -> None:
    save(checkpoints, 10, 20)
    (checkpoints.folder / "latest").write_bytes(b"\xff\xfe")
    found = checkpoints.resumable(silent)
    assert found is not None
    assert found.step == 20


def test_a_refusal_before_the_commit_makes_nothing_visible(checkpoints: Checkpoints) -> None:
    def refuse() -> None:
        raise UserError("not yours")

    tmp = checkpoints.begin(10, 1)
    with pytest.raises(UserError, match="not yours"):
        checkpoints.commit(tmp, 10, write(tmp), {}, refuse)
    assert list(checkpoints.folder.iterdir()) == [tmp]


def test_prune_keeps_the_newest_and_what_latest_names(checkpoints: Checkpoints) -> None:
    save(checkpoints, 10, 20, 30, 40)
    (checkpoints.folder / "latest").write_text("step-00000010\n")
    assert [checkpoint.step for checkpoint in checkpoints.prune(2)] == [20]
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [10, 30, 40]


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
