"""The end of an array, as the job that finishes after it sees it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slurm import jobs, scheduler
from slurm.jobs import ARRAYS, Job
from slurm.record.launch_log import launches
from slurm.scheduler import SchedulerError


@dataclass(frozen=True)
class ArrayEnd:
    """Tasks of an array by their end."""

    job: str
    tasks: int
    cancelled: int
    completed: int

    @property
    def unwanted(self) -> bool:
        """True if somebody cancelled the array: tasks that time out, crash or lose their node have other states."""
        return self.cancelled > 0 and not self.completed

    @property
    def words(self) -> str:
        """`array 77 was cancelled (3 of 3 tasks)`."""
        return f"array {self.job} was cancelled ({self.cancelled} of {self.tasks} tasks)"


def array_end(run: Path, job: str, *, has_sacct: bool) -> ArrayEnd | None:
    """The end of the array that a job has waited for; None if it has waited for none.

    Args:
        run: folder.
        job: the number of the job that finishes.
        has_sacct: whether accounting can be asked.
    """
    sent = jobs.sent(run)
    after = {number for each in sent if job in each.numbers for number in each.after}
    array = next((each for each in sent if each.stage in ARRAYS and each.job in after), None)
    if array is None:
        return None
    states = list(_states(run, array, has_sacct=has_sacct).values())
    cancelled = sum(state.startswith("CANCELLED") for state in states)
    return ArrayEnd(array.job, array.tasks, cancelled, states.count("COMPLETED"))


def _states(run: Path, array: Job, *, has_sacct: bool) -> dict[str, str]:
    """Tasks of which an end is known: by the controller, then by accounting, then by the ledger."""
    found: dict[str, str] = {}
    for launch in launches(run, array.stage):
        if launch.job in array.numbers and launch.end is not None:
            # Nothing followed what the scheduler ended, so that it was neither requeued nor timed out.
            ended = {"scheduler": "CANCELLED", "done": "COMPLETED"}
            found[launch.job] = ended.get(launch.end.next, "FAILED")
    known: dict[str, str] = {}
    with suppress(SchedulerError):
        known |= {number: state.state for number, state in scheduler.jobs([array.job]).items()}
    missing = [number for number in array.numbers if number not in known]
    if missing and has_sacct:
        with suppress(SchedulerError):
            accounted = scheduler.accounting(missing)
            known |= {number: each.state for number, each in accounted.items() if each.over}
    return {number: state for number in array.numbers if (state := known.get(number, found.get(number)))}
