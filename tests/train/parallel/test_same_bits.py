"""The same layout gives the same bits twice, and a run that changes its layout at every resume goes as one process."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from pipeline.config.load import load
from pipeline.train.loop import trainer
from pipeline.train.torch_compat.pipeline_stage import SPLITS_BACKWARD
from tests.train.distributed import ranks
from tests.train.parallel import layouts
from tests.train.runs import column, exact, weights_hash

pytestmark = pytest.mark.parallel

EIGHT = {"parallel.pp": 2, "parallel.dp_shard": 2, "parallel.tp": 2}


def train(root: Path, name: str, world: int, *values: str, family: str = "gpt2") -> Path:
    """A run in `root / name` over so many processes."""
    ranks.run(world, _train, root / f"{family}.yaml", [f"run.dir={root / name}", *values], connect=False)
    return root / name


def _train(file: Path, values: Sequence[str]) -> None:
    trainer.train(load(file, values))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zbv", marks=layouts.trains("zbv"))])
def test_same_layout_same_bits_twice_and_resumed(families: Path, schedule: str) -> None:
    values = [f"{key}={value}" for key, value in EIGHT.items()]
    values += [f"parallel.pipeline.schedule={schedule}", "model.layers=4", "train.micro_batch_size=2"]
    values += ["train.duration=6 steps", "train.checkpoint.every_steps=3"]
    once, again, parts = (train(families, f"{schedule}-{name}", 8, *values) for name in ("once", "again", "parts"))
    # As if it had been killed after step 4.
    shutil.rmtree(parts / "checkpoints" / "step-00000006")
    (parts / "checkpoints" / "latest").write_text("step-00000003\n")
    train(families, f"{schedule}-parts", 8, *values)
    for other in (again, parts):
        assert exact(other) == exact(once)
        assert weights_hash(other) == weights_hash(once)


@pytest.mark.slow
def test_a_run_that_changes_its_layout_at_every_resume(families: Path) -> None:
    common = [
        "train.schedule.type=constant",
        "train.schedule.warmup=0 steps",
        "train.validation.samples=0",
        "model.layers=4",
    ]
    one = train(families, "one", 1, *common, "train.duration=7 steps", "train.micro_batch_size=4")
    zero_bubble = "zbv" if SPLITS_BACKWARD else "interleaved_1f1b"
    turns = [
        (2, "parallel.tp=2", "train.micro_batch_size=4"),
        (2, "parallel.pp=2", f"parallel.pipeline.schedule={zero_bubble}", "train.micro_batch_size=4"),
        (4, "parallel.dp_shard=4"),
        (4, "parallel.dp_replicate=2", "parallel.tp=2"),
        (1, "train.micro_batch_size=16"),
        (8, *(f"{key}={value}" for key, value in EIGHT.items()), "train.micro_batch_size=2"),
        (2, "parallel.pp=2", "parallel.pipeline.schedule=gpipe", "train.micro_batch_size=8"),
    ]
    for step, (world, *values) in enumerate(turns, start=1):
        run = train(families, "turns", world, *common, *values, f"train.duration={step} steps")
    for key in ("order_hash", "data_hash", "tokens", "lr"):
        assert column(run, key) == column(one, key)
    for key, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4)):
        assert column(run, key) == pytest.approx(column(one, key), rel=tolerance)
