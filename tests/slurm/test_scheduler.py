"""What is asked of a scheduler that does not answer, as its commands say it."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm import scheduler
from slurm.job.allocation import Allocation
from tests.clock import set_time

AWAY = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
"""SLURM 22.05, whose controller was killed."""


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A command of this name; the test writes it."""
    command = tmp_path / "scontrol"
    command.write_text("#!/bin/sh\nexit 0\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return command


@pytest.fixture
def hours(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Each pause of an allocation lasts ten minutes, in no time."""
    passed = [0.0]
    sleep = lambda seconds: passed.append(passed[-1] + 600.0)  # noqa: E731
    set_time(monkeypatch, monotonic=lambda: passed[-1], sleep=sleep)
    return passed


def test_a_controller_that_is_away_is_waited_for_as_long_as_the_job_lives(
    scontrol: Path, hours: list[float], tmp_path: Path
) -> None:
    told: list[str] = []
    job = Allocation("7", [], told.append)
    calls = tmp_path / "calls"
    scontrol.write_text(
        f"#!/bin/sh\necho $1 >> {shlex.quote(str(calls))}\n"
        f"[ $(wc -l < {shlex.quote(str(calls))}) -gt 9 ] || {{ echo {shlex.quote(AWAY)} >&2; exit 1; }}\n"
        "[ $1 = show ] && echo JobState=RUNNING\nexit 0\n"
    )
    assert job.is_running()
    assert hours[-1] > 5000 and told[0].startswith("warning: ")
    calls.unlink()
    assert job.requeue() is None
    assert [calls.read_text().split()[n] for n in (0, 1, -2, -1)] == ["requeue", "show", "show", "requeue"]


def test_what_is_refused_is_not_asked_for_without_end(scontrol: Path, hours: list[float]) -> None:
    scontrol.write_text("#!/bin/sh\n[ $1 = show ] && echo JobState=RUNNING || { echo denied >&2; exit 1; }\n")
    refused = Allocation("7", [], print).requeue()
    assert refused is not None and "denied" in refused
    scontrol.write_text("#!/bin/sh\nexit 1\n")
    assert Allocation("7", [], print).is_running()
    assert hours[-1] < 2000


def test_a_list_of_nodes_that_the_site_changes_is_not_asked_for_without_end(scontrol: Path, hours: list[float]) -> None:
    told: list[str] = []
    scontrol.write_text('#!/bin/sh\n[ "$2" = job ] && echo JobState=PENDING ExcNodeList=n7 || echo n7\n')
    assert not Allocation("7", [], told.append).keep_from("7", ["n1"], 1000.0)
    assert told == ["warning: job 7 still excludes n7, despite a request"] and len(hours) < 5


def test_the_end_of_a_job_does_not_end_what_it_asks(scontrol: Path) -> None:
    """The scheduler sends SIGTERM to all processes of a job that has gone back into the queue."""
    scontrol.write_text("#!/bin/sh\nkill -TERM $$\necho 7\n")
    assert scheduler.ask(["scontrol"]) == "7\n"
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """A cluster with jobs 1, 2 and 3 of this user and 8 and 9 of others; returns how squeue selected jobs so far."""
    file, calls = tmp_path / "squeue", tmp_path / "calls"
    file.write_text(
        "#!/bin/bash\n"
        f"calls={shlex.quote(str(calls))}\n"
        "shift 6\n"
        'echo "$*" >> "$calls"\n'
        'case "$*" in --me) all="1 2_0 2_1 3";; *) all=$(echo "$2" | tr , " ");; esac\n'
        "for job in $all; do case $job in [12389]*) "
        'echo "$job|RUNNING|None|n1|N/A|N/A|";; *) [ "$all" != "$job" ] || '
        "{ echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1; } ;; esac; done\n"
    )
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return lambda: calls.read_text().splitlines() if calls.exists() else []


def test_the_jobs_of_the_whole_cluster_are_not_asked_for(squeue: Callable[[], list[str]]) -> None:
    """With one number squeue sends REQUEST_JOB_INFO_SINGLE, with `--me` REQUEST_JOB_USER_INFO, with two the whole."""
    assert scheduler.jobs([]) == {} and squeue() == []
    assert set(scheduler.jobs(["1"])) == {"1"}
    assert set(scheduler.jobs(["2_0", "2_1"])) == {"2"}
    assert scheduler.jobs(["77"]) == {}
    assert set(scheduler.jobs(["1", "2_0", "3"])) == {"1", "2_0", "2_1", "3"}
    assert squeue() == ["--jobs 1", "--jobs 2", "--jobs 77", "--me"]


def test_what_is_forgotten_or_anothers_is_asked_for_once(squeue: Callable[[], list[str]]) -> None:
    assert set(scheduler.jobs(["1", "77", "78"], own=["1", "77", "78"])) == {"1"}
    assert squeue() == ["--me"]  # forgotten, whatever their number
    assert set(scheduler.jobs(["1", "77", "9"], own=["77"])) == {"1", "9"}
    assert set(scheduler.states_of({"1": "me", "77": "me", "8": "other"}, "me")) == {"1", "8"}
    assert squeue()[1:] == ["--me", "--jobs 9", "--me", "--jobs 8"]
