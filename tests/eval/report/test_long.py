"""A run of a million steps: the page stays small, and says what its curves are made of."""

from __future__ import annotations

import math
from pathlib import Path

import orjson
import pytest
from rich.console import Console

from pipeline.eval.report.command import report
from tests.eval.report.reading import Report, number

STEPS = 1_000_000
SOURCES = 12


def loss(step: int) -> float:
    return 2 + 8 / math.sqrt(1 + step / 100) + 0.1 * math.sin(step)


@pytest.mark.slow
def test_a_million_steps(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with (run / "metrics.jsonl").open("wb") as file:
        for step in range(1, STEPS + 1):
            row = {
                "step": step,
                "attempt": 1 + step // 1500,
                "time": 1e9 + step,
                "tokens": 4_000_000 * step,
                "loss": loss(step),
                "loss_by_source": {f"source-{each}": loss(step) + each for each in range(SOURCES)},
                "grad_norm": 1.0,
                "skipped": step % 1000 == 0,
                "lr": 1e-4,
                "tokens_per_second": 4e6,
                "step_seconds": 1.0,
                "data_wait": 0.0,
            }
            file.write(orjson.dumps(row) + b"\n")
    with (run / "ledger.jsonl").open("wb") as file:
        for attempt in range(1, STEPS // 1500 + 2):
            first = max(0, 1500 * (attempt - 1) - 1)
            head = {"host": "h", "pid": 1, "layout": {}, "config": ""}
            begin = {"event": "attempt", "attempt": attempt, "time": 1e9 + first, "first_step": first, **head}
            end = {"event": "attempt end", "attempt": attempt, "seconds": 1500.0, "step": 0, "code": None, "reason": ""}
            file.write(orjson.dumps(begin) + b"\n" + orjson.dumps(end) + b"\n")
    out = tmp_path / "r.html"
    report([run], Console(quiet=True), out=out)
    assert out.stat().st_size < 3e6
    found = Report(out)
    assert "Line: means of 3,334 steps; band: the lowest and highest of them." in found.text
    before = 0
    for row_ in found.tables["Loss"][1:]:
        step = int(number(row_[0]))
        assert number(row_[3]) == pytest.approx(loss(step), rel=1e-5)
        mean = math.fsum(map(loss, range(before + 1, step + 1))) / (step - before)
        assert number(row_[4]) == pytest.approx(mean, rel=1e-5)
        before = step
    assert before == STEPS and "earlier attempts are in ledger.jsonl" in found.text
