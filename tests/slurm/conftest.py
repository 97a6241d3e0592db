"""The cluster that tests marked `slurm` run on: the one that `SLURM_CONF` names, or a dev cluster started for them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm import jobs, scheduler
from slurm.devcluster import DevCluster, can_split_hosts
from tests.slurm.training import Run, reference, write

_PROGRAMS = ("slurmctld", "slurmd", "slurmdbd", "munged", "mariadbd")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevCluster]:
    """A SLURM with three nodes whose commands the tests and what they start talk to.

    `PIPELINE_DEVCLUSTER` names the folder of one that is up; without it one is started and taken down again. Where that
    cannot be the tests are skipped, which CI (`CI=true`) takes for a failure. Its nodes are strangers to each other, as
    those of a real cluster, where this machine can have such ones.
    """
    folder = os.environ.get("PIPELINE_DEVCLUSTER")
    missing = [name for name in _PROGRAMS if shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin:/sbin") is None]
    if not folder and missing:
        reason = f"no SLURM here ({', '.join(missing)} missing): python -m slurm.devcluster up --install"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    # Workers of pytest-xdist have one each.
    port = 18000 + 100 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    splits = not folder and can_split_hosts()
    base = tmp_path_factory.getbasetemp()
    if splits:  # the small disks that tests mount below show on the nodes
        subprocess.run(["mount", "--bind", "--make-shared", base, base], check=True)
    own = None if folder else DevCluster.up(_folder(), port=port, split_hosts=splits)
    found = own or DevCluster.at(Path(str(folder)))
    before = {name: os.environ.get(name) for name in found.environment}
    os.environ.update(found.environment)
    yield found
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    if own is not None:
        own.down(purge=True)
    if splits:
        subprocess.run(["umount", "--lazy", base], check=False)


@pytest.fixture
def handlers() -> Iterator[None]:
    """A batch process ignores signals when it leaves. The processes of later tests must not inherit that."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2, signal.SIGCONT)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Jobs take as long as the machine is loaded: what hangs is found by the waits within the tests."""
    for item in items:
        if item.get_closest_marker("slurm") is not None:
            item.add_marker(pytest.mark.timeout(1800))


def _folder() -> Path:
    """Not one of pytest's, which other users cannot enter: some tests send jobs as another user."""
    folder = Path(tempfile.mkdtemp(prefix="devcluster-"))
    folder.chmod(0o755)
    return folder


@pytest.fixture(scope="session")
def run_file(cluster: DevCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run of several processes, whose data is preprocessed."""
    return write(tmp_path_factory.mktemp("training"))


@pytest.fixture(scope="session")
def whole(run_file: Path) -> Path:
    """The folder of the run of this file that nothing happened to."""
    return reference(run_file)


@pytest.fixture
def train(cluster: DevCluster, run_file: Path, request: pytest.FixtureRequest) -> Iterator[Run]:
    """A run of the test's own, with overrides as its parameters; its jobs end with the test."""
    run = Run(cluster, run_file, re.sub(r"\W+", "-", request.node.name).strip("-"), *getattr(request, "param", ()))
    yield run
    scheduler.cancel([number for job in jobs.sent(run.folder) for number in job.numbers])
    run.until_over()
    for node in cluster.nodes:
        if not cluster.usable():
            cluster.start_node(node)
