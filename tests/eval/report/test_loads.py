"""Loads of experts in a report: what is kept of the metrics, and what is drawn of it."""

from __future__ import annotations

import base64
import io
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipeline.common.storage import JsonLines
from pipeline.eval.report.loads import Loads
from tests import tiers
from tests.eval.report.reading import Report, read


def write(folder: Path, steps: int, loads: Any, **experts: Any) -> Path:
    """A run whose layers have 4 experts; `loads` is a function of the step."""
    folder.mkdir()
    lines = JsonLines(folder / "metrics.jsonl")
    for step in range(1, steps + 1):
        row = {
            "step": step,
            "attempt": 1,
            "time": float(step),
            "tokens": 64 * step,
            "loss": 3.0,
            "tokens_per_second": 8.0,
        }
        told = {"load_max_over_mean": 1 + 1 / step, "dead_experts": 1, "balance_loss": 2.0 + 1 / step}
        row["experts"] = told | {"load_by_layer": loads(step)} | experts
        lines.write(row)
    lines.close()
    return folder


def pixels(report: Report) -> Any:
    (inline,) = re.findall(r'href="data:image/png;base64,([^"]+)"', report.file.read_text())
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(inline))).convert("RGBA"))


def test_a_report_has_the_curves_and_the_layer_with_the_most_uneven_experts(tmp_path: Path) -> None:
    def loads(step: int) -> dict[str, list[float]]:
        return {"2": [1.0, 1.0, 1.0, 1.0], "10": [4.0, 0.0, 0.0, 0.0] if step <= 6 else [1.0, 2.0, 0.0, 1.0]}

    seen = read(write(tmp_path / "run", 12, loads), out=tmp_path / "report.html")
    assert seen.tables["Load of the busiest expert"][1][3] == "2"
    assert seen.tables["Balance loss"][-1][3] == "2.08333"
    table = seen.tables["Load per expert: layer 10"]
    assert table[1:] == [["2", "12", "1", "0", "1", "0"], ["10", "12", "2", "1", "0", "1"]]
    assert seen.tiles["busiest expert"] == "1.15x"
    assert seen.tags.count("script") == 2  # its data, and what shows them
    picture = pixels(seen)
    above, below = picture[..., 0] > picture[..., 2], picture[..., 2] > picture[..., 0]
    full = picture[..., 3] == 255
    half = picture.shape[1] // 2
    quarter = picture.shape[0] // 4
    rows = [picture[quarter // 2 + number * quarter] for number in range(4)]
    assert rows[0][half // 2, 3] == 255 and rows[0][half // 2, 0] > rows[0][half // 2, 2], "all tokens"
    assert (full & below)[quarter + 1 :, : half - 2].all(), "no token"
    assert rows[0][-half // 2, 3] == 0, "the mean"
    assert 0 < rows[1][-half // 2, 3] < 255 and above[quarter + quarter // 2, -half // 2]


def test_forced_loads_are_named(tmp_path: Path) -> None:
    seen = read(
        write(tmp_path / "run", 3, lambda step: {"0": [1.0] * 4}, balance_forced=True), out=tmp_path / "report.html"
    )
    assert "forced: tokens were dealt in turn" in seen.text
    assert "Tokens were dealt to experts in turn (train.balance.force): run." in seen.text


@pytest.mark.parametrize(
    "damaged",
    tiers.first(
        3, [None, {"x": [1.0]}, {"0": [math.nan] * 4}, 3, {"0": "no"}, {"0": []}, {"0": ["a", None]}], rest="guard"
    ),
)
def test_damaged_loads_end_no_report(tmp_path: Path, damaged: Any) -> None:
    seen = read(write(tmp_path / "run", 3, lambda step: damaged), out=tmp_path / "report.html")
    assert "Load of the busiest expert" in seen.tables


def test_what_is_kept_is_bounded_and_goes_back() -> None:
    loads = Loads()
    for step in range(1, 5001):
        loads.add(step, {"0": [float(step), 1.0]})
    assert len(loads.step) == len(loads.by_layer) <= 256 and loads.step[0] == 1
    assert loads.step[-1] > 4900
    loads.go_back(100)
    assert loads.step[-1] <= 100 and [each["0"][0] for each in loads.by_layer] == loads.step.tolist()
