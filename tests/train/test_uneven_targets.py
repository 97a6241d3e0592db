"""Ranks and micro-batches that have no target at all in a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.train.run.folder import read_metrics
from tests import tiny
from tests.train.distributed.ranks import Ranks
from tests.train.parallel import layouts
from tests.train.runs import train

STEPS = 4


@pytest.mark.guard
def test_they_weigh_nothing(root: Path, processes: Callable[[int], Ranks]) -> None:
    """A mean over each of two ranks, and of these means, would be half of the loss."""
    changes: dict[str, Any] = {
        "train.precision": {"compute": "fp32"},
        "train.duration": f"{STEPS} steps",
        "train.optimizer": {"lr": 1e-3},
        "train.loss": {"mask_document_start": True, "z_loss": 1e-2},
        # Three of the four samples of each step: those of the second rank, or of the first one.
        "blend": {"skip": [{"samples": f"{4 * step + step % 2}-{4 * step + step % 2 + 2}"} for step in range(STEPS)]},
    }
    file = tiny.write_run(root, changes, "uneven.yaml")
    one = read_metrics(train(root, "one", "train.micro_batch_size=4", file=file.name))
    values = [f"run.dir={root / 'two'}", "parallel={dp_shard: 2}", "train.micro_batch_size=1"]
    processes(2).call(layouts.train, file, values)
    two = read_metrics(root / "two")
    assert [row["step"] for row in two] == [row["step"] for row in one] == list(range(1, STEPS + 1))
    for row, other in zip(two, one, strict=True):
        assert row["data_hash"] == other["data_hash"]
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
