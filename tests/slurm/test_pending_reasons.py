"""What is said of jobs that wait: every reason of squeue's manual, and some that a real controller gives."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.common.slurm_commands import SchedulerError, ask
from slurm import jobs
from slurm.devcluster import DevCluster
from slurm.pending_reasons import TABLE, meaning
from slurm.status.command import status
from slurm.submit.waiting import warn_of_waiting
from tests import tiny
from tests.slurm.training import Run

RESOURCES = ("BB", "Billing", "Energy", "GRES", "License", "Mem", "Memory", "Node", "Unknown", "Cpu", "CPU")


def limits() -> Iterator[str]:
    """Limits of accounts and qualities of service, as `resource_limits.html` lists them for 25.11, and more alike."""
    for kind in ("Assoc", "QOS"):
        for resource in RESOURCES:
            for form in ("{0}", "{0}Limit", "{0}Minutes", "{0}MinutesLimit", "{0}RunMinutes", "{0}RunMinutesLimit"):
                yield f"{kind}Grp{form.format(resource)}"
            for form in ("{0}PerJob", "{0}PerJobLimit", "{0}PerNode", "{0}MinutesPerJob", "{0}MinutesPerJobLimit"):
                yield f"{kind}Max{form.format(resource)}"
        yield from (f"{kind}{name}" for name in ("GrpJobsLimit", "GrpSubmitJobsLimit", "GrpWallLimit"))
        yield f"{kind}MaxWallDurationPerJobLimit"
    yield from (f"QOSMax{resource}PerUser{end}" for resource in RESOURCES for end in ("", "Limit"))
    yield from (f"QOSMin{resource}" for resource in (*RESOURCES, "CpuNotSatisfied"))
    yield from (f"Max{resource}PerAccount" for resource in RESOURCES)


OTHERS = """
    AccountingPolicy AccountNotAllowed AssocMaxJobsLimit AssocMaxSubmitJobLimit AssociationJobLimit
    AssociationResourceLimit AssociationTimeLimit BadConstraints BeginTime BurstBufferOperation BurstBufferResources
    BurstBufferStageIn Cleaning Constraints DeadLine Dependency DependencyNeverSatisfied FedJobLock FrontEndDown
    InactiveLimit InvalidAccount InvalidQOS JobArrayTaskLimit JobHeldAdmin JobHeldUser JobHoldMaxRequeue
    JobLaunchFailure Licenses MaxJobsPerAccount MaxMemPerLimit MaxSubmitJobsPerAccount NodeDown NonZeroExitCode None
    OutOfMemory PartitionConfig PartitionDown PartitionInactive PartitionNodeLimit PartitionTimeLimit PowerNotAvail
    PowerReserved Priority Prolog QOSJobLimit QOSMaxJobsPerUserLimit QOSMaxSubmitJobPerUserLimit QOSNotAllowed
    QOSResourceLimit QOSTimeLimit QOSUsageThreshold RaisedSignal:9(Killed) ReqNodeNotAvail Reservation
    ReservationDeleted ReservationInvalid Resources SchedDefer SystemFailure TimeLimit WaitingForScheduling
