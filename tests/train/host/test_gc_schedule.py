"""Cycles of dead objects are looked for at given steps alone, and a step leaves none that hold tensors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pipeline.data.loading.batch import StepData
from pipeline.train.host.gc_schedule import EVERY_STEPS, GcSchedule
from pipeline.train.loop import trainer
from pipeline.train.loop.step import Stepper
from tests.train.runs import train
from tests.train.test_step import batches, step_config, stepper


class Cycle:
    """Refers to itself, so that its last name does not free it."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def as_it_was(quick_collections: None) -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.enable()


def test_only_its_steps_collect() -> None:
    with GcSchedule() as garbage:
        assert gc.isenabled()
        garbage.after(7)
        assert not gc.isenabled() and gc.get_freeze_count() > 0
        dead = weakref.ref(Cycle())
        for step in range(8, EVERY_STEPS):
            garbage.after(step)
        _ = [[] for _ in range(100_000)]  # which would have set off a collection
        assert dead() is not None
        garbage.after(EVERY_STEPS)
        assert dead() is None
    assert gc.isenabled() and gc.get_freeze_count() == 0


@pytest.mark.guard
def test_an_exception_leaves_it_as_it_was() -> None:
    with pytest.raises(KeyError), GcSchedule() as garbage:
        garbage.after(1)
        raise KeyError
    assert gc.isenabled() and gc.get_freeze_count() == 0
    gc.disable()
    with GcSchedule() as garbage:
        garbage.after(1)
    assert not gc.isenabled(), "whoever called had it so"


def test_a_run_collects_at_its_steps(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[bool] = []
    step = Stepper.step

    def looking(self: Stepper, *arguments: object, **named: object) -> object:
        states.append(gc.isenabled())
        return step(self, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(trainer.Stepper, "step", looking)
    train(root, "collected", "train.duration=3 steps")
    assert states == [True, False, False]
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_steps_leave_no_tensors_to_collect() -> None:
    """Without automatic collection they would fill the device up to the next one."""
    _, _, ours = stepper(step_config())
    ours.step(StepData(0, batches(2), 40), 1e-2)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for seed in range(3):
            ours.step(StepData(seed, batches(2, seed=seed), 40), 1e-2).to_host()().columns()
        gc.collect()
        left = [found for found in gc.garbage if isinstance(found, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert left == []
