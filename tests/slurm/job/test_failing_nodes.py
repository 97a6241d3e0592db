"""Nodes that are lost, or on which jobs fail, on a real controller: which node takes their place."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from slurm import scheduler
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
@pytest.mark.slow
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


@pytest.mark.parametrize("train", [("slurm.spare_nodes=1", "train.checkpoint.every_steps=1000")], indirect=True)
@pytest.mark.slow
def test_a_node_on_which_launches_crash_is_left_out(train: Run, whole: Path) -> None:
    train.submit()
    for number in (1, 2):
        train.until(partial(train.beats, number, 3), why=f"signs of life of launch {number}")
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
@pytest.mark.slow
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


def _nodes_now(job: str) -> list[str]:
    return scheduler.hostnames(scheduler.details(job).get("NodeList", "").replace("(null)", ""))
