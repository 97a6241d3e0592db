"""The report as one HTML file: no request, the same in light and dark; a script of its own makes its charts answer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any, assert_never

import numpy as np
from markupsafe import Markup

from pipeline import __version__
from pipeline.common.page.html import LIGHT, Fact, Table, document, prose, section
from pipeline.common.page.render import render
from pipeline.common.page.words import NONE, moment
from pipeline.eval.report.charts import curves, scales
from pipeline.eval.report.drawing import UNDRAWN, svg
from pipeline.eval.report.embed import embedded
from pipeline.eval.report.facts import attempts_table, config_table, headline, layout_table
from pipeline.eval.report.gather import RunFacts
from pipeline.eval.report.model import BarChart, Chart, HeatChart, LineChart, Look
from pipeline.eval.report.outcomes import others
from pipeline.eval.report.sections.compared import compared_table
from pipeline.eval.report.sections.sample_losses import epoch_table, highest_table
from pipeline.eval.report.sections.texts import texts_section
from pipeline.eval.report.series import DETAIL

_PACKAGE = "pipeline.eval.report"
_DASHES = {"-": "none", "--": "6 3", ":": "1.5 2.5", "-.": "6 2.5 1.5 2.5"}
_SYMBOLS = {
    "^": {"path": "M7 2 L11 10 L3 10 Z", "filled": True},
    "x": {"path": "M3 2 L11 10 M11 2 L3 10", "filled": False},
    "|": {"path": "M7 1 L7 11", "filled": False},
    "D": {"path": "M7 1 L12 6 L7 11 L2 6 Z", "filled": True},
    "s": {"path": "M3 2 H11 V10 H3 Z", "filled": True},
    "v": {"path": "M3 2 L11 2 L7 10 Z", "filled": True},
    "o": {"path": "M3 6 a4 4 0 1 0 8 0 a4 4 0 1 0 -8 0", "filled": False},
}
_HELP = (
    "Point at a chart, tap it, or select it and press ← and → for its values. Drag across a chart to zoom all of them; "
    "a double click, or Esc, shows all again. Smoothing is an exponential mean of the steps before, by their distance; "
    "it begins anew where an attempt began, and is not drawn where there is no value. This page has up to "
    f"{DETAIL:,} values of a line: of a run with more steps each is the mean of several, and none of their lowest and "
    "highest is left out."
)


def page(runs: Sequence[RunFacts]) -> bytes:
    """The whole file.

    Args:
        runs: one, or several that are compared.
    """
    by_tokens, _ = scales(runs)
    charts = [(f"chart-{n}", chart) for n, chart in enumerate([*curves(runs, by_tokens), *others(runs)])]
    body = render(
        "report.html",
        _PACKAGE,
        runs=runs,
        looks=[Look.of(number) for number in range(len(runs))],
        tiles=list(headline(runs[0])),
        compared=_compared(runs),
        dashes=_DASHES,
        help=_HELP,
        charts=[_figure(key, chart) for key, chart in charts],
        undrawn=UNDRAWN,
        data=embedded(charts, [facts.name for facts in runs]),
        sections=list(_sections(runs)),
        pair=list(_pair(runs)),
        made=moment(time.time()),
        version=__version__,
    )
    files = resources.files(_PACKAGE)
    css, script = (files.joinpath(f"report.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    return document("Report: " + ", ".join(facts.name for facts in runs), [body], css, script)


def _compared(runs: Sequence[RunFacts]) -> Table:
    """The main figures of several runs beside each other."""
    columns = [{fact.label: fact for fact in headline(facts)} for facts in runs]
    labels = dict.fromkeys(label for column in columns for label in column)
    rows = tuple(
        (label, *(_words(column[label]) if label in column else NONE for column in columns)) for label in labels
    )
    return Table(("", *(facts.name for facts in runs)), rows, 1 + len(runs))


def _words(fact: Fact) -> str:
    return f"{fact.value} ({fact.detail})" if fact.detail else fact.value


def _figure(key: str, chart: Chart) -> dict[str, Any]:
    """A chart as the template shows it."""
    try:
        drawn = Markup(svg(chart, key))
    except Exception:  # figures of others may be what no axis is made for: the other charts are shown all the same
        drawn = Markup()
    notes = {"note": Markup(prose(chart.note)), "drawn_note": "", "values": "", "rules": False}
    if isinstance(chart, LineChart):
        notes |= {"drawn_note": chart.drawn_note, "values": _values(chart), "rules": bool(chart.rules)}
    return {"key": key, "chart": chart, "legend": _legend(chart), "drawn": drawn, **notes}


def _values(chart: LineChart) -> str:
    """A note on what the page has of lines with a value for each step."""
    details = [line.detail for line in chart.lines if line.detail is not None and not line.points]
    steps = max((float(np.max(each.places.last - each.places.first, initial=0)) + 1 for each in details), default=0)
    if steps <= 1:
        return "Every step is in this page." if steps else ""
    return f"Line: means of up to {steps:,.0f} steps; band: the lowest and highest of them. Zooming shows no more."


def _legend(chart: Chart) -> list[dict[str, Any]]:
    if isinstance(chart, LineChart):
        looks = {line.label: line.look for line in chart.lines}
        items: list[dict[str, Any]] = []
        if len(looks) > 1 or chart.marks:
            items = [{"label": label, "look": look} for label, look in looks.items()]
        return items + [
            {"label": marks.label, "symbol": _SYMBOLS[marks.symbol], "slot": marks.slot} for marks in chart.marks
        ]
    if isinstance(chart, BarChart):
        return [
            {"label": part.label, "colour": f"var(--{part.look.slot})", "outline": part.outline}
            for part in chart.legend
        ]
    if isinstance(chart, HeatChart):
        return [{"label": label, "colour": LIGHT[slot], "outline": False} for slot, label in chart.legend]
    assert_never(chart)


def _sections(runs: Sequence[RunFacts]) -> Iterator[Markup]:
    """Tables below the charts, over the whole width."""
    if len(runs) > 1 and (compared := compared_table(runs))[0].rows:
        yield section("Losses compared", *compared)
    yield texts_section([(facts.name, facts.texts) for facts in runs])
    recorded = [(facts.name, facts.sample_losses) for facts in runs]
    if any(losses.epochs for _, losses in recorded):
        yield section("Loss by source and epoch", *epoch_table(recorded))
    if any(losses.highest for _, losses in recorded):
        yield section("Samples with the highest losses", *highest_table(recorded))
    tries, note = attempts_table(runs)
    yield section("Attempts", tries, note)


def _pair(runs: Sequence[RunFacts]) -> Iterator[Markup]:
    """Tables of which two have room beside each other, of one run."""
    words = "Layout: of the last attempt. Versions: of the newest checkpoint."
    yield section("Layout and versions", layout_table(runs), words)
    title, words = "Keys that are not the default", "All keys are in config.yaml in the run folder."
    if len(runs) > 1:
        title, words = "Differences between the run files", ""
    yield section(title, config_table(runs), words)
