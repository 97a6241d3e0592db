"""The runs of a sweep as jobs: an array on SLURM, one after the other here; each is trained and then evaluated."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.common import links, storage
from pipeline.common.errors import UserError
from pipeline.common.hashing import value_hash
from pipeline.common.run_files import RunFiles
from pipeline.config import Config
from pipeline.config.slurm import SiteConfig
from pipeline.train.run.folder import make_writable
from slurm import jobs
from slurm.jobs import Backend, Job
from slurm.record.planned_job import PlannedJob
from slurm.record.submission import read_submission
from slurm.site.site_profile import site_of
from slurm.submit import code_snapshot, job_plan, permissions, preflight, submitit_backend
from slurm.submit.submit import all_or_none, record_sent, write_submission
from slurm.sweep.members import Member


@dataclass(frozen=True)
class Group:
    """Runs that ask for the same, and so can be tasks of one array."""

    planned: PlannedJob
    """What they ask for, as one job or array."""
    members: list[Member]
    """In the order of its tasks."""
    backend: Backend
    per_node: int = 1
    """Runs that share a job."""

    @property
    def packs(self) -> list[list[Member]]:
        """The runs of each job."""
        return [self.members[first : first + self.per_node] for first in range(0, len(self.members), self.per_node)]

    @property
    def config(self) -> Config:
        """Config of the first run; its keys about jobs are the same in all."""
        return self.members[0].config

    @property
    def site(self) -> SiteConfig:
        """Site on which they run."""
        return site_of(self.config, self.backend)

    def check(self, *, dry_run: bool = False) -> list[str]:
        """Warnings of the checks that `submit` makes.

        Raises:
            UserError: it would be refused.
        """
        submitit_backend.refuse_derived_options(self.planned, self.site)
        submitit_backend.refuse_path(self.config.run.dir)
        one = planned_training(self.config, self.backend) if self.per_node > 1 else self.planned
        return preflight.check(self.config, self.site, [one], self.backend, dry_run=dry_run)


def shared_job(one: PlannedJob, per_node: int, site: SiteConfig) -> PlannedJob:
    """The job of several runs of one node: it asks for what all of them need.

    Raises:
        UserError: a run is of several nodes, or in a container that srun makes.
    """
    if per_node > 1 and one.nodes + one.spare_nodes > 1:
        raise UserError(
            f"--per-node {per_node} puts runs of one node together, but each has {one.nodes + one.spare_nodes} "
            "(slurm.nodes, slurm.spare_nodes); leave the option out, or set slurm.nodes=1"
        )
    if per_node > 1 and (containers := [each for each in site.srun_options if each.startswith("--container")]):
        raise UserError(
            f"--per-node {per_node} starts runs without srun, and srun_options of the profile have {containers[0]}: "
            "they would run outside of the container; leave --per-node out, or use container_prefix"
        )
    memory = one.resources.mem_gb
    return replace(
        one,
        processes_per_node=per_node * one.processes_per_node,
        gpus_per_node=per_node * one.gpus_per_node,
        resources=one.resources.model_copy(update={"mem_gb": None if memory is None else per_node * memory}),
    )


def planned_training(config: Config, backend: Backend) -> PlannedJob:
    """The training of one run."""
    (planned,) = job_plan.plan(config, site_of(config, backend), ["train"], backend)
    # Tasks of an array have one name, so by their names they would wait for each other.
    return replace(planned, chain="afterany") if planned.chain == "singleton" else planned


def refuse_larger_evaluation(config: Config, training: PlannedJob, backend: Backend) -> None:
    """A `UserError` where the evaluation, which follows in the job of the training, does not fit into it."""
    evaluation = job_plan.eval_job(config, site_of(config, backend), None, backend=backend)
    fits = evaluation.nodes <= training.nodes and evaluation.processes_per_node <= training.processes_per_node
    if backend == "slurm" and not fits:
        raise UserError(
            f"eval.processes={config.eval.processes} ({evaluation.nodes} x {evaluation.processes_per_node}) do not fit "
            f"into the job of the training, {training.nodes} x {training.processes_per_node} processes, in which runs "
            f"of a sweep are evaluated; set eval.processes={training.processes} or less"
        )


def groups(folder: Path, members: Sequence[Member], backend: Backend, per_node: int = 1) -> list[Group]:
    """Runs by what they ask for, in the order of their first ones; `per_node` of them share a job.

    Raises:
        UserError: runs of several nodes cannot share one.
    """
    found: dict[str, list[tuple[Member, PlannedJob]]] = {}
    for member in members:
        planned = planned_training(member.config, backend)
        asked = [planned.resources.model_dump(), planned.nodes, planned.processes_per_node, planned.spare_nodes]
        asked += [planned.gpus_per_node, planned.chain, planned.links, member.config.slurm.profile]
        found.setdefault(value_hash(asked), []).append((member, planned))
    result = []
    for number, group in enumerate(found.values(), start=1):
        name = f"sweep-{value_hash(str(folder))[:6]}" + (f"-{number}" if len(found) > 1 else "")
        together = min(per_node, len(group))
        tasks = -(-len(group) // together) if backend == "slurm" else 1
        member, one = group[0]
        planned = replace(shared_job(one, together, site_of(member.config, backend)), name=name, tasks=tasks)
        result.append(Group(planned, [member for member, _ in group], backend, together))
    return result


def send(folder: Path, wanted: Sequence[Group], backend: Backend) -> list[Job]:
    """Send all groups, or none if one is refused.

    Args:
        folder: of the sweep; scripts, logs and the copy of the code are there, for all its runs.
        wanted: the runs.
        backend: to the scheduler, or one after the other into the background of this machine.

    Returns:
        The job of each run, for a chain the first one.

    Raises:
        MachineError: a job was refused, or a folder cannot be written to.
    """
    site = wanted[0].site
    code = code_snapshot.take(folder, site.modules, permissions.make_private(wanted[0].config, folder))
    files = {
        member.name: _prepare(folder, group, member, backend, code) for group in wanted for member in group.members
    }
    if backend == "local":
        return _send_here(folder, wanted, files)
    found: list[Job] = []
    with all_or_none() as sent:
        for group in wanted:
            before: str | None = None
            for chain_job in range(1, group.planned.links + 1):
                dependency = f"afterany:{before}" if before else None
                paths = [_pack(group, pack, files) for pack in group.packs]
                before = submitit_backend.send(
                    folder, group.planned, paths, backend=backend, dependency=dependency, chain_job=chain_job
                )
                sent.numbers.append(before)
                numbers = [before] if len(paths) == 1 else [f"{before}_{task}" for task in range(len(paths))]
                for place, member in enumerate(group.members):
                    file, planned, number = files[member.name], group.planned, numbers[place // group.per_node]
                    more = {"tasks": 1, "link": chain_job, "shared": group.per_node > 1}
                    job = record_sent(member.folder, planned, file, number, backend, **more)
                    sent.noted.append((member.folder, job))
                    found += [job] if chain_job == 1 else []
    return found


def _prepare(folder: Path, group: Group, member: Member, backend: Backend, code: Path) -> Path:
    """Write what a run's job reads: its training, and the evaluation that follows in the same job."""
    run, config, site = member.folder, member.config, group.site
    make_writable(run)
    permissions.apply_permissions(config)
    jobs.forget_cancelled(run)
    links.remove(RunFiles(run).stop, missing_ok=True)
    _symlink_jobs_folder(folder, run)
    evaluation = write_submission(
        run, config, site, job_plan.eval_job(config, site, None, backend=backend), backend, code
    )
    packed = group.per_node > 1
    planned = planned_training(config, backend) if packed else group.planned
    if packed:  # no srun says how many
        config = config.model_copy(
            update={"launch": config.launch.model_copy(update={"processes": planned.processes_per_node})}
        )
    file = write_submission(run, config, site, planned, backend, code)
    submission = read_submission(file)
    if packed:
        replace(read_submission(evaluation), packed=True).save(evaluation)
        submission = replace(submission, packed=True, doctor=False, every_checkpoint=False)
    replace(submission, then=(str(evaluation),)).save(file)
    return file


