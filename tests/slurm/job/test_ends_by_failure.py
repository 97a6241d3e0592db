"""Ends of training jobs that nobody wants, on a real controller: what is lost, and how the run goes on."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from pipeline.common import storage
from pipeline.train.run.lock import Lock
from slurm import scheduler
from tests import tiny
from tests.slurm.training import Run, profile_with

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1500)]


@pytest.mark.parametrize("place", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_node_is_lost(train: Run, whole: Path, place: int) -> None:
    """The batch process is on the first one."""
    (job,) = train.submit()
    train.until_saved(10)
    lost = train.launches()[0].nodes[place]
    train.cluster.kill_node(lost)
    train.until(lambda: len(train.launches()) == 2, why="the second start")
    second = train.launches()[1]
    assert (second.job, second.restarts) == (job, 1)
    assert lost not in second.nodes
    assert second.checkpoint >= 10
    train.until_over()
    train.cluster.start_node(lost)
    train.check(whole)


@pytest.mark.parametrize("train", [("slurm.spare_nodes=1",)], indirect=True)
def test_a_node_is_lost_and_a_spare_one_takes_its_place(train: Run, whole: Path) -> None:
    (job,) = train.submit()
    train.until_saved(10)
    lost = train.launches()[0].nodes[1]
    train.cluster.kill_node(lost)
    train.until(lambda: len(train.launches()) == 2, why="the second launch")
    first, second = train.launches()
    assert (second.job, second.restarts, second.number) == (job, 0, 2), "in the same start of the same job"
    assert first.end is not None and lost in first.end.failed_nodes
    assert lost not in second.nodes
    train.until_over()
    train.cluster.start_node(lost)
    train.check(whole)


@pytest.mark.slow
@pytest.mark.parametrize("train", [("slurm.spare_nodes=1",)], indirect=True)
def test_the_batch_node_is_lost_of_a_job_with_spare_ones(train: Run, whole: Path) -> None:
    """SLURM lets such a job live on without its batch process; a step on another node puts it back into the queue."""
    (job,) = train.submit()
    train.until_saved(10)
    lost = train.launches()[0].nodes[0]
    train.cluster.kill_node(lost)
    train.until(lambda: lost not in _nodes_now(job), why="the controller to notice")
    train.cluster.start_node(lost)  # the job wants all three nodes
    train.until(lambda: len(train.launches()) == 2, why="the second start")
    second = train.launches()[1]
    assert (second.job, second.restarts) == (job, 1)
    assert second.checkpoint >= 10
    train.until_over()
    train.check(whole)


def test_a_rank_crashes(train: Run, whole: Path) -> None:
    (job,) = train.submit()
    train.until_saved(10)
    train.kill(3)
    train.until_over()
    train.check(whole)
    first, second = train.launches()
    assert (second.job, second.restarts, second.number) == (job, 0, 2)
    assert first.end is not None and first.end.next == "relaunch"
    assert (first.end.rank, first.end.node) == (3, first.nodes[1])
    assert "SIGKILL" in first.end.reason
    assert second.checkpoint >= 10
    files = {file.name for file in (train.folder / first.logs).iterdir()}
    assert files == {"srun.log", "rank-0000.log", "node-0000.log", "node-0001.log", "errors.jsonl"}
    assert len(list((train.folder / "heartbeats").iterdir())) == 2, "one for each node"
    log = tiny.pipeline("logs", train.folder, "--attempt", "1", "--rank", "2")
    assert "error: rank 2 has lost another process of the run" in log.stdout, log.stdout
    assert "SIGKILL" in tiny.pipeline("logs", train.folder, "--attempt", "1", "--first-error").stdout


@pytest.mark.slow
def test_a_rank_hangs(train: Run, whole: Path) -> None:
    train.submit()
    train.until_saved(10)
    train.kill(2, signal.SIGSTOP)
    train.until_over()
    train.check(whole)
    first, second = train.launches()
    assert first.end is not None and (first.end.code, first.end.next) == (76, "relaunch"), first.end
    assert second.checkpoint >= 10
    hang = sorted((train.folder / "logs" / "hang-0001").iterdir())
    assert [file.name for file in hang] == ["flight-recorder-node-0000.jsonl", "flight-recorder-node-0001.jsonl"]
    assert {row["rank"] for row in storage.read_json_lines(hang[0])} == {0, 1}


@pytest.mark.parametrize("train", [("slurm.max_restarts=1", "train.checkpoint.every_steps=1000")], indirect=True)
def test_crashes_without_progress_end_the_chain(train: Run) -> None:
    (job,) = train.submit()
    for number in (1, 2):
        train.until(partial(_beats, train, number, 1), why=f"signs of life of launch {number}")
        train.kill(1)
    train.until_over()
    first, second = (launch.end for launch in train.launches())
    assert first is not None and second is not None
    assert (first.next, second.next) == ("relaunch", "end")
    assert scheduler.jobs([job])[job].state == "FAILED"
    report = (train.folder / "slurm" / "report.txt").read_text()
    assert "slurm.max_restarts=1" in report and "rank 1 on" in report
    train.check_left()


@pytest.mark.parametrize("train", [("slurm.spare_nodes=1", "train.checkpoint.every_steps=1000")], indirect=True)
def test_a_node_on_which_launches_crash_is_left_out(train: Run, whole: Path) -> None:
    train.submit()
    for number in (1, 2):
        train.until(partial(_beats, train, number, 3), why=f"signs of life of launch {number}")
        train.kill(3)
    train.until_over()
    train.check(whole)
    first, second, third = train.launches()
    assert first.nodes == second.nodes
    bad = first.nodes[1]
    assert first.end is not None and first.end.node == bad
    assert bad not in third.nodes and len(third.nodes) == 2
    (log,) = (train.folder / "slurm" / "jobs").glob("*_log.out")
    assert f"{bad} is left out: the last launches failed there" in log.read_text()


def _make_unhealthy(train: Run, bad: str) -> None:
    """Nothing can be written there, as on a node whose file system has turned read-only; only the doctor notices."""
    profile = profile_with(train.file.parent, f"[[ $SLURMD_NODENAME != {bad} ]] || ulimit -f 0")
    train.overrides += [f"slurm.profile={profile}", "slurm.doctor=true"]


@pytest.mark.parametrize("train", [("slurm.spare_nodes=1",)], indirect=True)
def test_an_unhealthy_node_is_not_used(train: Run, whole: Path) -> None:
    bad = train.cluster.nodes[0]
    _make_unhealthy(train, bad)
    train.submit()
    train.until_over()
    train.check(whole)
    (launch,) = train.launches()
    assert bad not in launch.nodes and len(launch.nodes) == 2
    (log,) = (train.folder / "slurm" / "jobs").glob("*_log.out")
    assert f"{bad} is unhealthy" in log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("train", [("train.duration=10 steps",)], indirect=True)
def test_a_job_without_spare_nodes_is_kept_from_an_unhealthy_one(train: Run) -> None:
    """The scheduler ends all processes of a job that goes back into the queue, also those that tell it this."""
    bad = train.cluster.nodes[0]
    _make_unhealthy(train, bad)
    (job,) = train.submit()
    train.until(lambda: train.launches() and train.launches()[0].end, why="the first start")
    train.until(lambda: _excluded(job) == bad, why=f"a job that is kept from {bad}")
    scheduler.update(job, {"ExcNodeList": ""})  # as if nobody had told it
    train.until_over()
    first, second = train.launches()
    assert first.end is not None and (first.end.failed_nodes, first.end.next) == ((bad,), "requeue")
    assert bad not in second.nodes and second.restarts == 2, "the start between did not launch"
    assert train.step() == 10
    train.check_left()
    (log,) = (train.folder / "slurm" / "jobs").glob("*_log.out")
    assert f"job {job} was given {bad} again" in log.read_text()


def _excluded(job: str) -> str:
    return scheduler.details(job).get("ExcNodeList", "")


@pytest.mark.parametrize("train", [("slurm.train.options={begin: now+10}",)], indirect=True)
def test_what_is_refused_is_not_started_again(train: Run) -> None:
    (job,) = train.submit()
    lock = Lock.take(train.folder)  # somebody trains by hand meanwhile
    train.until_over()
    lock.release()
    (launch,) = train.launches()
    assert launch.end is not None and (launch.end.code, launch.end.next) == (2, "end")
    assert f"run folder {train.folder} is in use" in launch.end.reason
    assert scheduler.jobs([job])[job].state == "FAILED"
    train.check_left()


@pytest.mark.parametrize("train", [("train.optimizer.lr=1e30", "train.faults.on_nonfinite=stop")], indirect=True)
def test_numbers_that_go_wrong_end_the_run(train: Run) -> None:
    train.submit()
    train.until_over()
    (launch,) = train.launches()
    assert launch.end is not None and (launch.end.code, launch.end.next) == (77, "end")
    train.check_left()


def test_the_controller_is_away_when_the_job_has_to_decide(train: Run, whole: Path) -> None:
    (job,) = train.submit()
    train.until_step(12)
    controller = train.cluster.daemons()["slurmctld"]
    assert controller is not None
    os.kill(controller, signal.SIGKILL)
    for rank in range(4):
        train.kill(rank, signal.SIGUSR2)
    train.until((train.folder / "exit.json").exists, why="the end of the processes")
    time.sleep(3)
    train.cluster.restart()
    train.until(lambda: len(train.launches()) == 2, why="the second start")
    train.until_over()
    train.check(whole)
    first, second = train.launches()
    assert first.end is not None and (first.end.code, first.end.next) == (75, "requeue")
    assert (second.job, second.restarts, second.checkpoint) == (job, 1, first.end.checkpoint)


def _nodes_now(job: str) -> list[str]:
    return scheduler.hostnames(scheduler.details(job).get("NodeList", "").replace("(null)", ""))


def _beats(train: Run, number: int, rank: int) -> bool:
    """Whether this rank of the launch with this number lives."""
    found = train.launches()
    try:
        environment = Path(f"/proc/{train.pid(rank)}/environ").read_bytes()
    except (OSError, KeyError):
        return False
    return len(found) == number and found[-1].logs.encode() in environment
