"""Saves that fail again and again: what is said, and when the run ends because of it."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from pipeline.common.errors import MachineError
from pipeline.train.checkpoint import dcp_storage
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.loop import saving, trainer
from pipeline.train.run import unsaved
from pipeline.train.run.folder import RunFolder, read_metrics
from pipeline.train.run.unsaved import Saves, Unsaved, read_saves, too_late
from tests import tiny
from tests.train.poison import INF, poison
from tests.train.runs import start, train

HOUR = 3600.0


class Clock:
    """Seconds that go on when they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(unsaved, "_clock", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def failing(monkeypatch: pytest.MonkeyPatch, clock: Clock, failures: Iterable[bool], hours: float = 1) -> None:
    """Time passes with each write of a checkpoint; where an item is true the disk is full."""
    original, coming = dcp_storage.write, iter(failures)

    def write(*args: Any, **keys: Any) -> Any:
        clock.now += hours * HOUR
        if next(coming):
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*args, **keys)

    monkeypatch.setattr(dcp_storage, "write", write)
    monkeypatch.setattr(saving, "_PAUSE", 0.0)


KEYS = (
    "train.duration=12 steps",
    "train.checkpoint.every_steps=2",
    "train.checkpoint.retries=0",
    "train.checkpoint.max_unsaved_minutes=130",
    "train.checkpoint.async_save=false",
)


def test_only_saves_that_fail_for_too_long_are_too_many(tmp_path: Path, clock: Clock) -> None:
    found = Unsaved(RunFolder(tmp_path, 3, step=40), 120, write=True)
    clock.now += 10 * HOUR
    assert not found.overdue, "nothing has failed: the next save is not due yet"
    found.committed(50)
    clock.now += 2 * HOUR
    said = found.failed(60, MachineError("step 60 could not be saved in /run: No space left on device. Make room"))
    assert "Make room. Nothing was saved for 2 h" in said
    clock.now += 1
    assert not found.overdue, "it may be a matter of seconds"
    kept = read_saves(tmp_path)
    assert kept is not None and (kept.attempt, kept.step, kept.failed, kept.failed_step) == (3, 50, 1, 60)
    assert kept.words(kept.since + 7200) == (
        "1 save has failed since step 50 was saved; 2 h of work are unsaved (train.checkpoint.max_unsaved_minutes "
        "allows 2 h); the last failure: step 60 could not be saved in /run: No space left on device"
    )
    found.failed(65, MachineError("no room"))
    assert found.overdue and "longer than train.checkpoint.max_unsaved_minutes (120)" in found.why
    found.committed(70)
    assert not found.overdue
    kept = read_saves(tmp_path)
    assert kept is not None and (kept.step, kept.words(kept.since)) == (70, "")
    found.failed(80, MachineError("no room"))
    clock.now += 2 * HOUR
    assert not found.overdue
    clock.now += 1
    assert found.overdue, "the next save may be far away"


@pytest.mark.parametrize(
    ("failed", "unsaved", "failing", "late"),
    [(0, 9, 0, False), (1, 9, 0, False), (1, 3.9, 1.9, False), (1, 5.1, 2.1, True), (2, 1.9, 1, False),
     (2, 2.1, 1, True)],
)  # fmt: skip
def test_one_failure_ends_no_run_however_seldom_it_saves(
    failed: int, unsaved: float, failing: float, late: bool
) -> None:
    assert too_late(failed, unsaved, failing, 2) is late


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"attempt": 1', b" " * 100])
def test_a_file_that_is_being_written_says_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "saves.json").write_bytes(content)
    assert read_saves(tmp_path) is None


GOOD = {"attempt": 1, "limit_minutes": 120.0, "since": 1e9, "step": 5, "failed": 1, "failed_step": 6, "failed_at": 1e9}


