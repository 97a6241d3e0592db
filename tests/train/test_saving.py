"""Saves that are written while training goes on: what is in them, and what happens when they fail."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.serialization import get_crc32_options

from pipeline.common.errors import NumericalError
from pipeline.common.format import size
from pipeline.train.checkpoint import dcp_storage
from pipeline.train.checkpoint.host_snapshot import Staging
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.loop import faults, saving
from pipeline.train.run.folder import read_metrics
from tests import tiny
from tests.train.runs import exact, start, train, weights_hash
from tests.waiting import until

Write = Callable[..., Any]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "_PAUSE", 0.01)


@pytest.fixture(scope="module")
def straight(root: Path) -> Path:
    """A run whose saves are written before they return."""
    return train(root, "straight", "train.checkpoint.async_save=false", "train.checkpoint.keep=9")


def steps_saved(run: Path) -> list[int]:
    return [checkpoint.step for checkpoint in Checkpoints.of_run(run).all()]


def slow(monkeypatch: pytest.MonkeyPatch, before: Callable[[], None]) -> None:
    """Every write beside the loop begins with this."""
    original = dcp_storage.write

    def write(*args: Any, **keys: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            before()
        return original(*args, **keys)

    monkeypatch.setattr(dcp_storage, "write", write)


def failing(monkeypatch: pytest.MonkeyPatch, failures: Iterator[bool]) -> None:
    """Writes that meet a disk that is full, where an item is true."""
    original = dcp_storage.write

    def write(*args: Any, **keys: Any) -> Any:
        if next(failures, False):
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*args, **keys)

    monkeypatch.setattr(dcp_storage, "write", write)


def test_a_save_has_the_weights_of_its_step_though_training_goes_on_while_it_is_written(
    root: Path, straight: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = root / "meanwhile"
    # The save of step 3 is written after step 5, the one of step 6 after step 7.
    slow(monkeypatch, lambda: until(lambda: len(read_metrics(run)) >= 5 + 2 * bool(steps_saved(run))))
    train(root, run.name, "train.checkpoint.keep=9")
    assert exact(run) == exact(straight)
    for step in (3, 6, 8):
        assert weights_hash(run, step) == weights_hash(straight, step)
        assert (
            Checkpoints.of_run(run).at(step).state()["journal"]
            == Checkpoints.of_run(straight).at(step).state()["journal"]
        )


def test_one_save_is_in_flight_and_the_next_one_waits_for_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, busy = root / "one-in-flight", []

    def before() -> None:
        busy.append(threading.active_count())
        until(lambda: len(read_metrics(run)) >= 2)
        time.sleep(0.2)  # the loop comes to the next save meanwhile

    slow(monkeypatch, before)
    train(root, run.name, "train.checkpoint.every_steps=1", "train.duration=4 steps", "train.checkpoint.keep=9")
    assert steps_saved(run) == [1, 2, 3, 4]
    assert len(set(busy)) == 1, "two saves were written at the same time"
    parents = [checkpoint.state()["parent"]["step"] for checkpoint in Checkpoints.of_run(run).all()[1:]]
    assert parents == [1, 2, 3]


def test_a_write_that_fails_is_tried_again(root: Path, straight: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, iter([True, True, False, True, False]))
    run = root / "retried"
    code, out = start(root, run.name, "train.checkpoint.keep=9")
    assert code == 0 and not tiny.warnings_of(out), out
    assert steps_saved(run) == [3, 6, 8]
    assert weights_hash(run, 3) == weights_hash(straight, 3)


@pytest.mark.parametrize("mode", ["true", "false"])
def test_a_save_that_is_given_up_is_reported_and_the_next_one_tries_again(
    root: Path, straight: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, iter([False, True, True]))
    run = root / f"given-up-{mode}"
    code, out = start(
        root, run.name, f"train.checkpoint.async_save={mode}", "train.checkpoint.retries=1", "train.checkpoint.keep=9"
    )
    assert code == 0, out
    (line,) = [line for line in out.splitlines() if tiny.failed_saves(line)]
    assert tiny.failed_saves(line) == [6] and "No space left on device" in line, line
    assert "step-00000003 is still good; training continues" in line and " are free" in line, line
    assert steps_saved(run) == [3, 8]
    assert Checkpoints.of_run(run).at(8).state()["parent"]["step"] == 3
    assert not list((run / "checkpoints").glob("*.tmp"))
    assert exact(run) == exact(straight)


def test_a_file_system_that_answers_nothing_for_a_while_ends_no_run(
    root: Path, straight: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even the message about the save can look at it."""

    def gone(*arguments: Any) -> Any:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    failing(monkeypatch, iter([False, True]))
    monkeypatch.setattr(saving.shutil, "disk_usage", gone)
    monkeypatch.setattr(saving.Saver, "last_good", gone)
    run = root / "no-answer"
    code, out = start(root, run.name, "train.checkpoint.retries=0", "train.checkpoint.keep=9")
    assert code == 0, out
    assert tiny.failed_saves(out) == [6] and "What was committed before" in out
    assert steps_saved(run) == [3, 8]
    assert exact(run) == exact(straight)


