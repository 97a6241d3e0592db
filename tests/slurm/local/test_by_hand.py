"""Starts by hand of a run whose jobs wait or run, by what a scripted squeue says of them."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.common.errors import UserError
from pipeline.common.run_files import RunFiles
from slurm import jobs
from slurm.job.srun_task import LOGS
from slurm.jobs import Stage
from slurm.local import by_hand
from slurm.record.launch_log import LaunchEnd, begin, end
from tests import tiny

Queue = Callable[..., list[str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (LOGS, "WORLD_SIZE", "SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SUBMITIT_LOCAL_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


@pytest.fixture
def questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Queue:
    """Lets squeue say these lines; returns the questions so far."""
    programs = tmp_path / "bin"
    programs.mkdir()
    asked, says = tmp_path / "asked", tmp_path / "says"
    (programs / "squeue").write_text(f'#!/bin/sh\necho "$@" >> {asked}\ncat {says}\n')
    (programs / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)

    def queue(*lines: str) -> list[str]:
        if lines:
            says.write_text("".join(f"{line}\n" for line in lines))
        return asked.read_text().splitlines() if asked.exists() else []

    return queue


def send(run: Path, stage: Stage, number: str, tasks: int = 1) -> None:
    RunFiles(run).slurm.mkdir(exist_ok=True)
    jobs.note(run, jobs.new_job(stage, number, "slurm", "name", "none.json", tasks=tasks))


def checked(run: Path, *stages: str) -> str:
    console = Console(file=io.StringIO(), width=200)
    by_hand.check(run, stages, console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_training_is_refused_while_a_job_that_trains_waits_or_runs(run: Path, questions: Queue) -> None:
    send(run, "train", "77")
    questions("77|PENDING|Resources||N/A|N/A|")
    for stages in (("train",), ("preprocess", "train", "eval")):
        with pytest.raises(
            UserError, match=r"^the run is already submitted, so nothing was started:\n  train: job 77 \(PENDING, Res"
        ):
            checked(run, *stages)
    assert checked(run, "preprocess") == ""
    questions("77|RUNNING|None|n1|N/A|N/A|")
    with pytest.raises(UserError, match=r"RUNNING on n1.*\n.*`pipeline cancel "):
        checked(run, "train")
    questions("77|COMPLETED|None|n1|N/A|N/A|")
    assert checked(run, "train") == ""


def test_preprocessing_shares_its_units(run: Path, questions: Queue) -> None:
    send(run, "preprocess", "5", tasks=2)
    send(run, "finish", "6")
    questions("5_0|RUNNING|None|n1|N/A|N/A|", "5_1|PENDING|Priority||N/A|N/A|", "6|PENDING|Dependency||N/A|N/A|")
    text = checked(run, "preprocess", "train", "eval")
    assert "units are shared with preprocess: job 5 (RUNNING on n1" in text and "job 6 (PENDING" in text
    assert checked(run, "train") == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [(LOGS, "/logs"), ("SLURM_JOB_ID", "77"), ("SLURM_ARRAY_JOB_ID", "77"), ("WORLD_SIZE", "2")],
)
def test_jobs_and_ranks_ask_nothing(
    run: Path, questions: Queue, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    send(run, "train", "77")
    questions("77|RUNNING|None|n1|N/A|N/A|")
    monkeypatch.setenv("SLURM_JOB_ID", "1")  # an interactive job, that is none of the run's
    with pytest.raises(UserError):
        checked(run, "train")
    monkeypatch.setenv(name, value)
    assert checked(run, "preprocess", "train") == "" and len(questions()) == 1


def test_nothing_is_asked_where_no_job_can_be_left(run: Path, questions: Queue) -> None:
    assert checked(run, "train") == ""
    send(run, "train", "77")
    values = {"restarts": 0, "number": 1, "link": 1, "nodes": ("n1",), "processes_per_node": 1, "checkpoint": 0}
    launch = begin(run, "train", "77", logs="logs/x", **values)
    end(run, launch, LaunchEnd(0, "it is done", "done", 8, time.time()))
    assert checked(run, "train") == "" and questions() == []


def test_a_scheduler_that_does_not_answer(run: Path, questions: Queue) -> None:
    send(run, "train", "77")
    (run.parent / "bin" / "squeue").write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2\nexit 1\n")
    assert "its jobs may wait or run: " in checked(run, "train")


def test_on_the_command_line(run: Path, questions: Queue) -> None:
    file = tiny.write_run(run.parent)
    send(run, "train", "77")
    questions("77|RUNNING|None|n1|N/A|N/A|")
    refused = tiny.pipeline("train", file)
    assert refused.returncode == 2 and "already submitted, so nothing was started" in refused.stderr
    assert sorted(path.name for path in run.iterdir()) == ["slurm"]
