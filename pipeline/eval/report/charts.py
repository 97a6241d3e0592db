"""The charts that follow the steps of runs: losses, learning rate, gradients, speed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pipeline.common.page.html import Table
from pipeline.common.page.words import NONE, count, figure, seconds
from pipeline.eval.report.gather import RunFacts
from pipeline.eval.report.model import Axis, Line, LineChart, Look, Marks
from pipeline.eval.report.series import DETAIL, Curve, Detail, Floats, Positions, Validation, curve, detail, places_of

T = TypeVar("T")
TABLE_ROWS = 12
"""Rows of a run in the table of a chart."""
_MOST_MARKS = 400
"""Positions of marks that a drawing can tell apart."""
MOST_LINES = 8
"""That can be told apart in a chart."""
_MEMORY = (
    ("allocated", "GPU memory: peak of tensors"),
    ("reserved", "GPU memory: held by the allocator"),
    ("host", "Memory of the process on the host"),
)
_UNITS = ((2 * 86_400.0, 86_400.0, "days"), (7_200.0, 3_600.0, "hours"), (120.0, 60.0, "minutes"))


@dataclass(frozen=True)
class Scale:
    """Scale of the horizontal axis."""

    axis: Axis
    label: str
    unit: float = 1.0

    def of(self, facts: RunFacts) -> Floats:
        """Positions of the steps of a run."""
        if self.axis == "tokens":
            return np.asarray(facts.columns.tokens)
        return (np.asarray(facts.columns.time) - (facts.start or 0.0)) / self.unit

    def at(self, facts: RunFacts, step: int, time: float) -> float:
        """Position of something that happened after a step, at a time."""
        return _tokens_at(facts, step) if self.axis == "tokens" else (time - (facts.start or 0.0)) / self.unit


def scales(runs: Sequence[RunFacts]) -> tuple[Scale, Scale]:
    """By tokens, and by time since the start of each run, pauses included."""
    times = [time - (each.start or 0.0) for each in runs for time in (*each.columns.time[-1:], *_begun(runs, each))]
    longest = max((time for time in times if math.isfinite(time)), default=0.0)
    unit, name = next(((unit, name) for least, unit, name in _UNITS if longest >= least), (1.0, "seconds"))
    return Scale("tokens", "tokens"), Scale("time", f"{name} since the start", unit)


def curves(runs: Sequence[RunFacts], scale: Scale) -> Iterator[LineChart]:
    """The charts that follow the steps of the runs."""
    yield _by_step(runs, scale, "loss", "Loss", "nats per token", line="training", validation=True, logarithmic=True)
    yield from _losses_by_source(runs, scale)
    yield from _validations_by(runs, scale, "source", lambda each: each.columns.validations)
    yield from _validations_by(runs, scale, "set", lambda each: each.columns.set_validations)
    if _has(runs, "mtp_loss"):
        title = "Loss of multi-token prediction"
        yield _by_step(runs, scale, "mtp_loss", title, "nats per token, mean of depths", logarithmic=True)
    if _has(runs, "lr"):
        yield _by_step(runs, scale, "lr", "Learning rate", "learning rate", from_zero=True, smooth=False)
    if _has(runs, "grad_norm"):
        yield _by_step(runs, scale, "grad_norm", "Gradient norm", "L2 norm before clipping", logarithmic=True)
    if _has(runs, "tokens_per_second"):
        yield _by_step(runs, scale, "tokens_per_second", "Throughput", "tokens per second", from_zero=True)
    if _has(runs, "mfu"):
        yield _by_step(runs, scale, "mfu", "Model FLOP utilization", "fraction of the peak", from_zero=True)
    for name, title in _MEMORY:
        if _has(runs, name):
            yield _by_step(runs, scale, name, title, "GiB of rank 0", from_zero=True)
    if _has(runs, "load_max_over_mean"):
        yield _by_step(
            runs,
            scale,
            "load_max_over_mean",
            "Load of the busiest expert",
            "times the mean, worst layer",
            from_zero=True,
        )
    if _has(runs, "balance_loss"):
        yield _by_step(runs, scale, "balance_loss", "Balance loss", "sum, without coefficient")


def _has(runs: Sequence[RunFacts], name: str) -> bool:
    """True if a step of a run has a finite number in a column."""
    return any(np.isfinite(each.columns.column(name)).any() for each in runs)


def _tokens_at(facts: RunFacts, step: int) -> float:
    columns = facts.columns
    at = int(np.searchsorted(np.asarray(columns.step), step, side="right")) - 1
    return columns.tokens[at] if at >= 0 else 0.0


def _begun(runs: Sequence[RunFacts], facts: RunFacts) -> list[float]:
    """Times at which the attempts that are shown began."""
    return [each.begin for each in facts.tries[1:]] if len(runs) == 1 else []


def _rules(runs: Sequence[RunFacts], scale: Scale) -> tuple[tuple[float, str], ...]:
    """Positions at which attempts of a single run began; of several it would not be seen whose they are."""
    if len(runs) > 1 or len(runs[0].tries) < 2:
        return ()
    return tuple((scale.at(runs[0], each.first_step, each.begin), f"{each.number}") for each in runs[0].tries[1:])


def _rule_places(runs: Sequence[RunFacts]) -> Positions | None:
    """Those of `_rules` on every axis."""
    begun = runs[0].tries[1:] if len(runs) == 1 else []
    if not begun:
        return None
    steps, times = [each.first_step for each in begun], [each.begin for each in begun]
    return places_of(runs[0].columns, runs[0].start, steps, times)


def _looked_at(facts: RunFacts, looks: Sequence[Validation], losses: Floats) -> Detail:
    """Losses of validations on every axis."""
    steps, times = [each.step for each in looks], [each.time for each in looks]
    return Detail(places_of(facts.columns, facts.start, steps, times), np.where(np.isfinite(losses), losses, np.nan))


def _marks(runs: Sequence[RunFacts], scale: Scale) -> tuple[Marks, ...]:
    """Steps at which something happened, of all runs."""
    kinds: tuple[tuple[str, str, Callable[[RunFacts], Sequence[int]]], ...] = (
        ("spike", "^", lambda each: each.columns.spikes),
        ("not applied", "x", lambda each: each.columns.skipped),
        ("skipped", "|", lambda each: each.columns.passed_over),
        ("blend changes", "D", lambda each: each.changes.get("blend", [])),
        ("batch size changes", "s", lambda each: each.changes.get("batch size", [])),
        ("sequence length changes", "v", lambda each: each.changes.get("sequence length", [])),
        ("evaluated", "o", lambda each: sorted({one.step for one in each.evaluations if not one.replaced})),
    )
    found = []
    for label, symbol, steps_of in kinds:
        drawn: list[float] = []
        places: list[tuple[int, Positions]] = []
        for number, each in enumerate(runs):
            steps, marked = np.asarray(each.columns.step), np.asarray(steps_of(each), np.int64)
            marked = marked[np.isin(marked, steps)]  # the plan has changes that are still to come
            x = scale.of(each)[np.isin(steps, marked)]
            drawn += _apart(x, x, _MOST_MARKS).tolist()
            if len(marked):
                kept = _apart(marked, marked.astype(float), DETAIL)
                places.append((number, places_of(each.columns, each.start, kept.tolist())))
        if drawn:
            found.append(Marks(label, np.asarray(drawn), symbol, "ink", tuple(places)))
    return tuple(found)


def _apart(values: npt.NDArray[Any], x: Floats, most: int) -> npt.NDArray[Any]:
    """The first of the values in each of `most` equal stretches of their positions; all, if they are no more."""
    if len(values) <= most:
        return values
    finite = np.isfinite(x)
    values, x = values[finite], x[finite]
    stretch = np.floor((x - x.min()) / ((x.max() - x.min()) or 1.0) * (most - 1)) if len(x) else x
    kept: npt.NDArray[Any] = values[np.unique(stretch, return_index=True)[1]]
    return kept


def _by_step(
    runs: Sequence[RunFacts],
    scale: Scale,
    name: str,
    title: str,
    y_label: str,
    *,
    line: str | None = None,
    validation: bool = False,
    logarithmic: bool = False,
    from_zero: bool = False,
    smooth: bool = True,
) -> LineChart:
    """The chart of a number of each step.

    Args:
        runs: one, or several that are compared.
        scale: of the horizontal axis.
        name: of the column.
        title: of the chart.
        y_label: of the vertical axis.
        line: what the line of a single run is called; by default as the chart.
        validation: whether the validation loss, and steps that were spikes or not applied, are drawn as well.
        logarithmic: of the vertical axis.
        from_zero: whether it begins at zero.
        smooth: whether the page may smooth it.
    """
    several = len(runs) > 1
    lines, notes = [], []
    for number, each in enumerate(runs):
        look = Look.of(number)
        drawn = curve(scale.of(each), each.columns.column(name), each.columns.breaks)
        label = each.name if several else line or title.lower()
        exact = detail(each.columns, each.start, each.columns.column(name))
        lines.append(Line(label, drawn, look, run=number, detail=exact, smooth=smooth))
        notes.append(drawn.note)
        if validation and each.columns.validations:
            x = np.array([scale.at(each, v.step, v.time) for v in each.columns.validations])
            y = np.array([v.loss for v in each.columns.validations])
            label = f"{each.name}, validation" if several else "validation"
            validations = Look(look.slot if several else "s1", ":")
            exact = _looked_at(each, each.columns.validations, y)
            lines.append(Line(label, points_of(x, y), validations, points=True, run=number, detail=exact))
    shown = (
        f"Training and validation loss over {scale.label}, {y_label}"
        if validation
        else f"{title} over {scale.label}: {y_label}"
    )
    return LineChart(
        title=title,
        description=f"{shown}. {_ends(runs, name)}",
        axis=scale.axis,
        x_label=scale.label,
        y_label=y_label,
        lines=tuple(lines),
        table=_table(runs, name, validation=validation),
        marks=_marks(runs, scale) if validation else (),
        rules=_rules(runs, scale),
        rule_places=_rule_places(runs),
        logarithmic=logarithmic,
        from_zero=from_zero,
        drawn_note=" / ".join(dict.fromkeys(notes)),  # what is said of all runs once, else of each in order
        note=_forced(runs),
    )


def _forced(runs: Sequence[RunFacts]) -> str:
    """Runs whose figures are not those of a model that is trained for use."""
    forced = [each.name for each in runs if each.columns.balance_forced]
    return f"Tokens were dealt to experts in turn (train.balance.force): {', '.join(forced)}." if forced else ""


def _losses_by_source(runs: Sequence[RunFacts], scale: Scale) -> Iterator[LineChart]:
    """Charts of losses by source: of one run all sources in one, of several runs one for each source."""
    return _by_source(
        runs,
        scale,
        "loss",
        "Loss by source",
        lambda each: list(each.columns.loss_by_source),
        lambda each, name: (scale.of(each), each.columns.source(name)),
        _source_rows,
        lambda each, name: detail(each.columns, each.start, each.columns.source(name)),
        points=False,
    )


def _validations_by(
    runs: Sequence[RunFacts], scale: Scale, of: str, looks: Callable[[RunFacts], list[Validation]]
) -> Iterator[LineChart]:
    def of_name(each: RunFacts, name: str) -> tuple[list[Validation], Floats]:
        found = [v for v in looks(each) if name in v.by_source]
        return found, np.array([v.by_source[name] for v in found])

    def values(each: RunFacts, name: str) -> tuple[Floats, Floats]:
        found, losses = of_name(each, name)
        return np.array([scale.at(each, v.step, v.time) for v in found]), losses

    return _by_source(
        runs,
        scale,
        "validation loss",
        f"Validation by {of}",
        lambda each: list(dict.fromkeys(name for v in looks(each) for name in v.by_source)),
        values,
        lambda each, names: [
            (count(v.step), count(_tokens_at(each, v.step)), *(figure(v.by_source.get(name)) for name in names))
            for v in _some(looks(each))
        ],
        lambda each, name: _looked_at(each, *of_name(each, name)),
        of=of,
        points=True,
    )


def _by_source(
    runs: Sequence[RunFacts],
    scale: Scale,
    what: str,
    title: str,
    names_of: Callable[[RunFacts], list[str]],
    values: Callable[[RunFacts, str], tuple[Floats, Floats]],
    rows: Callable[[RunFacts, list[str]], list[tuple[str, ...]]],
    detailed: Callable[[RunFacts, str], Detail],
    *,
    of: str = "source",
    points: bool,
) -> Iterator[LineChart]:
    every = list(dict.fromkeys(name for each in runs for name in names_of(each)))
    if len(every) < (2 if of == "source" else 1):
        return  # of one source it is the loss itself
    looks = source_looks(runs, every)
    names = list(looks)[:MOST_LINES]
    left = f"The {len(names)} largest of {len(every)} {of}s." if len(every) > len(names) else ""

    def line(number: int, name: str, label: str, look: Look) -> Line:
        each = runs[number]
        x, y = values(each, name)
        drawn = points_of(x, y) if points else curve(x, y, each.columns.breaks, plain=True)
        return Line(label, drawn, look, points=points, run=number, detail=detailed(each, name), smooth=not points)

    def chart(title: str, lines: list[Line], table: Table, rules: tuple[tuple[float, str], ...]) -> LineChart:
        steps = max((each.curve.steps for each in lines), default=1)
        note = "" if points else f"Means of {steps:,} steps." if steps > 1 else "Each point is a step."
        return LineChart(
            title=title,
            description=f"{what.capitalize()} of each {of} over {scale.label}, nats per token.",
            axis=scale.axis,
            x_label=scale.label,
            y_label="nats per token",
            lines=tuple(lines),
            table=table,
            rules=rules,
            rule_places=_rule_places(runs),
            logarithmic=True,
            drawn_note=note,
            note=left,
        )

    if len(runs) == 1:
        lines = [line(0, name, name, looks[name]) for name in names]
        table = Table(("step", "tokens", *names), tuple(rows(runs[0], names)))
        yield chart(title, lines, table, _rules(runs, scale))
        return
    for name in names:
        lines = [
            line(number, name, each.name, Look.of(number)) for number, each in enumerate(runs) if name in names_of(each)
        ]
        cells = [(each.name, *row) for each in runs if name in names_of(each) for row in rows(each, [name])]
        yield chart(f"{what.capitalize()}: {name}", lines, Table(("run", "step", "tokens", what), tuple(cells), 1), ())


def source_looks(runs: Sequence[RunFacts], names: Sequence[str]) -> dict[str, Look]:
    """Looks of sources, in the order of the data: each has the same in every chart, also where it is one of few."""
    order = {row.source: place for place, row in enumerate(c for each in runs for c in each.consumption)}
    known = sorted(names, key=lambda name: order.get(name, len(order)))
    return {name: Look.of(order.get(name, len(order) + place)) for place, name in enumerate(known)}


def points_of(x: Floats, y: Floats) -> Curve:
    """A few values that are drawn as they are."""
    return Curve(x, np.where(np.isfinite(y), y, np.nan), 1)


def _ends(runs: Sequence[RunFacts], name: str) -> str:
    """The first and last value of each run, for those who cannot see the chart."""
    found = []
    for each in runs:
        values = _finite(each.columns.column(name))
        if values.size:
            of = f"{each.name}: " if len(runs) > 1 else ""
            found.append(f"{of}from {figure(float(values[0]))} to {figure(float(values[-1]))}")
    return "; ".join(found) + "." if found else "No step has this value yet."


def _finite(values: Floats) -> Floats:
    return values[np.isfinite(values)]


def _mean(values: Floats) -> str:
    """The mean of the values that are finite."""
    finite = _finite(values)
    return figure(float(finite.mean()) if finite.size else None)


def _some(values: Sequence[T], most: int = TABLE_ROWS) -> list[T]:
    """At equal distances, the last one among them."""
    if not values:
        return []
    return [values[place] for place in np.unique(np.linspace(0, len(values) - 1, most).round().astype(int))]


def _table(runs: Sequence[RunFacts], name: str, *, validation: bool = False) -> Table:
    """Steps at equal distances: the number of each, the mean since the row before, the last validation until then."""
    cells = []
    for each in runs:
        columns = each.columns
        values = columns.column(name)
        known = list({v.step: v for v in columns.validations}.values())
        before, at = -1, 0
        for place in _some(range(len(columns))):
            row = [
                count(columns.step[place]),
                count(columns.tokens[place]),
                seconds(columns.time[place] - (each.start or 0.0)),
                figure(float(values[place])),
                _mean(values[before + 1 : place + 1]),
            ]
            if validation:
                newest = None
                while at < len(known) and known[at].step <= columns.step[place]:
                    newest, at = known[at], at + 1
                row.append(f"{figure(newest.loss)} (step {newest.step:,})" if newest else NONE)
            cells.append((each.name, *row) if len(runs) > 1 else tuple(row))
            before = place
    head = ["step", "tokens", "time", "value", "mean since the row above", *(["validation"] if validation else [])]
    several = len(runs) > 1
    return Table(tuple(["run", *head] if several else head), tuple(cells), 1 if several else 0)


def _source_rows(each: RunFacts, names: list[str]) -> list[tuple[str, ...]]:
    """Means of each source's loss since the row before."""
    columns, rows, before = each.columns, [], -1
    for place in _some(range(len(columns))):
        cells = [
            _mean(columns.source(name)[before + 1 : place + 1]) if name in columns.loss_by_source else NONE
            for name in names
        ]
        rows.append((count(columns.step[place]), count(columns.tokens[place]), *cells))
        before = place
    return rows
