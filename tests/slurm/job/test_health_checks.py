"""The site's own health check: its exit code decides which nodes are used."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurm.doctor import health
from slurm.doctor.health import health_check, unhealthy
from slurm.job.health_checks import HealthChecks
from tests.clock import set_time
from tests.slurm.training import Run, profile_with
from tests.waiting import until

SRUN = """#!/bin/bash
# On each node of the list, as srun does.
for word in "$@"; do case $word in --nodelist=*) nodes=${word#*=} ;; esac; done
number=0
for node in ${nodes//,/ }; do
  SLURMD_NODENAME=$node "${@: -4}" | sed "s/^/$number: /"
  number=$((number + 1))
done
"""
BAD = 'echo looking; [ "$SLURMD_NODENAME" != n2 ] || { echo "NHC: no mount of /scratch"; exit 3; }'


@pytest.mark.parametrize(
    ("command", "ok", "value", "message"),
    [
        ("true", True, "ok", ""),
        ("echo all is well", True, "all is well", ""),
        ("echo first; echo why >&2; exit 7", False, "code 7", "health_command: it ended with code 7: why"),
        ("kill -9 $$", False, "code -9", "health_command: it ended with code -9"),
        ("sleep 60", False, "hangs", "health_command: it did not end within 0.5 s"),
    ],
)
def test_the_exit_code_decides(
    monkeypatch: pytest.MonkeyPatch, command: str, ok: bool, value: str, message: str
) -> None:
    if command.startswith("sleep"):
        monkeypatch.setattr(health, "SECONDS", 0.5)
    found = health_check(command)
    assert (found.ok, found.value, found.message) == (ok, value, message)


def test_lines_of_srun_are_no_results() -> None:
    lines = [
        "srun: error: {",
        '0: {"node":"n1","problem":""}',
        '1: {"node":"n2","problem":"it"}',
        "2: {}",
        "",
        '{"node":3}',
    ]
    assert unhealthy(lines) == {"n2": "it"}


class Allocation:
    nodes = ("n1", "n2", "n3", "n4")

    def __init__(self) -> None:
        self.unhealthy: dict[str, list[str]] = {}

    def down(self) -> list[str]:
        return ["n4", *self.unhealthy]


@pytest.fixture
def checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[HealthChecks, Allocation, list[str]]:
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    site = SimpleNamespace(
        health_command=BAD, health_minutes=30, srun_options=[], container_prefix="no such", python=None
    )
    submission: Any = SimpleNamespace(site=site, resources=SimpleNamespace(cpus_per_task=None), stage="train")
    allocation, told = Allocation(), list[str]()
    given: Any = allocation
    return HealthChecks(submission, given, told.append), allocation, told


def test_before_a_launch(checks: tuple[HealthChecks, Allocation, list[str]], tmp_path: Path) -> None:
    found, allocation, told = checks
    found.check(tmp_path)
    why = "health_command: it ended with code 3: NHC: no mount of /scratch"
    assert allocation.unhealthy == {"n2": [why]} and told == [f"n2 is unhealthy: {why}; is not used"]
    found.check(tmp_path)  # n2 is down now, and so not asked
    assert len(told) == 1 and "n2" not in (tmp_path / "health.log").read_text()


def test_while_a_training_runs(
    checks: tuple[HealthChecks, Allocation, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, allocation, told = checks
    now = time.monotonic()
    found.look(["n1", "n2"], tmp_path)
    assert not (tmp_path / "health.log").exists()
    set_time(monkeypatch, monotonic=lambda: now + 1801)
    until(lambda: found.look(["n1", "n2"], tmp_path) or told)
    assert list(allocation.unhealthy) == ["n2"] and "the training continues" in told[0]
    assert '"node":"n1"' in (tmp_path / "health.log").read_text()


def test_a_check_that_hangs_is_ended_with_the_job(
    checks: tuple[HealthChecks, Allocation, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, allocation, told = checks
    (tmp_path / "srun").write_text("#!/bin/bash\nexec sleep 600\n")
    monkeypatch.setattr("slurm.job.health_checks.SECONDS", 0.2)
    found.check(tmp_path)
    found.stop()
    assert not allocation.unhealthy and "its result is not used" in told[0]


@pytest.mark.slurm
@pytest.mark.slow
@pytest.mark.parametrize("train", [("slurm.spare_nodes=1", "train.duration=10 steps")], indirect=True)
def test_on_a_cluster(train: Run) -> None:
    bad, folder = train.cluster.nodes[0], train.file.parent / "health"
    folder.mkdir()
    profile = profile_with(folder, "")
    with profile.open("a") as file:
        file.write(f'health_command: "[ $SLURMD_NODENAME != {bad} ] || exit 9"\n')
    train.overrides.append(f"slurm.profile={profile}")
    train.submit()
    train.until_over()
    train.check_left()
    (launch,) = train.launches()
    assert bad not in launch.nodes and len(launch.nodes) == 2 and train.step() == 10
