"""Preprocessing arrays that a person cancelled, told from those that lost tasks, by recorded answers of SLURM."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pipeline.common.run_files import RunFiles
from slurm import jobs, scheduler
from slurm.job.array_end import array_end
from slurm.record import launch_log
from slurm.record.launch_log import LaunchEnd, Next
from slurm.scheduler import SchedulerError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    RunFiles(tmp_path).slurm.mkdir()
    jobs.note(tmp_path, jobs.new_job("preprocess", "70", "slurm", "name", "none.json", tasks=4))
    jobs.note(tmp_path, jobs.new_job("finish", "71", "slurm", "name", "none.json", after=("70",)))
    return tmp_path


def answer(monkeypatch: pytest.MonkeyPatch, squeue: dict[str, str], sacct: str) -> None:
    def ask(command: list[str], hint: str = "", *, seconds: float = 0) -> str:
        if command[0] == "sacct":
            return sacct
        if not squeue:
            raise SchedulerError(command, "slurm_load_jobs error: Invalid job id specified")
        return "".join(f"70_{task}|{state}|None|n1|N/A|N/A|\n" for task, state in squeue.items())

    monkeypatch.setattr(scheduler, "ask", ask)


def end(run: Path, job: str, following: Next) -> None:
    values = {"restarts": 0, "number": 1, "link": 1, "nodes": ("n1",), "processes_per_node": 1, "checkpoint": 0}
    begun = launch_log.begin(run, "preprocess", job, logs="logs/x", **values)
    launch_log.end(run, begun, LaunchEnd(75, "it ended", following, 0, time.time()))


ALL = dict.fromkeys("0123", "CANCELLED")
ACCOUNTED = "70_0|CANCELLED by 0|0:0|00:00:02|n1\n70_1|CANCELLED by 0|0:0|00:00:02|n1\n"


@pytest.mark.parametrize(
    ("squeue", "sacct", "ledger", "counts", "unwanted"),
    [
        (ALL, "", {}, (4, 0), True),
        ({}, f"{ACCOUNTED}70_[2-3%2]|CANCELLED by 0|0:0|00:00:00|None assigned\n", {}, (4, 0), True),
        ({}, "", dict.fromkeys("0123", "scheduler"), (4, 0), True),
        ({**ALL, "1": "NODE_FAIL"}, "", {"0": "scheduler"}, (3, 0), True),
        ({**ALL, "1": "COMPLETED"}, "", {}, (3, 1), False),
        ({}, f"{ACCOUNTED}70_2|COMPLETED|0:0|00:00:09|n1\n", {"3": "done"}, (2, 2), False),
        (dict(zip("0123", ("TIMEOUT", "NODE_FAIL", "PREEMPTED", "FAILED"), strict=True)), "", {}, (0, 0), False),
        ({}, "", {"0": "done", "1": "scheduler"}, (1, 1), False),
        ({}, "", {}, (0, 0), False),
    ],
)
def test_who_ended_an_array(
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    squeue: dict[str, str],
    sacct: str,
    ledger: dict[str, Next],
    counts: tuple[int, int],
    unwanted: bool,
) -> None:
    answer(monkeypatch, squeue, sacct)
    for task, following in ledger.items():
        end(run, f"70_{task}", following)
    found = array_end(run, "71", has_sacct=True)
    assert found is not None
    assert (found.cancelled, found.completed) == counts
    assert found.unwanted == unwanted
    assert array_end(run, "99", has_sacct=True) is None
