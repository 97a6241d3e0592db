"""Items of `gpu_evidence.py` that generate and train: rehearsals, and their comparisons with what has to be refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(FOLDER))


def rehearse(item: str, folder: Path) -> dict[str, Any]:
    """The result of an item on this CPU."""
    file = folder / "lines.jsonl"
    words = [sys.executable, str(FOLDER / "gpu_evidence.py"), "--rehearse", "--only", item, "--to", str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=580, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = (json.loads(row) for row in file.read_text().splitlines())
    assert line["status"] == "ok"
    result: dict[str, Any] = line["result"]
    return result


from evidence.gpt2 import beside_cpu, course  # noqa: E402
from evidence.saves import repeated, saves, start_seconds, step_seconds  # noqa: E402


def row(attempt: int, step: int, time: float, **more: float | str) -> dict[str, Any]:
    """A row of metrics.jsonl."""
    return {"attempt": attempt, "step": step, "time": time, **more}


def made(attempt: int, step: int, time: float, seconds: float = 1.0, **more: float | str) -> dict[str, Any]:
    """That of a step."""
    known = {"step_seconds": seconds, "loss": 3.0 - step / 10, "grad_norm": 1.0, "data_hash": "d", "order_hash": "o"}
    return row(attempt, step, time, **(known | more))


# transformers is imported in the tests that need it: that takes seconds.


def test_texts_agree_up_to_a_token() -> None:
    from evidence.generation import agreement

    found = agreement([[1, 2, 3], [4, 5, 6], [7, 8]], [[1, 2, 3], [4, 0, 6], [7, 8, 9]])
    assert found == {"rows": 3, "equal_rows": 1, "equal_tokens": [3, 1, 2], "tokens": [8, 9]}


def test_another_weight_gives_other_texts() -> None:
    from evidence.generation import TIE, compare_exactly

    from benchmarks.eval.generate_cache import Shape, models

    ours, theirs = models(Shape(vocabulary=128, layers=2, dim=32, heads=4, kv_heads=2, ffn_dim=64))
    same = compare_exactly(ours, theirs, rows=2, new=8)
    assert all(part["gap"] <= TIE for part in same["parts"])
    # Both models have the same weights in memory; one of ours becomes another one.
    weight = ours.get_parameter("layers.1.mlp.w2.weight")
    generator = torch.Generator().manual_seed(1)
    weight_of_ours = torch.nn.Parameter(weight + torch.randn(weight.shape, generator=generator))
    ours.load_state_dict({**ours.state_dict(), "layers.1.mlp.w2.weight": weight_of_ours}, assign=True)
    other = compare_exactly(ours, theirs, rows=2, new=8)
    assert other["equal_rows"] < 2
    assert max(part["gap"] for part in other["parts"]) > TIE


@pytest.mark.slow
def test_generation(tmp_path: Path) -> None:
    from evidence.generation import TIE

    result = rehearse("generation", tmp_path)
    speeds = result["tokens_per_second"]
    assert [line["rows"] for line in speeds] == [1, 3]
    assert [len(line["equal_tokens"]) for line in speeds] == [1, 3]
    assert all(line[side] > 0 for line in speeds for side in ("ours", "transformers"))
    assert all(part["gap"] <= TIE for part in result["exact"]["parts"])
    # Embedding and head, and the matrices and norms of two layers.
    assert result["parameters"] == 2 * 512 * 64 + 2 * (64 * (2 * 64 + 2 * 32) + 3 * 64 * 192 + 2 * 64) + 64


def test_times_of_saves_and_of_steps_beside_them() -> None:
    rows = [
        made(1, 1, 101.0, seconds=9.0),
        made(1, 2, 102.0),
        row(1, 2, 102.5, save_blocked=0.5),
        made(1, 3, 104.0, seconds=1.5),
        made(1, 4, 106.0, seconds=2.0),
        row(1, 2, 106.2, save_seconds=4.2),
        made(1, 5, 107.5, seconds=1.5),
        made(1, 6, 108.5),
        row(1, 6, 109.5, save_blocked=1.0),
        made(1, 7, 112.5, seconds=3.0),
        row(1, 7, 112.75, save_blocked=0.25),
        row(1, 6, 112.75, save_seconds=4.0),
        row(1, 7, 114.0, save_seconds=1.0, save_waited=0.125),
    ]
    found = saves(rows)
    assert [(save["step"], save["first"], save["blocked_s"]) for save in found] == [
        (2, True, 0.5),
        (6, False, 1.0),
        (7, False, 0.25),
    ]
    assert [(save["waited_s"], save["commit_s"]) for save in found] == [(0.0, 4.2), (0.0, 4.0), (0.125, 1.0)]
    assert [save["in_flight"] for save in found] == [(102.5, 106.2), (109.5, 112.5), (112.75, 113.625)]
    # The first two steps warm up, and the fifth began while the first save was in flight.
    times = step_seconds(rows, found)
    assert times == [
        {"save": "in flight", "steps": 3, "median_s": 2.0},
        {"save": "none", "steps": 1, "median_s": 1.0},
    ]


def test_a_save_that_was_killed_was_in_flight() -> None:
    rows = [made(1, step, 100.0 + step) for step in range(1, 4)]
    rows += [row(1, 3, 103.5, save_blocked=0.5), made(1, 4, 105.5, seconds=2.0), made(2, 4, 115.0)]
    found = saves(rows)
    assert found[0]["commit_s"] is None
    assert step_seconds(rows, found)[0] == {"save": "in flight", "steps": 1, "median_s": 2.0}


def test_a_start_has_its_parts() -> None:
    rows = [made(1, 1, 101.0), made(2, 2, 132.0, seconds=2.0), made(2, 3, 133.0)]
    parts = start_seconds(rows, attempt=2, since=110.0, begun=117.0)
    assert parts == {"start": 7.0, "load": 13.0, "first_step": 2.0, "total": 22.0}


@pytest.mark.parametrize(
    ("change", "data", "losses"),
    [
        ({}, True, True),
        ({"data_hash": "e"}, False, True),
        ({"order_hash": "e"}, False, True),
        ({"loss": 2.7 + 1e-15}, True, False),
        ({"grad_norm": 1.5}, True, False),
    ],
)
def test_repeated_steps_that_differ_are_told(change: dict[str, Any], data: bool, losses: bool) -> None:
    rows = [*(made(1, step, 100.0 + step) for step in range(1, 5)), made(2, 3, 120.0, **change), made(2, 4, 121.0)]
    rows += [row(2, 4, 121.5, save_blocked=0.5), made(2, 5, 122.0)]
    found = repeated(rows, 1, 2)
    assert (found["steps"], found["data_equal"], found["losses_equal"]) == (2, data, losses)
    assert (found["largest_difference"] > 0) == ("loss" in change)


@pytest.mark.slow
def test_saves_and_a_kill(tmp_path: Path) -> None:
    result = rehearse("saves", tmp_path)
    assert result["repeated"] == {
        "steps": result["repeated"]["steps"],
        "data_equal": True,
        "losses_equal": True,
        "largest_difference": 0.0,
    }
    assert result["repeated"]["steps"] >= 4 or result["killed"]["newest_committed"] > 40
    assert result["killed"]["attempt_ran_as"] == "killed"
    # Matrices and norms of two layers with 4 heads and a hidden size of 192, embedding and head, thrice in fp32.
    parameters = 2 * (4 * 64 * 64 + 3 * 64 * 192 + 2 * 64) + 2 * 512 * 64 + 64
    assert 12 * parameters < result["checkpoint_bytes"] < 12 * parameters + 1_000_000
    assert {save["step"] for save in result["saves"]} >= {20, 40, 60}
    restart = result["restart"]
    assert restart["total"] == pytest.approx(restart["start"] + restart["load"] + restart["first_step"], abs=0.01)
    assert result["goodput"]["attempts"] == 2
    assert result["goodput"]["lost"] > 0


def trained(steps: int = 20) -> list[dict[str, Any]]:
    """Rows of a run whose loss falls, with two validations."""
    rows = [
        made(
            1,
            step,
            100.0 + step,
            loss=10.0 - step / 10,
            lr=1e-4 * step,
            data_hash=f"d{step}",
            order_hash=f"o{step}",
            tokens=100 * step,
            tokens_per_second=float(step),
            epochs_by_source={"library": step / 10},
        )
        for step in range(1, steps + 1)
    ]
    rows[9]["validation_loss"], rows[19]["validation_loss"] = 9.5, 8.5
    return rows


def failing(result: dict[str, Any]) -> list[str]:
    return [name for name, holds in result["checks"].items() if not holds]


def test_a_run_has_its_speeds_behind_the_first_steps() -> None:
    found = course(trained(), first_steps=4)
    assert failing(found) == []
    # Steps 10 to 20.
    assert found["tokens_per_second"] == 15.0
    assert found["mfu"] is None
    assert found["heldout_losses"] == {10: 9.5, 20: 8.5}
    assert (found["steps"], found["tokens"], found["epochs"]) == (20, 2000, 2.0)


def test_a_held_out_loss_that_does_not_fall_is_told() -> None:
    rows = trained()
    rows[19]["validation_loss"] = 9.4
    assert failing(course(rows, first_steps=4)) == ["the held-out loss falls"]
    del rows[19]["validation_loss"], rows[9]["validation_loss"]
    assert failing(course(rows, first_steps=4)) == ["the held-out loss falls"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"data_hash": "e"}, ["data_hash is equal"]),
        ({"order_hash": "e"}, ["order_hash is equal"]),
        ({"lr": 0.5}, ["lr is equal"]),
        ({"loss": 9.8 * 1.004}, ["losses differ by at most 0.003"]),
        ({"loss": float("nan")}, ["losses differ by at most 0.003"]),
        ({"loss": 9.8 * 1.002}, []),
    ],
)
def test_first_steps_that_differ_are_told(change: dict[str, Any], told: list[str]) -> None:
    rows, other = trained(), trained()[:4]
    rows[1] |= change
    assert failing(beside_cpu(rows, other, steps=4)) == told
    assert "the CPU made the first steps" in failing(beside_cpu(rows, other[:3], steps=4))


@pytest.mark.slow
def test_gpt2(tmp_path: Path) -> None:
    result = rehearse("gpt2", tmp_path)
    # 4 steps of 2 windows and 76 of 8.
    assert (result["steps"], result["tokens"]) == (80, 64 * (4 * 2 + 76 * 8))
    assert result["first_losses"] == pytest.approx(result["first_losses_cpu"], rel=result["limit"])
    # In bf16 and in fp32.
    assert result["first_losses"] != result["first_losses_cpu"]
    assert list(result["heldout_losses"]) == ["20", "40", "60", "80"]
    assert result["heldout_losses"]["80"] < result["heldout_losses"]["20"]
    assert result["corpus"]["documents"] > 100
