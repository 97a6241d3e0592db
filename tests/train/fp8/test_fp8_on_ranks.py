"""Products in fp8 (emulated) on several processes: the losses and gradients of one process that has them too.

A scale is found of the numbers of one product, so one process and each layout have to take the same pairs of windows at
once, in validation too. Then most layouts do the products of one process, and only gradients are added up in another
order. Others (tp, cp, compiled) round their factors otherwise, and what that does to a code of fp8 grows from step to
step, on each processor in its own way: so every step starts from the weights that one process had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config.load import load
from pipeline.data.loading.heldout import sample
from pipeline.data.preprocess.stage import preprocess
from pipeline.train.loop import trainer
from pipeline.train.run.folder import read_metrics
from pipeline.train.start.open_run import open_heldout
from tests import tiny
from tests.train.distributed.ranks import Ranks
from tests.train.parallel.layouts import Probe, Tensors

pytestmark = pytest.mark.parallel

STEPS = 3
PAIR = 2
"""Windows of one pass."""
MOST_RANKS = 4
"""Processes of a layout that see other windows, at most."""
SAMPLES = 17
"""Windows of validation, of which both sources have 8: a pair for each of the processes."""

KEYS: dict[str, Any] = {
    "model.dim": 64,
    "model.heads": 4,
    "model.kv_heads": 2,
    "model.ffn_dim": 128,
    "model.layers": 4,
    "train.duration": f"{STEPS} steps",
    "train.batch_size": MOST_RANKS * PAIR,
    "train.micro_batch_size": PAIR,
    # An update is about proportional to the gradient. Adam's would be a whole step where a gradient is rounding alone.
    "train.optimizer": {"lr": 0.5, "eps": 1.0},
    "train.validation": {"every_steps": STEPS, "samples": SAMPLES},
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


@dataclass(frozen=True)
class Tolerance:
    """Relative differences that the number formats explain within one step."""

    loss: float
    grad_norm: float
    tensor: float
    """Norm of the error of a gradient or an update, by its own norm."""


SAME = Tolerance(loss=1e-6, grad_norm=1e-6, tensor=1e-5)
"""The same products: sums over micro-batches are in another order, in fp32."""
ROUNDED = Tolerance(loss=2**-9, grad_norm=2**-5, tensor=2**-3)
"""Other codes: a gradient is off by what rounding to e5m2 does to a factor, 1 in 8 at most, and its errors are of both
signs, so that norms are nearer. A loss is nearer than rounding to bf16."""
FP32_SPACING = 2**-23


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp8")
    config = load(tiny.write_run(folder, KEYS))
    preprocess(config)
    chosen = sample(open_heldout(config, config.train.validation.split), SAMPLES)
    assert all(len(windows) % (MOST_RANKS * PAIR) == 0 for windows in chosen.values()), "other pairs on other layouts"
    return folder


def name_of(row: Row) -> str:
    kind, _, values, _ = row
    return "-".join([kind, *(value.rpartition(".")[2].replace("=", "") for value in values)])


def lead(root: str, name: str, values: list[str]) -> None:
    """Train as one process; `tensors.pt` in the run folder has what `follow` compares with."""
    with Probe(0, range(1, STEPS + 1), weights=True) as probe:
        trainer.train(load(Path(root) / "run.yaml", [f"run.dir={root}/{name}", *values]))
    torch.save(probe.tensors, Path(root) / name / "tensors.pt")


def follow(root: str, name: str, kind: str, values: list[str], tolerance: float) -> tuple[set[str], list[str]]:
    """Train on a layout, each step from the weights of the run `kind` of one process.

    Returns:
        The names of the parameters that this process has a part of, and the gradients and updates that differ.
    """
    expected = torch.load(Path(root) / kind / "tensors.pt", weights_only=True)
    with Probe(0, range(1, STEPS + 1), weights=True, lead=expected) as probe:
        trainer.train(load(Path(root) / "run.yaml", [f"run.dir={root}/{name}", *values]))
    assert probe.tensors.keys() == expected.keys()
    return set(probe.tensors["initial"]), list(differences(probe.tensors, expected, tolerance))


def differences(found: Tensors, expected: Tensors, tolerance: float) -> Iterator[str]:
    before = expected["initial"]
    for kind, tensors in found.items():
        for name, tensor in tensors.items():
            wanted = expected[kind][name]
            error, size, least = (tensor - wanted).norm().item(), wanted.norm().item(), 0.0
            if kind.startswith("weights"):
                size, least = (wanted - before[name]).norm().item(), FP32_SPACING * size
            if not error <= (0.0 if kind == "initial" else tolerance * size + least):
                yield f"{kind} of {name}: {error / size:.2g}"
        if kind.startswith("weights"):
            before = expected[kind]


@pytest.fixture(scope="module")
def one(root: Path, processes: Callable[[int], Ranks]) -> Callable[[str], None]:
    """See that there is the run of one process, in a folder named like the kind."""

    def get(kind: str) -> None:
        if not (root / kind).exists():
            processes(1).call(lead, str(root), kind, [f"train.precision.fp8={FP8[kind]}"])

    return get


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=name_of(row), marks=pytest.mark.slow if row[3] else pytest.mark.guard) for row in ROWS]
)
def test_a_layout_computes_what_one_process_does(
    root: Path, processes: Callable[[int], Ranks], one: Callable[[str], None], row: Row
) -> None:
    kind, world, values, _ = row
    one(kind)
    allowed = ROUNDED if any(value in OTHER_SUMS for value in values) else SAME
    settings = [f"train.precision.fp8={FP8[kind]}", *values]
    several = processes(world).call(follow, str(root), name_of(row), kind, settings, allowed.tensor, timeout=400)
    assert [differ for _, differ in several] == [[]] * world
    assert set().union(*(names for names, _ in several)) == parameters(root / kind)
    rows = [read_metrics(root / name) for name in (kind, name_of(row))]
    assert "validation_loss" in rows[0][-1]
    for expected, found in zip(*rows, strict=True):
        assert found["data_hash"] == expected["data_hash"]
        assert found["loss"] == pytest.approx(expected["loss"], rel=allowed.loss)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=allowed.grad_norm)
        if "validation_loss" in expected:
            assert found["validation_loss"] == pytest.approx(expected["validation_loss"], rel=allowed.loss)


def parameters(run: Path) -> set[str]:
    return set(torch.load(run / "tensors.pt", weights_only=True, mmap=True)["initial"])
