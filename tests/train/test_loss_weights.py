"""Steps with loss weights: plain PyTorch, copies of rows, and whole runs on layouts and across a stop."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pipeline.config.load import load
from pipeline.config.model import ModelConfig
from pipeline.data.loading.batch import Batch, StepData
from pipeline.data.preprocess.stage import preprocess
from pipeline.train.loop.step import Stepper
from pipeline.train.model.decoder import Context
from pipeline.train.optim.optimizers import Optimizers
from pipeline.train.parallel.parallelize import build_model
from pipeline.train.parallel.tested import OF_EXPERTS, OVERLAPPED, TESTED, WITHIN_LAYERS
from pipeline.train.run.folder import read_metrics
from tests import tiny
from tests.tiers import first
from tests.train import runs
from tests.train.distributed.ranks import Ranks
from tests.train.one_process import config_of, numbers, setup_of
from tests.train.parallel import layouts
from tests.train.test_step import batches, plain_copy, plain_weights, step_config, stepper


def weighed(batch: Batch, seed: int) -> Batch:
    """With weights of many sizes."""
    generator = torch.Generator().manual_seed(seed)
    return replace(batch, loss_weight=batch.weight * torch.rand(batch.weight.shape, generator=generator) * 5)


def test_three_steps_equal_plain_pytorch() -> None:
    model, _, ours = stepper(step_config(lr=1e-2, clip_norm=None, eps=1e-3))
    reference = plain_copy(model)
    matrices, vectors = ([p for p in reference.parameters() if (p.ndim >= 2) == wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-3)
    for number in range(3):
        data = [weighed(batch, number) for batch in batches(3, seed=number)]
        total, top, counted = 0.0, torch.zeros(()), 0
        for batch in data:
            losses = F.cross_entropy(
                reference(batch.tokens, Context())[..., :61].flatten(0, 1), batch.targets.flatten(), reduction="none"
            )
            assert batch.loss_weight is not None
            for loss, weight in zip(losses, batch.loss_weight.flatten().tolist(), strict=True):
                top, total, counted = top + weight * loss, total + weight, counted + (weight > 0)
        optimizer.zero_grad()
        (top / total).backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), float("inf"))
        optimizer.step()
        result = ours.step(StepData(number, data, counted, total_weight=total), 1e-2)
        assert result.columns()["weighted_loss"] == pytest.approx((top / total).item(), rel=1e-5)
        assert result.columns()["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
        assert numbers(result)["targets"].sum().item() == counted
    for name, value in plain_weights(model).items():
        torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_a_weight_of_two_is_a_second_copy_of_the_row() -> None:
    """With z-loss and multi-token prediction, whose terms are weighted in the same way."""
    model = ModelConfig.model_validate({"layers": 1, "dim": 32, "heads": 2, "vocab_multiple": 8, "mtp": {"depth": 2}})
    keys: dict[str, Any] = {"loss": {"z_loss": 0.1, "mtp": 0.5}, "precision": {"compute": "fp32"}}
    config = config_of(model, sequence_length=16, optimizer={"clip_norm": None}, **keys)
    (base,) = batches(1)
    generator = torch.Generator().manual_seed(5)
    base = replace(
        base,
        ahead_targets=torch.randint(0, 61, (2, 2, 16), generator=generator),
        ahead_weight=(torch.rand(2, 2, 16, generator=generator) < 0.8).float(),
    )
    rows = [0, 1, 1]
    copied = {
        name: getattr(base, name)[rows] for name in ("tokens", "targets", "weight", "ahead_targets", "ahead_weight")
    }
    starts = torch.tensor([0, 16, 32], dtype=torch.int32)
    twice = replace(base, **copied, starts=starts, sources=torch.tensor([0, 1, 1]))
    factor = torch.tensor([1.0, 2.0])
    assert base.ahead_weight is not None and twice.ahead_weight is not None
    once = replace(
        base,
        loss_weight=base.weight * factor[:, None],
        ahead_loss_weight=base.ahead_weight * factor[:, None, None],
    )
    counts = [int(each.ahead_weight.sum(dim=(0, 2))[depth]) for each in (base, twice) for depth in (0, 1)]
    valid = [int(each.weight.sum()) for each in (base, twice)]
    ends = []
    for batch, totals in (
        (once, {"valid_ahead": counts[:2], "total_weight": float(valid[1]), "total_ahead": counts[2:]}),
        (twice, {"valid_ahead": counts[2:]}),
    ):
        setup = setup_of(config)
        built = build_model(config, setup)
        ours = Stepper(config, setup, built, Optimizers(config, built), sources=["a", "b"])
        row = ours.step(StepData(0, [batch], valid[len(ends)], **totals), 1e-2).columns()
        ends.append((row.get("weighted_loss", row["loss"]), row["grad_norm"], plain_weights(built.whole)))
    assert ends[0][:2] == pytest.approx(ends[1][:2], rel=1e-6)
    for name, value in ends[0][2].items():
        torch.testing.assert_close(value, ends[1][2][name], rtol=1e-4, atol=1e-5)


def write(root: Path, changes: dict[str, Any], name: str = "run.yaml") -> Path:
    """A run file of two sources, of which the documents of one have weights."""
    file = tiny.write_run(root, {})
    with (root / "sea.jsonl").open("w") as lines:
        for number, path in enumerate(sorted((root / "sea").glob("*.txt"))):
            lines.write(json.dumps({"text": path.read_text(), "quality": [0.25, 3, 1.5][number % 3]}) + "\n")
    sources: list[dict[str, Any]] = [
        {"name": "sea", "type": "jsonl", "paths": [str(root / "sea.jsonl")], "weight": 3, "weight_key": "quality"},
        {"name": "land", "paths": [str(root / "land" / "*.txt")], "weight": 1, "loss_weight": 2.5},
    ]
    file = tiny.write_run(root, {"data.sources": sources, **changes}, name)
    return file


@pytest.mark.guard
def test_a_resumed_run_is_the_straight_one_and_the_past_stays(tmp_path: Path) -> None:
    keys = {"train.checkpoint": {"every_steps": 4}, "train.schedule.type": "constant"}
    phases = [{"until": "3 steps"}, {"loss_weights": {"land": 0.5}}]
    preprocess(load(write(tmp_path, {**keys, "blend.phases": phases})))
    straight = runs.train(tmp_path, "straight")
    runs.train(tmp_path, "split", "train.duration=4 steps")
    split = runs.train(tmp_path, "split")
    assert runs.exact(straight) == runs.exact(split)
    assert runs.weights_hash(straight) == runs.weights_hash(split)
    one, two = (runs.column(run, "weighted_loss") for run in (straight, split))
    assert one == two and all(
        weighted != loss for weighted, loss in zip(one, runs.column(straight, "loss"), strict=True)
    )
    for override, words in (
        ("blend.phases.1.loss_weights={land: 0.6}", "loss_weight of 'land' 0.5 -> 0.6"),
        ("data.sources.1.loss_weight=1", "loss_weight of 'land' 2.5 -> 1"),
    ):
        code, out = runs.start(tmp_path, "split", override, "train.duration=9 steps")
        assert code == 2 and words in out
    later = '[{"until": "3 steps"}, {"until": "8 steps", "loss_weights": {"land": 0.5}}, {"loss_weights": {"sea": 9}}]'
    runs.train(tmp_path, "split", f"blend.phases={later}", "train.duration=9 steps")


@pytest.mark.guard
def test_equal_weights_of_all_sources_change_no_bit(tmp_path: Path) -> None:
    """A power of two for all scales both sums exactly."""
    preprocess(load(tiny.write_run(tmp_path)))
    plain = runs.train(tmp_path, "plain")
    assert not any("weight" in key for key in read_metrics(plain)[0])
    assert "loss_weight" not in (plain / "journal.json").read_text()
    twice = runs.train(tmp_path, "twice", "data.sources.0.loss_weight=2", "data.sources.1.loss_weight=2")
    assert runs.exact(plain) == runs.exact(twice)
    tensors = [
        {name: value for name, value in runs.weights_hash(run).items() if name != ".metadata"} for run in (plain, twice)
    ]
    assert tensors[0] == tensors[1]
    assert runs.column(twice, "weighted_loss") == pytest.approx(runs.column(plain, "loss"), rel=1e-12)


ROWS = {row.name: row for row in (*TESTED, *WITHIN_LAYERS, *OVERLAPPED, *OF_EXPERTS)}
CASES = [
    ("ahead", "pp2-1f1b"),
    ("ahead", "reshard-cp2-all_gather"),
    ("mixtral", "fsdp2-reshard-ep2"),
    ("bert", "reshard-cp2-ulysses"),
    ("ahead", "fsdp2-reshard"),
    ("ahead", "tp2"),
]
PACKED = ("ahead",)
"""Families that read packs, the others windows."""


@pytest.fixture(scope="module")
def weighted_families(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("weighted")
    for family in dict.fromkeys(family for family, _ in CASES):
        packing = "best_fit" if family in PACKED else "windows"
        changes = {**layouts.COMMON, **layouts.FAMILIES[family], "data.loader": {"packing": packing}}
        preprocess(load(write(root, changes, f"{family}.yaml")))
    return root


@pytest.mark.guard
@pytest.mark.parallel
@pytest.mark.parametrize(("family", "name"), first(1, CASES, rest="slow"))
def test_a_layout_computes_what_one_process_does(
    weighted_families: Path, processes: Callable[[int], Ranks], family: str, name: str
) -> None:
    row = ROWS[name]
    assert layouts.compare(weighted_families, family, row, processes(row.layout.world_size)) == []
    one = layouts.reference(weighted_families, family, row.layers)
    mine, theirs = ({r["step"]: r for r in read_metrics(run)} for run in (weighted_families / f"{family}-{name}", one))
    for step in range(layouts.SEED_STEP + 1, layouts.LAST_STEP + 1):
        assert mine[step]["weighted_loss"] == pytest.approx(theirs[step]["weighted_loss"], rel=1e-5)
        assert not np.isclose(mine[step]["weighted_loss"], mine[step]["loss"], rtol=1e-6)
