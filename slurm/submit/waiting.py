"""Warnings about jobs that were just sent, and that the scheduler will not start when their turn comes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from pipeline.common.console import warn
from slurm import scheduler
from slurm.jobs import Job, resources_key, stage_words
from slurm.pending_reasons import meaning
from slurm.scheduler import JobState

_PAUSE = 2.0
"""Seconds until the second look at jobs that the scheduler had not looked at itself before the first one."""
_UNSEEN = ("", "Priority")
"""Reasons of such jobs."""


def warn_of_waiting(sent: Mapping[Path, Sequence[Job]], console: Console) -> None:
    """Warn of jobs that wait for more than their turn, each reason once; where the scheduler is silent, of none.

    Args:
        sent: jobs by the folder of their run.
        console: for the warnings.
    """
    queued = [(run, job) for run, jobs in sent.items() for job in jobs if job.where == "slurm"]
    states = _states([number for _, job in queued for number in job.numbers])
    warned = set()
    for run, job in queued:
        for state in (states[number] for number in job.numbers if number in states):
            found = meaning(state.reason) if state.waits else None
            if found is not None and found.outlook != "turn" and (job.stage, state.reason) not in warned:
                warned.add((job.stage, state.reason))
                words = found.words(run, job.job, resources_key(job.stage), state.excluded)
                warn(console, f"{stage_words(job.stage)}: job {job.job} waits ({state.reason}): {words}")


def _states(numbers: Sequence[str]) -> dict[str, JobState]:
    """States of jobs, when the scheduler has looked at them; {} if it does not answer."""
    states: dict[str, JobState] = {}
    with suppress(ValueError):
        states = scheduler.jobs(numbers)
        if any(state.waits and state.reason in _UNSEEN for state in states.values()):
            time.sleep(_PAUSE)
            states = scheduler.jobs(numbers)
    return states
