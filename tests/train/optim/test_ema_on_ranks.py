"""The moving average of the weights on layouts: its closed form, its copies, and from one layout to another."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
import torch

from pipeline.config.load import load
from pipeline.data.preprocess.stage import preprocess
from pipeline.train.distributed.layout import Layout
from pipeline.train.loop import step, trainer
from pipeline.train.optim.ema import Ema
from pipeline.train.parallel.tested import Combination
from pipeline.train.torch_compat.pipeline_stage import SPLITS_BACKWARD
from tests import tiny
from tests.train.distributed.ranks import Ranks
from tests.train.optim.averages import averages_differ, tensors
from tests.train.parallel import layouts

pytestmark = pytest.mark.parallel

DECAY = 0.8
CHAIN: list[tuple[str, Combination]] = [
    ("fsdp2-tp2", Combination(Layout(dp_shard=2, tp=2))),
    ("zbv", Combination(Layout(pp=2), "zbv" if SPLITS_BACKWARD else "interleaved_1f1b")),
    ("pp2-hsdp", Combination(Layout(pp=2, dp_replicate=2))),
    ("one", Combination(Layout())),
    ("dp4", Combination(Layout(dp_shard=4))),
]
"""Layouts, each of which goes on from where the one before it ended."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ema")
    changes = {
        "model.layers": 4,
        "train.ema.decay": DECAY,
        "train.validation": {"every_steps": 100, "samples": 0},
        "train.schedule": {"type": "constant", "warmup": "2 steps"},
        "train.checkpoint": {"every_steps": 1, "keep": 99},
    }
    # Tied embeddings, of which the first and the last stage have copies.
    file = tiny.write_run(folder, {**layouts.COMMON, **layouts.FAMILIES["gpt2"], **changes}, "gpt2.yaml")
    preprocess(load(file))
    return folder


def _train(file: Path, values: list[str]) -> dict[str, float]:
    """Trains; returns a sum over the bits of each average that this rank has a piece of."""
    made: list[Ema] = []

    class Kept(Ema):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)  # type: ignore[arg-type]
            made.append(self)

    before, step.Ema = step.Ema, Kept  # type: ignore[misc]
    try:
        trainer.train(load(file, values))
    finally:
        step.Ema = before  # type: ignore[misc]
    (ema,) = made
    sums = {}
    for name, average in ema.averages.items():
        whole = average.full_tensor().view(torch.int32).long().flatten()  # type: ignore[attr-defined]
        sums[name] = int((whole * torch.arange(1, whole.numel() + 1)).sum())
    return sums


@pytest.mark.slow
def test_an_average_goes_from_layout_to_layout(root: Path, processes: Callable[[int], Ranks]) -> None:
    before: Path | None = None
    for number, (name, row) in enumerate(CHAIN):
        run, first, last = root / name, 2 * number, 2 * number + 2
        if before is not None:
            checkpoint = f"checkpoints/step-{first:08d}"
            shutil.copytree(before / checkpoint, run / checkpoint)
        parallel = orjson.dumps(row.parallel.model_dump(mode="json", exclude_unset=True)).decode()
        values = [
            f"run.dir={run}",
            f"parallel={parallel}",
            f"train.duration={last} steps",
            f"train.micro_batch_size={layouts.BATCH_SIZE // row.layout.dp // row.micro_batches}",
        ]
        by_rank = processes(row.layout.world_size).call(_train, root / "gpt2.yaml", values)
        # All that have a piece of an average have the same whole one, those of other stages too.
        together: dict[str, float] = {}
        for sums in by_rank:
            for key, value in sums.items():
                assert together.setdefault(key, value) == value, (name, key)
        assert together.keys() == tensors(run, last, "ema").keys()
        assert averages_differ(run, DECAY, first=max(1, first), last=last) == [], name
        before = run
