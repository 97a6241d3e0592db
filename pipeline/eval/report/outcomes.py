"""Charts of the outcome of runs: time spent, data read, scores of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pipeline.common.page.html import Table
from pipeline.common.page.words import NONE, count, figure, in_percent, seconds, si
from pipeline.eval.report.charts import MOST_LINES, points_of, source_looks
from pipeline.eval.report.gather import Consumption, RunFacts
from pipeline.eval.report.load_charts import load_charts
from pipeline.eval.report.model import Bar, BarChart, BarPart, Chart, Line, LineChart, Look
from pipeline.eval.report.series import Detail, places_of
from pipeline.eval.reports import WINDOWS, Evaluation

_MOST_BARS = 12
_NOT_HOW = ("checkpoint", "weights", "split")
"""Keys that say what was evaluated; the rest say how."""
_SPENT: tuple[tuple[str, dict[str, str], str], ...] = (
    ("steps that count", {"productive": "steps that count"}, "s2"),
    ("steps lost", {"lost": "steps lost"}, "s1"),
    ("waiting for data", {"waiting": "waiting for data"}, "s4"),
    ("saving", {"saving": "saving"}, "s0"),
    ("validating", {"validating": "validating"}, "s3"),
    ("starting", {"importing": "starting: imports", "starting": "starting: data, model, checkpoint"}, "s5"),
    ("suspended", {"suspended": "suspended"}, "s7"),
    (
        "between attempts",
        {"queued": "between attempts: in the queue", "down": "between attempts: no job"},
        "s6",
    ),
    ("other", {"other": "other"}, "muted"),
)
"""Pieces of the chart of goodput in their order: the parts of each by field, with their labels in the table."""


def others(runs: Sequence[RunFacts]) -> Iterator[Chart]:
    """The charts that are the same by tokens and by time."""
    yield from load_charts(runs)
    if any(each.goodput for each in runs):
        yield _goodput(runs)
    for each in runs:
        if each.consumption:
            yield _consumption(each, several=len(runs) > 1)
    held_out = _evaluations(runs)
    if held_out.lines:
        yield _at_one_step(held_out) or held_out
    yield from _scores(runs)


def _goodput(runs: Sequence[RunFacts]) -> BarChart:
    bars, rows = [], []
    used: set[str] = set()
    for each in runs:
        spent = each.goodput
        if spent is None:
            continue
        wall = spent.wall or 1.0
        pieces = [
            BarPart(label, sum(getattr(spent, key) for key in parts) / wall, Look(slot))
            for label, parts, slot in _SPENT
        ]
        found = tuple(piece for piece in pieces if piece.value > 0)
        bars.append(Bar(each.name, found, f"{in_percent(spent.share)} of {seconds(spent.wall)}"))
        used |= {piece.label for piece in found}
        for _, parts, _ in _SPENT:
            for key, label in parts.items():
                value = float(getattr(spent, key))
                rows.append((each.name, label, seconds(value), in_percent(value / wall)))
    return BarChart(
        title="Goodput",
        description="Where the time went: "
        + "; ".join(f"{bar.label} {bar.text} into steps that count" for bar in bars)
        + ".",
        x_label="share of the time since the start",
        bars=tuple(bars),
        table=Table(("run", "part", "time", "share"), tuple(rows), 2),
        axis="share",
        note="Steps that count, out of all the time since the first start. " + _lost(runs),
        legend=tuple(BarPart(label, 0, Look(slot)) for label, _, slot in _SPENT if label in used),
    )


def _lost(runs: Sequence[RunFacts]) -> str:
    lost = [f"{each.name}: " * (len(runs) > 1) + f"{each.columns.lost:,}" for each in runs if each.columns.lost]
    return f"Steps that were made and lost: {', '.join(lost)}." if lost else ""


def _consumption(facts: RunFacts, *, several: bool) -> BarChart:
    rows = facts.consumption
    planned = sum(row.in_all.drawn for row in rows if row.in_all) or 1
    drawn = sum(_drawn(row) for row in rows) or 1
    bars = []
    looks = source_looks([facts], [row.source for row in rows])
    for row in rows[:_MOST_BARS]:
        look = looks[row.source]
        parts = [BarPart("drawn", float(_drawn(row)), look)]
        epochs = f"{row.by_now.epochs:.3g}" if row.by_now else NONE
        if row.in_all:
            parts.insert(0, BarPart("planned", float(row.in_all.drawn), look, outline=True))
            epochs += f" of {row.in_all.epochs:.3g}"
        bars.append(Bar(row.source, tuple(parts), f"{si(_drawn(row))} tokens, {epochs} epochs"))
    cells = [
        (
            row.source,
            count(row.drawn),
            count(row.by_now.drawn if row.by_now else None),
            count(row.in_all.drawn if row.in_all else None),
            in_percent(_drawn(row) / drawn),
            in_percent(row.in_all.drawn / planned if row.in_all else None),
            f"{row.by_now.epochs:.4g}" if row.by_now else NONE,
            f"{row.in_all.epochs:.4g}" if row.in_all else NONE,
            count(row.by_now.unique if row.by_now else None),
            count(row.by_now.unseen if row.by_now else None),
        )
        for row in rows
    ]
    head = ("source", "drawn", "planned by now", "planned in all", "share", "planned share")
    left = f"The {_MOST_BARS} largest of {len(rows)} sources. " if len(rows) > _MOST_BARS else ""
    return BarChart(
        title=f"Data: {facts.name}" if several else "Data by source",
        description="Tokens drawn from each source, against the plan of the whole run: "
        + "; ".join(f"{bar.label} {bar.text}" for bar in bars)
        + ".",
        x_label="tokens",
        bars=tuple(bars),
        table=Table((*head, "epochs", "epochs at the end", "seen at least once", "left out"), tuple(cells), 1),
        note=left + "Frame: the plan of the whole run. Left out: tokens of epochs that ended early.",
        legend=(BarPart("drawn", 0, Look("muted")), BarPart("planned", 0, Look("muted"), outline=True)),
    )


def _drawn(row: Consumption) -> int:
    """By the metrics, or by the plan where they do not say."""
    return row.drawn if row.drawn is not None else row.by_now.drawn if row.by_now else 0


def _evaluations(runs: Sequence[RunFacts]) -> LineChart:
    """The held-out loss of checkpoints, all sources together and each of several. What differs is a line of its own."""
    lines: list[Line] = []
    cells = []
    shown = [_settings(each, found) for each in runs for found in each.evaluations if not found.replaced]
    differ = _differing(shown)
    looks = source_looks(
        runs, list(dict.fromkeys(name for each in runs for one in each.evaluations for name in one.sources))
    )
    for number, each in enumerate(runs):
        of_source: dict[str, str] = {}
        series: dict[tuple[str, str], list[tuple[int, float]]] = {}
        for found in each.evaluations:
            if found.replaced:
                continue
            asked = _settings(each, found)
            words = [f"{key} {_setting(key, asked[key], values)}" for key, values in differ.items() if key in asked]
            words += ["average of weights"] * (found.weights == "ema")
            what = f"{found.split} ({', '.join(words)})" if words else found.split
            name = f"{each.name}, {what}" if len(runs) > 1 else what
            parts = {name: found.scores}
            if len(found.sources) > 1 and len(runs) == 1:
                parts |= {f"{name}: {source}": scores for source, scores in found.sources.items()}
                of_source |= {f"{name}: {source}": source for source in found.sources}
            measured = dict.fromkeys(parts, found.measure)
            for of, scores in found.sets.items():
                parts[f"{name}: set {of}"], measured[f"{name}: set {of}"] = scores, found.set_measures[of]
            for label, scores in parts.items():
                if (loss := scores["loss"]) is not None:
                    series.setdefault((label, measured[label]), []).append((found.step, loss))
                cells.append(
                    (label, count(found.step), *(figure(scores[k]) for k in ("loss", "perplexity", "bits_per_byte")))
                )
        for place, ((label, _), points) in enumerate(series.items()):
            look = Look.of(number).dotted(place)
            if len(runs) == 1:
                own = looks[of_source[label]] if label in of_source else Look("ink")
                look = _unused(own, {line.look for line in lines})
            lines.append(_line(label, points, look, number, each))
    is_whole = all(asked.get("samples") is None for asked in shown)
    notes = ["From `pipeline eval`" + (": the whole split, where validation takes a sample." if is_whole else ".")]
    lossy = sorted({source for each in runs for found in each.evaluations for source in found.lossy})
    if lossy:
        notes.append(
            f"Bits per byte of {', '.join(lossy)} are too low: they count all bytes of the text, and the tokenizer "
            "does not keep all of them."
        )
    if differ:
        notes.append("Only what was evaluated in the same way can be compared.")
    if len(lines) > MOST_LINES:
        notes.append(f"{MOST_LINES} of {len(lines)} lines; the table has all.")
    return LineChart(
        title="Held-out loss",
        description="Held-out loss of the checkpoints that were evaluated, over steps, nats per token.",
        axis="steps",
        x_label="steps",
        y_label="nats per token",
        lines=tuple(lines[:MOST_LINES]),
        table=Table(("of", "step", "loss", "perplexity", "bits per byte"), tuple(cells), 1),
        logarithmic=True,
        note=" ".join(notes),
    )


def _at_one_step(chart: LineChart) -> BarChart | None:
    """A bar per line, if each has one point at the same step; as points they would cover each other."""
    if len({step for line in chart.lines for step in line.curve.x.tolist()}) != 1:
        return None
    if any(len(line.curve.x) != 1 for line in chart.lines):
        return None
    step = int(chart.lines[0].curve.x[0])
    losses = [float(line.curve.mean[0]) for line in chart.lines]
    return BarChart(
        title=chart.title,
        description=f"Held-out loss of the checkpoint of step {step:,}, nats per token.",
        x_label=f"nats per token at step {step:,}",
        bars=tuple(
            Bar(line.label, (BarPart(line.label, loss, line.look),), figure(loss))
            for line, loss in zip(chart.lines, losses, strict=True)
        ),
        table=chart.table,
        axis="steps",
        note=chart.note,
    )


def _unused(look: Look, used: set[Look]) -> Look:
    """A look, or one that is like it, or any that no line has."""
    others = (look, *map(look.dotted, range(4)), *map(Look.of, range(len(used) + 1)))
    return next((each for each in others if each not in used), look)


def _line(label: str, points: Sequence[tuple[int, float]], look: Look, number: int, facts: RunFacts) -> Line:
    """The line of a few values of a run, each at its step."""
    x, y = (np.array(values, float) for values in zip(*points, strict=True))
    places = places_of(facts.columns, facts.start, [step for step, _ in points])
    return Line(label, points_of(x, y), look, points=True, run=number, detail=Detail(places, y))


def _settings(facts: RunFacts, found: Evaluation) -> dict[str, Any]:
    """Settings of an evaluation, as far as its loss depends on them."""
    made_with = facts.made_with.get((found.step, found.weights), {})
    return {**WINDOWS, **{key: made_with[key] for key in sorted(made_with) if key not in _NOT_HOW}}


def _differing(asked: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Keys with more than one value, and their values in the order in which they come."""
    found: dict[str, list[Any]] = {}
    for each in asked:
        for key, value in each.items():
            values = found.setdefault(key, [])
            if value not in values:
                values.append(value)
    return {key: found[key] for key in sorted(found) if len(found[key]) > 1}


