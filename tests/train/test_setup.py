"""What a rank takes of its machine before the first weight."""

import os
from pathlib import Path

import pytest
import torch

from pipeline.common.errors import UserError
from pipeline.config.load import load
from pipeline.train.distributed.process_group import Processes
from pipeline.train.start import setup
from pipeline.train.start.setup import choose_device, cores_of, init_rank, threads_of_shell
from tests import tiny


def test_ranks_share_the_cores_and_keep_to_those_that_srun_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    rank = Processes(rank=5, world_size=8, local_rank=1, local_world_size=4)
    assert cores_of(rank, {}) == 16
    task = {"SLURM_CPUS_PER_TASK": "6", "SLURM_PROCID": "5", "SLURM_NTASKS": "8"}
    assert cores_of(rank, task) == 6  # not bound to them
    # Ranks that a launcher has started share those of its task.
    assert cores_of(rank, {**task, "PIPELINE_LAUNCHER": "1"}) == 1
    assert cores_of(rank, {"SLURM_CPUS_PER_TASK": "12", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    assert cores_of(rank, task) == 6  # bound
    assert cores_of(rank, {}) == 1


def test_a_rank_has_no_more_threads_than_the_cores_that_it_got(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = set(range(8))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(mask))
    monkeypatch.setattr(setup, "available", lambda: frozenset(range(8)))
    monkeypatch.setattr(setup, "bind", lambda *_: mask.intersection_update({0, 1, 2}))
    monkeypatch.setattr(setup.process_group, "init_process_group", lambda *_: None)
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    rank = Processes(rank=0, world_size=2, local_rank=0, local_world_size=2)
    changes = {"launch.device": "cpu", "launch.bind": "auto", "launch.threads": None}
    init_rank(load(tiny.write_run(tmp_path, changes)), rank)
    assert threads == [3]


@pytest.mark.parametrize(
    ("wanted", "gpus", "device"),
    [
        ("auto", 0, "cpu"),
        ("cpu", 4, "cpu"),
        ("auto", 4, "cuda:1"),
        ("cuda", 2, "cuda:1"),
        ("auto", 1, None),
        ("cuda", 0, None),
    ],
)
def test_a_rank_takes_the_gpu_of_its_local_number(
    monkeypatch: pytest.MonkeyPatch, wanted: str, gpus: int, device: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    rank = Processes(rank=3, world_size=4, local_rank=1, local_world_size=2)
    if device is None:
        with pytest.raises(UserError, match=f"torch sees {gpus or 'no CUDA device'}"):
            choose_device(wanted, rank)
    else:
        assert choose_device(wanted, rank) == torch.device(device)


@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({}, None),
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "4,2"}, 4),  # of nested regions
        ({"OMP_NUM_THREADS": ""}, None),
        ({"OMP_NUM_THREADS": "1"}, 1),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}, None),  # torchrun's own
        ({"OMP_NUM_THREADS": "2", "TORCHELASTIC_RUN_ID": "none"}, 2),
    ],
)
def test_the_shell_decides_threads_if_a_person_set_them(environment: dict[str, str], threads: int | None) -> None:
    assert threads_of_shell(environment) == threads


@pytest.mark.parametrize("value", ["many", "0", "-3", "2.5", " ", "99999999999"])
def test_what_is_no_number_of_threads_is_refused(value: str) -> None:
    with pytest.raises(UserError, match=f"OMP_NUM_THREADS is {value!r}, which is not a number of threads"):
        threads_of_shell({"OMP_NUM_THREADS": value})
