"""Jobs that the scheduler does not show, on a real controller: of another user (PrivateData=jobs), or filtered by the
shell; and those that sbatch got no answer about.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipeline.common.errors import EXIT_SUPERSEDED
from pipeline.common.slurm_commands import JobIdentity, whether_runs
from pipeline.train.run import lock_holder
from pipeline.train.run.heartbeat import Beat, node_file
from pipeline.train.run.lock import holder, refusal, take_over
from slurm import control, jobs, scheduler
from slurm.devcluster import DevCluster, can_split_hosts, missing_programs
from slurm.record import active_jobs
from slurm.status.command import status
from slurm.submit import submit
from tests.repository import ROOT
from tests.slurm.training import Run
from tests.waiting import until

pytestmark = pytest.mark.slurm
NOBODY = 65534
HOLDER = """
import sys, time
from pathlib import Path
from pipeline.train.run.folder import open_run
try:
    with open_run(Path(sys.argv[1])) as folder:
        folder.begin(0, layout={}, config="")
        Path(sys.argv[1], "begun").touch()
        while True:
            time.sleep(0.2)
            folder.assert_mine()
except Exception as error:
    sys.exit(error.exit_code)
"""


def as_nobody(do: Callable[[], Any]) -> Any:
    """What a function returns in a process of another user, who need not be able to read our files of Python."""
    out, into = os.pipe()
    if (child := os.fork()) == 0:
        found: Any = "it raised nothing, and returned nothing"
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.environ["USER"] = os.environ["LOGNAME"] = "nobody"
            found = do()
        except BaseException as error:
            found = f"{type(error).__name__}: {error}"
        finally:
            os.write(into, json.dumps(found).encode())
            os._exit(0)
    os.close(into)
    with os.fdopen(out, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text)


@pytest.fixture(scope="module")
def private() -> Iterator[DevCluster]:
    """A cluster that shows users their own jobs alone, and whose nodes are strangers to each other."""
    if missing_programs():
        pytest.skip("no SLURM here: python -m slurm.devcluster up --install")
    if os.geteuid() != 0:
        pytest.skip("the tests are not run by root, so there is no second user: these were not tried")
    port = 19700 + 100 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    with tempfile.TemporaryDirectory(prefix="private-", dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        cluster = DevCluster.up(
            Path(folder) / "c", nodes=2, port=port, split_hosts=can_split_hosts(), private_jobs=True
        )
        try:
            yield cluster
        finally:
            cluster.down()


@pytest.fixture
def group_run(private: DevCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str]]:
    """A run folder of a group to which both users belong, and the job of the first one that trains in it."""
    for name, value in private.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(lock_holder, "WATCH_SECONDS", 0.5)
    with tempfile.TemporaryDirectory(prefix="group-", dir="/tmp") as folder:
        run = Path(folder) / "run"
        run.mkdir()
        os.chmod(folder, 0o755)
        os.chown(run, 0, NOBODY)
        run.chmod(0o2775)
        script = f"#!/bin/sh\ncd {ROOT}\numask 002\nexec {sys.executable} -c '{HOLDER}' {run}\n"
        job = scheduler.ask(["sbatch", "--parsable", f"--output={folder}/log"], given=script).strip()
        record = jobs.new_job("train", job, "slurm", "train", "none.json")
        (run / "slurm").mkdir()
        jobs.note(run, record)
        try:
            until((run / "begun").exists)
            yield run, job
        finally:
            scheduler.cancel([job])
            until(lambda: not any(state.runs for state in scheduler.jobs([job]).values()))


def make_old(run: Path) -> None:
    """Nothing there was written for an hour."""
    beat = Beat(0, "elsewhere", 1, 1, 5, "step", time.time() - 3600)
    node_file(run, 0).parent.mkdir(exist_ok=True)
    node_file(run, 0).write_text(json.dumps(asdict(beat)) + "\n")
    for file in [run / "lock", *run.glob("heartbeats/*")]:
        os.utime(file, (time.time() - 3600,) * 2)


def test_another_user_does_not_take_a_running_job_for_one_that_has_ended(group_run: tuple[Path, str]) -> None:
    run, job = group_run
    held = holder(run)
    assert held is not None and (held["uid"], held["attempt"]) == (0, 1)
    if can_split_hosts():
        assert held["host"] in scheduler.details(job)["NodeList"], "its node has its own name"
    assert whether_runs(JobIdentity(job, uid=0)).state == "running"
    make_old(run)
    assert as_nobody(lambda: whether_runs(JobIdentity(job, uid=0)).state) == "unknown"
    assert "--take-over" in as_nobody(lambda: refusal(run))
    assert as_nobody(lambda: [each.job.job for each in active_jobs.find(run) if active_jobs.is_hidden(each)]) == [job]
    assert "nothing was sent" in as_nobody(lambda: submit._find(run, None, take_over=False))
    assert as_nobody(lambda: status({run: None})[0].state) == "unknown"
    text = io.StringIO()
    as_nobody(lambda: control.hold(run, Console(file=text)))
    assert holder(run) == held


def test_who_was_taken_over_by_another_user_ends_for_good(group_run: tuple[Path, str], tmp_path: Path) -> None:
    run, job = group_run
    assert "last sign of life" in as_nobody(lambda: take_over(run)), "it has just begun"
    make_old(run)
    assert "job " + job in as_nobody(lambda: take_over(run))
    until(lambda: scheduler.details(job)["JobState"] == "FAILED")
    assert scheduler.details(job)["ExitCode"] == f"{EXIT_SUPERSEDED}:0"
    assert int((run / "attempt").read_text()) > 1


def test_own_jobs_are_shown_so_that_one_that_is_not_there_has_ended(private: DevCluster, group_run: object) -> None:
    first = int(scheduler.configuration()["NEXT_JOB_ID"]) - 1
    assert whether_runs(JobIdentity("1", uid=0)).state == "ended", "forgotten"
    assert whether_runs(JobIdentity(str(first + 1000), uid=0)).state == "unknown", "never given out"
    assert whether_runs(JobIdentity("1", uid=0, cluster="another")).state == "unknown"
    assert as_nobody(lambda: whether_runs(JobIdentity("1", uid=NOBODY)).state) == "ended"


@pytest.mark.slow
@pytest.mark.parametrize("train", [("slurm.train.options={begin: now+600}",)], indirect=True)
def test_filters_of_the_shell_lead_to_no_second_job(train: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE_PARTITION", "short")
    monkeypatch.setenv("SQUEUE_NAMES", "another")
    monkeypatch.setenv("SQUEUE_STATES", "COMPLETED")
    sent = train.submit()
    assert len(sent) == 1 and train.submit() == sent
    script = f"env > {train.folder}/environment"
    wrapped = scheduler.ask(["sbatch", "--parsable", "--output=/dev/null", f"--wrap={script}"]).strip()
    until(lambda: scheduler.details(wrapped)["JobState"] == "COMPLETED")
    assert "SQUEUE_" not in (train.folder / "environment").read_text()
    assert scheduler.jobs(sent)[sent[0]].waits


BUSY = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"


@pytest.mark.parametrize("train", [("slurm.train.options={begin: now+600}",)], indirect=True)
@pytest.mark.parametrize("accepted", [True, False])
def test_a_submission_that_times_out_comes_to_one_job(
    train: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, accepted: bool
) -> None:
    """The controller has accepted it, or not; sbatch gets no answer the first time."""
    real, wrapper = shutil.which("sbatch"), tmp_path / "sbatch"
    first = f'{real} "$@"; ' if accepted else ""
    wrapper.write_text(
        f'#!/bin/sh\n[ -e {tmp_path}/tried ] && exec {real} "$@"\ntouch {tmp_path}/tried\n'
        f'{first}echo "{BUSY}" >&2\nexit 1\n'
    )
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    sent = train.submit()
    assert (tmp_path / "tried").exists() and len(sent) == 1
    name = jobs.sent(train.folder)[0].name
    queued = scheduler.ask(["squeue", "--me", "--noheader", f"--name={name}", "--format=%i"]).split()
    assert queued == sent == train.submit()


@pytest.mark.slow
def test_of_a_submission_without_any_answer_nothing_is_left(
    train: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The controller accepts the job, and answers nobody any more until the run is submitted again."""
    real, silent = {name: shutil.which(name) for name in ("sbatch", "squeue")}, tmp_path / "silent"
    silent.touch()
    for name, path in real.items():
        act = f'{path} --hold "$@" > {tmp_path}/first; ' if name == "sbatch" else ""
        file = tmp_path / name
        file.write_text(f'#!/bin/sh\n[ -e {silent} ] || exec {path} "$@"\n{act}echo "{BUSY}" >&2\nexit 1\n')
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(AssertionError, match="may have been accepted"):
        train.submit()
    lost = (tmp_path / "first").read_text().split()[-1]
    silent.unlink()
    sent = train.submit("slurm.train.options={begin: now+600}")
    assert len(sent) == 1 and lost not in sent
    assert scheduler.details(lost)["JobState"] == "CANCELLED"
