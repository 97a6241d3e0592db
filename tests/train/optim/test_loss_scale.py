"""The factor on fp16 losses: when it changes, what a checkpoint keeps of it, and that it drops out of the result."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeline.config.train import LossScaleConfig
from pipeline.train.optim.loss_scale import LossScale
from tests.train.runs import column, exact, train

CPU = torch.device("cpu")


def test_it_halves_at_an_overflow_and_doubles_after_enough_good_steps() -> None:
    scale = LossScale(LossScaleConfig(initial=8.0, growth_steps=3), CPU)
    seen = []
    for finite in (True, True, True, True, False, True, True, False, False, False, False, False, False):
        scale.update(torch.tensor(finite))
        seen.append(scale.scale.item())
    #              good, good, doubles, good, halves, good, good, halves ... never below 1
    assert seen == [8, 8, 16, 16, 8, 8, 8, 4, 2, 1, 1, 1, 1]


def test_a_checkpoint_keeps_scale_and_count() -> None:
    config = LossScaleConfig(initial=8.0, growth_steps=3)
    one, other = LossScale(config, CPU), LossScale(config, CPU)
    for finite in (True, False, True, True):
        one.update(torch.tensor(finite))
    other.load(one.state())
    for scale in (one, other):
        scale.update(torch.tensor(True))
    assert one.scale.item() == other.scale.item() == 8.0


FP16 = "train.precision.compute=fp16"


@pytest.mark.guard
def test_an_fp16_run_goes_as_fp32_does_and_its_scale_settles(root: Path) -> None:
    fp32 = train(root, "fp32", "train.precision.compute=fp32")
    # So large that the first steps overflow.
    fp16 = train(root, "fp16", FP16, "train.precision.loss_scale.initial=16777216", "train.duration=16 steps")
    scales, skipped = column(fp16, "loss_scale"), column(fp16, "skipped")
    assert skipped[0] and not skipped[-1]
    assert [scale for scale, withheld in zip(scales, skipped, strict=True) if not withheld][-1] < scales[0]
    assert not (fp16 / "faults.jsonl").exists(), "an overflow is part of the method"
    small = train(root, "fp16-small", FP16, "train.precision.loss_scale.initial=256")
    for ours, theirs in zip(column(small, "loss"), column(fp32, "loss"), strict=True):
        assert ours == pytest.approx(theirs, rel=5e-3)
    for ours, theirs in zip(column(small, "grad_norm"), column(fp32, "grad_norm"), strict=True):
        assert ours == pytest.approx(theirs, rel=3e-2)


@pytest.mark.guard
def test_a_resumed_fp16_run_has_the_bits_of_an_uninterrupted_one(root: Path) -> None:
    keys = ["train.precision.loss_scale.initial=1024", "train.precision.loss_scale.growth_steps=4"]
    keys += ["train.schedule.type=constant", "train.validation.samples=0", FP16]
    whole = train(root, "fp16-whole", *keys, "train.duration=12 steps")
    train(root, "fp16-parts", *keys, "train.duration=6 steps")
    parts = train(root, "fp16-parts", *keys, "train.duration=12 steps")
    assert exact(parts) == exact(whole)
    assert column(parts, "loss_scale") == column(whole, "loss_scale")
    assert len(set(column(whole, "loss_scale"))) > 1
