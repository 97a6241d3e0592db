"""Signals to a command in an allocation, which the scheduler hands on to its step."""

from __future__ import annotations

import io
import signal
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.common.console import Console
from slurm import scheduler
from slurm.job.batch_main import JobStart
from slurm.job.ending import Ending, judge
from slurm.job.step_signals import StepSignals
from slurm.jobs import Stage
from slurm.record import launch_log
from tests.clock import set_time

INT, TERM, HUP, USR2, KILL = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2, signal.SIGKILL


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The only step of an allocation: a test says whether it is there, and sees what it got."""
    state = SimpleNamespace(name="", got=[], problem=None, now=0.0)

    def find(job: str, name: str) -> str | None:
        if state.problem:
            raise state.problem
        return f"{job}.0" if name == state.name else None

    monkeypatch.setattr(scheduler, "find_step", find)
    monkeypatch.setattr(scheduler, "signal_step", lambda step, number: state.got.append(number))
    set_time(monkeypatch, monotonic=lambda: state.now)
    yield state


def deliver(signals: StepSignals, steps: SimpleNamespace) -> list[signal.Signals]:
    steps.now += 10
    signals.hand_on()
    return list(steps.got)


@pytest.mark.parametrize(
    ("stage", "number", "passes", "first"),
    [
        ("train", INT, TERM, INT),
        ("train", TERM, TERM, TERM),
        ("train", HUP, TERM, HUP),
        ("train", USR2, USR2, USR2),
        ("eval", INT, TERM, INT),
        ("eval", USR2, USR2, None),  # it is ignored there
    ],
)
def test_the_first_signal_stops_a_step_once_it_is_there(
    steps: SimpleNamespace, stage: Stage, number: signal.Signals, passes: signal.Signals, first: signal.Signals | None
) -> None:
    signals = StepSignals("7", stage, pytest.fail)
    assert deliver(signals, steps) == []
    signals.note(number, runs=True)
    assert deliver(signals, steps) == [], "srun has not begun it yet"
    steps.name = signals.name
    assert deliver(signals, steps) == deliver(signals, steps) == [passes]
    assert (signals.first, signals.killed) == (first, False)


def test_a_second_interrupt_kills_the_step(steps: SimpleNamespace) -> None:
    signals = StepSignals("7", "train", pytest.fail)
    steps.name = signals.name
    signals.note(INT, runs=True)
    signals.note(INT, runs=True)
    assert deliver(signals, steps) == [TERM, KILL] and signals.killed
    with pytest.raises(KeyboardInterrupt):
        signals.note(INT, runs=True)
    alone = StepSignals("7", "train", pytest.fail)
    alone.note(INT, runs=False)
    with pytest.raises(KeyboardInterrupt):
        alone.note(INT, runs=False)


def test_a_scheduler_that_is_away_is_asked_again(steps: SimpleNamespace) -> None:
    said: list[str] = []
    signals = StepSignals("7", "train", said.append)
    steps.name, steps.problem = signals.name, scheduler.SchedulerError(["squeue"], "no answer for 30 seconds")
    signals.note(TERM, runs=True)
    assert deliver(signals, steps) == deliver(signals, steps) == [] and len(said) == 1
    steps.problem = None
    assert deliver(signals, steps) == [TERM]


@pytest.mark.parametrize(
    ("stage", "stop", "srun", "code"),
    [
        ("train", INT, "n1: task 0: Terminated", 75),
        ("train", None, "n1: task 0: Terminated", 1),
        ("train", TERM, "n1: task 0: Segmentation fault", 1),
        ("eval", INT, "n1: task 0: Terminated", 130),
        ("eval", TERM, "n1: task 0: Exited with exit code 1", 75),
    ],
)
def test_processes_that_end_by_what_was_handed_on_are_stopped(
    tmp_path: Path, stage: str, stop: signal.Signals | None, srun: str, code: int
) -> None:
    (tmp_path / "srun.log").write_text(f"srun: error: {srun}\n")
    submission = SimpleNamespace(stage=stage)
    step: Any = SimpleNamespace(nodes=("n1",), logs=tmp_path, srun_output=tmp_path / "srun.log", submission=submission)
    launch: Any = SimpleNamespace(nodes=("n1",), processes_per_node=1)
    assert judge(tmp_path, step, 1, launch, None, stop=stop).code == code


@pytest.mark.parametrize(
    ("state", "left", "ends"), [("RUNNING", 1000, False), ("RUNNING", 5, True), ("COMPLETING", 1000, True)]
)
def test_sigterm_is_said_to_be_the_schedulers_where_the_allocation_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, left: float, ends: bool
) -> None:
    end = datetime.fromtimestamp(time.time() + left).isoformat()
    monkeypatch.setattr(scheduler, "details", lambda job: {"JobState": state, "EndTime": end})
    monkeypatch.setattr(scheduler, "hostnames", lambda text: ["n1"])
    monkeypatch.setattr(scheduler, "find_step", lambda job, name: None)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    site = SimpleNamespace(gpus_per_node=0, network_interface=None, health_command="", health_minutes=None)
    what = {"stage": "train", "chain": "none", "max_restarts": 0, "nodes": 1, "every_checkpoint": False}
    submission: Any = SimpleNamespace(
        run=tmp_path, where="slurm", packed=False, run_file=tmp_path / "run.yaml", site=site, folder_id=None, **what
    )
    start = JobStart(submission, 1, Console(file=io.StringIO()), by_hand=True)
    more: dict[str, Any] = {"restarts": 0, "number": 1, "link": 1, "processes_per_node": 1, "checkpoint": 0}
    launch = launch_log.begin(tmp_path, "train", "7", nodes=("n1",), logs="", **more)
    start._launched, start._stop_name = launch, "SIGHUP"
    start._signals.add(TERM)
    start._look()
    (noted,) = launch_log.launches(tmp_path)
    assert noted.end is not None
    reason, following = ("the scheduler ends this job", "scheduler") if ends else ("stopped by SIGHUP", "end")
    assert (noted.end.reason, noted.end.next) == (reason, following)
    assert start._decide(launch, Ending(75, "SIGTERM at step 3")).next == following
