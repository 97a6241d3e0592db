"""Reading of files of which any may be missing or damaged: that becomes a line for the reader, and the rest is read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

MALFORMED = (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, IndexError)
"""Errors of code that meets values of another kind than it expects: their file is damaged."""
T = TypeVar("T")
_Signature = tuple[tuple[int, int, int] | None, ...]


@dataclass(frozen=True)
class _Kept:
    signature: _Signature
    read_at: float
    """By `time.monotonic`."""
    value: Any
    problems: list[str]


class Reading:
    """Reads parts of a run.

    Args:
        keeps: whether they are read again and again: one whose files have not changed is then kept.
    """

    def __init__(self, *, keeps: bool = False) -> None:
        self._keeps = keeps
        self._kept: dict[str, _Kept] = {}
        self.problems: list[str] = []
        """What was missing or could not be read since `begin`."""

    def begin(self) -> None:
        """Forget the problems."""
        self.problems = []

    def read(self, what: str, function: Callable[[], T], otherwise: T) -> T:
        """Something that may be missing or damaged."""
        try:
            return function()
        except FileNotFoundError as error:
            self.problems.append(f"{what} is missing ({Path(error.filename).name if error.filename else error})")
        except (OSError, *MALFORMED) as error:
            self.problems.append(f"{what} cannot be read: {str(error) or type(error).__name__}")
        return otherwise

    def unless_kept(
        self,
        key: str,
        what: str,
        files: Iterable[Path],
        function: Callable[[], T],
        otherwise: T,
        *,
        seconds: float = 0.0,
    ) -> T:
        """`read`, or what it gave before if the files have not changed.

        Args:
            key: name of the part.
            what: its files, for problems.
            files: that it is made of; of folders the entries are compared by their number and time alone.
            function: reads it.
            otherwise: value where it cannot be read.
            seconds: it is not read again before, changed or not.
        """
        if not self._keeps:
            return self.read(what, function, otherwise)
        now, signature = time.monotonic(), tuple(map(_signature, files))
        kept = self._kept.get(key)
        if kept is None or (kept.signature != signature and now >= kept.read_at + seconds):
            before = len(self.problems)
            value = self.read(what, function, otherwise)
            kept = self._kept[key] = _Kept(signature, time.monotonic(), value, self.problems[before:])
        else:
            self.problems += kept.problems
        found: T = kept.value
        return found


def _signature(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
