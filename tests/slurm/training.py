"""A small run of tensor and pipeline parallelism over two nodes of a dev cluster, and how its end is looked at."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

import slurm
from pipeline.config.load import load
from pipeline.train.run.attempts import attempts
from pipeline.train.run.folder import read_metrics
from pipeline.train.run.heartbeat import read_beats
from slurm import jobs, scheduler
from slurm.devcluster import DevCluster
from slurm.record.launch_log import Launch, launches
from slurm.scheduler import Accounted
from tests import tiny

STEPS = 100
LONG = 1500.0
"""Seconds until a test gives up waiting for what takes some ten on an idle machine."""


def write(root: Path) -> Path:
    """The run file and its preprocessed data."""
    changes = {
        "launch": {"threads": 1, "device": "cpu", "heartbeat_seconds": 0.2, "time_limits": {"step_seconds": 10}},
        "model": {"layers": 2, "dim": 64, "heads": 4, "vocab_multiple": 16},
        "parallel": {"tp": 2, "pp": 2},
        "train.precision": {"compute": "fp32"},
        "train.duration": f"{STEPS} steps",
        "train.sequence_length": 128,
        "train.batch_size": 8,
        "train.micro_batch_size": 4,
        "train.validation": {"every_steps": 1000, "samples": 0},
        "train.checkpoint": {"every_steps": 10, "keep": 5},
        "slurm": {"profile": "devcluster", "nodes": 2, "processes_per_node": 2, "doctor": False, "max_restarts": 3},
    }
    file = tiny.write_run(root, changes)
    done = tiny.pipeline("preprocess", file)
    assert done.returncode == 0, done.stderr
    return file


def profile_with(folder: Path, line: str) -> Path:
    """The profile of the dev cluster, in which every process of a step starts with this line of bash."""
    wrapper, profile = folder / "wrapper", folder / "site.yaml"
    wrapper.write_text(f'#!/bin/bash\n{line}\nexec "$@"\n')
    wrapper.chmod(0o755)
    shipped = yaml.safe_load((Path(slurm.__file__).parent / "profiles" / "devcluster.yaml").read_text())
    profile.write_text(yaml.safe_dump({**shipped, "container_prefix": str(wrapper)}))
    return profile


def reference(file: Path) -> Path:
    """The run that nothing happens to, on this machine without any scheduler; its folder."""
    folder = file.parent / "reference"
    done = tiny.pipeline("train", file, f"run.dir={folder}", "launch.processes=4", timeout=400)
    assert done.returncode == 0, done.stderr
    return folder


class Run:
    """A run that was submitted.

    Args:
        cluster: where.
        file: run file.
        name: of its folder.
        overrides: further keys.
    """

    def __init__(self, cluster: DevCluster, file: Path, name: str, *overrides: str) -> None:
        self.cluster = cluster
        self.file = file
        self.folder = file.parent / name
        self.overrides = [f"run.dir={self.folder}", *overrides]

    def submit(self, *words: str, command: str = "train") -> list[str]:
        """Send it; the numbers of its training jobs."""
        done = tiny.pipeline(command, self.file, *self.overrides, "--slurm", *words)
        assert done.returncode == 0, done.stdout + done.stderr
        return [job.job for job in jobs.sent(self.folder) if job.stage == "train"]

    def step(self) -> int:
        """The last one in the metrics."""
        return max((row["step"] for row in read_metrics(self.folder)), default=0)

    def until(self, what: Callable[[], Any], *, why: str, seconds: float = LONG) -> Any:
        """Wait for something to be true."""
        end = time.monotonic() + seconds
        while not (found := what()):
            assert time.monotonic() < end, f"waited for {why} in vain:\n{self.story()}"
            time.sleep(0.1)
        return found

    def until_step(self, step: int) -> None:
        """Wait until a step is done."""
        self.until(lambda: self.step() >= step, why=f"step {step}")

    def until_saved(self, step: int) -> None:
        """Wait until a checkpoint of this step, or a later one, is whole."""
        latest = self.folder / "checkpoints" / "latest"
        name = f"step-{step:08d}"
        self.until(lambda: latest.exists() and latest.read_text() >= name, why=f"the checkpoint of step {step}")

    def until_over(self, *, seconds: float = LONG) -> None:
        """Wait until no job of it is in the queue any more."""
        numbers = [number for job in jobs.sent(self.folder) for number in job.numbers]
        self.until(
            lambda: not any(state.waits or state.runs for state in scheduler.jobs(numbers).values()),
            why="the end of all jobs",
            seconds=seconds,
        )

    def until_accounted(self) -> dict[str, Accounted]:
        """Wait until accounting knows of the end of all jobs, and what it says of them."""
        numbers = [number for job in jobs.sent(self.folder) for number in job.numbers]

        def accounted() -> dict[str, Accounted] | None:
            found = scheduler.accounting(numbers)
            return found if all(job.over for job in found.values()) else None

        known: dict[str, Accounted] = self.until(accounted, why="the end of all jobs in accounting")
        return known

    def end_after(self, job: str, seconds: float) -> None:
        """Give a job that runs a time limit that ends it so soon, or in the minute after: limits are whole minutes.

        A limit given when it is sent would also have to last until the job has started, however slow the machine is.
        """
        began = datetime.fromisoformat(scheduler.ask(["squeue", "--noheader", "--jobs", job, "--format=%S"]).strip())
        minutes = ((datetime.now() - began).total_seconds() + seconds) / 60
        scheduler.update(job, {"TimeLimit": str(math.ceil(minutes))})

    def preempt(self) -> None:
        """A job with precedence takes all nodes for a moment; waits for the start that follows."""
        nodes, known = len(self.cluster.nodes), len(self.launches())
        words = f"sbatch --parsable --partition=urgent --nodes={nodes} --exclusive --output=/dev/null --wrap".split()
        text = scheduler.ask([*words, "sleep 3"])
        self.until(lambda: len(self.launches()) > known, why=f"the next start, after job {text.strip()}")

    def launches(self) -> list[Launch]:
        """Of the training."""
        return launches(self.folder, "train")

    def pid(self, rank: int) -> int:
        """Of a rank that runs, by its heartbeat."""
        return read_beats(self.folder)[rank].pid

    def beats(self, launch: int, rank: int) -> bool:
        """Whether this rank of the launch with this number lives."""
        found = self.launches()
        try:
            environment = Path(f"/proc/{self.pid(rank)}/environ").read_bytes()
        except (OSError, KeyError):
            return False
        return len(found) == launch and found[-1].logs.encode() in environment

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Signal a rank."""
        os.kill(self.pid(rank), number)

    def story(self) -> str:
        """What is known, for a test that failed."""
        logs = sorted((self.folder / "slurm" / "jobs").glob("*_log.out"))
        ranks = sorted(self.folder.glob("logs/*/*.log"))
        text = "".join(f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}\n" for file in [*logs, *ranks])
        queue = subprocess.run(["squeue", "-a"], capture_output=True, text=True).stdout
        return f"{text}\n{queue}\n{[launch.end for launch in self.launches()]}"

    def codes(self) -> list[int | None]:
        """How its attempts ended."""
        return [attempt.code for attempt in attempts(self.folder)]

    def check(self, whole: Path, *, steps: int = STEPS) -> None:
        """It is done, equals the run that nothing happened to, and nobody is left behind."""
        assert self.step() == steps, self.story()
        assert curve(self.folder) == curve(whole)[:steps]
        self.check_left()

    def check_left(self) -> None:
        """No process and no node suffers from how it ended."""
        self.until(lambda: not self.cluster.processes_of_jobs(), why="the end of all processes")
        states = self.cluster.node_states()
        assert not any("DRAIN" in state for state in states.values()), states


def curve(run: Path) -> list[tuple[Any, ...]]:
    """What each step computed, exactly, and from which data."""
    keys = ("step", "loss", "grad_norm", "lr", "tokens", "order_hash", "data_hash")
    return [tuple(row[key] for key in keys) for row in read_metrics(run) if "loss" in row]


def config_of(run: Run) -> Any:
    """The resolved config of a run file."""
    return load(run.file, run.overrides)
