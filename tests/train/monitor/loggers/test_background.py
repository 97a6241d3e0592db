"""Loggers behind a thread: what they are called with, in which order, and after which failures."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.train.monitor.loggers import background
from pipeline.train.monitor.loggers.background import BackgroundLogger, BatchLogger, NumberedRow
from pipeline.train.monitor.loggers.base import Logger
from pipeline.train.monitor.loggers.json_lines import MetricsFile
from pipeline.train.monitor.metrics import Metrics
from tests.waiting import until


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_INTERVAL", "_PAUSE", "_LONGEST_PAUSE"):
        monkeypatch.setattr(background, name, 0.0)


def opened(folder: Path, *openers: Any) -> Metrics:
    rows = folder / "metrics.jsonl"
    file = ("metrics.jsonl", MetricsFile(rows))
    return Metrics([file, *(("t", BackgroundLogger("t", rows, each)) for each in openers)])


class Plain(Logger):
    """A logger of another package, which fails at some calls."""

    def __init__(self, failures: Sequence[bool] = ()) -> None:
        self.failures, self.calls, self.threads = list(failures), list[Any](), set[int]()

    def _call(self, what: Any) -> None:
        self.threads.add(threading.get_ident())
        if self.failures and self.failures.pop(0):
            raise RuntimeError("https://user:hunter2@host/ is away")
        self.calls.append(what)

    def write(self, row: dict[str, Any]) -> None:
        self._call(row["step"])

    def rewind(self, step: int) -> None:
        self._call(("rewind", step))

    def close(self) -> None:
        self._call("close")


def test_rows_and_rewinds_come_in_order_from_one_thread_and_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step":99,"of":"an attempt before"}\n{"torn')
    plain = Plain([False, True, True])
    tries = [RuntimeError("not yet")]

    def slow() -> Plain:
        if tries:
            raise tries.pop()
        return plain

    with opened(tmp_path, slow) as metrics:
        for step in (1, 2, 3):
            metrics.write({"step": step})
        metrics.rewind(1)
        for step in (2, 3):
            metrics.write({"step": step})
        until(lambda: not plain.failures)
    assert plain.calls == [1, 2, 3, ("rewind", 1), 2, 3, "close"]
    assert len(plain.threads) == 1 and threading.get_ident() not in plain.threads
    assert "hunter2" not in caplog.text


class Batches(BatchLogger):
    """A tracker that keeps what it gets even where its answer is lost."""

    def __init__(self, kept: list[NumberedRow], failures: list[bool]) -> None:
        self.kept, self.failures = kept, failures

    def sent(self) -> int:
        return self.kept[-1].number if self.kept else 0

    def send(self, rows: Sequence[NumberedRow]) -> None:
        self.kept += rows
        if self.failures and self.failures.pop(0):
            raise RuntimeError("no answer")

    def rewind(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass


def test_rows_whose_answer_was_lost_are_not_sent_again_and_those_of_attempts_before_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_BATCH", 2)
    kept: list[NumberedRow] = []
    failures = [True, False, True, True]
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step":1}\nnot JSON\n{"step":2}\n')
    with opened(tmp_path, lambda: Batches(kept, failures)) as metrics:
        for step in range(3, 9):
            metrics.write({"step": step})
        until(lambda: not failures)
    assert [row.row["step"] for row in kept] == list(range(1, 9))
    assert [row.number for row in kept] == [1, *range(3, 10)]
    with opened(tmp_path, lambda: Batches(kept, [])) as metrics:
        metrics.write({"step": 9})
    assert [row.row["step"] for row in kept] == list(range(1, 10))


def test_neither_a_row_nor_the_end_waits_for_a_tracker_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "_CLOSE", 0.0)
    answers = threading.Event()

    def hangs() -> Logger:
        answers.wait()
        raise RuntimeError("it was never there")

    with opened(tmp_path, hangs) as metrics:
        for step in range(1, 4):
            metrics.write({"step": step})
    assert caplog.messages == ["t: rows of metrics.jsonl that were not sent: 3; the file has them"]
    answers.set()
