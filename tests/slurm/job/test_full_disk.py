"""A job whose run folder has no room left: what it says, and that it ends (a small tmpfs; needs root)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import orjson
import pytest

from slurm import jobs, scheduler
from slurm.devcluster import DevCluster
from slurm.record.launch_log import launches
from tests import tiny
from tests.waiting import until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tmpfs needs root")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=60m", "tmpfs", folder]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let root mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", folder], check=False)


def fill(disk: Path) -> None:
    """To the last byte."""
    with (disk / "filler").open("ab", buffering=0) as out, suppress(OSError):
        while True:
            out.write(bytes(512))


@pytest.mark.parametrize(
    "where", [pytest.param("local", marks=pytest.mark.guard), pytest.param("slurm", marks=pytest.mark.slurm)]
)
def test_a_job_that_cannot_save_says_so_and_ends_though_nothing_can_be_written(
    where: str, tmp_path: Path, disk: Path, request: pytest.FixtureRequest
) -> None:
    """Two ranks; logs, error files and `exit.json` are on the same disk."""
    run = disk / "run"
    if where == "slurm":
        request.getfixturevalue("cluster")
    keys = {"run.dir": str(run), "train.duration": "100000 steps", "train.checkpoint.every_steps": 1}
    more = {"train.checkpoint.retries": 0, "train.checkpoint.max_unsaved_minutes": 1e-4, "launch.processes": 2}
    device = {"launch.device": "cpu", "launch.heartbeat_seconds": 0.2}
    site = {"slurm": {"profile": "devcluster", "nodes": 2, "processes_per_node": 1, "doctor": False}}
    file = tiny.write_run(tmp_path, {**keys, **more, **device, **site})
    assert tiny.pipeline("preprocess", file).returncode == 0
    sent = tiny.pipeline("train", file, f"--{where}")
    assert sent.returncode == 0, sent.stdout + sent.stderr
    until(lambda: list(run.glob("checkpoints/step-????????")))
    until(lambda: fill(disk) or launches(run)[-1].end)

    (launch,) = launches(run)
    assert launch.end is not None and (launch.end.code, launch.end.next) == (79, "end"), launch.end
    assert "No space left on device" in launch.end.reason and "step-0" in launch.end.reason
    log = jobs.sent(run)[-1].log(run)
    until(lambda: "train has ended" in log.read_text())
    text = log.read_text()
    assert "could not be saved in" in text and "(code 79); end: no checkpoint can be written" in text
    assert "failed since step" in text, "each failure, too"
    end = orjson.loads((run / "exit.json").read_bytes())
    assert (end["code"], end["agreed"]) == (79, True)
    status = tiny.pipeline("status", run)
    assert status.stdout.splitlines()[0].endswith("unsaved (train)"), status.stdout
    assert "failed since step" in status.stdout and "No space left on device" in status.stdout


@pytest.mark.slow
@pytest.mark.slurm
def test_a_disk_that_became_too_small_ends_the_job_and_blames_no_node(
    tmp_path: Path, disk: Path, cluster: DevCluster
) -> None:
    """The check of the nodes needs 1 GiB; submitting again is refused by the same limit."""
    run = disk / "run"
    site = {"slurm": {"profile": "devcluster", "nodes": 1, "processes_per_node": 1, "doctor": True}}
    file = tiny.write_run(tmp_path, {"run.dir": str(run), "launch.device": "cpu", **site})
    assert tiny.pipeline("preprocess", file).returncode == 0
    refused = tiny.pipeline("train", file, "--slurm")
    assert refused.returncode == 2 and "1.0 GiB are needed" in refused.stderr
    _resize(disk, "2g")
    sent = tiny.pipeline("train", file, "slurm.train.options={begin: now+1hour}", "--slurm")
    assert sent.returncode == 0, sent.stdout + sent.stderr
    _resize(disk, "60m")
    scheduler.update(jobs.sent(run)[-1].job, {"StartTime": "now"})
    until(lambda: launches(run) and launches(run)[-1].end)

    (launch,) = launches(run)
    assert launch.end is not None and (launch.end.code, launch.end.next, launch.end.failed_nodes) == (79, "end", ())
    status = tiny.pipeline("status", run)
    assert status.stdout.splitlines()[0].endswith("unsaved (train)") and "suspect" not in status.stdout, status.stdout
    for said in (status, tiny.pipeline("logs", run), tiny.pipeline("logs", run, "--first-error")):
        assert "1.0 GiB are needed" in said.stdout, said.stdout


def _resize(disk: Path, size: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", disk], check=True)
