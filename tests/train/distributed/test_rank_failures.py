"""One rank of a training is late, or fails, at the worst moment."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeline.common.errors import UserError
from pipeline.config.load import load
from pipeline.config.run import TimeLimitsConfig
from pipeline.data.preprocess.stage import preprocess
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.distributed import process_group
from pipeline.train.loop import saving, trainer
from pipeline.train.run.folder import read_metrics
from tests import tiny
from tests.train.distributed import ranks

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("failures")
    preprocess(load(tiny.write_run(folder, {"train.validation.samples": 0, "train.duration": "3 steps"})))
    return folder


def _train(file: Path, run: str, *values: str) -> None:
    trainer.train(load(file, [f"run.dir={file.parent / run}", *values]))


def _rank_1_fails_while_rank_0_commits(file: Path) -> None:
    calls = 0

    def broadcast(make: Callable[[], Any], group: dist.ProcessGroup) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:  # the folder that is written to
            return process_group.broadcast_from_rank0(make, group)
        if dist.get_rank() == 1:
            raise RuntimeError("a connection is lost")
        time.sleep(1)
        make()
        raise RuntimeError("now here, too")

    saving.broadcast_from_rank0 = broadcast
    with pytest.raises(RuntimeError, match="a connection is lost|now here, too"):
        _train(file, "run", "parallel.dp_shard=2")


def test_a_rank_that_fails_takes_no_files_from_a_checkpoint_that_is_committed(root: Path) -> None:
    ranks.run(2, _rank_1_fails_while_rank_0_commits, root / "run.yaml")
    (checkpoint,) = Checkpoints.of_run(root / "run").all()
    assert checkpoint.problems() == []


def _rank_1_copies_longer(file: Path) -> None:
    original = trainer.copy_locally

    def copy_locally(*arguments: Any, **options: Any) -> Any:
        if dist.get_rank() == 1:
            time.sleep(25)
        return original(*arguments, **options)

    trainer.copy_locally = copy_locally
    # The stages of a pipeline connect before the first step.
    _train(file, "late", "launch.time_limits.init_seconds=20", "parallel.pp=2")


@pytest.mark.slow
def test_a_rank_that_copies_longer_is_waited_for(root: Path) -> None:
    """Its own limit is off for that time, and so must be those of the others."""
    ranks.run(2, _rank_1_copies_longer, root / "run.yaml", connect=False)
    assert [row["step"] for row in read_metrics(root / "late")] == [1, 2, 3]


def _wait_twice() -> list[tuple[float, float]]:
    place = process_group.of_environment()
    process_group.init_process_group(place, torch.device("cpu"), TimeLimitsConfig())
    times = []
    for late in (1, 2):
        if place.rank == late:
            time.sleep(0.5)
        arrived = time.monotonic()  # one clock for all processes of a machine
        process_group.wait_for_all()
        times.append((arrived, time.monotonic()))
    return times


@pytest.mark.guard
def test_all_wait_for_the_last() -> None:
    for times in zip(*ranks.run(3, _wait_twice, connect=False), strict=True):
        arrived, left = zip(*times, strict=True)
        assert max(arrived) <= min(left)


def test_what_rank_0_says_is_not_lost_with_those_it_cannot_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise UserError("train.x is wrong")

    def broadcast(what: object, group: object) -> None:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer")

    monkeypatch.setattr(process_group, "_world", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(process_group, "_broadcast", broadcast)
    with pytest.raises(UserError, match=r"train\.x"):
        process_group.broadcast_from_rank0(refuse)


def _with_other_keys_on_rank_1(file: Path) -> None:
    _train(file, "other", "parallel.dp_shard=2", f"train.optimizer.lr={[1e-3, 2e-3][int(os.environ['RANK'])]}")


def test_ranks_with_other_run_files_are_refused(root: Path) -> None:
    with pytest.raises(ranks.RankFailed, match=r"rank 1 on .*\n.*train.optimizer.lr: 0.001 on rank 0, 0.002 here"):
        ranks.run(2, _with_other_keys_on_rank_1, root / "run.yaml", connect=False)