def _pack(group: Group, members: Sequence[Member], files: Mapping[str, Path]) -> Path:
    """The submission of a job: that of its run, or one that names those of all of its runs."""
    first = files[members[0].name]
    if group.per_node == 1:
        return first
    file = first.with_name(f"{first.stem}-pack.json")
    beside = tuple(str(files[member.name]) for member in members)
    replace(read_submission(first), then=(), packed=False, beside=beside).save(file)
    return file


def _symlink_jobs_folder(folder: Path, run: Path) -> None:
    """Scripts and logs of an array are in one folder, to which each of its runs has a symlink."""
    shared, mine = jobs.jobs_folder(folder), jobs.jobs_folder(run)
    storage.make_below(folder, shared)
    storage.make_below(run, mine.parent)
    with suppress(FileExistsError):  # of a submission before, or one of this run alone
        mine.symlink_to(os.path.relpath(shared, mine.parent), target_is_directory=True)


def _send_here(folder: Path, wanted: Sequence[Group], files: dict[str, Path]) -> list[Job]:
    """One process for all runs."""
    members = [(group, member) for group in wanted for member in group.members]
    first, *others = (files[member.name] for _, member in members)
    replace(read_submission(first), others=tuple(str(file) for file in others)).save(first)
    number = submitit_backend.send(folder, replace(wanted[0].planned, tasks=1), [first], backend="local")
    return [
        record_sent(member.folder, group.planned, files[member.name], number, "local", tasks=1)
        for group, member in members
    ]
