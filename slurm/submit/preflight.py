"""Before anything is sent: whatever would end a job at its start is found here, and told all at once. Writes nothing.

What the scheduler says of the jobs is in `slurm.submit.preflight_cluster`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from pipeline.common.capacity import free_space, nearest
from pipeline.common.format import duration, minutes
from pipeline.common.problems import Problems
from pipeline.config import Config
from pipeline.config.parsing.code_keys import refuse_code_of_others
from pipeline.config.slurm import SiteConfig
from pipeline.data.datasets.files import TRAIN
from pipeline.data.datasets.open import dataset_place, open_dataset
from pipeline.train.checkpoint.policy import cadences
from pipeline.train.planning.jobs import jobs_needed
from pipeline.train.rules.layout import check_evaluation_layout
from slurm.checks import look_at_stages
from slurm.doctor.node import space
from slurm.jobs import ARRAYS, LAST_OF_ARRAYS, Backend
from slurm.notify.outbox import describe, unusable
from slurm.record.planned_job import PlannedJob
from slurm.site import sbatch_env
from slurm.submit.course import START_S, Forecast, forecast, job_seconds
from slurm.submit.disk_space import checkpoints_room
from slurm.submit.job_plan import eval_job, gpus_key
from slurm.submit.preflight_cluster import check_cluster

_STAGES = {"decide": "curate", "finish": "preprocess"}
"""Stages that the last jobs of arrays belong to."""
_FEW_FILES = 10_000
"""Inodes below which a warning is due."""


def check(
    config: Config, site: SiteConfig, planned: Sequence[PlannedJob], backend: Backend, *, dry_run: bool = False
) -> list[str]:
    """As `examine`, for a run that is sent only if nothing is wrong with it.

    Returns:
        Warnings, a sentence each.

    Raises:
        UserError: there are problems; one message lists all of them.
        MachineError: there are problems, all of them of the machine or the scheduler.
    """
    found = examine(config, site, planned, backend, dry_run=dry_run)
    found.raise_problems("nothing was sent")
    return found.warnings


def examine(
    config: Config, site: SiteConfig, planned: Sequence[PlannedJob], backend: Backend, *, dry_run: bool = False
) -> Problems:
    """Look for all that would end the jobs of a run at their start, or that is probably not meant.

    Args:
        config: the run.
        site: where it runs.
        planned: its jobs.
        backend: on a cluster or on this machine.
        dry_run: nothing will be sent, so what only the scheduler knows is left out where there is none.
    """
    found = Problems()
    # `stage.dir` may be on the disks of nodes alone; what is looked at of datasets in a bucket comes to this machine.
    here = config.model_copy(update={"stage": config.stage.model_copy(update={"dir": None})})
    makes_data = any(job.stage in (*ARRAYS, *LAST_OF_ARRAYS) for job in planned)
    with found.collecting():
        refuse_code_of_others(config)
    for number, entry in enumerate(config.notify):
        if problem := unusable(entry):
            found.warn(f"{describe(number, entry)}: {problem} here; jobs get the environment of this shell")
    _check_folder("run.dir", config.run.dir, found)
    if makes_data:
        with found.collecting():
            _check_folder("data.dir", config.data_dir, found)
        for source_config in config.data.inputs.values():
            if source_config.dataset is not None:
                with found.collecting():
                    open_dataset(here, dataset_place(here, source_config, TRAIN))
    by_stage = {_STAGES.get(job.stage, job.stage): job for job in planned}
    processes = {stage: by_stage[stage].processes for stage in ("train", "eval") if stage in by_stage}
    step = by_stage["eval"].step if "eval" in by_stage else None
    look_at_stages(here, by_stage, found, train=processes.get("train", 1), evaluate=processes.get("eval", 1), step=step)
    if (training := by_stage.get("train")) is not None:
        _check_training_job(config, site, training, backend, found)
    if backend == "slurm":
        for key, value, todo in _needs_gpus(config, planned):
            found.problem(
                f"{key}={value} needs GPUs, but jobs ask for none ({gpus_key(config)} is {site.gpus_per_node}); set "
                f"slurm.gpus_per_node, or gpus_per_node in the profile, or {todo}"
            )
        sbatch_env.check(os.environ, site, planned, found)
        check_cluster(config, site, planned, found, dry_run=dry_run)
    return found


def _needs_gpus(config: Config, planned: Sequence[PlannedJob]) -> Iterator[tuple[str, object, str]]:
    """Keys and values with which jobs that have no GPU would fail, and what to set instead."""
    without = {job.stage for job in planned if not job.gpus_per_node and not _names_gpus(job)}
    if config.launch.device == "cuda" and without & {"train", "eval"}:
        yield "launch.device", "cuda", "launch.device=auto"
    if "train" not in without or config.launch.device == "cpu":  # of which the rules of layouts speak
        return
    if config.parallel.overlap.async_tp:
        yield "parallel.overlap.async_tp", "true", "parallel.overlap.async_tp=false"
    if (backend := config.train.attention.backend) not in ("auto", "sdpa"):
        yield "train.attention.backend", backend, "train.attention.backend=auto"
    fp8 = config.train.precision.fp8
    if fp8 is not None and not fp8.emulate:
        yield "train.precision.fp8.backend", fp8.backend, "leave train.precision.fp8 out"


def _names_gpus(job: PlannedJob) -> bool:
    """True if a job asks for GPUs by options of its own."""
    options = job.resources.options
    return "gpu" in options.get("gres", "") or any(name.startswith(("gpus-per-", "tres-per-")) for name in options)


def _check_folder(key: str, path: Path, found: Problems) -> None:
    """Check that a folder can be written to, or made. Quotas are not known here."""
    there = nearest(path)
    todo = f"set {key} to a folder of yours on a disk that all nodes share"
    if not there.is_dir():
        found.problem(f"{key}={path}: {there} is a file; {todo}")
        return
    if not os.access(there, os.W_OK | os.X_OK):
        mode = stat.filemode(there.stat().st_mode)
        found.problem(f"{key}={path}: this user cannot write to {there} ({mode}); {todo}, or get the permission")
        return
    _, files = free_space(path)
    if files is not None and files < _FEW_FILES:
        found.warn(f"{key}={path}: there are only {files:,} inodes free; remove small files there")


def _check_training_job(config: Config, site: SiteConfig, job: PlannedJob, backend: Backend, found: Problems) -> None:
    """Check what only a job of a training has: nodes, devices, room, time."""
    tp = config.parallel.tp
    if tp > job.processes_per_node:
        found.warn(
            f"parallel.tp={tp} is more than the {job.processes_per_node} processes of a node, so that every "
            f"layer communicates over the network; parallel.tp={job.processes_per_node} or less is faster"
        )
    if backend == "slurm":
        _check_devices(config, site, job, found)
        _check_cpus(job, found)
        if config.slurm.doctor:
            _check_run_space(config, found)
    if config.eval.every_checkpoint and backend == "slurm":
        with found.collecting():
            eval_job(config, site, None)
            check_evaluation_layout(config, config.eval.processes)
    with suppress(OSError):  # of a file system that does not answer, which was told before
        ahead = forecast(config, site, job)
        _check_room(config, ahead, found)
        if backend == "slurm":
            _check_time(config, job, ahead, found)


def _check_devices(config: Config, site: SiteConfig, job: PlannedJob, found: Problems) -> None:
    """Processes of a node against its GPUs."""
    if config.launch.device == "cpu" or not site.gpus_per_node:
        return
    here, gpus = job.processes_per_node, site.gpus_per_node
    if here > gpus:
        found.problem(
            f"slurm.processes_per_node={here}, but a node has {gpus} GPUs ({gpus_key(config)}) and "
            f"each process takes one; set slurm.processes_per_node={gpus} and slurm.nodes={-(-job.processes // gpus)}, "
            "or leave it out"
        )
    if here < gpus:
        found.warn(
            f"slurm.processes_per_node={here}: a job asks for {gpus} GPUs on each node ({gpus_key(config)}), of "
            f"which {gpus - here} are not used"
        )


def _check_cpus(job: PlannedJob, found: Problems) -> None:
    """CPUs of the processes of a node, where nothing asks for any."""
    asked, here = job.resources, job.processes_per_node
    if here == 1 or asked.cpus_per_task is not None or asked.exclusive or any("cpus" in name for name in asked.options):
        return
    found.warn(
        f"slurm.train.cpus_per_task is not set: SLURM gives each of the {here} processes of a node one CPU, unless the "
        "site has another default; loading data, communication and Python share it. Set it to the CPUs of a node "
        f"divided by {here}, here or in the profile"
    )


def _check_run_space(config: Config, found: Problems) -> None:
    """Check the disk of run.dir by the limits of the check of the nodes, which would end the job."""
    seen = space("run.dir", config.run.dir)
    if not seen.ok:
        found.problem(
            f"{seen.message}, or set run.dir to a folder on another disk; with less, the check of the nodes ends the "
            "job before training starts (slurm.doctor=false leaves that check out)"
        )


def _check_room(config: Config, ahead: Forecast, found: Problems) -> None:
    """Disk for the checkpoints."""
    if ahead.disk is not None:
        problem, warning = checkpoints_room(config, ahead.disk, ahead.course)
        if problem:
            found.problem(problem)
        if warning:
            found.warn(warning)


def _check_time(config: Config, job: PlannedJob, ahead: Forecast, found: Problems) -> None:
    """The time limit of a job against its stop and its saves."""
    limit, given = 60 * job.minutes, config.launch.stop_before_end_seconds
    if given is not None and limit <= 2 * given:
        found.problem(
            f"slurm.train.time is {minutes(job.minutes)}, and launch.stop_before_end_seconds={given:g} takes half of "
            f"it or more; set slurm.train.time to at least {minutes(int(2 * given / 60) + 1)}, or a lower "
            "launch.stop_before_end_seconds (without the key it is measured)"
        )
        return
    links = jobs_needed(ahead.seconds or 0.0, job_seconds(config, job.minutes))
    if links is None:
        found.warn(
            f"slurm.train.time is {minutes(job.minutes)}, which may leave no time for steps between the start (about "
            f"{duration(START_S)}) and the stop before the end"
        )
    elif job.chain in ("singleton", "afterany") and links > job.links:
        found.warn(
            f"slurm.links={job.links}: about {links:,} jobs are needed; raise slurm.links, or submit again when these "
            "have ended"
        )
    rules, step = config.train.checkpoint, ahead.step_seconds
    every = min(cadences(rules))
    if step is not None and rules.every_minutes is None and every * step > limit:
        found.warn(
            f"train.checkpoint.every_steps={rules.every_steps:,} steps take about {duration(every * step)}, longer "
            f"than a job (slurm.train.time, {minutes(job.minutes)}): a checkpoint is saved only at its end, and a "
            "crash loses all its work; lower every_steps or set train.checkpoint.every_minutes"
        )
