"""Stages of a run in an allocation of SLURM that exists already: `--in-allocation`.

The same batch process as that of a job starts them, on the nodes of the allocation. Nothing is sent to the queue: no
requeue, no chain, no evaluation beside the training.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from pipeline.common import links, storage
from pipeline.common.console import Console, say, warn
from pipeline.common.errors import Stopped, UserError
from pipeline.common.file_lock import exclusive
from pipeline.common.format import counted
from pipeline.common.problems import Problems
from pipeline.common.run_files import RunFiles
from pipeline.config import Config
from pipeline.config.slurm import SiteConfig
from pipeline.train.distributed.rank import is_rank
from pipeline.train.run import lock
from pipeline.train.run.folder import make_writable
from pipeline.train.run.lock_holder import identity, lives_here
from slurm import jobs, scheduler
from slurm.checks import look_at_stages
from slurm.jobs import Backend, StageName, stage_name
from slurm.local import by_hand
from slurm.record.planned_job import PlannedJob
from slurm.record.submission import read_submission
from slurm.site.site_profile import site_of
from slurm.submit import permissions
from slurm.submit.complete_stages import missing_stages
from slurm.submit.dry_run import show_findings
from slurm.submit.job_plan import eval_job, plan
from slurm.submit.submit import write_submission

_PATIENCE = 2.0
"""Seconds for another command that runs the same run in an allocation."""


def run_in_allocation(
    config: Config,
    stages: Sequence[StageName],
    console: Console,
    *,
    step: int | None = None,
    take_over: bool = False,
    dry_run: bool = False,
) -> None:
    """Run stages to their end on the nodes of this allocation, one after the other, but those that are complete.

    Args:
        config: the run.
        stages: which, in their order.
        console: for what is told.
        step: of the checkpoint, for an evaluation alone.
        take_over: a holder of the run's lock of whom it is unknown whether it runs is taken to be gone.
        dry_run: show what would be started, and write nothing.

    Raises:
        UserError: there is no allocation, it does not have what the run needs, or the run trains elsewhere.
        Stopped: a signal, a stop file or the end of the allocation stopped it; training has saved.
        SystemExit: a stage failed, with its code.
    """
    if is_rank():
        raise UserError("--in-allocation starts the processes of the run itself, but WORLD_SIZE is set; unset it")
    nodes = _nodes(os.environ)
    config = _fitted(config, len(nodes), os.environ)
    site = site_of(config, "slurm")
    stages = missing_stages(config, stages, console, so="so it is left out")
    if not stages:
        say(console, f"nothing to do: all stages of {config.run.dir} are complete")
        return
    planned = [job for stage in stages for job in _planned(config, stage, step)]
    processes = {job.stage: job.processes for job in planned}
    found = Problems()
    look_at_stages(config, stages, found, train=processes.get("train", 1), evaluate=processes.get("eval", 1), step=step)
    for job in planned:
        _check_size(job, nodes, site, os.environ, found)
    run = config.run.dir
    with found.collecting() if dry_run else nullcontext():
        _refuse_other_start(run, stages, console, take_over=take_over and not dry_run)
    if dry_run:
        for job in planned:
            say(console, _job_line(job, nodes))
        show_findings(console, found)
    else:
        found.ask(console)
    found.raise_problems("nothing was started")
    if dry_run:
        say(console, "no problem was found; nothing was started and nothing was written (--dry-run)")
        return
    for warning in found.warnings:
        warn(console, warning)
    permissions.apply_permissions(config)
    make_writable(run)
    storage.make_below(run, RunFiles(run).slurm)
    # The lock of the run takes a later step of the same job for a restart of it.
    with exclusive(RunFiles(run).slurm / "in-allocation.lock", _PATIENCE):
        jobs.forget_cancelled(run)
        links.remove(RunFiles(run).stop, missing_ok=True)
        files = [write_submission(run, config, site, job, "slurm", None) for job in planned]
        first = replace(read_submission(files[0]), then=tuple(str(file) for file in files[1:]))
        first.save(files[0])
        _start(files[0], nodes, console)


def _start(file: Path, nodes: Sequence[str], console: Console) -> None:
    """Run a submission and those that follow it."""
    run = read_submission(file).run
    say(console, f"job {os.environ['SLURM_JOB_ID']} on {', '.join(nodes)}; follow it with: pipeline logs {run} -f")
    from slurm.job.batch_main import run_submission

    if run_submission(str(file), by_hand=True) != "done":
        raise Stopped("stopped before the end; run the same command again to resume, in this allocation or another")


def _check_size(
    job: PlannedJob, nodes: Sequence[str], site: SiteConfig, environment: Mapping[str, str], found: Problems
) -> None:
    """Nodes and CPUs that a stage needs against those of the allocation."""
    if job.stage not in ("train", "eval"):  # others are one process, which no step starts
        return
    if job.nodes > len(nodes):
        key = "slurm.nodes" if job.stage == "train" else "eval.processes"
        found.problem(
            f"{key}: the {job.stage} stage needs {job.nodes} nodes, and the allocation has {len(nodes)} "
            f"({', '.join(nodes)}); ask salloc for more, or lower {key}"
        )
        return
    here, each = job.processes_per_node, job.resources.cpus_per_task or 1
    cpus = min(_cpus(environment)[: job.nodes], default=None)
    if cpus is None or here * each <= cpus or {"--overcommit", "-O"} & {*site.srun_options}:
        return
    given = "SLURM_CPUS_PER_TASK" if environment.get("SLURM_CPUS_PER_TASK") else f"slurm.{job.stage}.cpus_per_task"
    lower = "slurm.processes_per_node" if job.stage == "train" else "eval.processes"
    found.problem(
        f"the {job.stage} stage needs {here} x {each} CPUs per node ({lower} x {given}), and the allocation has {cpus} "
        f"(SLURM_JOB_CPUS_PER_NODE); ask salloc for more, or lower one of the two"
    )


def _cpus(environment: Mapping[str, str]) -> list[int]:
    """CPUs of the allocation on each node: `4(x2),8` -> 4, 4, 8; empty where that is not known."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_JOB_CPUS_PER_NODE", ""))
    return [int(cpus) for cpus, times in found for _ in range(int(times or 1))]


