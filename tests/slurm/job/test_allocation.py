"""The nodes of a job as the controller tells of them, on a real one."""

from __future__ import annotations

import pytest

from slurm import scheduler
from slurm.devcluster import DevCluster
from slurm.job.allocation import Allocation
from tests.waiting import until

pytestmark = pytest.mark.slurm


def test_a_node_that_was_lost_and_comes_back_is_not_the_jobs_any_more(cluster: DevCluster) -> None:
    nodes = ",".join(cluster.nodes)
    words = f"sbatch --parsable --no-kill --time=5 --nodelist={nodes} --nodes={len(cluster.nodes)} --output=/dev/null"
    job = scheduler.ask([*words.split(), "--wrap", "sleep 200"]).strip()
    lost = ""
    try:
        until(lambda: scheduler.details(job).get("JobState") == "RUNNING")
        host = scheduler.details(job)["BatchHost"]
        allocation = Allocation(job, cluster.nodes, print)
        assert allocation.down() == []
        lost = next(node for node in cluster.nodes if node != host)
        cluster.kill_node(lost)
        until(lambda: lost not in scheduler.hostnames(scheduler.details(job)["NodeList"]))
        cluster.start_node(lost)
        assert not scheduler.node_states([lost])[lost].startswith("down")
        assert allocation.down() == [lost]
    finally:
        scheduler.cancel([job])
        if lost:
            cluster.start_node(lost)


def test_a_job_is_kept_only_from_so_many_nodes_that_it_can_start(cluster: DevCluster) -> None:
    """Else it would wait for ever, held by the scheduler, beside nodes that are idle."""
    script = "#!/bin/bash\n#SBATCH --nodes=2 --time=5 --output=/dev/null --hold\nsleep 1\n"
    job = scheduler.ask(["sbatch", "--parsable"], given=script).strip()
    first, second, third, *more = cluster.nodes
    told: list[str] = []
    try:
        allocation = Allocation(job, [first, second], told.append)
        assert allocation.exclusion(job, [first], [first]) == []
        assert allocation.exclusion(job, [first], []) == [first] and not told
        assert allocation.exclusion(job, [third, first], more) == [third]
        assert f"job {job} does not exclude {first}: " in told[-1]
        assert allocation.exclusion(job, [first], [*more, second]) == [], "where there are too few without it"
        assert allocation.keep_from(job, [first], 0) and allocation.excluded(job) == {first}
        assert allocation.keep_from(job, [], 0) and allocation.excluded(job) == set()
    finally:
        scheduler.cancel([job])
