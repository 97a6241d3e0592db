"""Goodput: the fraction of a run's time that went into steps that count, and where the rest went."""

from __future__ import annotations

import math
import time
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeGuard

from pipeline.common import storage
from pipeline.common.format import counted, percent
from pipeline.common.run_files import RunFiles
from pipeline.train.run.attempts import Attempt, attempts

_MEASURED = ("step_seconds", "save_blocked", "validation_seconds", "suspended")
MOST_STEPS = 10**12
"""A step beyond is none of a run, but damage."""
MOST = 1e100
"""Larger values are not figures: sums and squares of such would leave the range of floats."""


@dataclass(frozen=True)
class Goodput:
    """Seconds of a run over all attempts. All but `wall` add up to it."""

    wall: float
    """Time from the start of the first attempt until now, or until the last sign of life."""
    productive: float
    """Time in steps that count: those that were lost and made again count once. Waiting for data is not in it."""
    lost: float
    """Time in steps that were not in the checkpoint that a later attempt resumed from."""
    waiting: float
    """Time that steps waited for data."""
    saving: float
    """Time that steps waited for saves: for a copy to the memory of the host, or for a whole save."""
    validating: float
    starting: float
    """Time after `importing` until the first step of an attempt: data, model, checkpoint. Of older versions with
    `importing`."""
    down: float
    """Time between attempts, with no job in the queue. Of older versions with `queued`."""
    other: float
    """Time within attempts that is none of these: leaving, waiting for a hang to be noticed."""
    attempts: int
    queued: float = 0.0
    """Time between attempts, with a job in the queue; with the node check before a launch."""
    importing: float = 0.0
    """Time from the launch of processes until all of them are there and have imported their packages."""
    suspended: float = 0.0
    """Time in which the processes were stopped, as by `scontrol suspend`."""

    @property
    def share(self) -> float:
        """Productive over wall."""
        return self.productive / self.wall if self.wall else 0.0

    def to_json(self) -> dict[str, float]:
        """All fields, with `share`."""
        return {**asdict(self), "share": self.share}

    def __str__(self) -> str:
        parts = {
            "lost": self.lost,
            "waiting for data": self.waiting,
            "saving": self.saving,
            "validating": self.validating,
            "queued": self.queued,
            "importing": self.importing,
            "starting": self.starting,
            "suspended": self.suspended,
            "down": self.down,
            "other": self.other,
        }
        rest = ", ".join(f"{name} {percent(seconds / self.wall, 1)}" for name, seconds in parts.items() if seconds)
        tries = counted(self.attempts, "attempt")
        whole = f"{percent(self.share, 1)} of {_duration(self.wall)} wall time ({tries})"
        return f"{whole}; {rest}" if rest else whole


def goodput(
    run: Path, tries: Sequence[Attempt] | None = None, rows: Iterable[dict[str, Any]] | None = None
) -> Goodput | None:
    """The goodput of a run folder; None before its first attempt. An attempt that still runs counts until now.

    Args:
        run: folder.
        tries: its attempts, where they are known already.
        rows: its metrics, where somebody reads them anyway; all of them are taken if there was an attempt.
    """
    tries = attempts(run) if tries is None else tries
    if not tries:
        return None
    used = GoodputSums(tries)
    for row in storage.json_lines(RunFiles(run).metrics) if rows is None else rows:
        used.add(row)
    return used.goodput(tries)


def _goodput(tries: Sequence[Attempt], used: GoodputSums) -> Goodput:
    now = time.time()
    importing = starting = other = inside = 0.0
    between = {True: 0.0, False: 0.0}
    end = None
    for attempt in tries:
        measured, first = used.measured[attempt.number], used.first_step_began.get(attempt.number)
        begin = attempt.begin if attempt.launched is None else max(attempt.launched, end or 0.0)
        opened = begin if attempt.opened is None else attempt.opened
        length = max(0.0, (now if attempt.end is None else attempt.end) - begin)
        before = length if first is None else min(max(0.0, first - begin), length)
        imports = min(max(0.0, opened - begin), before)
        # Clocks that are set while a run lasts must not make parts that are more than the whole.
        length = max(length, before + measured)
        importing, starting = importing + imports, starting + before - imports
        other, inside = other + length - before - measured, inside + length
        if end is not None:
            between[attempt.queued] += max(0.0, begin - end)
        end = begin + length
    return Goodput(
        wall=inside + sum(between.values()),
        productive=sum(used.productive),
        lost=used.lost,
        waiting=used.waiting,
        saving=used.saving,
        validating=used.validating,
        starting=starting,
        down=between[False],
        other=other,
        attempts=len(tries),
        queued=between[True],
        importing=importing,
        suspended=used.suspended,
    )


