"""The interface of all loggers, and what each of them is told about the run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar


@dataclass(frozen=True)
class ParentRun:
    """The run that this one is a fork of."""

    folder: Path
    step: int
    """Of the checkpoint that the fork began with."""
    id: str | None
    """`RunInfo.id` of the parent; None if its folder does not have one, or cannot be read."""


@dataclass(frozen=True)
class RunInfo:
    """A run, as its loggers need it. Nothing in it is secret."""

    folder: Path
    """Run folder."""
    config: dict[str, Any]
    """The resolved run file, as JSON values: nested, with the keys of docs/config.md."""
    name: str
    """Name of the run folder."""
    id: str
    """16 hexadecimal digits, the same in all attempts at the run and different in a fork."""
    parent: ParentRun | None
    """Parent run, for a fork."""
    first_step: int
    """Steps that are done when this attempt begins; rows of later steps that were logged before are outdated."""
    total_steps: int
    """Steps of the whole run."""
    attempt: int
    """Number of this attempt, from 1."""


class Logger:
    """A destination of metrics.

    Subclasses need `write` alone, and those of other packages `open`. Each logger is called from a single thread. An
    `OSError` means that a call may succeed later: the row is handed over again. A logger that
    may wait (for a network) belongs behind `BackgroundLogger`, as loggers of other packages are.
    """

    keeps_all: ClassVar[bool] = False
    """True if rows are written even if the run has gone back before they could be."""

    def write(self, row: dict[str, Any]) -> None:
        """Log a row of metrics.

        Args:
            row: numbers and texts by name, nested; as in metrics.jsonl, with `step`, `attempt` and `time` (seconds
                since 1970). A step may have several rows: of the step, of its validation, of its save.

        Raises:
            OSError: it cannot be logged now; the same row comes again.
        """
        raise NotImplementedError

    def rewind(self, step: int) -> None:
        """Forget the rows after a step: the run resumes from there and logs the steps after it again.

        Args:
            step: the last one whose rows stay.
        """

    def close(self) -> None:
        """Flush and close; the run has ended, or this attempt has.

        Raises:
            OSError: rows may be missing.
        """

    def wait(self) -> None:
        """Wait, for a bounded time, for what goes on in the background after `close`."""


def flat(row: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a row, nested keys joined by slashes; hashes and other texts are left out."""
    numbers: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            numbers |= flat(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and name not in ("step", "attempt", "time"):
            numbers[prefix + name] = value
    return numbers
