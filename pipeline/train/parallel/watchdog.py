"""Ends a process that has not got on for too long, with the stacks of its threads.

Ranks wait for one another in every step: one that is stuck stops them all, without an error.
"""

from __future__ import annotations

import faulthandler
import io
import os
import sys
import threading
import time
import traceback
from contextlib import suppress
from types import TracebackType
from typing import Literal

from pipeline.config.run import TimeLimitsConfig
from pipeline.errors import EXIT_HANG, HangError
from pipeline.train.parallel.rank import record_error

Phase = Literal["init", "first_step", "step", "save"]

_DOING: dict[Phase, str] = {
    "init": "finding the other processes and building the model",
    "first_step": "the first step",
    "step": "a step",
    "save": "saving or loading a checkpoint",
}
_INTERVAL = 1.0
"""Seconds between two looks, at most."""


class Watchdog:
    """A context manager in which every phase of a run has its time limit; over it, the process ends with code 76.

    The clock starts in the phase "init". Time in which the whole process is stopped (Ctrl-Z, a suspended machine) does
    not count.
    """

    def __init__(self, limits: TimeLimitsConfig) -> None:
        self._limits: dict[Phase, float] = {
            "init": limits.init_seconds,
            "first_step": limits.first_step_seconds,
            "step": limits.step_seconds,
            "save": limits.save_seconds,
        }
        self._main = threading.get_ident()
        self._lock = threading.Lock()
        self._phase: Phase | None = "init"
        self._step: int | None = None
        self._elapsed = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def phase(self, phase: Phase, step: int | None = None) -> None:
        """What begins now, at which step (for the message); starts the clock anew."""
        with self._lock:
            self._phase, self._step, self._elapsed = phase, step, 0.0

    def beat(self) -> None:
        """The phase goes on and gets on: starts the clock anew."""
        with self._lock:
            self._elapsed = 0.0

    def pause(self) -> None:
        """No limit until the next `phase`: for work that takes as long as it takes, like copying data."""
        with self._lock:
            self._phase = None

    def _watch(self) -> None:
        interval = min(_INTERVAL, *(limit / 4 for limit in self._limits.values()))
        last = time.monotonic()
        while not self._ended.wait(interval):
            now = time.monotonic()
            # If this thread was not run either, nothing was.
            gap, last = min(now - last, 2 * interval), now
            with self._lock:
                self._elapsed += gap
                phase, step, elapsed = self._phase, self._step, self._elapsed
            if phase is not None and elapsed > self._limits[phase]:
                self._end(phase, step, elapsed)

    def _end(self, phase: Phase, step: int | None, elapsed: float) -> None:
        what = _DOING[phase] if step is None else f"{_DOING[phase]} (step {step})"
        rank, world = os.environ.get("RANK", "0"), int(os.environ.get("WORLD_SIZE", "1"))
        others = "; look in the logs at where the other ranks were, too" if world > 1 else ""
        message = (
            f"no progress for {elapsed:.0f} s in {what}; if it only needs longer, raise "
            f"launch.time_limits.{phase}_seconds ({self._limits[phase]:g}){others}"
        )
        with suppress(Exception):  # whatever happens to the telling, the process ends
            frame = sys._current_frames().get(self._main)
            stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
            record_error(HangError(message), f"Where the main thread was (most recent call last):\n{stack}")
        with suppress(Exception):
            print(f"hang: rank {rank} of {world}: {message}\nStacks of all threads:", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(_descriptor(), all_threads=True)
        with suppress(Exception):
            sys.stdout.flush()
        os._exit(EXIT_HANG)


def _descriptor() -> int:
    """stderr, or the descriptor that it has where somebody has put an object without one in its place."""
    try:
        return sys.stderr.fileno()
    except (io.UnsupportedOperation, AttributeError, ValueError):
        return 2
