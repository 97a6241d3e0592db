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


# transformers is imported in the tests that need it: that takes seconds.


def test_texts_agree_up_to_a_token() -> None:
    from evidence.generation import agreement

    found = agreement([[1, 2, 3], [4, 5, 6], [7, 8]], [[1, 2, 3], [4, 0, 6], [7, 8, 9]])
    assert found == {"rows": 3, "equal_rows": 1, "equal_tokens": [3, 1, 2], "tokens": [8, 9]}


def test_another_weight_gives_other_texts() -> None:
    from evidence.generation import TIE, compare_exactly
    from generate_cache import Shape, models

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
    assert [line["rows"] for line in result["speeds"]] == [1, 3]
    assert all(line["agreement"]["tokens"] == [8 * line["rows"]] * 2 for line in result["speeds"])
    assert all(rate > 0 for line in result["speeds"] for rate in line["tokens_per_s"].values())
    assert all(part["gap"] <= TIE for part in result["exact"]["parts"])
    # Embedding and head, and the matrices and norms of two layers.
    assert result["parameters"] == 2 * 512 * 64 + 2 * (64 * (2 * 64 + 2 * 32) + 3 * 64 * 192 + 2 * 64) + 64
