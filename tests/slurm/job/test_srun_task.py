"""Processes of a step: their ranks, and signals before the stage listens to them, while modules are imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.common.errors import EXIT_STOPPED
from slurm.job.srun_task import LOGS, first_node, ranks_environment
from slurm.record.failure_analysis import first_failure, stopped
from tests import tiny

CONTINUED = 7
PROGRAM = """
import os, signal, sys

class AtImport:
    def find_spec(self, name, path=None, target=None):
        if name == signalled:
            os.kill(os.getpid(), getattr(signal, number))
        if name == last:
            sys.stdout.write(str(signal.pthread_sigmask(signal.SIG_BLOCK, [])))
            sys.stdout.flush()
            os._exit(7)

signalled, number, last = sys.argv[1:4]
sys.argv[1:] = sys.argv[4:]
sys.meta_path.insert(0, AtImport())
from slurm.job import srun_task
srun_task.main()
"""
"""`slurm.job.srun_task`, which gets a signal when it imports one module, and ends when it comes to another one."""


def started(folder: Path, signalled: str, number: str, last: str, *words: str) -> subprocess.Popen[str]:
    """A process of a step of one."""
    folder.mkdir()
    place = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_NODES": "1"}
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "PIPELINE_"))}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, signalled, number, last, *words],
        env=environment | place | {LOGS: str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.usefixtures("hangup")
def test_a_signal_before_the_stage_listens_is_a_stop(tmp_path: Path) -> None:
    run_file = str(tiny.write_run(tmp_path))
    cases = {
        "first": ("slurm.record.rank_logs", "SIGUSR2", "pipeline.cli.main", "train", run_file),
        "train": ("pipeline.config.load", "SIGUSR2", "torch", "train", run_file),
        "units": ("pipeline.cli.main", "SIGHUP", "pipeline.data.preprocess.stage", "preprocess", run_file, "--units"),
        "doctor": ("slurm.doctor.command", "SIGTERM", "torch", "doctor", "--run", run_file, "--out", str(tmp_path)),
    }
    processes = {name: started(tmp_path / name, *words) for name, words in cases.items()}
    for name, process in processes.items():
        output = process.communicate(timeout=300)[0]
        assert process.returncode == EXIT_STOPPED, (name, output)
        assert f"stopped: received {cases[name][1]} before " in output
        assert stopped(tmp_path / name) and first_failure(tmp_path / name, ["n1"], 1) is None


def test_an_evaluation_uses_the_time_that_is_left(tmp_path: Path) -> None:
    process = started(tmp_path / "logs", "slurm.record.rank_logs", "SIGUSR2", "pipeline.cli.main", "eval", "run.yaml")
    output = process.communicate(timeout=300)[0]
    assert (process.returncode, output) == (CONTINUED, "set()"), "and nothing that it starts has blocked signals"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n[3-5,9],gpu1", "n3"),
        ("n[9,3-5]", "n9"),
        ("nid[00017-00019]", "nid00017"),
        ("rack[1-2]n[04-05],rack3n1", "rack1n04"),
        ("gpu-a.site,gpu-[1-2].site", "gpu-a.site"),
        ("gpu-[1-2].site", "gpu-1.site"),
    ],
)
def test_the_first_node_of_a_step(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_rank_0_has_its_address_where_the_step_orders_its_nodes_by_the_topology() -> None:
    place = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_NODES": "2"}
    found = ranks_environment({**place, "MASTER_ADDR": "n1", "SLURM_STEP_NODELIST": "n[2,1]"})
    assert (found["MASTER_ADDR"], found["LOCAL_WORLD_SIZE"]) == ("n2", "2")
    assert "MASTER_ADDR" not in ranks_environment({**place, "SLURM_STEP_NODELIST": "n[2,1]"})
