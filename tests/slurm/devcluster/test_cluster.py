"""The development cluster: jobs run and are accounted, a lost node is one, and nothing is left of it."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.common.errors import UserError
from slurm.devcluster import DevCluster, missing_programs
from tests.waiting import until

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(bool(missing_programs()) or os.geteuid() != 0, reason="needs SLURM's programs, and root"),
]
PORT = 19500


@pytest.fixture(scope="module")
def own_cluster() -> Iterator[DevCluster]:
    """With nodes that can be killed while other tests use theirs. Sockets want a shorter path than pytest's."""
    with tempfile.TemporaryDirectory(prefix="own-", dir="/tmp") as folder:
        cluster = DevCluster.up(Path(folder) / "c", nodes=2, port=PORT)
        try:
            yield cluster
        finally:
            cluster.down()


def _call(cluster: DevCluster, *command: str) -> str:
    environment = {**os.environ, **cluster.environment}
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=300).stdout


def test_jobs_run_on_all_nodes_and_are_accounted(own_cluster: DevCluster) -> None:
    assert own_cluster.usable()
    assert own_cluster.nodes == [f"c{PORT}n1", f"c{PORT}n2"]
    said = _call(own_cluster, "srun", "-N2", "--job-name=both", "printenv", "SLURMD_NODENAME")
    assert sorted(said.split()) == own_cluster.nodes

    def accounted() -> bool:
        return "both|dev|COMPLETED" in _call(own_cluster, "sacct", "-X", "-n", "-P", "-o", "JobName,Account,State")

    until(accounted)
    with pytest.raises(subprocess.CalledProcessError):
        _call(own_cluster, "sbatch", "--account=other", "--wrap=true")
    with pytest.raises(UserError, match=f"port {PORT} and 2 nodes, not 17100 and 2"):
        DevCluster.up(_folder(own_cluster), nodes=2, port=17100)


def test_a_killed_node_loses_all_its_processes_and_its_job_starts_again(own_cluster: DevCluster) -> None:
    first, second = own_cluster.nodes
    log = _folder(own_cluster) / "job.out"
    script = (
        f"--wrap=echo run $SLURM_RESTART_COUNT >>{log}; trap : TERM; srun -N1 sleep 1000 & setsid sleep 1000 & wait"
    )
    job = _call(own_cluster, "sbatch", "--parsable", "--requeue", "--output=/dev/null", f"-w{first}", script).strip()
    other = _call(own_cluster, "sbatch", "--parsable", "--output=/dev/null", f"-w{second}", "--wrap=sleep 1000").strip()
    until(lambda: len(own_cluster.processes_of_jobs()) >= 6)
    before = set(own_cluster.processes_of_jobs())

    own_cluster.kill_node(first)
    left = own_cluster.processes_of_jobs()
    assert left and set(left) < before
    assert {_environ(pid)["SLURM_JOB_ID"] for pid in left} == {other}, "another node's job goes on"

    own_cluster.start_node(first)
    until(lambda: log.read_text().split() == ["run", "run", "1"])
    assert _call(own_cluster, "squeue", "-h", "-j", job, "-o", "%T %N").split() == ["RUNNING", first]


@pytest.mark.slow
def test_down_ends_jobs_and_daemons_and_up_goes_on_from_there(own_cluster: DevCluster) -> None:
    _call(own_cluster, "sbatch", "--output=/dev/null", "--wrap=trap : TERM; sleep 1000 & wait; sleep 1000")
    until(lambda: bool(own_cluster.processes_of_jobs()))
    own_cluster.down()
    assert not own_cluster.is_up
    assert not own_cluster.processes_of_jobs()
    assert set(own_cluster.daemons().values()) == {None}
    assert f"c{PORT}n1" not in Path("/etc/hosts").read_text()
    assert DevCluster.up(_folder(own_cluster), nodes=2, port=PORT).usable()
    assert _call(own_cluster, "squeue", "-h", "-t", "PENDING,RUNNING") == ""
    assert "both" in _call(own_cluster, "sacct", "-X", "-n", "-P", "-o", "JobName")


def _folder(cluster: DevCluster) -> Path:
    return Path(cluster.environment["SLURM_CONF"]).parent.parent


def _environ(pid: int) -> dict[str, str]:
    pairs = (entry.partition("=") for entry in Path(f"/proc/{pid}/environ").read_text().split("\0"))
    return {key: value for key, _, value in pairs}
