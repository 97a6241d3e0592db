"""The metrics of a run as columns, read in one pass, and what is drawn of columns with more steps than pixels."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.eval.report.loads import Loads
from pipeline.train.run.attempts import Attempt
from pipeline.train.run.goodput import is_step, number

Floats = npt.NDArray[np.float64]

NUMBERS = ("loss", "mtp_loss", "grad_norm", "lr", "tokens_per_second", "mfu")
"""Numbers that are kept of each step; NaN where a row does not have it."""
OF_EXPERTS = ("load_max_over_mean", "load_max_layer", "dead_experts", "balance_loss", "rows_max_over_mean")
"""The same of numbers below `experts`."""
OF_MEMORY = ("host", "allocated", "reserved")
"""The same of numbers below `memory`, in GiB."""
EVERY_STEP = 1_500
"""Steps up to which a chart shows each one."""
_MEANS = 100
"""Points of the means that are drawn over them."""
_POINTS = 300
"""Points of a curve with more steps."""
_MOST_BREAKS = 100
DETAIL = 4_000
"""Values of a curve in the page; of more steps, each is the mean of several, with the lowest and highest of them."""
_MOST_DETAIL_BREAKS = DETAIL // 4


@dataclass(frozen=True)
class Validation:
    """A look at the held-out data while training."""

    step: int
    time: float
    loss: float
    by_source: dict[str, float]


class Columns:
    """Steps that count, in order: of those that were lost with an attempt and made again, the later ones.

    Args:
        tries: the attempts at the run, which tell the step at which each resumed.
    """

    def __init__(self, tries: Sequence[Attempt] = ()) -> None:
        self._first_steps: dict[int, int] = {}
        self._attempt = 0
        self.know(tries)
        self.step, self.tokens, self.attempt = array("q"), array("d"), array("q")
        self.time = array("d")
        """Time at which the step ended, in seconds since 1970."""
        self.numbers = {name: array("d") for name in (*NUMBERS, *OF_EXPERTS, *OF_MEMORY)}
        self.loads = Loads()
        self.balance_forced = False
        """Tokens were dealt to experts in turn in some step."""
        self.loss_by_source: dict[str, array[float]] = {}
        self.spikes, self.skipped, self.passed_over = array("q"), array("q"), array("q")
        """Steps that were spikes; that were not applied to the weights; of which nothing was computed."""
        self.validations: list[Validation] = []
        self.set_validations: list[Validation] = []
        """Looks at named sets, whose losses are `by_source`."""
        self.newest: dict[str, Any] | None = None
        """Row of the last step; None where the run went back and has made none since."""
        self.lost = 0
        """Steps that were made and do not count."""
        self.unread = self.untimed = 0
        """Rows that are none of a step; rows without a time."""

    def __len__(self) -> int:
        return len(self.step)

    def know(self, tries: Iterable[Attempt]) -> None:
        """Attempts, those that are known already among them."""
        self._first_steps |= {each.number: each.first_step for each in tries}

    def contradicted(self, tries: Iterable[Attempt]) -> bool:
        """True if attempts are other than those that the rows so far were read by: all have to be read again."""
        return any(
            self._first_steps.get(each.number, each.first_step if each.number > self._attempt else None)
            != each.first_step
            for each in tries
        )

    def add(self, row: dict[str, Any]) -> None:
        """A row of metrics.jsonl; rows come in the order of the file. One without a step is left out."""
        step, attempt = row.get("step"), row.get("attempt", 0)
        if not is_step(step) or type(attempt) is not int or not 0 <= attempt < 2**62:
            self.unread += 1
            return
        if attempt < self._attempt:
            return  # of a process that had lost the run's lock and had not noticed yet
        if attempt > self._attempt:
            self._go_on_as(attempt)
        time = number(row.get("time"))
        self.untimed += not math.isfinite(time)
        if "validation_loss" in row:
            by_source = row.get("validation_loss_by_source")
            losses = {str(k): number(v) for k, v in by_source.items()} if isinstance(by_source, dict) else {}
            self.validations.append(Validation(step, time, number(row["validation_loss"]), losses))
        if isinstance(sets := row.get("validation"), dict):
            losses = {str(k): number(v.get("loss")) for k, v in sets.items() if isinstance(v, dict)}
            self.set_validations.append(Validation(step, time, math.nan, losses))
        if "tokens" not in row:
            return
        if self.step and step <= self.step[-1]:
            self._go_back(step - 1)
        self.step.append(step)
        self.attempt.append(attempt)
        self.time.append(time)
        self.tokens.append(number(row["tokens"]))
        experts, memory = (of if isinstance(of := row.get(key), dict) else {} for key in ("experts", "memory"))
        for names, values, unit in ((NUMBERS, row, 1), (OF_EXPERTS, experts, 1), (OF_MEMORY, memory, 2**30)):
            for name in names:
                self.numbers[name].append(number(values.get(name)) / unit)
        self.loads.add(step, experts.get("load_by_layer"))
        self.balance_forced |= experts.get("balance_forced") is True
        by_source = row.get("loss_by_source")
        if isinstance(by_source, dict):
            for name, value in by_source.items():
                of_source = self.loss_by_source.setdefault(name, array("d"))
                of_source.extend([math.nan] * (len(self.step) - 1 - len(of_source)))
                of_source.append(number(value))
        for key, steps in (("spike", self.spikes), ("skipped", self.skipped), ("passed_over", self.passed_over)):
            if row.get(key) is True:
                steps.append(step)
        self.newest = row

    def finish(self) -> None:
        """No more rows for now: attempts that did not come to their first step have gone back, too."""
        if self._first_steps:
            self._go_on_as(max(self._attempt, *self._first_steps))
        for column in self.loss_by_source.values():
            column.extend([math.nan] * (len(self) - len(column)))

    def column(self, name: str) -> Floats:
        """A number of each step."""
        return np.asarray(self.numbers[name])

    def source(self, name: str) -> Floats:
        """The loss of a source in each step."""
        return np.asarray(self.loss_by_source[name])

    @property
    def breaks(self) -> list[int]:
        """Indices of the steps before which another attempt ended."""
        found: list[int] = (np.flatnonzero(np.diff(np.asarray(self.attempt))) + 1).tolist()
        return found

    def _go_on_as(self, attempt: int) -> None:
        for begun, first in self._first_steps.items():
            if self._attempt < begun <= attempt:
                self._go_back(first)
        self._attempt = attempt

    def _go_back(self, step: int) -> None:
        """Steps after this one do not count."""
        keep = bisect_right(self.step, step)
        if keep < len(self.step):
            self.lost += len(self.step) - keep
            self.newest = None
            for whole in (self.step, self.attempt):
                del whole[keep:]
            for column in (self.time, self.tokens, *self.numbers.values(), *self.loss_by_source.values()):
                del column[keep:]
            for steps in (self.spikes, self.skipped, self.passed_over):
                del steps[bisect_right(steps, step) :]
            self.loads.go_back(step)
        for looks in (self.validations, self.set_validations):
            while looks and looks[-1].step > step:
                looks.pop()


@dataclass(frozen=True)
class Positions:
    """Positions of values on every horizontal axis. Each is of one step, or of the steps from `first` to `last`."""

    first: Floats
    last: Floats
    tokens: Floats
    time: Floats
    """Seconds since the start of the run."""
    breaks: tuple[int, ...] = ()
    """Indices before which another attempt ended."""


@dataclass(frozen=True)
class Detail:
    """Values of a line that a page can show: more of them than `Curve` has, and on every axis."""

    places: Positions
    mean: Floats
    """Mean of the steps of each place; NaN where none has a value."""
    low: Floats | None = None
    high: Floats | None = None
    """Lowest and highest of them; None where each place is one step."""


@dataclass(frozen=True)
class Curve:
    """The curve of a column: means of `steps` steps each, and what lies behind them. NaN breaks the line."""

    x: Floats
    mean: Floats
    steps: int
    """Steps of a mean."""
    each_x: Floats | None = None
    each: Floats | None = None
    """Every step, where there are few."""
    low: Floats | None = None
    high: Floats | None = None
    """Lowest and highest of the steps of a mean, where there are many."""

    @property
    def note(self) -> str:
        """Description of the curve in words."""
        if self.steps == 1:
            return "Each point is a step."
        if self.each is not None:
            return f"Thin: each step; thick: means of {self.steps} steps."
        return f"Line: means of {self.steps:,} steps; band: the lowest and highest of them."


def curve(x: Floats, y: Floats, breaks: Sequence[int] = (), *, plain: bool = False) -> Curve:
    """A column as it is drawn.

    Args:
        x [n]: where each step is.
        y [n]: its value; what is not finite is left out of means.
        breaks: indices before which the line is interrupted.
        plain: means alone, for charts with many lines.
    """
    count = len(y)
    y = np.where(np.isfinite(y), y, np.nan)
    few = count <= EVERY_STEP
    steps = max(1, -(-count // (_MEANS if few else _POINTS)))
    breaks = [at for at in breaks if 0 < at < count] if len(breaks) <= _MOST_BREAKS else []
    if not count:
        return Curve(x, y, 1)
    bounds = _bounds(count, steps, breaks)
    mean, low, high = _bins(y, bounds)
    cuts = np.searchsorted(bounds, breaks)
    mean_x, mean = np.insert(_mean(x, bounds), cuts, np.nan), np.insert(mean, cuts, np.nan)
    if plain or steps == 1:
        return Curve(mean_x, mean, steps)
    if few:
        return Curve(mean_x, mean, steps, np.insert(x, breaks, np.nan), np.insert(y, breaks, np.nan))
    return Curve(mean_x, mean, steps, low=np.insert(low, cuts, np.nan), high=np.insert(high, cuts, np.nan))


def detail(columns: Columns, start: float | None, y: Floats) -> Detail:
    """A column as a page can show it: up to `DETAIL` steps each one, of more bins of equal numbers of steps.

    Args:
        columns: of the run; a bin never has steps of two attempts, unless there are very many.
        start: of the run, in seconds since 1970.
        y [n]: the value of each step.
    """
    count = len(y)
    y = np.where(np.isfinite(y), y, np.nan)
    steps = max(1, -(-count // DETAIL))
    breaks = columns.breaks if len(columns.breaks) <= _MOST_DETAIL_BREAKS else []
    step = np.asarray(columns.step, float)
    tokens, time = np.asarray(columns.tokens), np.asarray(columns.time) - (start or 0.0)
    if steps == 1:
        return Detail(Positions(step, step, tokens, time, tuple(breaks)), y)
    bounds = _bounds(count, steps, breaks)
    cuts = tuple(np.searchsorted(bounds, breaks).tolist())
    last = step[np.append(bounds[1:], count) - 1]
    places = Positions(step[bounds], last, _mean(tokens, bounds), _mean(time, bounds), cuts)
    return Detail(places, *_bins(y, bounds))


def places_of(columns: Columns, start: float | None, steps: Sequence[int], times: Sequence[float] = ()) -> Positions:
    """Positions of something that happened after steps.

    Args:
        columns: of the run.
        start: of the run, in seconds since 1970.
        steps: after which it happened.
        times: of it, in seconds since 1970; by default when these steps ended.
    """
    at = np.searchsorted(np.asarray(columns.step), np.asarray(steps, int), side="right")
    step = np.asarray(steps, float)
    tokens = np.append(0.0, columns.tokens)[at]
    ended = np.asarray(times) if len(times) else np.append(np.nan, columns.time)[at]
    return Positions(step, step, tokens, ended - (start or 0.0))


def _bounds(count: int, steps: int, breaks: Sequence[int]) -> npt.NDArray[np.int64]:
    """Indices at which bins of a number of steps begin, and those of breaks."""
    return np.unique(np.concatenate([np.arange(0, count, steps), np.asarray(breaks, int)])).astype(np.int64)


def _mean(x: Floats, bounds: npt.NDArray[np.int64]) -> Floats:
    found: Floats = np.add.reduceat(x, bounds) / np.diff(np.append(bounds, len(x)))
    return found


def _bins(y: Floats, bounds: npt.NDArray[np.int64]) -> tuple[Floats, Floats, Floats]:
    """Mean, lowest and highest of the values of bins that are not NaN."""
    finite = np.isfinite(y)
    counts = np.add.reduceat(finite.astype(float), bounds)
    with np.errstate(invalid="ignore"):
        mean = np.where(counts > 0, np.add.reduceat(np.where(finite, y, 0.0), bounds) / np.maximum(counts, 1), np.nan)
    return mean, np.fmin.reduceat(y, bounds), np.fmax.reduceat(y, bounds)
