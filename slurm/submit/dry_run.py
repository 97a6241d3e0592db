"""`--dry-run` with `--slurm` or `--local`: a table of jobs, what the training costs, one verdict. Sends nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.table import Table

from pipeline.common.console import is_verbose, print_table, say, verbatim, warn
from pipeline.common.format import counted, duration, minutes, rounded, size
from pipeline.common.problems import Problems
from pipeline.config import Config
from pipeline.config.slurm import SiteConfig
from pipeline.train.planning.jobs import jobs_needed
from slurm.jobs import Backend, jobs_folder
from slurm.record.planned_job import Chain, PlannedJob
from slurm.submit.course import START_S, Course, Disk, Forecast, forecast, job_seconds
from slurm.submit.stop_lead_time import signal_seconds

_AFTER_TIME: dict[Chain, str] = {
    "requeue": "the same job is queued again",
    "singleton": "the next of {links} jobs of this name starts",
    "afterany": "the next of {links} jobs starts, each after the end of the one before",
    "none": "it is not started again",
}


def show(
    console: Console,
    config: Config,
    site: SiteConfig,
    planned: Sequence[PlannedJob],
    backend: Backend,
    script_of: Callable[[PlannedJob], str],
    found: Problems,
) -> None:
    """Print the jobs that would be sent, what they cost, and with `--verbose` their scripts.

    The verdict is the last line; of problems the caller raises it.

    Args:
        console: where to.
        config: the run.
        site: where it runs.
        planned: the jobs in the order in which they would be sent.
        backend: on a cluster or on this machine.
        script_of: gives the text of a job's script.
        found: by `preflight.examine`.
    """
    say(console, f"run: {config.run.dir}")
    say(console, f"profile: {config.slurm.profile}" if backend == "slurm" else "where: this machine, in the background")
    print_table(console, jobs_table(planned, backend))
    for job in planned if backend == "slurm" else ():
        if more := ", ".join(_further_resources(job)):
            say(console, f"{job.name} also asks for: {more}")
    for job in planned:
        if job.stage == "train":
            say(console, "train:")
            if backend == "slurm":
                say(console, f"  when the time of a job is over: {_AFTER_TIME[job.chain].format(links=job.links)}")
            for line in training_lines(config, job, backend, forecast(config, site, job), time.time()):
                say(console, f"  {line}")
    if is_verbose():
        for job in planned:
            verbatim(console, f"\n--- script of {job.name} ---\n{script_of(job).rstrip()}\n--- end of script ---")
        say(console, "")
    elif backend == "slurm":
        say(console, f"scripts: they will be in {jobs_folder(config.run.dir)}; --verbose prints them here")
    show_findings(console, found)
    if not found.problems:
        say(console, "no problem was found; nothing was sent and nothing was written (--dry-run)")


def show_findings(console: Console, found: Problems) -> None:
    """Print warnings, and what was not looked at."""
    for line in found.warnings:
        warn(console, line)
    for line in found.left_out:
        say(console, f"not looked at: {line}")


def jobs_table(planned: Sequence[PlannedJob], backend: Backend) -> Table:
    """Table of jobs with their sizes, resources and the jobs that they wait for."""
    table = Table()
    table.add_column("#", justify="right")
    for head in ("job", "runs"):
        table.add_column(head, overflow="fold")
    heads = ["array tasks", "nodes", "processes\nper node"]
    heads += (
        ["CPUs per\nprocess", "GPUs\nper node", "memory\nper node", "time", "partition"] if backend == "slurm" else []
    )
    for head in [*heads, "waits for"]:
        table.add_column(head, justify="right")
    for number, job in enumerate(planned, start=1):
        step = "" if job.step is None else f" (step {job.step:,})"
        spare = f" + {job.spare_nodes} spare" if job.spare_nodes else ""
        cells = [f"{job.tasks:,}" if job.tasks > 1 else "-", f"{job.nodes:,}{spare}", f"{job.processes_per_node:,}"]
        asked = job.resources
        if backend == "slurm":
            memory = "-" if asked.mem_gb is None else f"{asked.mem_gb:g} GB" if asked.mem_gb else "all"
            gpus, cpus = (f"{each}" if each else "-" for each in (job.gpus_per_node, asked.cpus_per_task))
            cells += [cpus, gpus, memory, minutes(job.minutes), asked.partition or "(default)"]
        after = ", ".join(
            f"{planned.index(each.job) + 1} ({'done' if each.kind == 'afterok' else 'any end'})" for each in job.after
        )
        table.add_row(str(number), job.name, f"pipeline {job.command[0]}{step}", *cells, after or "-")
    return table


def _further_resources(job: PlannedJob) -> Iterator[str]:
    """Resources of a job that the table has no column for, in words."""
    asked = job.resources
    if asked.exclusive:
        yield "whole nodes"
    for key in ("account", "qos", "constraint", "exclude"):
        if (value := getattr(asked, key)) is not None:
            yield f"{key} {value}"
    yield from (f"{key}={value}" for key, value in asked.options.items())


def training_lines(config: Config, job: PlannedJob, backend: Backend, ahead: Forecast, now: float) -> Iterator[str]:
    """Lines on a training: length, time, cost, disk.

    Args:
        config: the run.
        job: the training.
        backend: it runs.
        ahead: what it has before it.
        now: in seconds since 1970.
    """
    course = ahead.course
    if course is None:
        yield "length: not known before the data are there"
    else:
        yield from _course_lines(course)
    if config.train.preference is not None and not (course is not None and course.done_steps):
        yield "reference: computed before the first step, by one forward pass of each pair, unless it is there"
    if course is None or course.steps_left:
        yield from _time_lines(config, job, backend, ahead, now)
    if ahead.disk is not None:
        yield _disk_line(ahead.disk, ahead.course)


def _course_lines(course: Course) -> Iterator[str]:
    assumed = "; there are no datasets yet, they are assumed to be large enough" if course.assumed else ""
    yield f"length: {counted(course.steps, 'step')}, {rounded(course.tokens)} tokens ({course.reason}{assumed})"
    if not course.steps_left:
        yield "left: nothing, all steps are done"
    elif course.done_steps:
        yield (
            f"left: {counted(course.steps_left, 'step')}, {rounded(course.tokens_left)} tokens; the newest checkpoint "
            f"is of step {course.done_steps:,}"
        )


def _time_lines(config: Config, job: PlannedJob, backend: Backend, ahead: Forecast, now: float) -> Iterator[str]:
    limit = 60.0 * job.minutes
    if backend == "slurm":
        full, unit = cost(job, limit)
        yield f"cost of a job that takes all its time: {full:,.1f} {unit}"
    course, step = ahead.course, ahead.step_seconds
    if course is None or ahead.seconds is None or step is None:
        yield f"time: {ahead.how}"
        return
    rate = course.tokens_left / ahead.seconds
    yield f"step: {duration(step)}, {rounded(rate)} tokens/s ({ahead.how})"
    length = f"time: {duration(ahead.seconds)} of steps"
    if ahead.bounds is not None:
        length += f" ({' to '.join(map(duration, ahead.bounds))})"
    starts = 1
    if backend == "slurm":
        stop = signal_seconds(config, job.minutes)
        needed = jobs_needed(ahead.seconds, job_seconds(config, job.minutes))
        if needed is None:
            yield f"{length}; {minutes(job.minutes)} per job leave no time for them"
            return
        starts = needed
        yield (
            f"{length}, about {counted(starts, 'job')} of {minutes(job.minutes)} "
            f"({duration(START_S)} for the start of each and {duration(stop)} before its end are subtracted)"
        )
    else:
        yield length
    whole = ahead.seconds + starts * START_S
    all_, unit = cost(job, whole)
    yield f"cost until the end: {all_:,.1f} {unit}"
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(now + whole))
    yield f"end: {when}, if it began now and never waited or failed"


def cost(job: PlannedJob, seconds: float) -> tuple[float, str]:
    """Cost of all nodes of a job for some time, spare ones too, in the unit that sites count in.

    GPU-hours; without GPUs core-hours, or node-hours where cores are not asked for.
    """
    nodes, hours = job.nodes + job.spare_nodes, seconds / 3600
    if job.gpus_per_node:
        return nodes * job.gpus_per_node * hours, "GPU-hours"
    if job.resources.cpus_per_task is not None and not job.resources.exclusive:
        return nodes * job.processes_per_node * job.resources.cpus_per_task * hours, "core-hours"
    return nodes * hours, "node-hours"


def _disk_line(disk: Disk, course: Course | None) -> str:
    more = ", and those of keep_every" if course is None else ""
    losses = f"; losses of samples: {size(course.losses_bytes)}" if course is not None and course.losses_bytes else ""
    losses += f"; exports that are still to be written: {size(disk.exports)}" if disk.exports else ""
    return (
        f"checkpoints: {size(disk.each)} each, up to {disk.most:,} at a time{more} = {size(disk.most * disk.each)} "
        f"({disk.there:,} are there){losses}; {size(disk.free)} free"
    )
