"""The commands of the documentation that need a cluster, in order, on a real one."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm.devcluster import DevCluster
from tests.docs.test_commands import PAGES, commands, finished, run_commands

__all__ = ["finished"]

pytestmark = pytest.mark.slurm

_PAGES = [page for page in PAGES if any(command.slurm for command in commands(page))]


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.name)
def test_commands_of(
    page: Path, finished: Path, cluster: DevCluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_commands(finished, [command for command in commands(page) if command.slurm], tmp_path / "folder", capfd)