def test_a_disk_without_room_is_told_the_size_of_what_is_there_and_what_makes_room(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, iter([False, True, False, True]))
    run = root / "advised"
    keys = ("train.duration=12 steps", "train.checkpoint.retries=0", "train.checkpoint.keep=9")
    code, out = start(root, run.name, *keys)
    assert code == 1, out
    first, last = [line for line in out.splitlines() if tiny.failed_saves(line)]
    each = sum(path.stat().st_size for path in (run / "checkpoints/step-00000003").iterdir() if path.name != "COMMIT")
    assert f"A checkpoint needs about {size(each)}" in first
    assert "checkpoint prune" not in first, "there is one alone"
    assert f"make room, for example with `pipeline checkpoint prune {run} --keep 1`, and run the same command" in last
    assert "lower train.checkpoint.keep (9)" in last and "train.checkpoint.keep" not in first


@pytest.mark.parametrize(
    ("free", "full", "told"),
    [(None, True, "cannot be seen"), (3_100_000, True, "3.1 MB are free: 40.0 kB are missing"),
     (9_000_000, True, "9.0 MB are free now, but there was less"), (9_000_000, False, "9.0 MB are free")],
)  # fmt: skip
def test_what_is_told_of_the_room_does_not_contradict_itself(free: int | None, full: bool, told: str) -> None:
    text = saving._room(3_140_000, free, full=full)
    assert text.startswith("A checkpoint needs about 3.1 MB") and told in text


