"""Columns of metrics and the curves that are drawn of them, compared with loops over lists."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from pipeline.eval.report.series import EVERY_STEP, Columns, curve
from pipeline.train.run.attempts import Attempt
from pipeline.train.run.folder import read_metrics


def attempt(number: int, first_step: int) -> Attempt:
    return Attempt(number, 0.0, 1.0, first_step, 0, 0, "", "h", 1, None, 0, {}, "")


def row(step: int, number: int, loss: float, **more: Any) -> dict[str, Any]:
    return {"step": step, "attempt": number, "time": float(step), "tokens": 10 * step, "loss": loss, **more}


def columns(rows: list[dict[str, Any]], tries: list[Attempt]) -> Columns:
    found = Columns(tries)
    for each in rows:
        found.add(each)
    found.finish()
    return found


def test_a_random_run_is_read_as_the_metrics_are_elsewhere(tmp_path: Path) -> None:
    """Attempts that go back to a checkpoint and further than the one before; `read_metrics` knows no ledger."""
    chance = random.Random(3)
    rows, tries, done = [], [], 0
    for number in range(1, 8):
        first = chance.randint(max(0, done - 6), done)
        tries.append(attempt(number, first))
        done += chance.randint(1, 12)
        for step in range(first + 1, done + 1):
            by_source = {name: chance.random() for name in "ab" if chance.random() < 0.7}
            rows.append(row(step, number, chance.random(), loss_by_source=by_source, spike=chance.random() < 0.2))
            if step % 5 == 0:
                rows.append({"step": step, "attempt": number, "time": 1.0, "validation_loss": chance.random()})
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(each) + b"\n" for each in rows))
    found, expected = columns(rows, tries), read_metrics(tmp_path)
    assert found.step.tolist() == [each["step"] for each in expected] == list(range(1, done + 1))
    assert found.numbers["loss"].tolist() == [each["loss"] for each in expected]
    assert found.attempt.tolist() == [each["attempt"] for each in expected]
    assert found.spikes.tolist() == [each["step"] for each in expected if each["spike"]]
    assert [(v.step, v.loss) for v in found.validations] == [
        (each["step"], each["validation_loss"]) for each in expected if "validation_loss" in each
    ]
    for name in "ab":
        np.testing.assert_array_equal(
            found.source(name), [each["loss_by_source"].get(name, math.nan) for each in expected]
        )
    assert found.lost == sum("loss" in each for each in rows) - done


def test_steps_that_were_lost_and_not_made_again_do_not_count() -> None:
    rows = [row(step, 1, 1.0) for step in range(1, 9)] + [row(5, 2, 2.0)]
    found = columns(rows, [attempt(1, 0), attempt(2, 4), attempt(3, 3)])
    assert found.step.tolist() == [1, 2, 3] and found.newest is None and found.lost == 6


def test_rows_of_a_process_that_has_lost_the_lock_do_not_count() -> None:
    rows = [row(1, 1, 1.0), row(2, 2, 2.0), row(2, 1, 3.0), row(3, 1, 3.0)]
    assert columns(rows, [attempt(1, 0), attempt(2, 1)]).numbers["loss"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("count", [1, 7, 100, 101, EVERY_STEP, EVERY_STEP + 1, 12_345])
def test_a_curve_has_the_means_and_the_ends_of_its_steps(count: int) -> None:
    chance = np.random.default_rng(count)
    x, y = np.cumsum(chance.random(count)), chance.normal(size=count)
    y[chance.random(count) < 0.1] = math.inf
    drawn = curve(x, y)
    assert len(drawn.mean) <= 301 and (drawn.low is not None) == (count > EVERY_STEP)
    for place, start in enumerate(range(0, count, drawn.steps)):
        part = [value for value in y[start : start + drawn.steps].tolist() if math.isfinite(value)]
        if not part:
            assert math.isnan(drawn.mean[place])
            continue
        assert drawn.mean[place] == pytest.approx(sum(part) / len(part))
        assert drawn.x[place] == pytest.approx(float(np.mean(x[start : start + drawn.steps])))
        if drawn.low is not None and drawn.high is not None:
            assert (drawn.low[place], drawn.high[place]) == (min(part), max(part))
    if drawn.each is not None:
        np.testing.assert_array_equal(drawn.each, np.where(np.isfinite(y), y, np.nan))


@pytest.mark.parametrize("count", [50, 1000, 5000])
def test_a_curve_is_broken_between_attempts(count: int) -> None:
    x, y = np.arange(count, dtype=float), np.ones(count)
    breaks = [count // 3, count // 2]
    drawn = curve(x, y, breaks)
    gaps = np.flatnonzero(np.isnan(drawn.x))
    assert len(gaps) == 2
    for gap, at in zip(gaps, breaks, strict=True):
        assert drawn.x[gap - 1] < at <= drawn.x[gap + 1]


def test_no_step_is_no_curve() -> None:
    assert len(curve(np.array([]), np.array([])).mean) == 0
