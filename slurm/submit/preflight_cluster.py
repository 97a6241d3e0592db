"""Checks of jobs against the limits of a cluster: partitions, time limits, nodes, accounts, arrays, GPUs."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.common.errors import MachineError, UserError
from pipeline.common.format import counted, minutes
from pipeline.common.problems import Problems
from pipeline.config import Config
from pipeline.config.slurm import SiteConfig
from slurm import scheduler
from slurm.jobs import resources_key, user
from slurm.record.planned_job import PlannedJob
from slurm.scheduler import Association, Partition
from slurm.site import sbatch_env
from slurm.submit.job_plan import gpus_key


def check_cluster(
    config: Config, site: SiteConfig, planned: Sequence[PlannedJob], found: Problems, *, dry_run: bool = False
) -> None:
    """Compare jobs with what the scheduler says, which is asked once for each thing.

    Args:
        config: the run.
        site: its profile.
        planned: its jobs.
        found: gets what is wrong.
        dry_run: nothing will be sent: that there is no scheduler is a warning.
    """
    if not scheduler.here() and dry_run:
        found.warn("no SLURM here: partition, account, limits were not checked")
        return
    if not scheduler.here():
        found.problem(
            "sbatch is not on the path: run this on a login node of the cluster (`module load slurm` at some), or with "
            "--local to use this machine"
        )
        return
    with found.collecting():
        try:
            partitions, settings = scheduler.partitions(), scheduler.configuration()
        except scheduler.SchedulerError as error:
            if not dry_run:
                raise
            found.warn(f"partition, account, limits were not checked: {error}")
            return
        everything = [_JobRequest(job, config.slurm.profile, gpus_key(config)) for job in planned]
        for request in everything:
            _check_partitions(request, partitions, settings, found)
            _check_array(request, settings, found)
            _check_features(request, partitions, found)
        if settings.get("JobRequeue") == "0" and any(job.chain == "requeue" for job in planned):
            found.warn(
                "jobs are not requeued here unless they ask for it (JobRequeue=0), as these do; if that is refused, "
                f"set has_requeue: false in the profile {config.slurm.profile}, and slurm.chain=singleton"
            )
        accounting = site.has_sacct and shutil.which("sacctmgr") is not None
        if accounting:
            _check_accounts(everything, settings, found)
        trained = [request for request in everything if request.job.stage == "train" and request.job.chain == "requeue"]
        _check_preemption(trained, partitions, settings, found, accounting=accounting)


@dataclass(frozen=True)
class _JobRequest:
    """A job, and how messages speak of what it asks for."""

    job: PlannedJob
    profile: str
    gpus: str
    """The key of its GPUs."""

    @property
    def section(self) -> str:
        """Section of the run file with its resources."""
        return f"slurm.{resources_key(self.job.stage)}"

    @property
    def nodes(self) -> int:
        """Those of the processes, and spare ones."""
        return self.job.nodes + self.job.spare_nodes

    def key(self, key: str) -> str:
        """A key, which may be set in either of two files."""
        variable = sbatch_env.variable(key, os.environ)
        more = f", or the variable {variable}" if variable else ""
        return f"{self.section}.{key} (or the profile {self.profile}{more})"


def _check_partitions(
    request: _JobRequest, partitions: Mapping[str, Partition], settings: Mapping[str, str], found: Problems
) -> None:
    names = request.job.resources.partition
    if names is None:
        here = [partition for partition in partitions.values() if partition.default]
        if not here:
            found.problem(
                f"{request.section}.partition is not set, and this cluster has no default partition; set "
                f"{request.key('partition')} to one of: {', '.join(partitions)}"
            )
    else:
        here = []
        for name in names.split(","):
            if name in partitions:
                here.append(partitions[name])
            else:
                found.problem(
                    f"{request.section}.partition={names}: there is no partition {name!r} here; set "
                    f"{request.key('partition')} to one of: {', '.join(partitions)}"
                )
    if not here:
        return
    problems = {partition.name: list(_misfits(request, partition)) for partition in here}
    everywhere = settings.get("EnforcePartLimits") == "ALL" or all(problems.values())
    # A quality of service may have the right to exceed the limits of a partition; that is not known from here.
    report = found.problem if everywhere and request.job.resources.qos is None else found.warn
    for text in (text for texts in problems.values() for text in texts):
        report(text)
    for partition in here:
        found.warn(*_oddities(request, partition))


def _misfits(request: _JobRequest, partition: Partition) -> Iterator[str]:
    """Reasons why a partition would refuse a job, or never start it."""
    job, name, section = request.job, partition.name, request.section
    if partition.state in ("drain", "inact", "inactive"):
        yield f"{section}.partition: {name} takes no jobs now (state {partition.state}); name another one"
    if partition.minutes is not None and job.minutes > partition.minutes:
        yield (
            f"{section}.time is {minutes(job.minutes)}, but partition {name} allows {minutes(partition.minutes)}; set "
            f"{request.key('time')} to at most that"
            + ("; training continues in the next job" if job.stage == "train" else ", or name another partition")
        )
    if request.nodes <= partition.nodes and (text := _too_large(request, partition)):
        yield text
    spare = f" + slurm.spare_nodes={job.spare_nodes}" if job.spare_nodes else ""
    what = f"slurm.nodes={job.nodes}{spare}" if job.stage == "train" else f"{section}: {request.nodes}"
    if request.nodes > partition.nodes:
        yield (
            f"{what} is more than the {partition.nodes} nodes of partition {name}; ask for fewer, or set "
            f"{request.key('partition')} to a larger one"
        )
    elif partition.most_nodes is not None and request.nodes > partition.most_nodes:
        yield (
            f"{what} is more than the {partition.most_nodes} nodes that partition {name} allows per job; ask for "
            f"fewer, or set {request.key('partition')} to another one"
        )


def _too_large(request: _JobRequest, partition: Partition) -> str:
    """Message that too few nodes of a partition have the CPUs and memory of a job; "" if enough do."""
    job, asked, name = request.job, request.job.resources, partition.name
    cpus, memory_mib = job.processes_per_node * (asked.cpus_per_task or 1), 1024 * (asked.mem_gb or 0)
    known = sum(size.nodes for size in partition.sizes)
    if known < partition.nodes or "overcommit" in asked.options:
        return ""
    enough_cpus = [size for size in partition.sizes if size.cpus >= cpus]
    large = [size for size in enough_cpus if size.memory_mib >= memory_mib]
    if sum(size.nodes for size in large) >= request.nodes:
        return ""
    there = ", ".join(
        f"{counted(size.nodes, 'node')} with {counted(size.cpus, 'CPU')} and {size.memory_mib / 1024:,.0f} GB"
        for size in partition.sizes
    )
    processes = f"{counted(job.processes_per_node, 'process')} x {counted(asked.cpus_per_task or 1, 'CPU')}"
    wanted, keys = f"{processes} = {counted(cpus, 'CPU')}", f"processes per node or {request.key('cpus_per_task')}"
    if sum(size.nodes for size in enough_cpus) >= request.nodes:
        wanted, keys = f"{asked.mem_gb:g} GB", request.key("mem_gb")
    return (
        f"{request.section}: {wanted} per node on {counted(request.nodes, 'node')} is more than partition {name} has "
        f"({there}); lower {keys}, or name another partition"
    )


def _oddities(request: _JobRequest, partition: Partition) -> Iterator[str]:
    """Reasons why a job may wait long in a partition."""
    name = partition.name
    if partition.state == "down":
        yield f"partition {name} is down: jobs wait until it is up again"
    if partition.usable < request.nodes <= partition.nodes:
        yield (
            f"partition {name} has {partition.nodes} nodes, but {partition.nodes - partition.usable} are down or "
            f"drained: {request.job.name} asks for {request.nodes}, and waits until there are as many"
        )
    wanted, most = request.job.gpus_per_node, gpus_of(partition)
    if most < wanted:
        gres = ", ".join(sorted(set(partition.gres)))
        yield (
            f"{request.job.name} asks for {counted(wanted, 'GPU')} per node, but those of partition {name} have "
            f"{most or 'none'} (gres: {gres}); see {request.gpus}"
        )


def gpus_of(partition: Partition) -> int:
    """GPUs of a node that has the most."""
    return max(map(_gpus, partition.gres), default=0)


def _gpus(gres: str) -> int:
    """GPUs in `gpu:h100:8(S:0-1),nvme:1`: 8."""
    kinds = re.sub(r"\([^)]*\)", "", gres).split(",")
    counts = [kind.rpartition(":")[2] for kind in kinds if kind.partition(":")[0] == "gpu"]
    return sum(int(count) if count.isdecimal() else 1 for count in counts)


def _check_array(request: _JobRequest, settings: Mapping[str, str], found: Problems) -> None:
    """The largest index of an array is one less than `MaxArraySize`."""
    most, tasks = settings.get("MaxArraySize", ""), request.job.tasks
    if tasks > 1 and most.isdecimal() and tasks > int(most):
        allowed = f"this cluster allows arrays of {int(most):,} tasks (MaxArraySize)"
        if request.job.stage == "train":  # of a sweep
            found.problem(f"there are {tasks:,} runs to send as an array, but {allowed}; give fewer values at a time")
            return
        found.problem(
            f"slurm.array.tasks={tasks:,}, but {allowed}; set slurm.array.tasks={max(1, int(most))} or less, its tasks "
            "share all units anyway"
        )


def _check_features(request: _JobRequest, partitions: Mapping[str, Partition], found: Problems) -> None:
    """A feature that no node has is refused."""
    constraint = request.job.resources.constraint
    there = frozenset[str]().union(*(partition.features for partition in partitions.values()))
    names = re.findall(r"[^\s&|,()\[\]*]+", re.sub(r"\*\d+", "", constraint or ""))
    if missing := [name for name in dict.fromkeys(names) if name not in there]:
        found.problem(
            f"{request.section}.constraint={constraint}: no node here has the feature {' or '.join(missing)}; "
            + (f"set {request.key('constraint')} to some of: {', '.join(sorted(there))}" if there else "leave it out")
        )


def _check_accounts(jobs: Sequence[_JobRequest], settings: Mapping[str, str], found: Problems) -> None:
    """Accounts and qualities of service against those of this user."""
    name = user()
    try:
        mine = scheduler.associations(name)
    except UserError as error:
        found.warn(f"accounts and qos could not be checked: {error}")
        return
    enforced = settings.get("AccountingStorageEnforce", "").split(",")
    if not mine:
        if "associations" in enforced or any(request.job.resources.account for request in jobs):
            found.warn(f"the accounting has no account for the user {name}; the scheduler may refuse the jobs")
        return
    for request in jobs:
        for kind, text in _foreign(request, name, mine):
            (found.problem if kind in enforced else found.warn)(text)


def _foreign(request: _JobRequest, name: str, mine: Sequence[Association]) -> Iterator[tuple[str, str]]:
    """Requests of a job that the user has no right to, each with the word that makes the scheduler insist on it."""
    account, qos = request.job.resources.account, request.job.resources.qos
    rows = mine
    if account is not None:
        # Names of accounts are in lower case there.
        rows = [row for row in mine if row.account == account.lower()]
        if not rows:
            have = ", ".join(dict.fromkeys(row.account for row in mine))
            yield (
                "associations",
                f"{request.section}.account={account} is not an account of the user {name}; set "
                f"{request.key('account')} to one of: {have}",
            )
            account, rows = None, mine
    names = request.job.resources.partition
    wanted = set(names.split(",")) if names else set()
    if wanted and not any(not row.partition or row.partition in wanted for row in rows):
        have = ", ".join(dict.fromkeys(row.partition for row in rows))
        yield (
            "associations",
            f"{request.section}.partition={names}: the user {name} may use only {have} with "
            f"{f'account {account}' if account else 'these accounts'}; set {request.key('partition')} to one of them",
        )
    allowed = dict.fromkeys(each for row in rows for each in row.qos)
    # Since 24.11 several may be named.
    if qos is not None and not {*qos.lower().split(",")} <= allowed.keys():
        yield (
            "qos",
            f"{request.section}.qos={qos} is not open to the user {name}"
            + (f" with account {account}" if account else "")
            + f"; set {request.key('qos')} to one of: {', '.join(allowed) or 'none (leave it out)'}",
        )


def _check_preemption(
    trained: Sequence[_JobRequest],
    partitions: Mapping[str, Partition],
    settings: Mapping[str, str],
    found: Problems,
    *,
    accounting: bool,
) -> None:
    """A job that is cancelled as soon as it is preempted cannot go back into the queue; a chain has the next job."""
    kind = settings.get("PreemptType", "").removeprefix("preempt/")
    try:
        for request in trained:
            places: Iterator[str] = iter(())
            if kind == "partition_prio":
                default = next((name for name, partition in partitions.items() if partition.default), "")
                names = request.job.resources.partition or default
                places = _cancelling_partitions(names.split(","), scheduler.partition_details())
            elif kind == "qos" and accounting:
                places = _cancelling_qos(request.job.resources.qos, request.job.resources.account, settings)
            for place in places:
                found.warn(
                    f"slurm.chain=requeue: {place}: a preempted job is cancelled and not requeued, and the run would "
                    "end with it; set slurm.chain=afterany, so that the next of slurm.links jobs resumes"
                )
    except (MachineError, ValueError) as error:
        found.warn(f"preemption could not be checked: {error}")


def _cancelling_partitions(names: Sequence[str], details: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Those whose jobs are cancelled without grace when a job of a partition of a higher tier takes their nodes."""
    highest = max((int(values.get("PriorityTier", 0)) for values in details.values()), default=0)
    for name in names:
        values = details.get(name, {})
        tier, grace = int(values.get("PriorityTier", 0)), values.get("GraceTime", "0")
        if tier < highest and grace == "0" and "CANCEL" in values.get("PreemptMode", "").split(","):
            yield f"partition {name} has PreemptMode=CANCEL without GraceTime"


def _cancelling_qos(name: str | None, account: str | None, settings: Mapping[str, str]) -> Iterator[str]:
    """The quality of service of a job, if others may preempt it and that cancels its jobs without grace."""
    if name is None:
        rows = scheduler.associations(user())
        name = (
            next((row.default_qos for row in rows if account is None or account.lower() == row.account), "") or "normal"
        )
    every = scheduler.qualities()
    own = every.get(name.lower())
    if own is None or not any(name.lower() in other.preempts for other in every.values()):
        return
    mode = settings.get("PreemptMode", "") if own.mode == "cluster" else own.mode
    if "CANCEL" in mode.upper().split(",") and own.grace == "00:00:00":
        yield f"qos {name} has PreemptMode=CANCEL without GraceTime"