def test_the_failure_of_the_save_before_the_last_one_is_a_warning(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original, waiting = saving.Saver.wait, threading.Event()

    def wait(self: saving.Saver) -> None:
        if self._thread is not None:
            waiting.set()
        original(self)

    failing(monkeypatch, iter([True, True]))
    slow(monkeypatch, lambda: until(waiting.is_set))
    monkeypatch.setattr(saving.Saver, "wait", wait)
    keys = ("train.duration=2 steps", "train.checkpoint.every_steps=1", "train.checkpoint.retries=0")
    code, _ = start(root, "both", *keys)
    assert code == 1
    (line,) = [text for text in caplog.messages if tiny.failed_saves(text)]
    assert line.startswith("warning: ") and tiny.failed_saves(line) == [1]


def test_old_checkpoints_that_cannot_be_removed_are_said_once_for_each_reason(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, original = root / "kept", os.replace
    by_save = {2: errno.EROFS, 3: errno.EROFS, 4: errno.EACCES, 6: errno.EROFS}

    def replace(old: Path, new: Path, **folders: int) -> None:
        if str(new).endswith(".pruned.tmp") and (reason := by_save.get(steps_saved(run)[-1])):
            raise OSError(reason, os.strerror(reason))
        original(old, new, **folders)

    monkeypatch.setattr(os, "replace", replace)
    code, out = start(root, run.name, "train.checkpoint.every_steps=1", "train.checkpoint.keep=1")
    assert code == 0, out
    assert [text for text in caplog.messages if "removed" in text] == [
        "warning: old checkpoints: step-00000001 cannot be removed (Read-only file system)",
        "warning: old checkpoints: step-00000001, step-00000002, step-00000003 cannot be removed (Permission denied)",
        "warning: old checkpoints: step-00000005 cannot be removed (Read-only file system)",
    ]
    assert steps_saved(run) == [8]


@pytest.mark.guard
def test_a_last_save_that_fails_ends_the_run(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, iter([False, True]))
    code, out = start(root, "last", "train.duration=4 steps", "train.checkpoint.retries=0")
    assert code == 1
    assert tiny.failed_saves(out) == [4] and "step-00000003" in out and "make room" in out
    assert steps_saved(root / "last") == [3]
    monkeypatch.undo()
    code, out = start(root, "last", "train.duration=4 steps")
    assert code == 0 and tiny.resumed_from(out) == 3


def test_a_save_whose_run_folder_was_taken_over_is_not_committed_and_ends_the_run(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = root / "taken"

    def take() -> None:
        until(lambda: len(read_metrics(run)) >= 4)
        lock = run / "lock"
        lock.write_bytes(lock.read_bytes().replace(b'"pid":', b'"pid":1'))

    slow(monkeypatch, take)
    code, out = start(root, run.name, "train.duration=100000 steps", "train.schedule.type=constant")
    assert code == 1, out
    assert "taken over" in out
    assert steps_saved(run) == []
    assert not list((run / "checkpoints").glob("*.tmp"))


def test_a_numerical_end_waits_for_the_save_in_flight(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, ended = root / "numerical", threading.Event()

    def after(self: faults.Faults, row: dict[str, Any]) -> None:
        if row["step"] == 5:
            ended.set()
            raise NumericalError("step 5 is not finite")

    monkeypatch.setattr(faults.Faults, "after", after)
    slow(monkeypatch, lambda: time.sleep(0.2) if ended.wait(60) else None)
    code, _ = start(root, run.name)
    assert code == 77
    assert steps_saved(run) == [3]


def test_another_error_does_not_wait_long_for_a_save_that_hangs(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With others about, whose part of the save may never come."""
    monkeypatch.setattr(saving, "_PATIENCE", 0.05)
    monkeypatch.setattr(saving.dist, "get_world_size", lambda group=None: 2 if group is None else 1)
    saver, hung = saving.Saver.__new__(saving.Saver), threading.Event()
    saver._error, saver._reports = None, saving.deque()
    saver.exporter = saver.mirroring = MagicMock()
    saver._thread = threading.Thread(target=hung.wait, daemon=True)
    saver._thread.start()
    with pytest.raises(ZeroDivisionError), saver:
        raise ZeroDivisionError
    assert saver._thread.is_alive()
    hung.set()


def test_buffers_are_used_again_and_hold_what_was_there_at_the_copy() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {
        "matrix": torch.randn(7, 5, generator=generator),
        "columns": torch.randn(4, 3, generator=generator).t(),
        "half": torch.randn(9, generator=generator).bfloat16(),
        "step": torch.tensor(3.0),
        "flag": torch.tensor(True),
        "nothing": torch.empty(0, 5),
        "number": 7,
    }
    staging = Staging(pin=False)
    first = staging.copy({"model": weights})["model"]
    places = {name: value.data_ptr() for name, value in first.items() if name != "number"}
    before = {name: value.clone() for name, value in first.items() if name != "number"}
    for name, value in before.items():
        assert torch.equal(value, weights[name])
        # torch would write all of a storage that tensors share.
        assert first[name].untyped_storage().nbytes() == value.numel() * value.element_size()
        weights[name].zero_()
        assert torch.equal(first[name], value)
    second = staging.copy({"model": weights})["model"]
    assert second["number"] == 7
    assert {name: value.data_ptr() for name, value in second.items() if name != "number"} == places
    assert all(not second[name].any() for name in before)
    larger = staging.copy({"model": weights, "ema": {"matrix": torch.ones(7, 5)}})
    assert torch.equal(larger["ema"]["matrix"], torch.ones(7, 5))


def test_torch_reads_what_is_written_without_its_own_checksums(straight: Path, tmp_path: Path) -> None:
    assert get_crc32_options(), "the switch is back where it was"
    dcp_to_torch_save(straight / "checkpoints" / "step-00000008", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert {"model", "optimizer"} <= whole.keys()
    assert all(torch.isfinite(value).all() for value in whole["model"].values())
