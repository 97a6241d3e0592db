"""The contents of a page that follows runs: the report, drawn again now and then, and the newest rows in between.

Reads the files of run folders alone, and of the metrics only what is new. Nothing is read while nobody asks.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.common.page.html import document
from pipeline.common.page.words import clean
from pipeline.common.run_files import RunFiles
from pipeline.config.load import load_run, no_run_folder
from pipeline.eval.report.gather import TRACES, RunReader, refuse_twice, under_names
from pipeline.eval.report.page import page
from pipeline.eval.report.state import State
from pipeline.train.run.goodput import is_step, number

LOOK_SECONDS = 1.0
"""Files are not looked at again before."""
DRAW_SECONDS = 5.0
"""The report is not drawn again before."""
_DRAW_FACTOR = 5
"""Nor before this many times as long as it took to draw, which bounds the part of a processor that it takes."""
_WAIT_SECONDS = 0.5
"""An answer about rows waits so long for a report that is being drawn, then says what was known before."""
_ROWS = 200
_NUMBERS = ("tokens", "loss", "validation_loss", "lr", "grad_norm", "tokens_per_second", "mfu")
_BEGUN = (*TRACES, RunFiles.jobs, RunFiles.lock)
"""Some of these are in the folder of a run that waits or prepares its data."""
_NOT_BEGUN = State("not begun", "paused", "")


def followed_folder(run: Path) -> Path:
    """The folder of a run that may not have begun.

    Args:
        run: run folder, which may be empty, or run file, whose folder may not exist yet.

    Raises:
        UserError: it is neither.
    """
    if not run.is_dir():
        return load_run(run).run.dir.absolute()
    folder = run.absolute()
    if any(folder.iterdir()) and not any((folder / name).exists() for name in _BEGUN):
        raise no_run_folder(run)
    return folder


@dataclass
class _Followed:
    """A run that is followed."""

    number: int
    folder: Path
    reader: RunReader
    seen: bool = False
    """True once its folder was there."""
    gone: bool = False
    state: State = _NOT_BEGUN
    step: int = 0
    evaluated: tuple[tuple[str, int], ...] = ()
    """Reports of evaluations, each with its time."""


class LiveView:
    """The state of runs for a page, safe to be asked from several threads.

    Args:
        runs: run files or run folders.

    Raises:
        UserError: one is neither, or is named more than once.
    """

    def __init__(self, runs: Sequence[Path]) -> None:
        folders = [followed_folder(run) for run in runs]
        refuse_twice(folders)
        self._lock = threading.Lock()
        self._rows: deque[tuple[int, int, dict[str, Any]]] = deque(maxlen=_ROWS)
        self._count = 0
        self._runs = [_Followed(number, folder, self._reader(number, folder)) for number, folder in enumerate(folders)]
        self._looked = -math.inf
        self._version = 1
        """One more for each look that has found something new."""
        self._drawn: tuple[int, bytes] | None = None
        """The version of which the report was drawn, and the report."""
        self._draw_after = -math.inf
        self._told: dict[str, Any] | None = None

    @property
    def title(self) -> str:
        """Names of the runs."""
        return ", ".join(each.folder.name for each in self._runs)

    def newest(self, after: int) -> dict[str, Any]:
        """State and new rows, which a page asks for every two seconds.

        Args:
            after: number of the last row that it has.

        Returns:
            `runs`: state and step of each. `rows`: those after it, at most the newest 200, with their numbers. `next`:
            the number of the last row. `report`: the version of the report that was drawn last, 0 without one; `due`:
            whether asking for it would draw a newer one. `ended`: whether all runs have ended.
        """
        if self._lock.acquire(timeout=_WAIT_SECONDS):
            try:
                self._look()
                self._told = self._state()
            finally:
                self._lock.release()
        told = self._told
        if told is None:
            return {"runs": [], "rows": [], "next": after, "report": 0, "due": False, "ended": False}
        rows = [row for row in told["rows"] if row["number"] > after]
        return {**told, "rows": rows, "next": rows[-1]["number"] if rows else after}

    def report(self) -> bytes:
        """The newest report; drawn if there is something new and the last one is old enough."""
        with self._lock:
            self._look()
            if self._drawn is None or self._is_due():
                began = time.monotonic()
                found = [each.reader.facts() for each in self._runs if each.seen and not each.gone]
                if found:
                    content = page(under_names(found))
                else:  # of runs that were deleted, the last one stays
                    content = _waiting(self.title) if self._drawn is None else self._drawn[1]
                self._drawn = (self._version, content)
                took = time.monotonic() - began
                self._draw_after = time.monotonic() + max(DRAW_SECONDS, _DRAW_FACTOR * took)
            assert self._drawn is not None
            return self._drawn[1]

    def _is_due(self) -> bool:
        """True if a report that is drawn now would be another one."""
        return (self._drawn is None or self._drawn[0] != self._version) and time.monotonic() >= self._draw_after

    def _state(self) -> dict[str, Any]:
        return {
            "runs": [
                {
                    "name": clean(each.folder.name),
                    "word": each.state.word,
                    "kind": each.state.kind,
                    "why": clean(each.state.why),
                    "step": each.step,
                }
                for each in self._runs
            ],
            "rows": [_shown(number, run, row) for number, run, row in self._rows],
            "report": 0 if self._drawn is None else self._drawn[0],
            "due": self._is_due(),
            "ended": all(each.gone or each.state.has_ended for each in self._runs),
        }

    def _look(self) -> None:
        """See what is new, if the last look was a moment ago."""
        if time.monotonic() < self._looked + LOOK_SECONDS:
            return
        before = self._count
        changed = False
        for each in self._runs:
            # Not the reason: that of a run without a sign of life is another one every second.
            known = (each.state.word, each.step, each.evaluated)
            if not each.folder.is_dir():
                each.gone = each.seen
                if each.gone:
                    each.state = State("deleted", "bad", f"{each.folder} does not exist any more")
                else:
                    each.state = State("not begun", "paused", f"{each.folder} does not exist yet")
            else:
                if each.gone:  # another run in its place
                    each.reader, each.gone = self._reader(each.number, each.folder), False
                each.seen = True
                made = each.reader.progress()
                each.state = made.state
                each.step = made.columns.step[-1] if len(made.columns) else 0
                each.evaluated = _evaluated(each.folder)
            changed |= known != (each.state.word, each.step, each.evaluated)
        self._looked = time.monotonic()
        self._version += changed or self._count != before

    def _reader(self, number: int, folder: Path) -> RunReader:
        return RunReader(folder, follows=True, seen=lambda row: self._add(number, row))

    def _add(self, run: int, row: dict[str, Any]) -> None:
        """Keep a row of the metrics for the page."""
        if not is_step(row.get("step")) or not ("loss" in row or "validation_loss" in row):
            return
        self._count += 1
        self._rows.append((self._count, run, row))


def _evaluated(folder: Path) -> tuple[tuple[str, int], ...]:
    """Reports of evaluations, each with its time."""
    found = []
    for path in sorted(RunFiles(folder).evaluations.glob("*.json")):
        with suppress(OSError):
            found.append((path.name, path.stat().st_mtime_ns))
    return tuple(found)


def _shown(count: int, run: int, row: dict[str, Any]) -> dict[str, Any]:
    """A row of the metrics as a page gets it."""
    values = {name: _figure(row.get(name)) for name in ("attempt", "time", *_NUMBERS)}
    return {"number": count, "run": run, "step": row["step"], **values}


def _figure(value: Any) -> float | None:
    """A figure for JSON, which has no NaN."""
    found = number(value)
    return found if math.isfinite(found) else None


def _waiting(title: str) -> bytes:
    words = "Nothing to show yet: the run folder does not exist. The report is here once it does."
    return document(title, [f"<main><p class='note'>{words}</p></main>"])
