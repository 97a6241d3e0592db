"""What is seen by layer on any layout is what one process sees, and the training stays bit for bit the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from pipeline.config.load import load
from pipeline.data.preprocess.stage import preprocess
from pipeline.train.distributed.layout import Layout
from pipeline.train.loop import trainer
from pipeline.train.parallel.tested import Combination
from pipeline.train.run.folder import read_metrics
from tests import tiny
from tests.train.distributed.ranks import Ranks
from tests.train.parallel import layouts
from tests.train.runs import weights_hash

pytestmark = pytest.mark.parallel

SEEN = ("grad_norm_by_layer", "activation_rms_by_layer", "attention_logit_max_by_layer")
LAYERS, STEPS = 4, 3
LAYOUTS: dict[str, Combination] = {
    "tp2": Combination(Layout(tp=2)),
    "tp2-no_sp": Combination(Layout(tp=2), sequence_parallel=False),
    "tp4": Combination(Layout(tp=4)),
    "pp2": Combination(Layout(pp=2)),
    "zbv": Combination(Layout(pp=2), "zbv"),
    "fsdp2": Combination(Layout(dp_shard=2)),
    "fsdp2-tp2": Combination(Layout(dp_shard=2, tp=2)),
    "hsdp": Combination(Layout(dp_replicate=2, dp_shard=2)),
    "pp2-tp2": Combination(Layout(pp=2, tp=2)),
    "pp2-fsdp2": Combination(Layout(pp=2, dp_shard=2), "interleaved_1f1b"),
    "cp2": Combination(Layout(cp=2)),
    "cp2-tp2": Combination(Layout(cp=2, tp=2), cp_method="ulysses"),
}
FAMILY_OF = {"tp4": "qwen3", "zbv": "qwen3", "pp2-tp2": "qwen3", "fsdp2": "gpt2", "pp2": "gpt2"}
"""Qwen3's two key heads on four ranks are shared; it and GPT-2 have tied embeddings. The others are Llama."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("observe")
    changes = {
        "model.layers": LAYERS,
        "train.duration": f"{STEPS} steps",
        "train.validation": {"every_steps": 100, "samples": 0},
        "train.metrics": {"tensorboard": False, "layers_every_steps": 1},
    }
    for family, keys in layouts.FAMILIES.items():
        file = tiny.write_run(folder, {**layouts.COMMON, **keys, **changes}, f"{family}.yaml")
    preprocess(load(file))
    return folder


def _train(file: Path, values: list[str]) -> None:
    trainer.train(load(file, values))


def run_on(root: Path, processes: Ranks, family: str, row: Combination, name: str, *values: str) -> Path:
    run = root / name
    if not run.exists():
        parallel = orjson.dumps(row.parallel.model_dump(mode="json", exclude_unset=True)).decode()
        processes.call(_train, root / f"{family}.yaml", [f"run.dir={run}", f"parallel={parallel}", *values])
    return run


def seen(run: Path) -> list[dict[str, Any]]:
    return [{key: row[key] for key in SEEN} for row in read_metrics(run)]


GUARD = ("tp2", "zbv", "fsdp2-tp2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[
                *layouts.trains(row.schedule),
                pytest.mark.guard if name in GUARD else pytest.mark.slow,
            ],
        )
        for name, row in LAYOUTS.items()
    ],
)
def test_a_layout_sees_what_one_process_sees(root: Path, processes: Callable[[int], Ranks], name: str) -> None:
    row, family = LAYOUTS[name], FAMILY_OF.get(name, "llama")
    one = run_on(root, processes(1), family, Combination(Layout()), f"one-{family}", "train.micro_batch_size=16")
    # Three windows in a micro-batch do not divide those of a rank: where a schedule allows it, some are padding.
    size = 3 if row.layout.pp == 1 else 2
    run = run_on(root, processes(row.layout.world_size), family, row, name, f"train.micro_batch_size={size}")
    expected, found = seen(one), seen(run)
    assert len(expected) == len(found) == STEPS
    for theirs, ours in zip(expected, found, strict=True):
        for key in SEEN:
            assert ours[key].keys() == theirs[key].keys()
            for layer, value in theirs[key].items():
                assert ours[key][layer] == pytest.approx(value, rel=1e-4), (key, layer)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp2-tp2", "pp2-tp2"])
def test_observing_changes_no_bit_on_a_layout(root: Path, processes: Callable[[int], Ranks], name: str) -> None:
    row, values = LAYOUTS[name], ["train.micro_batch_size=2"]
    watched = run_on(root, processes(4), "llama", row, f"{name}-watched", *values)
    plain = run_on(root, processes(4), "llama", row, f"{name}-plain", *values, "train.metrics.layers_every_steps=null")
    assert not any(key in row for row in read_metrics(plain) for key in SEEN)
    assert all(key in row for row in read_metrics(watched) for key in SEEN)
    assert weights_hash(plain) == weights_hash(watched)
