"""Jobs of a run that wait or run now, by its files and the scheduler, which is asked once, of open jobs only."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from slurm import jobs
from slurm.jobs import Job
from slurm.record import active_jobs
from slurm.record.active_jobs import ActiveJob, is_here
from slurm.record.launch_log import LAST, launches
from slurm.scheduler import JobState, SchedulerError


@dataclass(frozen=True)
class LiveJobs:
    """Jobs of a run that wait or run, or may, since the scheduler does not show them to this user."""

    active: list[ActiveJob]
    elsewhere: list[Job]
    """Local jobs of other machines of which no end is known."""
    launched: bool
    """A job of the scheduler trains, as far as the files tell."""
    unknown: SchedulerError | None
    """Reason why the jobs of the scheduler are not known."""

    @property
    def nothing(self) -> bool:
        """True if it is known that nothing waits or runs."""
        return not self.active and not self.elsewhere and self.unknown is None


def live_jobs(run: Path) -> LiveJobs:
    """Jobs of a run that wait or run, as far as that can be known."""
    last = {launch.job: launch.end for launch in launches(run)}

    def is_open(number: str) -> bool:
        end = last.get(number)
        return end is None or end.next not in LAST

    sent = [job for job in jobs.sent(run) if job.where == "local" or any(map(is_open, job.numbers))]
    queued = [job for job in sent if job.where == "slurm"]
    unknown: SchedulerError | None = None
    known: dict[str, JobState] = {}
    try:
        known = active_jobs.states_of(run, queued)
    except SchedulerError as error:
        unknown = error
    found: list[ActiveJob] = []
    elsewhere: list[Job] = []
    for job in sent:
        states = tuple(known[number] for number in job.numbers if number in known)
        left = tuple(state for state in states if state.active)
        if job.where == "local" and is_here(run, job):
            # The process of a sweep does one run after the other.
            turn = () if job.job in last else (JobState(job.job, "PENDING", "its turn has not come"),)
            found.append(ActiveJob(job, turn))
        elif left:
            found.append(ActiveJob(job, left))
        elif job.where == "local" and job.host != socket.gethostname() and job.job in last and is_open(job.job):
            elsewhere.append(job)
    training = {number for job in queued if job.stage == "train" for number in job.numbers}
    launched = any(number in last and last[number] is None for number in training)
    return LiveJobs(found, elsewhere, launched, unknown)


def waits(each: ActiveJob) -> bool:
    """True if it waits, or some tasks of it; a run of a sweep on this machine waits for its turn."""
    return any(state.waits for state in each.states)


def runs(each: ActiveJob) -> bool:
    """True if it runs, or some tasks of it."""
    return not each.states or any(state.runs for state in each.states)