def _job_line(job: PlannedJob, nodes: Sequence[str]) -> str:
    """Line of a dry run on a stage: nodes, processes, CPUs."""
    command = f"pipeline {' '.join(job.command)}"
    if job.stage not in ("train", "eval"):
        return f"{stage_name(job.stage)}: one process on {nodes[0]} ({command})"
    size = f"{counted(job.nodes, 'node')} x {counted(job.processes_per_node, 'process')}"
    cpus = job.resources.cpus_per_task
    size += f" x {counted(cpus, 'CPU')}" if cpus is not None else ""
    return f"{job.stage}: {size} on {', '.join(nodes[: job.nodes])} ({command})"


def _refuse_other_start(run: Path, stages: Sequence[StageName], console: Console, *, take_over: bool) -> None:
    """A `UserError` where a job of the run waits or runs, or a process outside of this allocation trains."""
    by_hand.check(run, stages, console, take_over=take_over)
    if take_over:
        by_hand.take_over(run, console)
    held = lock.holder(run) if "train" in stages else None
    if held is None:
        return
    if held.get("job") != os.environ["SLURM_JOB_ID"]:
        if why := lock.refusal(run):
            raise UserError(why)
        return
    # The batch process takes a lock of its own job for one of a step that has ended.
    lives = lives_here(held, identity())
    step = f"{held['job']}.{held.get('step')}"
    if lives or (lives is None and step in scheduler.steps(str(held["job"]))):
        raise UserError(
            f"process {held.get('pid')} on {held.get('host')} trains {run} in this allocation; stop it with "
            f"`touch {RunFiles(run).stop}`, or end its step with `scancel {step}`"
        )


def _nodes(environment: Mapping[str, str]) -> list[str]:
    """Nodes of the allocation that this process is in."""
    if "SLURM_JOB_ID" not in environment or "SLURM_JOB_NODELIST" not in environment:
        raise UserError(
            "--in-allocation is for a shell in an allocation of SLURM, but SLURM_JOB_ID is not set here; get one with "
            "`salloc --nodes=... --time=...` and give the command in it, or use --slurm, which sends a job"
        )
    return scheduler.hostnames(environment["SLURM_JOB_NODELIST"])


def _fitted(config: Config, nodes: int, environment: Mapping[str, str]) -> Config:
    """The run with the resources of the allocation where its file does not name any."""
    slurm, site = config.slurm, site_of(config, "slurm")
    values: dict[str, object] = {} if "nodes" in slurm.model_fields_set else {"nodes": nodes}
    if slurm.processes_per_node is None:
        gpus = environment.get("SLURM_GPUS_ON_NODE", "")
        tasks = re.match(r"\d+", environment.get("SLURM_NTASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", "")))
        # The variable of the GPUs is set on a node alone; salloc may leave its shell on the login node.
        here = int(gpus) if gpus.isdecimal() else site.gpus_per_node or (int(tasks[0]) if tasks else 1)
        values["processes_per_node"] = here
    cpus = environment.get("SLURM_CPUS_PER_TASK", "")
    if cpus.isdecimal():
        given = {"cpus_per_task": int(cpus)}
        values |= {key: getattr(slurm, key).model_copy(update=given) for key in ("preprocess", "train", "eval")}
    return config.model_copy(
        update={
            "slurm": slurm.model_copy(update=values),
            "eval": config.eval.model_copy(update={"every_checkpoint": False}),
        }
    )


def _planned(config: Config, stage: StageName, step: int | None) -> list[PlannedJob]:
    """The jobs of a stage as steps of this one: those that would be arrays in one process, and none is repeated."""
    backend: Backend = "local" if stage in ("curate", "preprocess") else "slurm"
    site = site_of(config, "slurm")
    if step is not None:
        found = [eval_job(config, site, step)]
    else:
        chain = {"chain": "requeue"} if site.has_requeue else {"chain": "afterany"}  # neither is used
        planable = config.model_copy(update={"slurm": config.slurm.model_copy(update=chain)})
        found = plan(planable, site, [stage], backend)
    return [replace(job, chain="none", links=1, spare_nodes=0, after=()) for job in found]
