"""The report as one HTML file: no script, no request, the same in light and dark."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import assert_never

from pipeline import __version__
from pipeline.common.page.html import LIGHT, Fact, Table, document, escaped, section, table, tile
from pipeline.common.page.words import moment
from pipeline.eval.report.charts import curves, scales
from pipeline.eval.report.compared import compared_table
from pipeline.eval.report.drawing import UNDRAWN, svg
from pipeline.eval.report.facts import attempts_table, config_table, headline, layout_table
from pipeline.eval.report.gather import RunFacts
from pipeline.eval.report.model import BarChart, BarPart, Chart, HeatChart, LineChart, Look
from pipeline.eval.report.outcomes import others
from pipeline.eval.report.sample_losses import epoch_table, highest_table
from pipeline.eval.report.texts import texts_section

_DASHES = {"-": "none", "--": "6 3", ":": "1.5 2.5", "-.": "6 2.5 1.5 2.5"}
_SYMBOLS = {"^": "M7 2 L11 10 L3 10 Z", "x": "M3 2 L11 10 M11 2 L3 10", "|": "M7 1 L7 11"}


def page(runs: Sequence[RunFacts]) -> bytes:
    """The whole file.

    Args:
        runs: one, or several that are compared.
    """
    title = "Report: " + ", ".join(each.name for each in runs)
    by_tokens, by_time = scales(runs)
    body = [
        *_head(runs),
        '<input type="radio" name="axis" id="by-tokens" checked><input type="radio" name="axis" id="by-time">',
        "<main>",
        '<div class="switch" role="group" aria-label="Horizontal axis"><span>curves over</span>'
        '<label for="by-tokens">tokens</label><label for="by-time">time</label></div>',
        '<div class="grid">',
        *(_figure(chart, f"a{n}", "over-tokens") for n, chart in enumerate(curves(runs, by_tokens))),
        *(_figure(chart, f"b{n}", "over-time") for n, chart in enumerate(curves(runs, by_time))),
        *(_figure(chart, f"c{n}") for n, chart in enumerate(others(runs))),
        "</div>",
        *_tables(runs),
        f"</main><footer>Made {moment(time.time())} by pretraining-pipeline {__version__} from the files of the run "
        f"folder{'s' * (len(runs) > 1)}. Times in UTC; loss in nats per token.</footer>",
    ]
    return document(title, body)


def _head(runs: Sequence[RunFacts]) -> Iterator[str]:
    if len(runs) > 1:
        yield f"<header><p class='above'>Training runs</p><h1>{len(runs)} runs compared</h1></header>"
    for number, facts in enumerate(runs):
        state = facts.state
        name = f"<h1>{escaped(facts.name)}</h1>" if len(runs) == 1 else f"<h2>{escaped(facts.name)}</h2>"
        swatch = "" if len(runs) == 1 else _line(Look.of(number))
        above = "<p class='above'>Training run</p>" if len(runs) == 1 else ""
        yield f"<header>{above}<div class='name'>{swatch}{name}"
        yield f"<span class='state {state.kind}'>{escaped(state.word)}</span></div>"
        if state.why:
            yield f"<p class='why {state.kind}'>{escaped(state.why)}</p>"
        if len(runs) == 1:
            yield "<dl class='tiles'>" + "".join(tile(fact) for fact in headline(facts)) + "</dl>"
        if facts.problems:
            items = "".join(f"<li>{escaped(line)}</li>" for line in facts.problems)
            yield f"<div class='missing'><p>What is missing or damaged:</p><ul>{items}</ul></div>"
        yield "</header>"
    if len(runs) > 1:
        columns = [{fact.label: fact for fact in headline(facts)} for facts in runs]
        labels = dict.fromkeys(label for column in columns for label in column)
        rows = tuple(
            (label, *(_words(column[label]) if label in column else "–" for column in columns)) for label in labels
        )
        figures = Table(("", *(facts.name for facts in runs)), rows, 1 + len(runs))
        yield f"<section class='wide'>{table(figures)}</section>"


def _words(fact: Fact) -> str:
    return f"{fact.value} ({fact.detail})" if fact.detail else fact.value


def _figure(chart: Chart, key: str, over: str = "always") -> str:
    try:
        drawn = svg(chart, key)
    except Exception:  # figures of others may be what no axis is made for: the other charts are shown all the same
        drawn = f"<p class='note'>{UNDRAWN} Its figures are below.</p>"
    note = f"<p class='note'>{escaped(chart.note)}</p>" if chart.note else ""
    if isinstance(chart, LineChart) and chart.rules:
        note += "<p class='note'>Dashed, numbered: where an attempt began.</p>"
    return (
        f"<figure class='{over}'><figcaption><h3>{escaped(chart.title)}</h3></figcaption>{_legend(chart)}"
        f"{drawn}{note}"
        f"<details><summary>Figures</summary>{table(chart.table)}</details></figure>"
    )


def _legend(chart: Chart) -> str:
    items = []
    if isinstance(chart, LineChart):
        looks = {line.label: line.look for line in chart.lines}
        if len(looks) > 1 or chart.marks:
            items = [f"<li>{_line(look)}{escaped(label)}</li>" for label, look in looks.items()]
        items += [
            f"<li><svg viewBox='0 0 14 12' aria-hidden='true'><path d='{_SYMBOLS[marks.symbol]}' "
            f"style='stroke:var(--{marks.slot});fill:{'none' if marks.symbol != '^' else f'var(--{marks.slot})'};"
            f"stroke-width:1.6'/></svg>{escaped(marks.label)}</li>"
            for marks in chart.marks
        ]
    elif isinstance(chart, BarChart):
        items = [f"<li>{_box(part)}{escaped(part.label)}</li>" for part in chart.legend]
    elif isinstance(chart, HeatChart):
        items = [f"<li>{_square(LIGHT[slot])}{escaped(label)}</li>" for slot, label in chart.legend]
    else:
        assert_never(chart)
    return f"<ul class='legend'>{''.join(items)}</ul>" if items else ""


def _line(look: Look) -> str:
    return (
        f"<svg viewBox='0 0 24 12' aria-hidden='true'><path d='M1 6 L23 6' style='stroke:var(--{look.slot});"
        f"stroke-width:2.4;stroke-dasharray:{_DASHES[look.dash]};fill:none'/></svg>"
    )


def _box(part: BarPart) -> str:
    opacity = "fill-opacity:.18;stroke-width:1.4" if part.outline else "stroke-width:0"
    return _square(f"var(--{part.look.slot})", opacity)


def _square(colour: str, more: str = "stroke-width:0") -> str:
    return (
        "<svg viewBox='0 0 14 12' aria-hidden='true'><rect x='1' y='1' width='11' height='10' "
        f"style='fill:{colour};stroke:{colour};{more}'/></svg>"
    )


def _tables(runs: Sequence[RunFacts]) -> Iterator[str]:
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
    yield "<div class='pair'>"
    words = "Layout: of the last attempt. Versions: of the newest checkpoint."
    yield section("Layout and versions", layout_table(runs), words)
    title, words = "Keys that are not the default", "All keys are in config.yaml in the run folder."
    if len(runs) > 1:
        title, words = "Differences between the run files", ""
    yield section(title, config_table(runs), words)
    yield "</div>"
