"""Ticks of axes, and the values of charts that a page can show."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from matplotlib.figure import Figure

from pipeline.common.page.html import LIGHT, Table
from pipeline.eval.report import drawing
from pipeline.eval.report.model import Line, LineChart, Look
from pipeline.eval.report.series import DETAIL, Columns, curve, detail, places_of
from pipeline.eval.report.ticks import linear_ticks, log_ticks, tick_labels


def test_every_axis_has_labels_that_differ() -> None:
    chance = random.Random(1)
    for _ in range(3000):
        low = 10 ** chance.uniform(-12, 12)
        high = low * 10 ** (10 ** chance.uniform(-3, 1.2))
        for ticks in (log_ticks(low, high), linear_ticks(low, high)):
            labels = tick_labels(ticks)
            assert 3 <= len(ticks) <= 7 and len(set(labels)) == len(labels)
            room = 1e-6 * (high - low)
            assert low - room <= ticks[0] and ticks[-1] <= high + room and ticks == sorted(ticks)
    assert tick_labels(log_ticks(2, 60)) == ["2", "5", "10", "20", "50"]
    assert tick_labels([2.00005, 2.0001]) == ["2.00005", "2.0001"]
    assert linear_ticks(3.0, 3.0) == [3.0]


def chart(y: list[float], breaks: list[int], *, logarithmic: bool) -> LineChart:
    line = Line("loss", curve(np.arange(1.0, len(y) + 1), np.array(y), breaks), Look.of(0))
    return LineChart("t", "d", "steps", "steps", "y", (line,), Table((), ()), logarithmic=logarithmic)


@pytest.mark.parametrize("ends", [(2.1, 8.9), (3.2, 3.9), (0.52, 0.95), (1e-7, 3e5), (2.0001, 2.0002)])
def test_a_logarithmic_axis_has_labels(ends: tuple[float, float]) -> None:
    axes = Figure().add_subplot()
    drawing._draw(axes, chart([*ends], [], logarithmic=True), LIGHT)
    low, high = axes.get_ylim()
    assert sum(low <= tick <= high for tick in axes.get_yticks()) >= 3
    assert all(label.get_text() for label in axes.get_yticklabels())


def test_an_attempt_of_one_step_is_drawn() -> None:
    axes = Figure().add_subplot()
    drawing._draw(axes, chart([3.0, 2.9, 2.8, 2.7, 2.6], [2, 3], logarithmic=True), LIGHT)
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    assert [dot.get_xydata().tolist() for dot in dots] == [[[3.0, 2.8]]]  # type: ignore[union-attr]


def columns(steps: int, attempts: list[int]) -> Columns:
    found = Columns()
    for step in range(1, steps + 1):
        attempt = 1 + sum(step > end for end in attempts)
        found.add({"step": step, "attempt": attempt, "time": 50.0 + 2 * step, "tokens": 10 * step, "loss": 1.0})
    return found


@pytest.mark.parametrize(("steps", "attempts"), [(5, []), (DETAIL, [10, 11]), (2 * DETAIL + 77, [10, 11, 5000])])
def test_detail_has_every_step_in_one_place(steps: int, attempts: list[int]) -> None:
    """Against loops; no spike is lost, and no place has steps of two attempts."""
    chance = np.random.default_rng(steps)
    y = chance.normal(size=steps)
    y[chance.random(steps) < 0.01] = math.inf
    y[steps // 3] = 1e9
    found = detail(columns(steps, attempts), 50.0, y)
    at = found.places
    assert len(found.mean) <= DETAIL + len(attempts) and (found.low is None) == (steps <= DETAIL)
    expected = 1
    for place, (first, last) in enumerate(zip(at.first, at.last, strict=True)):
        assert first == expected
        expected = int(last) + 1
        whole = range(int(first), int(last) + 1)
        assert len({sum(step > end for end in attempts) for step in whole}) == 1
        assert at.tokens[place] == pytest.approx(sum(10 * step for step in whole) / len(whole))
        assert at.time[place] == pytest.approx(sum(2 * step for step in whole) / len(whole))
        part = [y[step - 1] for step in whole if math.isfinite(y[step - 1])]
        if not part:
            assert math.isnan(found.mean[place])
            continue
        assert found.mean[place] == pytest.approx(sum(part) / len(part))
        if found.low is not None and found.high is not None:
            assert (found.low[place], found.high[place]) == (min(part), max(part))
    assert expected == steps + 1
    assert [int(at.first[place]) for place in at.breaks] == [end + 1 for end in attempts]


def test_places_of_steps() -> None:
    found = places_of(columns(20, []), 50.0, [0, 7, 30], [51.0, 65.0, 99.0])
    assert found.tokens.tolist() == [0.0, 70.0, 200.0] and found.time.tolist() == [1.0, 15.0, 49.0]
    assert places_of(columns(20, []), 50.0, [7]).time.tolist() == [14.0]
