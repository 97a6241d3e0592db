"""Watch over workers that are inside of a parser of another package: which record it has, and what it takes.

The bounds decide no dataset: a worker above one is killed, and its unit fails with the name of the record. The run goes
on once the user repairs the record, or lists it in `skip_records` of the source.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from pipeline.common.format import size
from pipeline.data.sources.foreign_parser import SLOT_BYTES

CPU_BOUND_S = 600.0
"""CPU seconds that a parser may take for a record, or a batch of small ones: a thousand times what the largest take."""
MEMORY_BOUND = 16 * 2**30
"""Bytes by which a worker may grow meanwhile."""
_PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that a process gets when the thread that started it ends."""
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def new_slot() -> ctypes.Array[ctypes.c_char]:
    """Memory that a worker shares with its parent, forked or spawned."""
    slot: ctypes.Array[ctypes.c_char] = multiprocessing.get_context("spawn").RawArray(ctypes.c_char, SLOT_BYTES)
    return slot


def die_with(parent: int) -> None:
    """End when the parent does, whatever this process is inside of then."""
    with contextlib.suppress(AttributeError):  # not Linux; there the closed pipe ends it, a little later
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it was gone already
        os._exit(1)


@dataclass(frozen=True)
class Parsed:
    """A call of a parser: its name, and the record; or the first and the last one of a batch."""

    parser: str
    records: tuple[str, ...]

    @property
    def is_batch(self) -> bool:
        """Tell whether it is unknown which record it is."""
        return len(set(self.records)) > 1

    def __str__(self) -> str:
        names = " to ".join(dict.fromkeys(self.records)) or "a text"
        return f"{self.parser} with {'the batch ' if self.is_batch else ''}{names}"


class WorkerWatch:
    """View of a worker from outside.

    Args:
        slot: shared with it.
    """

    def __init__(self, slot: ctypes.Array[ctypes.c_char]) -> None:
        self._slot = slot
        self._seen = b""
        self._begin = (0.0, 0)
        self.killed_for = ""
        """Bound that the worker was above when it was killed; else empty."""

    @property
    def parsed(self) -> Parsed | None:
        """The call that the worker is in, or was in when it died."""
        text = self._slot.value
        if not text:
            return None
        parser, *records = text.decode("utf-8", "replace").split("\n")
        return Parsed(parser, tuple(records))

    def is_above(self, pid: int) -> str:
        """The bound that the call is above since it was first seen; empty for none."""
        text = self._slot.value
        used = usage(pid) if text else None
        if used is None or text != self._seen:
            self._seen = text if used else b""
            self._begin = used or self._begin
            return ""
        seconds, grown = used[0] - self._begin[0], used[1] - self._begin[1]
        if seconds > CPU_BOUND_S:
            return f"{seconds:.0f} s of CPU time, more than {CPU_BOUND_S:.0f} s"
        if grown > MEMORY_BOUND:
            return f"{size(grown)} of memory, more than {size(MEMORY_BOUND)}"
        return ""


def usage(pid: int) -> tuple[float, int] | None:
    """CPU seconds and resident bytes of a process; None where /proc does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS, int(fields[21]) * _PAGE
    except (OSError, ValueError, IndexError):
        return None
