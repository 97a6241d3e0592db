"""A start from an older checkpoint than the one that was saved last: said, and refused beyond one save."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from pipeline.config.checkpoint import CheckpointConfig
from pipeline.train.checkpoint.policy import saves_lost
from pipeline.train.checkpoint.rollback import saves_on_line
from tests import tiny
from tests.train.runs import start, train

EVERY_STEP = ("train.checkpoint.every_steps=2", "train.checkpoint.keep=9", "train.schedule.type=constant")
"""Saves at 2, 4, 6 and 8."""


@pytest.mark.parametrize(
    ("step", "reached", "saved", "lost"),
    [
        (8, 8, {2, 4, 6, 8}, 0),
        (8, 6, {2, 4, 6, 8}, 0),
        (6, 8, {2, 4, 6, 8}, 1),
        (2, 8, {2, 4, 6, 8}, 3),
        (2, 8, {2, 8}, 1),  # they were so far apart
        (6, 9, {6, 7, 8, 9}, 3),
        (6, 9, {7}, 2),
        (3, 6, set(), 1),
        (2, 6, set(), 2),  # of what is not recorded the rhythm of saves tells
    ],
)
def test_the_number_of_saves_that_are_lost(step: int, reached: int, saved: set[int], lost: int) -> None:
    assert saves_lost(CheckpointConfig(every_steps=3), step, reached, saved) == lost


def save(attempt: int, step: int) -> dict[str, Any]:
    return {"step": step, "attempt": attempt, "save_seconds": 0.1}


@pytest.mark.parametrize(
    ("first_steps", "rows", "found"),
    [
        ({}, [], set()),
        ({1: 0}, [save(1, 3), save(1, 6)], {3, 6}),
        # Steps are ahead of saves: a killed run always loses some.
        ({1: 0}, [save(1, 3), {"step": 5, "attempt": 1, "tokens": 1}], {3}),
        # It went back to 3, by a rewind or by resume.from: what came after that is no loss.
        ({1: 0, 2: 3}, [save(1, 3), save(1, 6), save(1, 9), save(2, 5)], {3, 5}),
        ({1: 0, 2: 6, 3: 3}, [save(1, 3), save(1, 6), save(2, 9)], {3}),
        # Killed after the commit and before its row was written.
        ({1: 0, 2: 6}, [save(1, 3)], {3, 6}),
        # A process that lost the lock and has not noticed yet.
        ({1: 0, 2: 3}, [save(1, 3), save(2, 6), save(1, 9)], {3, 6}),
        # Without a ledger.
        ({}, [save(1, 3), save(1, 6)], {3, 6}),
    ],
)
def test_the_saves_on_the_way_to_where_a_run_is(
    first_steps: dict[int, int], rows: list[dict[str, Any]], found: set[int]
) -> None:
    assert saves_on_line(first_steps, reversed(rows)) == found


def test_records_are_read_no_further_back_than_needed() -> None:
    rows = iter([save(1, 9), save(1, 6), save(1, 3)])
    assert saves_on_line({1: 0}, rows, down_to=6) == {6, 9}
    assert next(rows) == save(1, 3)


@pytest.fixture(scope="module")
def done(root: Path) -> Path:
    """A run of eight steps with all its checkpoints."""
    return train(root, "done", *EVERY_STEP)


@pytest.fixture
def resume(root: Path, done: Path, tmp_path: Path) -> Callable[..., tuple[int, str, Path]]:
    """Resume in a copy of that run, of which some is damaged: exit code, what was printed, checkpoints."""

    def begin(damage: Callable[[Path], object], *overrides: str) -> tuple[int, str, Path]:
        run = tmp_path / "copy"
        if not run.exists():
            shutil.copytree(done, run)
        damage(run / "checkpoints")
        settings = (*EVERY_STEP, f"data.dir={root / 'data'}", "train.duration=9 steps", *overrides)
        return *start(root, str(run), *settings), run / "checkpoints"

    return begin


def gone(*steps: int) -> Callable[[Path], None]:
    def remove(folder: Path) -> None:
        for step in steps:
            shutil.rmtree(folder / f"step-{step:08d}")

    return remove


def copied(folder: Path) -> None:
    """The newest is a copy of the oldest, and so are those between."""
    gone(4, 6, 8)(folder)
    shutil.copytree(folder / "step-00000002", folder / "step-00000008")


def latest_says(text: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        gone(4, 6, 8)(folder)
        (folder / "latest").write_text(text)

    return damage


def nothing(folder: Path) -> None:
    pass


@pytest.mark.first(4)
@pytest.mark.parametrize(
    ("damage", "reasons"),
    [
        (gone(4, 6, 8), ["latest names step-00000008", "step-00000008 is not there"]),
        (latest_says("\x1b[2Jgarbage"), ["latest is damaged", "garbage", "metrics.jsonl", "step 8 was saved"]),
        (latest_says(""), ["latest is empty", "metrics.jsonl", "step 8 was saved"]),
        (copied, ["step-00000008", "COMMIT is of step 2", "copy"]),
    ],
    ids=["the newest are gone", "latest is garbage", "latest is empty", "the newest is a copy"],
)
@pytest.mark.parametrize("wanted", [(), ("resume.from=latest",)], ids=["default", "latest"])
def test_more_than_one_save_is_not_given_up_without_being_asked(
    resume: Callable[..., tuple[int, str, Path]],
    wanted: tuple[str, ...],
    damage: Callable[[Path], object],
    reasons: list[str],
) -> None:
    code, out, folder = resume(damage, *wanted)
    assert code == 2
    refusal = out[out.index("the run saved step 8") :]
    assert all(reason in refusal for reason in reasons), out
    assert "step-00000002" in refusal and "6 steps" in refusal and "resume.from=2" in refusal
    before = sorted(path.name for path in folder.iterdir())
    assert "abandoned" not in before, "nothing was moved"
    code, out, _ = resume(nothing, *wanted, "train.duration=4 steps")
    assert code == 2, "nor was anything noted that would let the next start through"


@pytest.mark.guard
def test_the_step_that_the_refusal_names_is_resumed_from_and_later_losses_are_refused_again(
    resume: Callable[..., tuple[int, str, Path]],
) -> None:
    code, out, folder = resume(gone(4, 6, 8), "resume.from=2")
    assert code == 0, out
    assert tiny.resumed_from(out) == 2
    assert (folder / "latest").read_text() == "step-00000009\n"
    # A job that is started again has the same run file.
    code, out, _ = resume(gone(4, 6, 8, 9), "resume.from=2", "train.duration=10 steps")
    assert code == 2
    assert "the run saved step 9" in out and "resumed-from.json" in out
    (folder / "resumed-from.json").unlink()
    code, out, _ = resume(nothing, "resume.from=2", "train.duration=4 steps")
    assert code == 0, out


def test_one_save_is_given_up_with_a_warning(resume: Callable[..., tuple[int, str, Path]]) -> None:
    code, out, folder = resume(gone(8))
    assert code == 0, out
    assert tiny.resumed_from(out) == 6
    warnings = [line for line in out.splitlines() if line.startswith("warning: ")]
    assert any("latest names step-00000008" in line for line in warnings)
    assert any("2 steps" in line and "step 8" in line for line in warnings)
    assert (folder / "latest").read_text() == "step-00000009\n"
    begun = [orjson.loads(line) for line in (folder.parent / "ledger.jsonl").read_bytes().splitlines()]
    assert [line["first_step"] for line in begun if line["event"] == "attempt"] == [0, 6]


def test_a_copy_is_named_and_the_one_before_it_resumed_from(resume: Callable[..., tuple[int, str, Path]]) -> None:
    def copy(folder: Path) -> None:
        gone(8)(folder)
        shutil.copytree(folder / "step-00000002", folder / "step-00000008")

    code, out, folder = resume(copy)
    assert code == 0, out
    assert f"{folder / 'step-00000008' / 'COMMIT'} is of step 2" in out
    assert tiny.resumed_from(out) == 6


def test_a_run_that_went_back_and_ended_there_is_resumed(resume: Callable[..., tuple[int, str, Path]]) -> None:
    code, out, folder = resume(nothing, "resume.from=2", "train.duration=2 steps")
    assert code == 0 and "nothing to do" in out
    shutil.rmtree(folder / "abandoned")
    code, out, _ = resume(nothing, "train.duration=3 steps")
    assert code == 0, out
    assert not tiny.warnings_of(out) and tiny.resumed_from(out) == 2
