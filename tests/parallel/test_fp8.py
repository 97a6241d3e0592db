"""Products in fp8 (emulated) on several processes: the losses and gradients of one process that has them too.

One process and each layout take the same pairs of windows at once, so that a scale is found of the same numbers. What
is left is the order of sums in bf16. Where a process sees a part of a sequence alone (cp) its scales are others.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from pipeline.config.load import load
from pipeline.data.preprocess import preprocess
from pipeline.train import trainer
from pipeline.train.run_folder import read_metrics
from tests import tiny
from tests.parallel.layouts import SEED_STEP, Probe
from tests.parallel.ranks import Ranks

pytestmark = pytest.mark.parallel

KEYS: dict[str, Any] = {
    "model.dim": 64,
    "model.heads": 4,
    "model.kv_heads": 2,
    "model.ffn_dim": 128,
    "model.layers": 4,
    "train.duration": "5 steps",
    "train.batch_size": 8,
    "train.micro_batch_size": 2,
    "train.optimizer": {"lr": 3e-3},
    "train.validation": {"every_steps": 5, "samples": 4},
    "train.checkpoint": {"every_steps": 100},
}

Row = tuple[str, int, tuple[str, ...], bool]
"""Recipe and how weights are sent, processes, layout, whether it is a slow test."""
ROWS: list[Row] = [
    ("tensorwise", 2, ("parallel.dp_shard=2",), True),
    ("gather", 2, ("parallel.dp_shard=2",), False),
    ("rowwise", 2, ("parallel.dp_shard=2",), True),
    ("gather", 2, ("parallel.dp_shard=2", "parallel.reshard_after_forward=false"), True),
    ("gather", 2, ("parallel.dp_shard=2", "parallel.overlap.reduce=last"), True),
    ("tensorwise", 2, ("parallel.dp_replicate=2",), True),
    ("gather", 4, ("parallel.dp_replicate=2", "parallel.dp_shard=2"), True),
    ("tensorwise", 2, ("parallel.tp=2",), True),
    ("tensorwise", 2, ("parallel.tp=2", "parallel.sequence_parallel=false"), True),
    ("rowwise", 2, ("parallel.tp=2",), True),
    ("tensorwise", 4, ("parallel.tp=4",), True),
    ("tensorwise", 4, ("parallel.dp_shard=2", "parallel.tp=2"), True),
    ("gather", 4, ("parallel.dp_shard=2", "parallel.tp=2"), True),
    ("tensorwise", 2, ("parallel.pp=2",), False),
    ("tensorwise", 2, ("parallel.pp=2", "parallel.pipeline.schedule=interleaved_1f1b"), True),
    ("gather", 4, ("parallel.pp=2", "parallel.dp_shard=2"), True),
    ("tensorwise", 4, ("parallel.pp=2", "parallel.tp=2"), True),
    ("tensorwise", 2, ("parallel.cp=2",), True),
    ("gather", 2, ("parallel.cp=2", "parallel.cp_method=ulysses"), True),
    ("gather", 2, ("parallel.dp_shard=2", "train.compile=true"), True),
    ("tensorwise", 2, ("parallel.tp=2", "train.compile=true"), True),
    ("gather", 2, ("parallel.dp_shard=2", "train.recompute.mode=full"), False),
    ("gather", 2, ("parallel.dp_shard=2", "train.recompute.mode=selective"), True),
    ("tensorwise", 2, ("parallel.tp=2", "train.recompute.mode=selective"), True),
    ("tensorwise", 2, ("parallel.pp=2", "train.recompute.mode=full"), True),
]

OTHER_SUMS = ("parallel.tp=2", "parallel.tp=4", "parallel.cp=2", "train.compile=true")
"""With these, sums within a layer are taken in another order, or scales are found of other numbers."""

FP8 = {
    "tensorwise": "{min_size: 16, emulate: true, all_gather: false}",
    "gather": "{min_size: 16, emulate: true, all_gather: true}",
    "rowwise": "{min_size: 16, emulate: true, recipe: rowwise}",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp8")
    preprocess(load(tiny.write_run(folder, KEYS)))
    return folder


def name_of(row: Row) -> str:
    kind, _, values, _ = row
    return "-".join([kind, *(value.rpartition(".")[2].replace("=", "") for value in values)])


def run(root: str, name: str, values: list[str]) -> dict[str, Tensor]:
    """Train; the gradients of the first step, by name, of those parameters that this process has a part of."""
    with Probe(SEED_STEP) as probe:
        trainer.train(load(Path(root) / "run.yaml", [f"run.dir={root}/{name}", *values]))
    return probe.tensors[f"gradient {SEED_STEP + 1}"]


def gradients_differ(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> list[str]:
    errors = {name: ((found[name] - expected[name]).norm() / expected[name].norm()).item() for name in found}
    return [f"{name}: {error:.2g}" for name, error in errors.items() if not error <= tolerance]


@pytest.fixture(scope="module")
def one(root: Path, processes: Callable[[int], Ranks]) -> Callable[[str], dict[str, Tensor]]:
    """The run of one process in a folder named like the kind; its gradients."""
    known: dict[str, dict[str, Tensor]] = {}

    def get(kind: str) -> dict[str, Tensor]:
        if kind not in known:
            (known[kind],) = processes(1).call(run, str(root), kind, [f"train.precision.fp8={FP8[kind]}"])
        return known[kind]

    return get


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=name_of(row), marks=[pytest.mark.slow] if row[3] else []) for row in ROWS]
)
def test_a_layout_computes_what_one_process_does(
    root: Path, processes: Callable[[int], Ranks], one: Callable[[str], dict[str, Tensor]], row: Row
) -> None:
    kind, world, values, _ = row
    gradients = one(kind)
    fp8 = f"train.precision.fp8={FP8[kind]}"
    several = processes(world).call(run, str(root), name_of(row), [fp8, *values], timeout=400)
    same = not any(value in OTHER_SUMS for value in values)
    loss, norm, each = (1e-4, 5e-3, 1e-5) if same else (2e-3, 3e-2, 0.1)
    assert set().union(*several) == set(gradients)
    for rank in several:
        assert gradients_differ(rank, gradients, each) == []
    rows = [read_metrics(root / name) for name in (kind, name_of(row))]
    for expected, found in zip(*rows, strict=True):
        assert found["data_hash"] == expected["data_hash"]
        assert found["loss"] == pytest.approx(expected["loss"], rel=loss)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=norm)
        if "validation_loss" in expected:
            assert found["validation_loss"] == pytest.approx(expected["validation_loss"], rel=loss)
