"""`--slurm` and `--local`: stages of a run become jobs, once, with a copy of the code they were asked for with."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from pipeline.common import links, run_identity, storage
from pipeline.common.console import say, warn
from pipeline.common.errors import MachineError, UserError
from pipeline.common.file_lock import exclusive
from pipeline.common.format import listed
from pipeline.common.problems import Problems
from pipeline.common.run_files import RunFiles
from pipeline.config import Config
from pipeline.config.load import dump
from pipeline.config.slurm import SiteConfig
from pipeline.data.work.frozen_plan import make_data_dir
from pipeline.data.work.units import cut_units, find_source_files
from pipeline.train.run import lock
from pipeline.train.run.folder import make_writable
from slurm import jobs, scheduler
from slurm.jobs import ARRAYS, LAST_OF_ARRAYS, Backend, Job, Stage, StageName
from slurm.record import active_jobs, integrity
from slurm.record.planned_job import PlannedJob
from slurm.record.rank_logs import STAMP
from slurm.record.submission import Submission, read_submission, record
from slurm.site.site_profile import site_of
from slurm.submit import code_snapshot, permissions, submitit_backend
from slurm.submit.complete_stages import missing_stages
from slurm.submit.job_plan import eval_job, plan
from slurm.submit.resubmission import attach
from slurm.submit.waiting import warn_of_waiting

_SUBMIT_SECONDS = 600.0
"""For another command that sends jobs of the same run: a chain of many jobs on a busy controller takes minutes."""


def submit(
    config: Config,
    stages: Sequence[StageName],
    backend: Backend,
    console: Console,
    *,
    dry_run: bool = False,
    step: int | None = None,
    take_over: bool = False,
) -> list[Job]:
    """Send stages of a run, unless they wait or run already.

    Args:
        config: the run.
        stages: which, in their order.
        backend: to the scheduler, or into the background of this machine.
        console: for what is told.
        dry_run: show what would be sent, and write nothing.
        step: of the checkpoint, for an evaluation alone.
        take_over: jobs and processes of whom it is unknown whether they run are taken to be gone.

    Returns:
        The jobs, those that were there already if there are any.

    Raises:
        UserError: the run cannot be sent as it is, which a dry run says after it has shown the jobs; its jobs wait or
            run with another config; another process trains.
        MachineError: the scheduler refuses a job or does not answer. Nothing stays in the queue then.
    """
    site = site_of(config, backend)
    if backend == "slurm":
        stages = missing_stages(config, stages, console)
    if not stages:
        say(console, f"nothing to submit: all stages of {config.run.dir} are complete")
        return []
    if step is None:
        reads = "preprocess" in stages or "curate" in stages
        planned = plan(config, site, stages, backend, units=_units(config) if reads else None)
    else:
        planned = [eval_job(config, site, step, backend=backend)]
    for job in planned:
        submitit_backend.refuse_derived_options(job, site)
    run = config.run.dir
    submitit_backend.refuse_path(run)
    if not dry_run and (found := _find(run, planned, take_over=take_over)):
        return attach(config, planned, found, console)
    from slurm.submit import preflight

    found_here = preflight.examine(config, site, planned, backend, dry_run=dry_run)
    if dry_run:
        _show(config, site, planned, backend, found_here, console)
    else:
        found_here.ask(console)
    found_here.raise_problems("nothing was sent")
    if dry_run:
        return []
    permissions.apply_permissions(config)
    make_writable(run)
    with one_at_a_time(run):
        if found := _find(run, planned, take_over=take_over):  # another command was faster
            return attach(config, planned, found, console)
        if backend == "slurm":
            cancel_unknown(run, console)  # one of them may hold the lock of the run
        _clear_the_way(run, planned, console, take_over=take_over)
        if any(job.stage in (*ARRAYS, *LAST_OF_ARRAYS) for job in planned):
            make_data_dir(config)  # of which jobs know then that it should be there
        with storage.naming(RunFiles(run).slurm):  # a full disk names no file
            code = code_snapshot.take(run, site.modules, permissions.make_private(config, run))
            with _refusal_noted(run, planned[0].stage):
                sent = send_all(run, config, site, planned, backend, code)
    for warning in found_here.warnings:
        warn(console, warning)
    _print_sent(run, sent, console)
    warn_of_waiting({run: sent}, console)
    return sent


@contextmanager
def _refusal_noted(run: Path, stage: Stage) -> Iterator[None]:
    """Write down that a submission is refused inside, for `status`."""
    try:
        yield
    except MachineError as error:
        with suppress(OSError):
            jobs.note_refused(run, stage, listed("; ".join(str(error).splitlines())))
        raise


def cancel_unknown(folder: Path, console: Console) -> None:
    """Cancel jobs that sbatch got no answer about when they were sent from this folder of a run or sweep."""
    if unknown := submitit_backend.cancel_unknown(folder):
        say(console, f"cancelled {', '.join(unknown)}, which sbatch got no answer about when they were sent")


def _show(
    config: Config,
    site: SiteConfig,
    planned: Sequence[PlannedJob],
    backend: Backend,
    found: Problems,
    console: Console,
) -> None:
    """Print what would be sent."""
    from slurm.submit.dry_run import show

    private = permissions.private_folder(config, config.run.dir)
    code = code_snapshot.place(config.run.dir, private)

    def script_of(job: PlannedJob) -> str:
        return submitit_backend.script(config.run.dir, job, site, code, config, backend)

    show(console, config, site, planned, backend, script_of, found)


def send_all(
    run: Path, config: Config, site: SiteConfig, planned: Sequence[PlannedJob], backend: Backend, code: Path | None
) -> list[Job]:
    """Send jobs and note them: all, or none if one is refused.

    Args:
        run: folder.
        config: what the stages run with.
        site: where they run.
        planned: the jobs, each after those that it waits for.
        backend: to the scheduler, or one after the other into the background of this machine.
        code: snapshot of the code.

    Raises:
        MachineError: one was refused.
    """
    files = [write_submission(run, config, site, job, backend, code) for job in planned]
    if backend == "local":
        return [_send_local(run, planned, files)]
    numbers: dict[PlannedJob, str] = {}
    with all_or_none() as sent:
        for job, file in zip(planned, files, strict=True):
            for chain_job in range(1, job.links + 1):
                waits = _waits(job, chain_job, numbers)
                dependency = ",".join(waits) or None
                number = submitit_backend.send(
                    run, job, [file], backend=backend, dependency=dependency, chain_job=chain_job
                )
                sent.numbers.append(number)
                after = tuple(part.partition(":")[2] for part in waits if ":" in part)
                sent.noted.append((run, record_sent(run, job, file, number, backend, link=chain_job, after=after)))
                numbers[job] = number
    return [job for _, job in sent.noted]


def write_submission(
    run: Path, config: Config, site: SiteConfig, planned: PlannedJob, backend: Backend, code: Path | None
) -> Path:
    """Write the files of a job: the resolved run file and the submission, in the run folder."""
    private = permissions.make_private(config, run)
    folder = (private or RunFiles(run).slurm) / jobs.SUBMISSIONS
    with integrity.for_owner_alone():
        storage.make_below(private or run, folder)
        run_file = _new_file(folder, planned)
    run_file.write_text(dump(config), encoding="utf-8")
    trains = planned.stage == "train"
    submission = Submission(
        run=run,
        stage=planned.stage,
        where=backend,
        command=planned.command,
        run_file=run_file,
        code=code,
        site=site,
        resources=planned.resources,
        nodes=planned.nodes,
        processes_per_node=planned.processes_per_node,
        spare_nodes=planned.spare_nodes,
        chain=planned.chain,
        links=planned.links,
        max_restarts=config.slurm.max_restarts,
        doctor=trains and config.slurm.doctor,
        every_checkpoint=trains and backend == "slurm" and config.eval.every_checkpoint,
        folder_id=run_identity.take_id(run),
    )
    file = run_file.with_suffix(".json")
    submission.save(file)
    return file


def _units(config: Config) -> int | None:
    """Number of units of the preprocessing; None where its sources cannot be read, which the checks report."""
    settings = config.data.preprocess
    with suppress(UserError):
        return sum(len(cut_units(found, settings.seed, settings.unit_bytes)) for found in find_source_files(config))
    return None


def _new_file(folder: Path, planned: PlannedJob) -> Path:
    """A run file in it that no other job has: `2026-01-31_12-00-00-train.yaml`."""
    base = f"{time.strftime(STAMP)}-{planned.stage}"
    base += "" if planned.step is None else f"-{planned.step}"
    number = 1
    while True:
        file = folder / (f"{base}.yaml" if number == 1 else f"{base}.{number}.yaml")
        with suppress(FileExistsError):
            file.touch(exist_ok=False)
            return file
        number += 1


def _waits(job: PlannedJob, chain_job: int, numbers: Mapping[PlannedJob, str]) -> list[str]:
    """Dependencies of a job of a chain, in the words of sbatch."""
    waits = [f"{after.kind}:{numbers[after.job]}" for after in job.after] if chain_job == 1 else []
    if job.links > 1 and job.chain == "singleton":
        waits.append("singleton")
    elif chain_job > 1:
        waits.append(f"afterany:{numbers[job]}")
    return waits


def _send_local(run: Path, planned: Sequence[PlannedJob], files: Sequence[Path]) -> Job:
    """One process that does all of them, one after the other."""
    first = replace(read_submission(files[0]), then=tuple(str(file) for file in files[1:]))
    first.save(files[0])
    number = submitit_backend.send(run, planned[0], files[:1], backend="local")
    return record_sent(run, planned[0], files[0], number, "local")


def record_sent(run: Path, planned: PlannedJob, file: Path, number: str, backend: Backend, **more: object) -> Job:
    """Write down a job that was sent just now, and return it."""
    submission = str(record(run, file).relative_to(run))
    values = {"tasks": planned.tasks, "step": planned.step, **more}
    job = jobs.new_job(planned.stage, number, backend, planned.name, submission, **values)
    jobs.note(run, job)
    return job


@dataclass(frozen=True)
class SentJobs:
    """Jobs that belong together, so far."""

    numbers: list[str] = field(default_factory=list)
    """Numbers of those that the scheduler has accepted; of an array without the tasks."""
    noted: list[tuple[Path, Job]] = field(default_factory=list)
    """Records of the jobs, each with its run folder."""


@contextmanager
def all_or_none() -> Iterator[SentJobs]:
    """Jobs that are sent inside, all or none: if one cannot be sent, those before it are cancelled.

    Raises:
        MachineError: one could not be sent; the message says what became of the jobs before.
    """
    sent = SentJobs()
    try:
        yield sent
    except BaseException as error:
        message = _take_back(sent)
        if message and isinstance(error, Exception):
            raise MachineError(f"{error}\n{message}") from error
        raise


def _take_back(sent: SentJobs) -> str:
    """Cancel what was sent; returns a message about it."""
    numbers = sent.numbers
    if not numbers:
        return ""
    try:
        scheduler.cancel(numbers)
    except scheduler.SchedulerError as other:
        return f"What was sent before it is still in the queue, since {other}; do `scancel {' '.join(numbers)}`"
    for run, job in sent.noted:
        with suppress(OSError):
            jobs.note_withdrawn(run, job)
    return f"Nothing of it stays in the queue: what was sent before it ({', '.join(numbers)}) was cancelled again"


def one_at_a_time(run: Path) -> AbstractContextManager[None]:
    """A lock on submission: of two commands at the same moment one sends, and the other one finds what it has sent."""
    folder = RunFiles(run).slurm
    folder.mkdir(exist_ok=True)
    return exclusive(folder / "submit.lock", _SUBMIT_SECONDS)


def _find(run: Path, planned: Sequence[PlannedJob] | None, *, take_over: bool) -> list[active_jobs.ActiveJob]:
    """Jobs of a run that wait or run, of those that do the same as one of these.

    Raises:
        UserError: the scheduler does not show one of another user, which may run: another one beside it would train the
            same run.
    """
    found = active_jobs.find(run, planned)
    hidden = [each for each in found if active_jobs.is_hidden(each)]
    if hidden and not take_over:
        listed = "\n".join(f"  {active_jobs.describe(run, each)}" for each in hidden)
        raise UserError(
            f"the run is already submitted, so nothing was sent:\n{listed}\nAsk {hidden[0].job.user}; if you know that "
            "it has ended, run the same command with --take-over"
        )
    return [each for each in found if each not in hidden]


def _clear_the_way(run: Path, planned: Sequence[PlannedJob], console: Console, *, take_over: bool) -> None:
    """Nobody else trains, and what was asked of the jobs before is not asked of these.

    Raises:
        UserError: another process trains in the run folder, or a cancelled job has not ended yet.
    """
    trains = any(job.stage == "train" for job in planned)
    if by := jobs.cancelled(run):
        if ending := _find(run, None, take_over=take_over):
            raise UserError(
                f"{by.by} has cancelled the run, and {active_jobs.describe(run, ending[0])} has not ended yet; wait "
                f"for it (`pipeline status {run}`), then submit again"
            )
        jobs.forget_cancelled(run)
        say(console, f"the run was cancelled by {by.by}; it may start again now")
    if not trains:
        return
    if take_over and (before := lock.take_over(run)) is not None:
        warn(console, f"the run is taken over from {before}; if that still runs, its next save fails and it ends")
    if why_not := lock.refusal(run):
        raise UserError(why_not)
    stop = RunFiles(run).stop
    if stop.exists():
        links.remove(stop, missing_ok=True)
        say(console, f"removed {stop}, which would have stopped the training at once")


def _print_sent(run: Path, sent: Sequence[Job], console: Console) -> None:
    """Print what was sent, and what to do next."""
    for job in sent:
        what = "process" if job.where == "local" else "job" if job.tasks == 1 else f"array of {job.tasks} jobs"
        waits = f", after {' and '.join(job.after)}" if job.after else ""
        link = f" (chain job {job.link})" if any(each.link > 1 and each.name == job.name for each in sent) else ""
        say(console, f"{active_jobs.stage_names(run, job)}: {what} {job.job}{link}{waits}")
    shown = os.path.relpath(run) if run.is_relative_to(Path.cwd()) else str(run)
    say(console, f"next: pipeline status {shown}, pipeline logs {shown} -f, pipeline cancel {shown}")
