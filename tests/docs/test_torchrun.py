"""The script for torchrun: it trains on CPUs, and saves and is requeued ahead of the end of its time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from pipeline.train.run.attempts import attempts
from pipeline.train.run.folder import read_metrics
from tests import tiny
from tests.repository import ROOT
from tests.waiting import until

SCRIPT = ROOT / "docs" / "torchrun.sbatch"
SCONTROL = """#!/bin/bash
[ "$1" = show ] && echo localhost || echo "$@" >> "$0.calls"
"""
SRUN = """#!/bin/bash
while [[ $1 = --* ]]; do shift; done
exec "$@"
"""


def started(root: Path, *changes: str) -> subprocess.Popen[str]:
    programs = root / "programs"
    programs.mkdir(exist_ok=True)
    for name, text in {"scontrol": SCONTROL, "srun": SRUN}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    of_job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_NUM_NODES": "1"}
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, **of_job, "PATH": path, "PROCESSES_PER_NODE": "2"}
    file = tiny.write_run(root, {"launch.device": "cpu", **dict(each.split("=") for each in changes)})
    if not (root / "run").exists():
        done = tiny.pipeline("preprocess", file)
        assert done.returncode == 0, done.stderr
    words = ["bash", str(SCRIPT), str(file), str(root / "run")]
    pipe = subprocess.PIPE
    return subprocess.Popen(words, cwd=root, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True)


@pytest.mark.guard
def test_the_script_trains_stops_in_time_is_requeued_and_resumes(tmp_path: Path) -> None:
    script = SCRIPT.read_text()
    assert len(script.splitlines()) <= 32 and "#SBATCH --signal=B:USR1@300" in script
    job = started(tmp_path, "train.duration=100000 steps")
    run = tmp_path / "run"

    def has_trained() -> bool:
        return any("loss" in row for row in (read_metrics(run) if (run / "metrics.jsonl").exists() else []))

    until(has_trained, job)
    job.send_signal(signal.SIGUSR1)
    text, _ = job.communicate()
    stopped = orjson.loads((run / "exit.json").read_bytes())
    assert (stopped["code"], job.returncode) == (75, 1), text
    calls = tmp_path / "programs" / "scontrol.calls"
    assert calls.read_text() == f"requeue {os.getpid()}\n"
    assert not (run / "stop").exists()

    steps = stopped["step"] + 2
    job = started(tmp_path, f"train.duration={steps} steps")
    text, _ = job.communicate(timeout=300)
    assert job.returncode == 0, text
    assert [each.code for each in attempts(run)] == [75, 0]
    assert len(calls.read_text().splitlines()) == 1
