"""Signals to a command whose processes are a step of an allocation: they are handed on through the scheduler.

In a job the scheduler itself signals all steps. It knows nothing of a Ctrl-C to a command in an allocation. Nor can
srun be asked: it kills its step at once when it gets SIGTERM.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable
from contextlib import suppress

from slurm import scheduler
from slurm.jobs import Stage

_AGAIN = 1.0
"""Seconds until the scheduler is asked again for a step that has not begun yet."""
_AWAY = 5.0
"""Seconds until a scheduler that did not answer is asked again."""


class StepSignals:
    """The signals of a command to its step: the first one stops it, a second Ctrl-C kills it.

    Args:
        job: of the allocation.
        stage: of the step. Training saves when it is told to stop.
        say: for what the user should know.
    """

    def __init__(self, job: str, stage: Stage, say: Callable[[str], None]) -> None:
        self._job, self._stage, self._say = job, stage, say
        self.name = f"{stage}-{secrets.token_hex(4)}"
        """Name of the step, which no other step of the allocation has."""
        self.first: signal.Signals | None = None
        """The first signal that is to stop the processes."""
        self.killed = False
        """The processes were killed, by a second Ctrl-C."""
        self._interrupts = 0
        self._left: list[signal.Signals] = []
        """Signals that the step is still to get."""
        self._next_try = 0.0
        self._failures = 0

    def note(self, number: int, *, runs: bool) -> None:
        """Note a signal, inside of its handler.

        Args:
            number: of it.
            runs: the step may run.

        Raises:
            KeyboardInterrupt: a second Ctrl-C, and nothing runs; or a third one.
        """
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 2 or (self._interrupts == 2 and not runs):
                raise KeyboardInterrupt
            if self._interrupts == 1:
                what = "Stopping after this step" if self._stage == "train" else "Stopping"
                with suppress(OSError):
                    os.write(2, f"\n{what}; once more ends all processes at once.\n".encode())
        kills = self._interrupts == 2 and number == signal.SIGINT
        # Processes that only begin know SIGTERM and SIGUSR2 as stops; an evaluation ignores the latter, as in a job.
        passes = signal.SIGKILL if kills else signal.SIGUSR2 if number == signal.SIGUSR2 else signal.SIGTERM
        if self.first is None and (passes == signal.SIGTERM or self._stage == "train"):
            self.first = signal.Signals(number)
        self._left.append(passes)

    def hand_on(self) -> None:
        """Send the step what it is still to get. One that srun has not begun yet gets it at a later call."""
        if not self._left or time.monotonic() < self._next_try:
            return
        self._next_try = time.monotonic() + _AGAIN
        try:
            step = scheduler.find_step(self._job, self.name)
            while step is not None and self._left:
                scheduler.signal_step(step, self._left[0])
                self.killed |= self._left.pop(0) == signal.SIGKILL
        except scheduler.SchedulerError as error:
            self._next_try = time.monotonic() + (_AWAY if error.away else _AGAIN)
            self._failures += 1
            # A Ctrl-C in a terminal ends a question that is being asked, too: one failure says nothing.
            if self._failures == 2:
                self._say(f"warning: {error}; trying again until it answers. The run's stop file needs no scheduler")