class GoodputSums:
    """Sums over the rows of metrics.jsonl, which come in the order of the attempts.

    Args:
        tries: the attempts that are known.
    """

    def __init__(self, tries: Iterable[Attempt] = ()) -> None:
        self._begun: list[tuple[int, int]] = []
        self._known: set[int] = set()
        self._attempt = 0
        self.know(tries)
        self.productive = array("d")
        """Productive time of each step that still counts, in order."""
        self._steps = array("q")
        """The number of each of them."""
        self.lost = self.waiting = self.saving = self.validating = self.suspended = 0.0
        self.measured: dict[int, float] = defaultdict(float)
        """By attempt, in steps, saves and validations."""
        self.first_step_began: dict[int, float] = {}
        """By attempt, in seconds since 1970."""

    def know(self, tries: Iterable[Attempt]) -> None:
        """Attempts, those that are known already among them; none before the one whose rows came last."""
        for attempt in tries:
            if attempt.number not in self._known:
                self._known.add(attempt.number)
                self._begun.append((attempt.number, attempt.first_step))

    def goodput(self, tries: Sequence[Attempt]) -> Goodput:
        """The goodput by the rows so far; more may come.

        Args:
            tries: all attempts, as they are known now.
        """
        self._finish()
        return _goodput(tries, self)

    def add(self, row: dict[str, Any]) -> None:
        """A row of metrics.jsonl."""
        attempt, step, ended = row.get("attempt"), row.get("step"), number(row.get("time"))
        if not is_step(step) or type(attempt) is not int or attempt not in self._known or not math.isfinite(ended):
            return  # it is damaged, or nothing else is known of that attempt
        if attempt < self._attempt:
            return  # of a process that had lost the run's lock and had not noticed yet
        if attempt > self._attempt:
            self._go_on_as(attempt)
        seconds, saving, validating, suspended = (_seconds(row, key) for key in _MEASURED)
        self.saving += saving
        self.validating += validating
        self.suspended += suspended
        self.measured[attempt] += seconds + saving + validating + suspended
        if attempt not in self.first_step_began and ("step_seconds" in row or "passed_over" in row):
            self.first_step_began[attempt] = ended - seconds - suspended
        if "step_seconds" in row:
            waiting = min(_seconds(row, "data_wait"), seconds)
            self.waiting += waiting
            self._lose(step - 1)
            self._steps.append(step)
            self.productive.append(seconds - waiting)

    def _finish(self) -> None:
        """No more rows: attempts that did not come to their first step have gone back, too."""
        if self._begun:
            self._go_on_as(self._begun[-1][0])

    def _go_on_as(self, attempt: int) -> None:
        self._attempt = attempt
        while self._begun and self._begun[0][0] <= attempt:
            self._lose(self._begun.pop(0)[1])

    def _lose(self, first: int) -> None:
        """Steps from `first` on, counted from 0, do not count."""
        keep = bisect_right(self._steps, first)
        if keep < len(self._steps):
            self.lost += sum(self.productive[keep:])
            del self.productive[keep:], self._steps[keep:]


def is_step(value: Any) -> TypeGuard[int]:
    """True if a row of metrics.jsonl can be of such a step."""
    return type(value) is int and 0 <= value <= MOST_STEPS


def number(value: Any) -> float:
    """A figure of a row as a float; NaN for what is none, or absurdly large."""
    is_one = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MOST
    return float(value) if is_one else math.nan


def _seconds(row: dict[str, Any], key: str) -> float:
    """A length of time; 0 for what is none."""
    value = number(row.get(key))
    return value if value > 0 else 0.0


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60:,} h {minutes % 60:02d} min"
