"""Ports of a run on one machine: only this machine reaches them, and the launcher has none."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
import torch

from pipeline.config.load import load
from pipeline.config.run import TimeLimitsConfig
from pipeline.data.preprocess.stage import preprocess
from pipeline.train.distributed import process_group
from pipeline.train.distributed.rank import STORE
from tests import tiny
from tests.listeners import beyond_loopback, descendants, listeners
from tests.train.distributed import ranks
from tests.train.distributed.test_train_command import ranks_of, steps

pytestmark = pytest.mark.parallel

WAIT = 120.0
"""Seconds after which a test gives up; nothing takes that long."""


def _outer_interface() -> str:
    """The network interface of the first route; the loopback where there is none."""
    return next((line.split()[0] for line in Path("/proc/net/route").read_text().splitlines()[1:]), "lo")


def join_and_look(address: str) -> tuple[list[str], list[tuple[str, int]]]:
    """Sockets of this rank beyond the loopback, and all of them, once it has joined the others."""
    os.environ.update(MASTER_ADDR=address, GLOO_SOCKET_IFNAME=_outer_interface())
    process_group.init_process_group(
        process_group.of_environment(), torch.device("cpu"), TimeLimitsConfig(init_seconds=60)
    )
    process_group.background_group()
    process_group.barrier()
    return beyond_loopback([os.getpid()]), listeners([os.getpid()])


@pytest.mark.parametrize("world", [1, 2])
def test_ranks_of_one_machine_listen_on_its_loopback(world: int) -> None:
    """Also where MASTER_ADDR is a name of the machine, as srun's first node is."""
    for beyond, all_of_them in ranks.run(world, join_and_look, socket.gethostname(), connect=False):
        assert beyond == []
        assert all_of_them, "gloo listens, or this test sees nothing"


@pytest.mark.guard
def test_training_on_several_processes_listens_on_the_loopback_and_has_no_store_to_write_to(tmp_path: Path) -> None:
    keys = {"train.duration": "100000 steps", "train.validation.samples": 0, "launch.device": "cpu"}
    file = tiny.write_run(tmp_path, keys)
    preprocess(load(file))
    command = tiny.command("train", file, "launch.processes=2", "parallel.dp_shard=2")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": _outer_interface()}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + WAIT
        while steps(tmp_path / "run") < 2:
            assert time.monotonic() < end and process.poll() is None, process.communicate()
            time.sleep(0.05)
        family = descendants(process.pid)
        assert len(family) >= 3, "the launcher and two ranks"
        assert beyond_loopback(family) == []
        assert listeners([process.pid]) == [], "torch's own rendezvous unpickles what is in its store"
        (store,) = {_store(pid) for pid in ranks_of(tmp_path / "run").values()}
        assert store.exists()
        assert store.parent.stat().st_mode & 0o777 == 0o700
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=WAIT)
    assert not store.parent.exists()


def _store(pid: int) -> Path:
    """The file through which a rank of our launcher finds the others."""
    entries = dict(entry.partition(b"=")[::2] for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    return Path(os.fsdecode(entries[STORE.encode()]))
