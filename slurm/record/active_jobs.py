"""Jobs of a run that wait or run now."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.common.format import when
from slurm import jobs, scheduler
from slurm.jobs import Job, Stage, stage_name, stage_words
from slurm.record.launch_log import LAST, is_all, launches
from slurm.record.planned_job import PlannedJob
from slurm.record.submission import find_submission, record
from slurm.scheduler import JobState


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
    if job.host != socket.gethostname() or not jobs.is_alive(run, job):
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
