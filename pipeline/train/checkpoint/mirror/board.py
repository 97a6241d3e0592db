"""Messages between ranks about uploads: rank 0 posts a task, and each rank answers it with a note.

It goes through the store by which the ranks have found one another: uploads take as long as they take, and no step may
wait for them, as it would in a collective.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple


class Task(NamedTuple):
    """Something to upload, as rank 0 has posted it."""

    number: int
    """Grows with each task; 0 before the first one."""
    step: int
    upload: str
    """Name of the folder in the mirror."""
    is_dealt: bool
    """Files are dealt to the ranks by size; otherwise each rank has those that it has written."""
    over: int
    """Steps up to this one need nothing any more."""


class Board:
    """The tasks and notes of a start, or of a rewind.

    Args:
        store: of torch, that all ranks are connected to; None of a process alone.
        session: number of the start or rewind within this process.
    """

    def __init__(self, store: Any, session: int) -> None:
        self._store = store
        self._prefix = f"mirror {session}"

    def post(self, task: Task) -> None:
        """Let all ranks know of a task."""
        if self._store is not None:
            self._store.set(f"{self._prefix} task", json.dumps(task))

    def task(self) -> Task | None:
        """The task that was posted last; None before the first one."""
        found = self._read(f"{self._prefix} task")
        return None if found is None else Task(*found)

    def answer(self, number: int, rank: int, note: dict[str, Any]) -> None:
        """Let rank 0 know how a rank's uploads of a task have ended."""
        self._store.set(f"{self._prefix} note {number} {rank}", json.dumps(note))

    def note(self, number: int, rank: int) -> dict[str, Any] | None:
        """The answer of a rank to a task; None as long as there is none."""
        found = self._read(f"{self._prefix} note {number} {rank}")
        return None if found is None else dict(found)

    def _read(self, key: str) -> Any:
        # `get` would wait for a key that is not there.
        return json.loads(self._store.get(key)) if self._store.check([key]) else None
