"""Runs whose objectives choose what is predicted: resumed as if never stopped, validated and evaluated alike."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipeline.config.load import load
from pipeline.eval.perplexity import evaluate
from slurm.local import stages
from tests import tiny

SPECIAL = ["[MASK]", *(f"<extra_id_{number}>" for number in range(8))]
RUNS: dict[str, dict[str, Any]] = {
    "spans": {"model.encoder": {"layers": 1}, "train.objective": {"type": "spans", "rate": 0.3}},
    "masked": {"model.direction": "both", "train.objective": {"type": "masked", "rate": 0.3, "whole_words": True}},
    "ul2": {
        "model.encoder": {"layers": 1},
        "train.objective": {"type": "ul2", "denoisers": [{"rate": 0.2}, {"rate": 0.3, "mean_span": None}]},
    },
}
KEYS = ("step", "loss", "data_hash", "order_hash", "validation_loss")


def rows(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{key: line[key] for key in KEYS if key in line} for line in lines if "loss" in line or KEYS[-1] in line]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.guard if name == "ul2" else pytest.mark.slow) for name in RUNS]
)
def test_a_resumed_run_is_the_straight_one(tmp_path: Path, name: str) -> None:
    quiet = Console(file=io.StringIO())
    changes = {"tokenizer.special_tokens": SPECIAL, "train.schedule.type": "constant", "train.optimizer": {"lr": 1e-3}}
    changes |= RUNS[name]
    straight = load(tiny.write_run(tmp_path, {**changes, "run.dir": str(tmp_path / "straight")}, "straight.yaml"))
    split = tiny.write_run(tmp_path, {**changes, "run.dir": str(tmp_path / "split")}, "split.yaml")
    stages.preprocess(straight)
    stages.train(straight, quiet)
    stages.train(load(split, ["train.duration=4 steps"]), quiet)
    stages.train(load(split, ["train.micro_batch_size=1"]), quiet)
    one, two = rows(straight.run.dir), rows(load(split).run.dir)
    steps = [row for row in one if "data_hash" in row]
    assert len(steps) == 8
    again = [row for row in two if "data_hash" in row]
    for key in ("data_hash", "order_hash"):
        assert [row[key] for row in steps] == [row[key] for row in again]
    assert [row["loss"] for row in steps] == pytest.approx([row["loss"] for row in again], rel=1e-4)
    report = evaluate(straight, None, quiet)
    assert report.blended.bits_per_byte is None and report.blended.targets > 0
    assert evaluate(straight, None, quiet).blended == report.blended
