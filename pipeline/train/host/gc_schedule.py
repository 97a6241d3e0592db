"""Garbage collection of cycles at steps that all ranks have in common.

By itself it does so whenever a process has made enough objects, which is another moment on every rank; each time, all
others wait for the one that collects.
"""

from __future__ import annotations

import gc
from types import TracebackType

EVERY_STEPS = 50
"""Steps between two collections."""


class GcSchedule:
    """A context manager inside which nothing is collected but by `after`; on leaving, all is as it was.

    What lives when the first step is done (modules, compiled code, the model) is never looked at again, so that a
    collection takes milliseconds.
    """

    def __enter__(self) -> GcSchedule:
        self._was_enabled = gc.isenabled()
        self._first = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._first:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()

    def after(self, step: int) -> None:
        """Collect garbage where it is due at the end of a step, counted from 1; every rank calls this in every step."""
        if self._first:
            gc.collect()
            gc.freeze()
            gc.disable()
            self._first = False
        elif step % EVERY_STEPS == 0:
            gc.collect()