@pytest.mark.parametrize(
    "change",
    [{"attempt": "9"}, {"attempt": None}, {"attempt": True}, {"step": -1}, {"step": 2.5}, {"failed": 10**12},
     {"failed_step": "6"}, {"limit_minutes": 1e308}, {"since": -1e308}, {"since": "x", "failed": 0}, {"since": None},
     {"failed_at": [1]}, {"reason": {"a": 1}}, {"reason": None}],
)  # fmt: skip
def test_a_file_of_a_stranger_says_nothing(tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / "saves.json").write_bytes(orjson.dumps({**GOOD, "reason": "x", **change}))
    assert read_saves(tmp_path) is None


def test_a_long_reason_is_cut(tmp_path: Path) -> None:
    (tmp_path / "saves.json").write_bytes(orjson.dumps({**GOOD, "reason": "x" * 10**6, "failed_at": None}))
    kept = read_saves(tmp_path)
    assert kept is not None and kept.failed_at is None and 0 < len(kept.reason) < 5000


def test_a_run_that_cannot_save_for_too_long_ends(root: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 2 is saved; 4, 6 and 8 are not, then it is too long ago."""
    failing(monkeypatch, clock, [False, True, True, True, True])
    code, out = start(root, "unsaved", *KEYS)
    run = root / "unsaved"
    assert code == 79, out
    for step, since in ((4, "1 h"), (6, "2 h"), (8, "3 h")):
        (line,) = [text for text in out.splitlines() if tiny.failed_saves(text) == [step]]
        assert line.startswith("warning: ")
        assert "No space left on device" in line and line.endswith(f"Nothing was saved for {since}")
    assert "no checkpoint could be written for 3 h, longer than train.checkpoint.max_unsaved_minutes (130)" in out
    assert "step-00000002" in out
    assert [checkpoint.step for checkpoint in Checkpoints.of_run(run).all()] == [2]
    end = orjson.loads((run / "exit.json").read_bytes())
    assert (end["code"], end["step"], end["agreed"]) == (79, 9, True)
    assert len(read_metrics(run)) == 9
    saves = read_saves(run)
    assert saves is not None and (saves.step, saves.failed, saves.failed_step) == (2, 4, 9), "the last one counts, too"
    assert not list(run.glob(".exit*"))


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("hours", "failures"), [(1, [False, True, True, True, False, False, False]), (3, [False, True, True, *[False] * 4])]
)
def test_if_the_last_try_works_training_goes_on(
    root: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, hours: float, failures: list[bool]
) -> None:
    """Where saves lie further apart than the limit, the second failure is followed by that try, too."""
    failing(monkeypatch, clock, failures, hours)
    code, out = start(root, f"saved-{hours}", *KEYS)
    run = root / f"saved-{hours}"
    assert code == 0, out
    assert len(read_metrics(run)) == 12
    assert [checkpoint.step for checkpoint in Checkpoints.of_run(run).all()] == [10, 12]
    saves = read_saves(run)
    assert saves is not None and (saves.step, saves.failed) == (12, 0)


@pytest.mark.guard
def test_saves_that_failed_before_a_rewind_are_still_told(
    root: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt after it has the next number, and `pipeline status` does not show what an earlier attempt noted."""
    failing(monkeypatch, clock, [False, False, False, True, *[False] * 9])
    poison(monkeypatch, {9: INF})
    original, seen = trainer.Trainer.rewind, list[Saves | None]()

    def rewind(self: trainer.Trainer, *args: Any) -> None:
        before = read_saves(root / "rewound")
        original(self, *args)
        seen.extend((before, read_saves(root / "rewound")))

    monkeypatch.setattr(trainer.Trainer, "rewind", rewind)
    train(root, "rewound", *KEYS, "train.faults.on_nonfinite=rewind", "train.faults.rewind_steps=3")
    before, after = seen
    assert before is not None and (before.attempt, before.step, before.failed_step) == (1, 6, 8)
    assert after == replace(before, attempt=2, step=4)
