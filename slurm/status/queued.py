"""Jobs of a run that wait or run, and launches that are over without an end, from its files and the scheduler."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.common.errors import EXIT_OK
from slurm import jobs
from slurm.jobs import Backend, Job, Stage
from slurm.record.launch_log import Launch, is_all
from slurm.scheduler import UNKNOWN, Accounted, JobState
from slurm.status.files import RunSnapshot

_SKEW = 60.0
"""Seconds that the clocks of a node and the controller may differ."""
_HELD = ("REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")


@dataclass(frozen=True)
class SchedulerSnapshot:
    """Answer of the scheduler about all jobs that it was asked for."""

    states: Mapping[str, JobState] | None
    """By number; None if it did not answer."""
    accounted: Mapping[str, Accounted] = field(default_factory=dict)
    """Accounting of jobs that it no longer knows."""
    problem: str | None = None
    """Reason why it did not answer, or accounting did not."""

    def has_ended(self, job: Job, number: str) -> bool:
        """True if a job, or a task of an array, of which there is no state is known to have ended.

        The controller shows all jobs to their user, so that one of this user is forgotten. Others may be hidden
        (PrivateData): then accounting has to know their end.
        """
        if number in self.accounted and self.accounted[number].over:
            return True
        return self.states is not None and job.user == jobs.user()


@dataclass(frozen=True)
class QueuedJob:
    """A job that waits or runs, or may."""

    stage: Stage
    job: str
    where: Backend
    state: str
    """As squeue names it, or UNKNOWN; of an array that of a task that runs, if one does."""
    tasks: dict[str, int]
    """Tasks of an array by state."""
    reason: str
    """Why it waits."""
    excluded: str
    """Nodes that it is kept from, compact."""
    link: int
    step: int | None
    """Step of the checkpoint that it evaluates."""
    nodes: str
    start: float | None
    """Start, or expected start, in seconds since 1970."""
    end: float | None
    """End of its time."""
    waits: bool
    runs: bool

    @property
    def held(self) -> bool:
        """True if it waits until a person releases it."""
        return self.waits and (self.state in _HELD or "held" in self.reason.lower())


def queue(facts: RunSnapshot, snapshot: SchedulerSnapshot) -> list[QueuedJob]:
    """The jobs of a run that wait or run, in the order in which they were sent."""
    found = (_queued(facts, job, snapshot) for job in facts.open_jobs())
    return [each for each in found if each is not None]


def in_question(facts: RunSnapshot, waiting: Sequence[QueuedJob]) -> list[QueuedJob]:
    """Jobs without those that the scheduler says nothing of and the files have an end of, which then counts."""
    over = {job.job for job in facts.sent if _will_not_start(facts, job)}
    return [job for job in waiting if job.state != UNKNOWN or job.where == "local" or job.job not in over]


def _will_not_start(facts: RunSnapshot, job: Job) -> bool:
    """True if a job has ended or will not begin, as far as the files say."""
    last = {launch.job: launch.end for launch in facts.launches_of(job)}
    ends = [end for end in last.values() if end is not None]
    if len(ends) < len(last):
        return False
    by = facts.cancelled
    if by is not None and job.stage in (by.stages or (job.stage,)) and by.time > job.time:
        return True
    if last:
        again = any(end.next in ("requeue", "relaunch") for end in ends)
        return not again and any(end.code != EXIT_OK and end.next in ("scheduler", "end") for end in ends)
    # The next job of a chain goes on after any end; another stage needs that of the one before.
    before = [each for each in facts.sent if each.job in job.after and each.stage != job.stage]
    return any(_will_not_start(facts, each) for each in before)


def _queued(facts: RunSnapshot, job: Job, snapshot: SchedulerSnapshot) -> QueuedJob | None:
    states: list[JobState] = []
    unknown = False
    if job.where == "local":
        unknown = job.host != socket.gethostname()
        past, submission = facts.launches_of(job), facts.submission(job)
        stages = None if submission is None else 1 + len(submission.then)
        if not unknown and jobs.is_alive(facts.run, job) and not is_all(past, stages):
            # The process of a sweep does one run after the other.
            begun = bool(past)
            state = JobState(job.job, "RUNNING", nodes=job.host, start=job.time)
            # Who is cancelled meanwhile stays in the list of the process, which passes it over.
            by = jobs.cancelled(facts.run, job.stage)
            turn = f"cancelled by {by.by}, it will be skipped" if by else "its turn has not come"
            states = [state if begun else JobState(job.job, "PENDING", turn)]
    elif snapshot.states is None:
        unknown = True
    else:
        states = [snapshot.states[number] for number in job.numbers if number in snapshot.states]
        hidden = [number for number in job.numbers if number not in snapshot.states]
        unknown = not states and not all(snapshot.has_ended(job, number) for number in hidden)
        states = [state for state in states if state.active]
    if not states and not unknown:
        return None
    # Of an array a task that is at work stands for all.
    by_work = sorted(states, key=lambda state: (state.state != "RUNNING", not state.runs))
    first = by_work[0] if states else JobState(job.job, UNKNOWN)
    last = next(iter(reversed(facts.launches_of(job))), None)
    may_run = unknown and last is not None and last.end is None
    return QueuedJob(
        stage=job.stage,
        job=job.job,
        where=job.where,
        state=first.state,
        tasks=dict(Counter(state.state for state in states)) if job.tasks > 1 else {},
        reason=first.reason if first.waits else "",
        excluded=first.excluded if first.waits else "",
        link=job.link,
        step=job.step,
        nodes=first.nodes,
        start=first.start,
        end=first.end if first.runs else None,
        waits=first.waits or (unknown and not may_run),
        runs=first.runs or may_run,
    )


def lost_launches(
    facts: RunSnapshot, snapshot: SchedulerSnapshot, waiting: Sequence[QueuedJob], *, fresh: bool
) -> set[tuple[str, int, int]]:
    """Launches whose end nobody has noted, and that are over: their job was started again since, or does not run.

    Args:
        facts: files of the run.
        snapshot: of the scheduler, which may tell nothing of others' jobs.
        waiting: jobs of the run that wait or run.
        fresh: whether a rank has given a sign of life just now.
    """
    open_launches = [launch for launch in facts.launches if launch.end is None]
    found = {launch.key for launch in open_launches if _is_lost(facts, launch, snapshot, waiting)}
    last = facts.launches[-1] if facts.launches else None
    if fresh and last is not None and last.stage == "train" and snapshot.states is not None:
        return found if last.job in snapshot.states else found - {last.key}
    return found


def _is_lost(facts: RunSnapshot, launch: Launch, snapshot: SchedulerSnapshot, waiting: Sequence[QueuedJob]) -> bool:
    if any(each.job == launch.job and each.key > launch.key for each in facts.launches):
        return True
    job = next((each for each in facts.sent if launch.job in each.numbers), None)
    if job is None:
        return False
    if job.where == "local":
        return not any(each.runs and is_of(launch, each) for each in waiting)
    if snapshot.states is None:
        return False
    state = snapshot.states.get(launch.job)
    if state is None:
        return snapshot.has_ended(job, launch.job)
    return not state.runs or (state.start is not None and state.start > launch.time + _SKEW)


def is_of(launch: Launch, job: QueuedJob) -> bool:
    """True if it is a launch of a job, or of a task of an array; a run of a sweep has one task as its job."""
    return job.job in (launch.job, launch.job.partition("_")[0])