""".split()


def test_every_reason_of_the_manual_has_its_advice() -> None:
    reasons = [*limits(), *OTHERS]
    unknown = [reason for reason in reasons if meaning(reason) is None]
    assert not unknown
    used = {id(meaning(reason)) for reason in reasons}
    assert {id(row) for row in TABLE} == used, "no row is without a reason, or behind one that takes all of its reasons"
    for row in TABLE:
        words = row.words(Path("runs/a"), "77", "train", "n[1-2]")
        assert "{" not in words and row.advice, row
        assert ("cannot start" in words) == (row.outlook == "never")


@pytest.mark.parametrize(
    ("reason", "outlook", "word"),
    [
        ("Priority", "turn", "nothing to do"),
        ("AssocMaxJobsLimit", "limit", "wait for jobs to end"),
        ("QOSMaxSubmitJobPerUserLimit", "limit", "slurm.links"),
        ("AssocGrpCPURunMinutesLimit", "limit", "slurm.train.time"),
        ("QOSGrpCPUMinutesLimit", "never", "sshare"),
        ("QOSMaxCpuMinutesPerJobLimit", "never", "lower slurm.nodes"),
        ("QOSMaxGRESPerUser", "limit", "wait for jobs to end"),
        ("AssocMaxNodePerJobLimit", "never", "lower slurm.nodes"),
        ("InvalidAccount", "never", "slurm.train.account"),
        ("JobHeldUser", "held", "`pipeline release runs/a`"),
        ("JobHeldAdmin", "held", "ask the administrators"),
        ("launch_failed_requeued_held", "held", "pipeline release runs/a"),
        ("(ReservationDeleted)", "never", "reservation"),
    ],
)
def test_what_a_reason_means(reason: str, outlook: str, word: str) -> None:
    found = meaning(reason)
    assert found is not None and found.outlook == outlook
    assert word in found.words(Path("runs/a"), "77", "train")


def test_a_reason_that_nobody_knows_has_no_meaning() -> None:
    assert meaning("its turn has not come") is None and meaning("") is None


# Rows that squeue of SLURM 22.05 has printed.
ROWS = {
    "2103|PENDING|QOSGrpCPUMinutesLimit||N/A|N/A|": "sshare",
    "2103|PENDING|PartitionInactive||N/A|N/A|": "sinfo",
    "2103|PENDING|JobHeldUser||N/A|N/A|": "pipeline release",
    "2103|PENDING|BeginTime||2026-11-29T07:01:50|2026-11-29T08:01:50|": "",
    "2103|PENDING|Dependency||N/A|N/A|": "",
    "2103|RUNNING|None|c19100n1|2026-11-29T06:01:50|2026-11-29T07:01:50|": "",
}


def test_what_is_said_of_jobs_that_were_just_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    squeue = tmp_path / "squeue"
    squeue.touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    job = jobs.new_job("train", "2103", "slurm", "name", "x.json")
    for row, word in ROWS.items():
        squeue.write_text(f"#!/bin/sh\necho '{row}'\n")
        text = warned(job)
        assert (word in text and row.split("|")[2] in text and "2103" in text) if word else not text
    squeue.write_text("#!/bin/sh\necho 'slurm_load_jobs error: Unable to contact' >&2\nexit 1\n")
    assert not warned(job), "what was sent is sent"


def test_a_scheduler_that_has_not_looked_yet_is_asked_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, late = "2103|PENDING|Priority||N/A|N/A|", "2103|PENDING|QOSGrpCPUMinutesLimit||N/A|N/A|"
    squeue = tmp_path / "squeue"
    squeue.touch(mode=0o755)
    squeue.write_text(f"#!/bin/sh\nif mkdir {tmp_path}/asked; then echo '{first}'; else echo '{late}'; fi 2>&-\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert "QOSGrpCPUMinutesLimit" in warned(jobs.new_job("train", "2103", "slurm", "name", "x.json"))


def warned(*sent: jobs.Job) -> str:
    """Warnings about jobs of a run that were sent."""
    output = io.StringIO()
    warn_of_waiting({Path("runs/a"): sent}, Console(file=output, width=1000))
    return output.getvalue()


@pytest.mark.slurm
def test_a_real_controller_keeps_a_job_back(cluster: DevCluster, train: Run) -> None:
    user = jobs.user()
    with suppress(SchedulerError):  # it has the account already
        ask(["sacctmgr", "-i", "add", "user", user, "Account=other"])
    ask(["sacctmgr", "-i", "modify", "user", user, "where", "account=other", "set", "MaxJobs=0"])
    try:
        changes = ["slurm.train.account=other", "slurm.train.partition=eval"]
        done = tiny.pipeline("train", train.file, *train.overrides, *changes, "--slurm")
        (job,) = jobs.sent(train.folder)
        assert done.returncode == 0
        text = " ".join((done.stdout + done.stderr).split())
        assert f"job {job.job} waits (AssocMaxJobsLimit): as many jobs" in text

        def why(reason: str) -> str:
            words: str = train.until(lambda: reason in (now := said(train)) and now, why=reason, seconds=60)
            return words

        assert "scontrol show assoc_mgr" in why("AssocMaxJobsLimit")
        held = tiny.pipeline("hold", train.folder)
        assert held.returncode == 0, held.stderr
        assert f"`pipeline release {train.folder}`" in why("JobHeldUser")
        assert tiny.pipeline("release", train.folder).returncode == 0
        ask(["scontrol", "update", "PartitionName=eval", "State=INACTIVE"])
        assert "cannot start: its partition is down or inactive" in why("PartitionInactive")
    finally:
        ask(["scontrol", "update", "PartitionName=eval", "State=UP"])
        ask(["sacctmgr", "-i", "modify", "user", user, "where", "account=other", "set", "MaxJobs=-1"])


def said(run: Run) -> str:
    """What `pipeline status` says of a run."""
    return status({run.folder: None})[0].why
