"""Reasons of squeue why a job waits, each with what to do, for SLURM 22.05 to 25.11."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

Outlook = Literal["turn", "limit", "never", "held"]
"""Future of a waiting job that nobody touches. `turn`: it starts when its turn comes; `limit`: it starts when a limit
has room; `never`: it does not start; `held`: somebody has to release it."""

HELD = "JobHeldUser"
"""Reason of a job that its user holds."""
_AGAIN = "then `pipeline cancel {run}` and submit it again"
_LESS = f"lower slurm.nodes, or time, cpus_per_task or mem_gb of slurm.{{key}}, or set another qos or account, {_AGAIN}"
_SMALLER = f"change slurm.nodes, or partition, qos and time of slurm.{{key}}, {_AGAIN}"
_OTHER_NODES = f"change slurm.nodes, or constraint, exclude and options of slurm.{{key}}, {_AGAIN}"
_ACCOUNT = f"set slurm.{{key}}.account to one of `sacctmgr show associations where user=$USER`, {_AGAIN}"
_QOS = f"set slurm.{{key}}.qos to one of `sacctmgr show associations where user=$USER format=account,qos`, {_AGAIN}"
_RESERVATION = (
    f"set reservation in slurm.{{key}}.options to one of `scontrol show reservation`, or leave it out, {_AGAIN}"
)
_SEE_LIMITS = "`scontrol show assoc_mgr flags=assoc,qos` shows limit and usage"
_WAIT = "wait for jobs to end"
_NOTHING = "nothing to do"
_SITE = "ask the administrators"
_NODES_UNAVAILABLE = "nodes that it needs are down, drained or reserved"
_SEE_NODES = "`sinfo -R` and `scontrol show reservation` show why, and until when"


@dataclass(frozen=True)
class PendingReason:
    """Meaning of a reason of squeue."""

    names: tuple[str, ...]
    """Patterns of the reason, as squeue writes it; of the table the first one that fits counts."""
    outlook: Outlook
    why: str
    advice: str
    """What to do, with `{run}`, `{job}` and `{key}` (the stage's key in `slurm`)."""
    nodes: bool = False
    """True if nodes that the job excludes may be the cause."""

    def words(self, run: Path, job: str, key: str, excluded: str = "") -> str:
        """Meaning and advice for a job.

        Args:
            run: folder of its run.
            job: number.
            key: of its stage's resources in `slurm`.
            excluded: nodes that it must not use, compact.
        """
        advice = self.advice.format(run=run, job=job, key=key)
        if self.nodes and excluded:
            update = f"`scontrol update JobId={job} ExcNodeList=`"
            advice = f"it excludes {excluded}: {update} lets it run there; or {advice}"
        cannot = "this job cannot start: " if self.outlook == "never" else ""
        return f"{cannot}{self.why}; {advice}"


def _group(*names: str) -> tuple[str, ...]:
    """Names of a limit of an account and of a quality of service."""
    return tuple(f"{kind}{name}" for name in names for kind in ("Assoc", "QOS"))


TABLE: tuple[PendingReason, ...] = (
    # Its turn will come.
    PendingReason(("None", "WaitingForScheduling"), "turn", "the scheduler has not looked at it yet", _NOTHING),
    PendingReason(("Priority",), "turn", "jobs of higher priority are before it", _NOTHING),
    PendingReason(("Resources",), "turn", "it waits until nodes are free", _NOTHING),
    PendingReason(("Dependency",), "turn", "it waits for other jobs of the run", _NOTHING),
    PendingReason(("BeginTime",), "turn", "its start time has not come, as for a while after a requeue", _NOTHING),
    PendingReason(("Cleaning",), "turn", "its last start is still being cleaned up", _NOTHING),
    PendingReason(("Prolog",), "turn", "the site's prolog program runs", _NOTHING),
    PendingReason(
        ("JobArrayTaskLimit",), "turn", "as many tasks of its array run as may at once (%N of --array)", _NOTHING
    ),
    PendingReason(("SchedDefer",), "turn", "the scheduler looks at it in the next round", _NOTHING),
    PendingReason(("FedJobLock",), "turn", "clusters of the federation agree on where it runs", _NOTHING),
    PendingReason(("BurstBufferResources", "BurstBufferStageIn"), "turn", "its burst buffer is prepared", _NOTHING),
    PendingReason(("ResourcesPowerCap", "Power*"), "turn", "the cluster's power cap leaves no room", _NOTHING),
    # Someone has to release it.
    PendingReason((HELD,), "held", "it is held by its user", "`pipeline release {run}` lets it start"),
    PendingReason(("JobHeldAdmin",), "held", "an administrator holds it", f"{_SITE}: users cannot release it"),
    PendingReason(
        ("JobHoldMaxRequeue", "launch failed requeued held", "job requeued in held state", "JobLaunchFailure"),
        "held",
        "SLURM could not launch it (a broken node or prolog, a disk that is not mounted), and holds it",
        "see `scontrol show job {job}`; `pipeline release {run}` lets it try again",
    ),
    # A limit has to get room.
    PendingReason(
        (*_group("Grp*RunMinutes*"),),
        "limit",
        "running jobs of its account or QOS may together have no more time left to run than they have",
        f"{_WAIT}, or shorten slurm.{{key}}.time, {_AGAIN}; {_SEE_LIMITS}",
    ),
    PendingReason(
        (*_group("Grp*Minutes*", "GrpWallLimit"), "AssociationTimeLimit", "QOSTimeLimit"),
        "never",
        "the time budget of its account or QOS is used up, or too small for the job",
        f"`sshare -l` shows usage; set slurm.{{key}}.account or qos to another one, or ask for more, {_AGAIN}",
    ),
    PendingReason(
        (*_group("*Submit*"), "MaxSubmitJobsPerAccount"),
        "limit",
        "its user, account or QOS may have no more jobs in the queue",
        f"{_WAIT}, or cancel some; lower slurm.links or slurm.array.tasks",
    ),
    PendingReason(
        (*_group("GrpJobsLimit", "MaxJobs*", "JobLimit"), "AssociationJobLimit", "MaxJobsPerAccount"),
        "limit",
        "as many jobs of its user, account or QOS run as may at once",
        f"{_WAIT}, or set slurm.{{key}}.account or qos to another one; {_SEE_LIMITS}",
    ),
    PendingReason(
        (*_group("Grp*"), "QOSMax*PerUser*", "Max*PerAccount", "AssociationResourceLimit", "QOSResourceLimit"),
        "limit",
        "jobs of its user, account or QOS may together use no more than they do, or this job alone asks for too much",
        f"{_WAIT}; where none run, {_LESS}; {_SEE_LIMITS}",
    ),
    PendingReason(
        ("Licenses",), "limit", "licenses that it asks for are in use", "`scontrol show licenses` shows them"
    ),
    PendingReason(
        ("Reservation",), "limit", "its reservation has not begun, or is full", "`scontrol show reservation` shows when"
    ),
    # It does not start as it is.
    PendingReason((*_group("Max*"),), "never", "its account or QOS allows less per job or node", _LESS),
    PendingReason(
        ("QOSMin*",),
        "never",
        "it asks for less than its QOS requires",
        f"ask for more, or set another qos in slurm.{{key}}, {_AGAIN}",
    ),
    PendingReason(("QOSUsageThreshold",), "limit", "the usage of its account is above its QOS's threshold", _QOS),
    PendingReason(("InvalidAccount",), "never", "its account does not exist any more, or not for its user", _ACCOUNT),
    PendingReason(("AccountNotAllowed",), "never", "its partition does not take its account", _ACCOUNT),
    PendingReason(("InvalidQOS",), "never", "its QOS does not exist any more, or not for its account", _QOS),
    PendingReason(("QOSNotAllowed",), "never", "its account or partition does not allow its QOS", _QOS),
    PendingReason(("AccountingPolicy",), "never", "its account or QOS allows less", f"{_LESS}; {_SEE_LIMITS}"),
    PendingReason(
        ("MaxMemPerLimit",),
        "never",
        "it asks for more memory per node or CPU than the site allows",
        f"lower slurm.{{key}}.mem_gb, or raise cpus_per_task, {_AGAIN}; `scontrol show config` has MaxMemPerNode",
    ),
    PendingReason(("BadConstraints",), "never", "too few nodes have what it asks for", _OTHER_NODES, nodes=True),
    PendingReason(("Constraints",), "limit", "its constraints cannot be met now", _OTHER_NODES, nodes=True),
    PendingReason(
        ("ReqNodeNotAvail*", "Nodes required for job are*", "NodeDown", "FrontEndDown"),
        "never",
        _NODES_UNAVAILABLE,
        _SEE_NODES,
        nodes=True,
    ),
    PendingReason(("PartitionNodeLimit",), "never", "its partition allows fewer nodes, or has them down", _SMALLER),
    PendingReason(("PartitionTimeLimit",), "never", "its partition has a shorter time limit", _SMALLER),
    PendingReason(("PartitionConfig",), "never", "it violates a limit of its partition", _SMALLER),
    PendingReason(
        ("PartitionDown", "PartitionInactive"),
        "never",
        "its partition is down or inactive",
        f"wait until `sinfo` shows it up, or {_SMALLER}",
    ),
    PendingReason(("ReservationDeleted",), "never", "its reservation does not exist any more", _RESERVATION),
    PendingReason(("ReservationInvalid",), "never", "its reservation cannot be used by it", _RESERVATION),
    PendingReason(("DependencyNeverSatisfied",), "never", "a job that it waits for has failed", f"look why, {_AGAIN}"),
    PendingReason(("DeadLine",), "never", "it cannot end before its deadline", _SMALLER),
    PendingReason(("BurstBufferOperation",), "never", "its burst buffer failed", f"{_SITE}, {_AGAIN}"),
    PendingReason(("SystemFailure",), "never", "SLURM, a network or a file system has failed", f"{_SITE}, {_AGAIN}"),
    # Ends of an earlier start, which a job may show until the scheduler looks at it again.
    PendingReason(
        ("NonZeroExitCode", "RaisedSignal*", "TimeLimit", "InactiveLimit", "OutOfMemory"),
        "turn",
        "its last start has ended, and the scheduler has not looked at it again",
        "`pipeline logs {run}` shows the end",
    ),
)
"""What squeue says of jobs that wait; a reason that no line has is shown as it is."""


def meaning(reason: str) -> PendingReason | None:
    """Meaning of a reason; None for one that is not known."""
    text = reason.strip("()").replace("_", " ")  # some versions write its blanks so
    return next((each for each in TABLE if any(fnmatchcase(text, name) for name in each.names)), None)
