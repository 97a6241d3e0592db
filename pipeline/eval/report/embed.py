"""The values of charts for the script of the page: JSON, in which arrays are base64 of little-endian floats."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
from markupsafe import Markup

from pipeline.common.page.words import clean
from pipeline.eval.report.model import Chart, Line, LineChart
from pipeline.eval.report.series import Curve, Detail, Floats, Positions

_PRECISION = 1e-6
"""Relative error of values; positions are exact."""


class _Arrays:
    """Arrays by their number."""

    def __init__(self) -> None:
        self.written: dict[str, int] = {}

    def add(self, values: Floats | None, precision: float = 0.0) -> int | None:
        """The number of an array, which is written if it is new: in four bytes a value where these are precise."""
        if values is None:
            return None
        with np.errstate(over="ignore", invalid="ignore"):
            short = values.astype("<f4")
            fits = np.allclose(short.astype(float), values, rtol=precision, atol=0, equal_nan=True)
        text = ("f" if fits else "d") + base64.b64encode((short if fits else values.astype("<f8")).tobytes()).decode()
        return self.written.setdefault(text, len(self.written))


def embedded(charts: Sequence[tuple[str, Chart]], runs: Sequence[str]) -> Markup:
    """The charts that the script draws, to be put into a `<script type="application/json">`.

    Args:
        charts: by the id of their figure.
        runs: names.
    """
    arrays = _Arrays()
    drawn = [{"id": key, **_chart(chart, arrays)} for key, chart in charts if isinstance(chart, LineChart)]
    value = {"runs": [clean(name) for name in runs], "charts": drawn, "arrays": list(arrays.written)}
    # No text in it can end the element.
    return Markup(orjson.dumps(value).decode().replace("<", "\\u003c"))


def _chart(chart: LineChart, arrays: _Arrays) -> dict[str, Any]:
    return {
        "title": clean(chart.title),
        "about": clean(chart.description),
        "y": clean(chart.y_label),
        "x": clean(chart.x_label),
        "axis": chart.axis,
        "log": chart.logarithmic,
        "zero": chart.from_zero,
        "lines": [_line(line, chart, arrays) for line in chart.lines],
        "marks": [
            {"label": clean(marks.label), "symbol": marks.symbol, "run": run, **_places(places, arrays)}
            for marks in chart.marks
            for run, places in marks.places
        ],
        "rules": {"names": [clean(name) for _, name in chart.rules], **_places(chart.rule_places, arrays)}
        if chart.rule_places is not None
        else None,
    }


def _line(line: Line, chart: LineChart, arrays: _Arrays) -> dict[str, Any]:
    detail = line.detail or _of_curve(line.curve, chart)
    return {
        "label": clean(line.label),
        "slot": line.look.slot,
        "dash": line.look.dash,
        "run": line.run,
        "points": line.points,
        "smooth": line.smooth,
        **_places(detail.places, arrays),
        **{key: arrays.add(getattr(detail, key), _PRECISION) for key in ("mean", "low", "high")},
    }


def _of_curve(curve: Curve, chart: LineChart) -> Detail:
    """Values of a line that has none on every axis: it stays where its chart has it."""
    nowhere = np.full(len(curve.x), np.nan)
    on = {name: curve.x if chart.axis == name else nowhere for name in ("steps", "tokens", "time")}
    places = Positions(on["steps"], on["steps"], on["tokens"], on["time"])
    return Detail(places, curve.mean, curve.low, curve.high)


def _places(places: Positions, arrays: _Arrays) -> dict[str, Any]:
    numbers = {key: arrays.add(getattr(places, key)) for key in ("first", "last", "tokens", "time")}
    return {**numbers, "breaks": list(places.breaks)}
