"""Ends of training jobs that somebody wants, on a real controller: nothing is lost, nobody is left behind."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from slurm import scheduler
from tests import tiny
from tests.slurm.training import Run, profile_with

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1500)]

LONG = ("train.duration=100000 steps",)
"""Of runs that something must happen to before they are done, however long that takes to begin."""
_WAIT = """
import os, sys, time

class Wait:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            open(f"{folder}/{{os.getpid()}}.torch", "w").close()
            time.sleep(600)

sys.meta_path.insert(0, Wait())
"""
"""Holds a process where it imports torch."""


@pytest.mark.slow
def test_undisturbed(train: Run, whole: Path) -> None:
    (job,) = train.submit()
    train.until_over()
    train.check(whole)
    (launch,) = train.launches()
    assert (launch.job, launch.restarts, len(launch.nodes)) == (job, 0, 2)
    assert launch.end is not None and launch.end.next == "done"


def test_the_signal_ahead_of_the_time_limit(train: Run, whole: Path) -> None:
    """What SLURM sends to the steps of a job some time before its limit."""
    (job,) = train.submit()
    train.until_step(12)
    scheduler.ask(["scancel", "--signal=USR2", job])
    train.until(lambda: len(train.launches()) == 2, why="the second start")
    train.until_over()
    train.check(whole)
    first, second = train.launches()
    assert (first.job, first.restarts, second.job, second.restarts) == (job, 0, job, 1)
    assert first.end is not None and (first.end.code, first.end.next) == (75, "requeue")
    assert second.checkpoint == first.end.checkpoint >= 12, "nothing is lost where the end is announced"
    assert train.codes() == [75, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "command", "processes"),
    [
        pytest.param(("slurm.doctor=true",), "doctor", 2, id="doctor", marks=pytest.mark.slow),
        pytest.param(("slurm.doctor=false",), "train", 4, id="ranks"),
    ],
    indirect=["train"],
)
def test_the_signal_comes_while_torch_is_imported(train: Run, tmp_path: Path, command: str, processes: int) -> None:
    """It is no crash, and says nothing about the nodes."""
    (tmp_path / "sitecustomize.py").write_text(_WAIT.format(folder=tmp_path))
    line = f'[[ "$*" != *{command}* ]] || export PYTHONPATH={tmp_path}:$PYTHONPATH'
    train.overrides += [f"slurm.profile={profile_with(tmp_path, line)}"]
    (job,) = train.submit()
    train.until(lambda: len(list(tmp_path.glob("*.torch"))) == processes, why="the import of torch")
    scheduler.ask(["scancel", "--signal=USR2", job])
    (end,) = train.until(lambda: [each.end for each in train.launches() if each.end], why="the end of the launch")
    assert (end.code, end.next, end.failed_nodes) == (75, "requeue", ()), end
    train.until(lambda: scheduler.details(job)["Restarts"] == "1", why="the requeue")
    assert len(train.launches()) == 1 and scheduler.details(job)["ExcNodeList"] == "(null)"


@pytest.mark.slow
@pytest.mark.parametrize("train", [(*LONG, "launch.stop_before_end_seconds=20")], indirect=True)
def test_the_time_limit_itself(train: Run) -> None:
    (job,) = train.submit()
    train.until_step(1)
    train.end_after(job, 25)
    train.until(lambda: len(train.launches()) == 2, why="the second start")
    train.end_after(job, 600)
    first, second = train.launches()
    assert (second.job, second.restarts) == (job, 1)
    assert first.end is not None and (first.end.code, first.end.next) == (75, "requeue"), first.end
    assert second.checkpoint == first.end.checkpoint > 0
    train.until_step(second.checkpoint + 1)
    scheduler.cancel([job])
    train.until_over()
    train.check_left()


@pytest.mark.slow
@pytest.mark.parametrize("train", [("launch.time_limits.step_seconds=600",)], indirect=True)
def test_the_time_limit_comes_while_a_rank_cannot_save(train: Run, whole: Path) -> None:
    """Nothing of the ranks sees the announcement, and SLURM itself ends them all."""
    (job,) = train.submit()
    train.until_saved(10)
    train.kill(3, signal.SIGSTOP)
    train.end_after(job, 1)
    train.until(lambda: len(train.launches()) == 2, why="the second start")
    train.end_after(job, 600)
    train.until_over()
    train.check(whole)
    first, second, *_ = train.launches()
    assert (second.job, second.restarts) == (job, 1)
    assert first.end is not None and first.end.next == "requeue", first.end
    assert second.checkpoint == first.end.checkpoint >= 10, "nothing beyond the last save"


@pytest.mark.slow
def test_preemption_without_grace(train: Run, whole: Path) -> None:
    """The processes get SIGTERM and have KillWait to save; the controller itself puts the job back."""
    (job,) = train.submit()
    train.until_step(12)
    train.preempt()
    train.until_over()
    train.check(whole)
    first, second = train.launches()
    assert (second.job, second.restarts) == (job, 1)
    assert second.checkpoint >= 12, "it has saved within KillWait"
    assert first.end is None or first.end.next == "scheduler"


@pytest.mark.parametrize("train", [("slurm.train.partition=grace",)], indirect=True)
@pytest.mark.slow
def test_preemption_with_grace(train: Run, whole: Path) -> None:
    (job,) = train.submit()
    train.until_step(12)
    train.preempt()
    train.until_over()
    train.check(whole)
    first, second = train.launches()
    assert (second.job, second.restarts) == (job, 1)
    assert first.end is not None and first.end.code == 75
    assert second.checkpoint == first.end.checkpoint >= 12


@pytest.mark.slow
def test_requeue_by_an_operator(train: Run, whole: Path) -> None:
    (job,) = train.submit()
    train.until_saved(10)
    scheduler.requeue(job)
    train.until(lambda: len(train.launches()) == 2, why="the second start")
    train.until_over()
    train.check(whole)
    assert train.launches()[1].checkpoint >= 10


@pytest.mark.parametrize("train", [LONG], indirect=True)
def test_pipeline_cancel(train: Run) -> None:
    (job,) = train.submit()
    train.until_step(12)
    done = tiny.pipeline("cancel", train.folder)
    assert done.returncode == 0, done.stderr
    train.until_over()
    (launch,) = train.launches()
    assert launch.end is not None and (launch.end.code, launch.end.next) == (75, "end")
    assert launch.end.checkpoint >= 12, "it has saved first"
    assert scheduler.jobs([job])[job].state == "COMPLETED"
    train.check_left()


@pytest.mark.parametrize("train", [LONG], indirect=True)
def test_scancel(train: Run) -> None:
    """A cancelled job stays cancelled, though it is asked to leave in the same way as one that is preempted."""
    (job,) = train.submit()
    train.until_saved(10)
    scheduler.cancel([job])
    train.until_over()
    assert scheduler.jobs([job])[job].state == "CANCELLED"
    assert len(train.launches()) == 1
    train.check_left()
    # Submitted again, it goes on from what it has saved.
    train.submit()
    train.until(lambda: len(train.launches()) == 2, why="the second start")
    assert train.launches()[1].checkpoint >= 10


@pytest.mark.slow
@pytest.mark.parametrize("train", [LONG], indirect=True)
def test_a_requeue_that_is_refused(train: Run) -> None:
    """It is told where the run is looked at, and the job counts as failed."""
    (job,) = train.submit()
    train.until_step(5)
    scheduler.update(job, {"Requeue": "0"})
    scheduler.ask(["scancel", "--signal=USR2", job])
    train.until_over()
    (launch,) = train.launches()
    assert launch.end is not None and (launch.end.code, launch.end.next) == (75, "end")
    assert "scontrol requeue" in launch.end.reason and "slurm.chain=singleton" in launch.end.reason
    assert scheduler.jobs([job])[job].state == "FAILED"
    assert launch.end.checkpoint >= 5
    train.check_left()
