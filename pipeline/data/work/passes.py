"""Passes: a stage is a list of them. A run does the missing jobs of the first pass that is not complete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeline.common import links
from pipeline.common.console import warn
from pipeline.data.work.job import ReceiptJob, StageJob
from pipeline.data.work.sorted_runs import DamagedResult


@dataclass(frozen=True)
class Pass:
    """Jobs that may be done in any order, when those of the passes before it are done.

    Attributes:
        name: of the pass, for messages.
        jobs: returns all of its jobs; called when the passes before it are done.
        shared: returns what its workers have in common, by the folder of a job (`ReceiptJob.make`).
    """

    name: str
    jobs: Callable[[], Sequence[ReceiptJob]]
    shared: Callable[[], Mapping[Path, Any]] = dict


@dataclass
class MissingJobs:
    """Jobs without receipts of passes that can be run at one time.

    Attributes:
        names: of the passes.
        jobs: of all of them.
        shared: of all of them.
    """

    names: list[str] = field(default_factory=list)
    jobs: list[ReceiptJob] = field(default_factory=list)
    shared: dict[Path, Any] = field(default_factory=dict)


def missing_jobs(lists: Iterable[Iterable[Pass]]) -> MissingJobs:
    """Missing jobs of the first pass that is not complete of each list.

    Args:
        lists: of passes; no pass of a list depends on one of another.
    """
    found = MissingJobs()
    for passes in lists:
        for each in passes:
            if missing := [job for job in each.jobs() if job.find() is None]:
                found.names += [each.name] if each.name not in found.names else []
                found.jobs += missing
                found.shared |= each.shared()
                break
    return found


_TIMES = 10


class Rounds:
    """Ends a stage whose jobs are made, and missing again, repeatedly."""

    def __init__(self) -> None:
        self._made: Counter[tuple[Path, int | str]] = Counter()

    def count(self, what: str, jobs: Sequence[StageJob[Any]]) -> str:
        """Count jobs that were missing, and are complete after a round; returns a message if one was made too often.

        Args:
            what: pass of the jobs, for the message.
            jobs: of the round.
        """
        made = [(job.folder, job.name) for job in jobs]
        self._made.update(made)
        if all(self._made[each] <= _TIMES for each in made):
            return ""
        return f"jobs of {what} are made and removed repeatedly; is another command running with other settings?"


@contextmanager
def removing_damaged(console: Console) -> Iterator[None]:
    """Remove a file that is found inside to be damaged, so that its job is missing again."""
    try:
        yield
    except DamagedResult as error:
        warn(console, f"{error}; it is made again")
        links.remove(error.path, missing_ok=True)
