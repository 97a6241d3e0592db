"""Rounds of a stage: what is missing is made until nothing is, and what is damaged is removed to be made again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeline.common import links
from pipeline.common.console import warn
from pipeline.common.errors import MachineError
from pipeline.data.work.job import StageJob
from pipeline.data.work.sorted_runs import DamagedResult

_TIMES = 10


class Rounds:
    """Ends a stage whose jobs are made, and missing again, repeatedly."""

    def __init__(self) -> None:
        self._made: Counter[tuple[Path, int | str]] = Counter()

    def count(self, what: str, jobs: Sequence[StageJob[Any]]) -> None:
        """Count jobs that were missing, and are complete after a round.

        Args:
            what: pass of the jobs, for the message.
            jobs: of the round.

        Raises:
            MachineError: one was made too often.
        """
        made = [(job.folder, job.name) for job in jobs]
        self._made.update(made)
        if any(self._made[each] > _TIMES for each in made):
            raise MachineError(
                f"jobs of {what} are made and removed repeatedly; is another command running with other settings?"
            )


@contextmanager
def removing_damaged(console: Console) -> Iterator[None]:
    """Remove a file that is found inside to be damaged, so that its job is missing again."""
    try:
        yield
    except DamagedResult as error:
        warn(console, f"{error}; it is made again")
        links.remove(error.path, missing_ok=True)
