"""Profiles of several processes: every one has its spans, the chosen ones their traces, and no bit changes."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from pipeline.config.load import load
from pipeline.data.preprocess.stage import preprocess
from pipeline.train.host.gc_schedule import GcSchedule
from pipeline.train.loop import trainer
from pipeline.train.monitor.profiler import Profile
from tests import tiny
from tests.train.distributed.ranks import Ranks
from tests.train.parallel import layouts
from tests.train.runs import exact, weights_hash

pytestmark = pytest.mark.parallel

SLOW = pytest.mark.slow
MICRO_BATCHES, FIRST, LAST = 4, 2, 3
LAYOUTS = {
    "fsdp2": {"dp_shard": 2},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "zbv": {"pp": 2, "pipeline": {"schedule": "zbv"}},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profile")
    changes = {"model.layers": 4, "train.duration": "4 steps", "train.batch_size": 8, "train.checkpoint.every_steps": 3}
    preprocess(load(tiny.write_run(folder, changes)))
    return folder


def _train(file: Path, values: list[str]) -> None:
    trainer.train(load(file, values))


def _times(file: Path, values: list[str]) -> float:
    """When this rank went on behind the profile; rank 0 when it had written, which takes a while."""
    times = []
    finish, after = Profile.finish, GcSchedule.after

    def slowly(profile: Profile) -> None:
        finish(profile)
        if dist.get_rank() == 0 and not times:
            time.sleep(1.5)
            times.append(time.monotonic())

    def passing(garbage: GcSchedule, step: int) -> None:
        if dist.get_rank() == 1 and step == LAST:
            times.append(time.monotonic())
        after(garbage, step)

    Profile.finish, GcSchedule.after = slowly, passing  # type: ignore[method-assign]
    try:
        _train(file, values)
    finally:
        Profile.finish, GcSchedule.after = finish, after  # type: ignore[method-assign]
    return times[0]


@SLOW
def test_the_others_wait_for_the_rank_that_writes(root: Path, processes: Callable[[int], Ranks]) -> None:
    """In the next step they would wait with its limit."""
    values = ["parallel.tp=2", f"run.dir={root / 'slow'}", f"train.profile={{steps: [{FIRST}, {LAST}], trace: false}}"]
    written, went_on = processes(2).call(_times, root / "run.yaml", values)
    assert went_on >= written


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[*layouts.trains(name), pytest.mark.guard if name == "zbv" else SLOW])
        for name in LAYOUTS
    ],
)
def test_every_rank_tells_what_it_does(name: str, root: Path, processes: Callable[[int], Ranks]) -> None:
    layout, file = LAYOUTS[name], root / "run.yaml"
    micro_batch = 8 // MICRO_BATCHES // (2 if name == "fsdp2" else 1)
    values = [f"parallel={json.dumps(layout)}", f"train.micro_batch_size={micro_batch}"]
    plain, run = root / name, root / f"{name}-profiled"
    processes(2).call(_train, file, [*values, f"run.dir={plain}"])
    profile = f"train.profile={{steps: [{FIRST}, {LAST}], ranks: [1]}}"
    processes(2).call(_train, file, [*values, f"run.dir={run}", profile])
    assert exact(run) == exact(plain)
    assert weights_hash(run) == weights_hash(plain)
    folder = run / "profile" / "attempt-0001"
    assert sorted(file.name for file in folder.iterdir()) == [
        *(f"spans.rank-{rank:04d}.json" for rank in (0, 1)),
        f"trace-step-{FIRST:08d}-{LAST:08d}.rank-0001.json.gz",
    ]
    stages = 2 if name == "zbv" else 1
    for rank in (0, 1):
        events = json.loads((folder / f"spans.rank-{rank:04d}.json").read_bytes())
        assert {event["pid"] for event in events} == {rank}
        counts = Counter(event["name"] for event in events)
        for each in ("fetch", "reduce", "optimizer", f"step {FIRST}", f"step {LAST}"):
            assert counts[each] == (1 if each.startswith("step") else 2)
        assert counts["save"] == 1
        assert counts["forward"] == counts["backward"] == 2 * MICRO_BATCHES * stages
        assert (counts["backward of weights"] > 0) == (name == "zbv")
