"""The nodes of a job as the controller tells of them, on a real one."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from slurm import scheduler
from slurm.allocation import Allocation
from slurm.devcluster import DevCluster

pytestmark = pytest.mark.slurm


def test_a_node_that_was_lost_and_comes_back_is_not_the_jobs_any_more(cluster: DevCluster) -> None:
    nodes = ",".join(cluster.nodes)
    words = f"sbatch --parsable --no-kill --time=5 --nodelist={nodes} --nodes={len(cluster.nodes)} --output=/dev/null"
    job = scheduler.ask([*words.split(), "--wrap", "sleep 200"]).strip()
    lost = ""
    try:
        _until(lambda: scheduler.details(job).get("JobState") == "RUNNING")
        host = scheduler.details(job)["BatchHost"]
        allocation = Allocation(job, cluster.nodes, print)
        assert allocation.down() == []
        lost = next(node for node in cluster.nodes if node != host)
        cluster.kill_node(lost)
        _until(lambda: lost not in scheduler.hostnames(scheduler.details(job)["NodeList"]))
        cluster.start_node(lost)
        assert not scheduler.node_states([lost])[lost].startswith("down")
        assert allocation.down() == [lost]
    finally:
        scheduler.cancel([job])
        if lost:
            cluster.start_node(lost)


def _until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 300
    while not what():
        assert time.monotonic() < end
        time.sleep(0.2)
