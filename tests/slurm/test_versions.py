"""Answers of SLURM's commands in newer versions than the one that the tests run on, up to 25.11.

Those of `scontrol` have the form of published answers of 25.05 and 25.11, with values of our own; states
are those of the source of 25.11.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.common import slurm_commands
from pipeline.common.slurm_commands import JobIdentity, whether_runs
from slurm import scheduler
from slurm.site.site_init import profile

Answers = Callable[..., None]
CONFIG = """\
Configuration data as of 2026-04-21T06:19:30
AccountingStorageType   = (null)
BOOT_TIME               = 2026-04-21T00:47:40
ClusterName             = linux
JobRequeue              = 1
KillWait                = 30 sec
MaxArraySize            = 1001
MetricsType             = (null)
NEXT_JOB_ID             = 26
PreemptType             = (null)
PriorityFlags           = 
SLURM_VERSION           = 25.11.4
SlurmctldHost[0]        = slurmctld

Slurmctld(primary) at slurmctld is UP
"""  # noqa: W291
JOB = """\
JobId=25 JobName=run-1a2b-train UserId=ann(1000) GroupId=ann(1000) MCS_label=N/A Priority=1 Nice=0 Account=lab \
QOS=normal,long JobState={state} Reason={reason} Dependency=(null) Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 \
ExitCode=0:0 RunTime=00:00:08 TimeLimit=1-00:00:00 TimeMin=N/A SubmitTime=2026-04-21T15:52:53 \
EligibleTime=2026-04-21T15:52:53 AccrueTime=2026-04-21T15:52:53 StartTime=2026-04-21T15:52:53 \
EndTime=2026-04-22T15:52:53 Deadline=N/A SuspendTime=None SecsPreSuspend=0 LastSchedEval=2026-04-21T15:52:53 \
Scheduler=Main Partition=gpu AllocNode:Sid=10.244.5.5:1 ReqNodeList=(null) ExcNodeList=c[4-5] NodeList=c[1-2] \
BatchHost=c1 StepMgrEnabled=Yes NumNodes=2 NumCPUs=4 NumTasks=1 CPUs/Task=1 ReqB:S:C:T=0:0:*:* \
ReqTRES=cpu=1,mem=96046M,node=1,billing=1 AllocTRES=cpu=4,mem=96046M,node=1,billing=4 Features=(null) \
LicensesAlloc=(null) Command=/work/slurm/jobs/job.sh SubmitLine=sbatch /work/lr=1e-3/slurm/jobs/job.sh \
WorkDir=/work AdminComment={{"pods":["x"]}} OOMKillStep=0
"""
PARTITION = """\
PartitionName=gpu AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES QoS=N/A DefaultTime=NONE \
DisableRootJobs=NO ExclusiveUser=NO ExclusiveTopo=NO GraceTime=30 Hidden=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED \
NodeSets=gpu_nodes Nodes=c[1-2] PriorityJobFactor=1 PriorityTier=3 RootOnly=NO ReqResv=NO PreemptMode=CANCEL \
State=UP TotalCPUs=24 TotalNodes=2 JobDefaults=(null) TRES=cpu=24,mem=15674M,node=2,billing=24
"""


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Let commands print texts, by the word of their arguments that is first found."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def write(name: str, **texts: str) -> None:
        cases = "\n".join(f"*{word}*) printf %s {shlex.quote(text)};;" for word, text in texts.items())
        (tmp_path / name).write_text(f'#!/bin/sh\ncase "$*" in\n{cases}\n*) exit 1;;\nesac\n')
        (tmp_path / name).chmod(0o755)

    return write


@pytest.mark.parametrize("state", ["EXPEDITING", "RESIZING", "POWER_UP_NODE", "RECONFIG_FAIL", "LAUNCH_FAILED", "NEW"])
def test_a_state_that_is_new_is_no_end(answers: Answers, state: str) -> None:
    answers("squeue", jobs=f"25|{state}|None|c1|2026-04-21T15:52:53|2026-04-22T15:52:53|(null)\n")
    answers("sacct", JobID=f"25|{state}|0:0|00:01:00|c1\n")
    answers("scontrol", config=CONFIG, job=JOB.format(state=state, reason="None"))
    assert scheduler.jobs(["25"])["25"].active
    assert not scheduler.accounting(["25"])["25"].over
    assert whether_runs(JobIdentity("25", 1000, "linux", None)).state == "running"


@pytest.mark.parametrize("state", sorted(slurm_commands.ENDED))
def test_states_of_an_end(answers: Answers, state: str) -> None:
    answers("squeue", jobs=f"25|{state}|None|c1|2026-04-21T15:52:53|2026-04-22T15:52:53|\n")
    more = " by 1000" if state == "CANCELLED" else ""
    answers("sacct", JobID=f"25|{state}{more}|0:0|00:01:00|c1\n")
    assert not scheduler.jobs(["25"])["25"].active
    assert scheduler.accounting(["25"])["25"].over


def test_records_of_jobs_and_partitions(answers: Answers) -> None:
    answers("scontrol", partition=PARTITION, job=JOB.format(state="PENDING", reason="AssocMaxJobsLimit"))
    job = scheduler.details("25")
    wanted = {"JobState": "PENDING", "Reason": "AssocMaxJobsLimit", "Restarts": "2", "ExcNodeList": "c[4-5]"}
    assert {key: job[key] for key in wanted} == wanted and job["UserId"] == "ann(1000)"
    gpu = scheduler.partition_details()["gpu"]
    assert (gpu["PreemptMode"], gpu["PriorityTier"], gpu["GraceTime"]) == ("CANCEL", "3", "30")


def test_settings_of_the_cluster(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    answers("scontrol", config=CONFIG)
    answers("sinfo", partition="2|12|(null)\n", noheader="cpu*|up|infinite|1-infinite|0/2/0/2|(null)|(null)\n")
    answers("sacct")
    settings = scheduler.configuration()
    assert (settings["MaxArraySize"], settings["ClusterName"]) == ("1001", "linux")
    assert scheduler.kill_wait() == 30.0
    assert "has_sacct: false" in profile(), "no accounting: (null) where 22.05 has accounting_storage/none"


def test_what_sbatch_says_in_a_federation(answers: Answers) -> None:
    answers("sbatch", job="Submitted batch job 4711 on cluster linux\n")
    assert scheduler.send(Path("/work/slurm/jobs/job.sh")) == "4711"