def _setting(key: str, value: Any, values: list[Any]) -> str:
    """A setting of evaluations that differ in it."""
    if isinstance(value, (dict, list)):  # hashes of data sets
        return f"{values.index(value) + 1}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ("all" if key == "samples" else "none") if value is None else str(value)


def _scores(runs: Sequence[RunFacts]) -> Iterator[LineChart]:
    """Benchmarks: what is a share of right answers in one chart, perplexities and bits in another."""
    for fractions, title, y_label in ((True, "Benchmarks", "share"), (False, "Benchmarks: perplexity, bits", "value")):
        series: dict[str, list[tuple[int, float]]] = {}
        looks: dict[str, Look] = {}
        whose: dict[str, int] = {}
        cells = []
        for number, each in enumerate(runs):
            kinds = {(s.task, s.figure) for s in each.scores if not s.is_fraction}
            for score in each.scores:
                if ((score.task, score.figure) not in kinds) is not fractions:
                    continue
                of = " (average of weights)" if score.weights == "ema" else ""
                name = f"{score.task}, {score.figure}{of}"
                label = f"{each.name}: {name}" if len(runs) > 1 else name
                series.setdefault(label, []).append((score.step, score.value))
                whose[label] = number
                looks.setdefault(label, Look.of(number).dotted(len(looks)) if len(runs) > 1 else Look.of(len(looks)))
                cells.append((label, count(score.step), figure(score.value), figure(score.stderr)))
        if not series:
            continue
        labels = list(series)[:MOST_LINES]
        yield LineChart(
            title=title,
            description=f"{title} of the checkpoints that were evaluated, over steps.",
            axis="steps",
            x_label="steps",
            y_label=y_label,
            lines=tuple(
                _line(label, series[label], looks[label], whose[label], runs[whose[label]]) for label in labels
            ),
            table=Table(("of", "step", "value", "standard error"), tuple(cells), 1),
            logarithmic=not fractions,
            note=f"{len(labels)} of {len(series)} figures; the table has all." if len(series) > len(labels) else "",
        )
