"""Jobs of a run that wait or run now; they are shown if the run is submitted again."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeline.common import storage
from pipeline.common.console import say
from pipeline.common.errors import UserError
from pipeline.common.format import when
from pipeline.config import Config
from pipeline.config.load import dump
from pipeline.config.parsing.document import parse
from pipeline.config.parsing.problems import show
from pipeline.config.parsing.schema import flat
from slurm import jobs, scheduler
from slurm.job.launch_log import LAST, is_all, launches
from slurm.jobs import Job, Stage
from slurm.scheduler import JobState
from slurm.submit import code_snapshot, submitit_backend
from slurm.submit.job_plan import PlannedJob, stage_name, stage_words
from slurm.submit.submission import Submission, find_submission, record

_SHOWN = 10
"""Keys that a message names, at most."""


@dataclass(frozen=True)
class ActiveJob:
    """A job that waits or runs, or may."""

    job: Job
    states: tuple[JobState, ...]
    """States of the job, or of the tasks of an array that have not ended; none for a local job that runs."""


def find(run: Path, planned: Sequence[PlannedJob] | None = None) -> list[ActiveJob]:
    """Jobs of a run that wait or run, in the order in which they were sent.

    Args:
        run: folder.
        planned: only those that do the same as one of these.

    Raises:
        SchedulerError: the scheduler does not say.
    """
    wanted = None if planned is None else {(job.stage, job.step) for job in planned}
    sent = [
        job
        for job in jobs.sent(run)
        if wanted is None or any((stage, job.step) in wanted for stage in stages(run, job))
    ]
    queued = [job for job in sent if job.where == "slurm"] if scheduler.here() else []
    known = states_of(run, queued)
    found = []
    for job in sent:
        if job.where == "local":
            if is_here(run, job):
                found.append(ActiveJob(job, ()))
            continue
        states = [known[number] for number in job.numbers if number in known]
        left = tuple(state for state in states if state.active)
        if left:
            found.append(ActiveJob(job, left))
    return found


def states_of(run: Path, queued: Sequence[Job]) -> dict[str, JobState]:
    """States of jobs of the scheduler by number, without those that are known to have ended and are not shown.

    Raises:
        SchedulerError: the scheduler does not say.
    """
    found = scheduler.states_of({number: job.user for job in queued for number in job.numbers}, jobs.user())
    last = {launch.job: launch.end for launch in launches(run)}
    over = {number for number, end in last.items() if end is not None and end.next in LAST}
    for job in queued:
        by = jobs.cancelled(run, job.stage)
        if by is not None and by.time > job.time:
            over |= set(job.numbers) - last.keys()  # it will start nothing
    return {number: state for number, state in found.items() if not (state.unknown and number in over)}


def is_hidden(each: ActiveJob) -> bool:
    """True if the scheduler shows nothing of a job to this user."""
    return bool(each.states) and all(state.unknown for state in each.states)


def is_here(run: Path, job: Job) -> bool:
    """True if a local job runs on this machine and has more to do for the run; a sweep's has other runs, too."""
    if job.host != socket.gethostname() or not submitit_backend.is_alive(run, job):
        return False
    past = [launch for launch in launches(run) if launch.job == job.job and launch.time >= job.time]
    return not is_all(past, len(stages(run, job)) if find_submission(run / job.submission) else None)


def stages(run: Path, job: Job) -> list[Stage]:
    """Stages of a job: a local one may do several, one after the other."""
    submission = find_submission(run / job.submission)
    then = submission.then if submission else ()
    following = [find_submission(record(run, Path(file))) for file in then]
    return [job.stage, *(each.stage for each in following if each)]


def stage_names(run: Path, job: Job) -> str:
    """Stages of a job, for people."""
    if job.where == "slurm":
        return stage_words(job.stage)
    # On this machine that is all of it.
    return ", ".join(stage_name(stage) for stage in stages(run, job))


def describe(run: Path, active: ActiveJob) -> str:
    """`train: job 77 (RUNNING on n1, since ...)`."""
    job, name = active.job, stage_names(run, active.job)
    if job.where == "local":
        since = active.states[0].reason if active.states else f"since {when(job.time)}"
        return f"{name}: process {job.job} on {job.host} ({since})"
    if is_hidden(active):
        return f"{name}: job {job.job} of {job.user}, which may wait or run: SLURM does not show it to {jobs.user()}"
    state = next((state for state in active.states if state.runs), active.states[0])
    more = f", {len(active.states)} of {job.tasks} tasks" if job.tasks > 1 else ""
    if state.runs:
        since = f", since {when(state.start)}" if state.start else ""
        return f"{name}: job {job.job} ({state.state} on {state.nodes}{since}{more})"
    reason = f", {state.reason}" if state.reason else ""
    return f"{name}: job {job.job} ({state.state}{reason}{more})"


def attach(config: Config, planned: Sequence[PlannedJob], found: Sequence[ActiveJob], console: Console) -> list[Job]:
    """Report the jobs of a run that is submitted again and send nothing, if its config is the same.

    Raises:
        UserError: it was submitted with another config.
    """
    run = config.run.dir
    submission = find_submission(run / found[-1].job.submission)
    listed = "\n".join(f"  {describe(run, each)}" for each in found)
    if submission and (differences := _differences(submission, config)):
        more = f"\n  and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise UserError(
            f"the run has been submitted with another config:\n{listed}\nThese keys differ:\n  "
            + "\n  ".join(differences[:_SHOWN])
            + f"{more}\nTo continue with the new values, run `pipeline cancel {run}` and submit again; to run both, "
            "set run.dir to another folder"
        )
    say(console, f"the run is already submitted, so nothing was sent:\n{listed}")
    if submission and submission.code and submission.code.name != code_snapshot.place(run)[0].name:
        say(console, "its jobs run the code as it was when they were submitted; it has changed since")
    present = {stage for each in found for stage in stages(run, each.job)}
    last = max(index for index, job in enumerate(planned) if job.stage in present)
    if missing := [job.stage for job in planned[last + 1 :]]:
        say(console, f"not among them: {', '.join(missing)}; submit again when they are done")
    say(console, f"next: pipeline status {run}, pipeline logs {run} -f, pipeline cancel {run}")
    return [each.job for each in found]


def _differences(submission: Submission, config: Config) -> list[str]:
    """Keys whose values differ from those that a job was sent with, each with both values."""
    try:
        # Not as a config: it may be of another version of the code.
        run_file = record(submission.run, submission.run_file)
        there = flat(parse(storage.read_bytes(run_file, storage.SMALL_BYTES).decode(), str(run_file)).value)
    except (OSError, UserError):
        return []
    here = flat(parse(dump(config), "").value)
    return [
        f"{key}: {show(there[key]) if key in there else 'not set'} there, "
        f"{show(here[key]) if key in here else 'not set'} here"
        for key in sorted(there.keys() | here.keys())
        if there.get(key, _MISSING) != here.get(key, _MISSING)
        and not _is_in_keys_below(key, there, here)
        and not _is_in_keys_below(key, here, there)
    ]


def _is_in_keys_below(key: str, one: dict[str, Any], other: dict[str, Any]) -> bool:
    """True if a mapping is empty in one config and has keys in the other, which are differences of their own."""
    return one.get(key) == {} and key not in other and any(each.startswith(f"{key}.") for each in other)


_MISSING = object()
