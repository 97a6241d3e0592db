"""Saves of several ranks that are written while they train."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from pipeline.config.load import load
from pipeline.data.preprocess.stage import preprocess
from pipeline.train.checkpoint import dcp_storage
from pipeline.train.checkpoint.host_snapshot import Staging
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.distributed.process_group import background_group, broadcast_from_rank0, gather
from pipeline.train.loop import saving, trainer
from tests import tiers, tiny
from tests.train.distributed import ranks
from tests.train.runs import exact, weights_hash

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saving")
    keys = {"train.validation.samples": 0, "train.checkpoint.keep": 9, "train.checkpoint.every_steps": 2}
    preprocess(load(tiny.write_run(folder, {**keys, "train.duration": "6 steps"})))
    return folder


def _train(file: Path, run: str, *values: str) -> None:
    trainer.train(load(file, [f"run.dir={file.parent / run}", *values]))


@pytest.mark.guard
@pytest.mark.parametrize(
    "layout", tiers.first(1, ["parallel.dp_shard=2", "parallel.tp=2", "parallel.pp=2"], rest="slow")
)
def test_what_is_written_meanwhile_is_what_would_be_written_at_once(root: Path, layout: str) -> None:
    runs = []
    for mode in ("true", "false"):
        runs.append(root / f"{layout}-{mode}")
        ranks.run(
            2, _train, root / "run.yaml", runs[-1].name, layout, f"train.checkpoint.async_save={mode}", connect=False
        )
    assert exact(runs[0]) == exact(runs[1])
    for step in (2, 4, 6):
        assert weights_hash(runs[0], step) == weights_hash(runs[1], step)
        assert Checkpoints.of_run(runs[0]).at(step).state()["layout"]["world_size"] == 2


def _train_where_rank_1_has_no_room(file: Path, run: str, failures: int, *values: str) -> None:
    saving._PAUSE = 0.01
    original, writes = os.fsync, 0

    def fsync(descriptor: int) -> None:
        nonlocal writes
        if dist.get_rank() == 1 and os.readlink(f"/proc/self/fd/{descriptor}").endswith(".distcp"):
            writes += 1
            if writes <= failures:
                raise OSError(errno.ENOSPC, "No space left on device")
        original(descriptor)

    os.fsync = fsync
    _train(file, run, "parallel.dp_shard=2", *values)


def test_a_write_of_one_rank_that_fails_is_tried_again_by_all(root: Path) -> None:
    ranks.run(2, _train_where_rank_1_has_no_room, root / "run.yaml", "again", 2, connect=False)
    checkpoints = Checkpoints.of_run(root / "again")
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [2, 4, 6]
    assert [problem for checkpoint in checkpoints.all() for problem in checkpoint.problems()] == []


@pytest.mark.guard
def test_a_save_that_one_rank_cannot_write_is_given_up_by_all_and_training_goes_on(root: Path) -> None:
    ranks.run(
        2, _train_where_rank_1_has_no_room, root / "run.yaml", "up", 2, "train.checkpoint.retries=1", connect=False
    )
    run = root / "up"
    assert [checkpoint.step for checkpoint in Checkpoints.of_run(run).all()] == [4, 6]
    assert not list((run / "checkpoints").glob("*.tmp"))
    assert len(exact(run)) == 6


def _two_threads(numbers: int) -> None:
    group, found = background_group(), []
    assert background_group() is group

    def beside() -> None:
        for number in range(numbers):
            found.append(
                (broadcast_from_rank0(lambda number=number: number, group), gather([dist.get_rank(), number], group))
            )

    thread = threading.Thread(target=beside)
    thread.start()
    for number in range(numbers):
        total = torch.tensor([float(number + dist.get_rank())])
        dist.all_reduce(total)
        assert total.item() == 2 * number + 1
    thread.join()
    gathered = [[[0, number], [1, number]] if dist.get_rank() == 0 else None for number in range(numbers)]
    assert found == list(zip(range(numbers), gathered, strict=True))


def test_a_thread_talks_to_those_of_other_ranks_while_the_loop_does() -> None:
    ranks.run(2, _two_threads, 200)


def _copy_shards(folder: Path) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    whole = {"even": torch.arange(12.0).view(4, 3), "one_row": torch.arange(3.0).view(1, 3), "plain": torch.ones(2)}
    tensors = {
        name: value.clone() if name == "plain" else distribute_tensor(value, mesh, [Shard(0)])
        for name, value in whole.items()
    }
    copy = Staging(pin=False).copy({"model": tensors})["model"]
    for name, value in tensors.items():
        if isinstance(value, DTensor):
            assert copy[name].placements == value.placements and copy[name].device_mesh == mesh
        value.zero_()
    dcp_storage.write(folder, {"model": copy})
    dist.barrier()
    found = {"model": {name: torch.full_like(value, -1) for name, value in whole.items()}}
    from torch.distributed.checkpoint import load as read

    read(found, checkpoint_id=folder, no_dist=True)
    return {name: torch.equal(found["model"][name], value) for name, value in whole.items()}


def test_copies_of_shards_are_the_shards_of_the_copy(tmp_path: Path) -> None:
    assert ranks.run(2, _copy_shards, tmp_path / "saved") == [{"even": True, "one_row": True, "plain": True}] * 2
