"""Requests to stop or to save: they set a flag, and the loop looks at it between steps.

Nothing else happens in a signal handler: a collective or a save there would meet the loop halfway through a step.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple

from pipeline.common import links
from pipeline.common.console import on_stop
from pipeline.common.run_files import RunFiles
from pipeline.common.signals import ignore, stop_signals

_ALLOCATION_END = "SLURM_JOB_END_TIME"
"""Set by SLURM in a job that has a time limit: when it ends, in seconds since 1970."""


RESUME_ADVICE = " Run the same command to resume."
"""Last sentence of the reason of a stop, which a job that starts again by itself leaves out."""
_UNMEASURED_SECONDS = 120.0
"""Seconds for a step and a save of which none was measured yet."""


class StopRequest(NamedTuple):
    """Requests of one process, or of any of them, at the end of a step."""

    stop: bool
    save: bool
    unsaved: bool = False
    """Nothing could be saved for too long: save now, or end."""


class Requests:
    """A context manager that listens for `stop_signals`, Ctrl-C, the clock, and files in the run folder.

    A second Ctrl-C does not wait for the step to end.

    Args:
        run: the run folder, where `stop` and `save` are looked for; None for a process that leaves files and clock to
            another one.
        to_the_end: the process has nothing else to do and ends after this. From then on signals are ignored: who asks
            twice must not kill ranks that wait for the last one to close its files.
        started: when the attempt began, by `time.monotonic`; by default now.
        max_minutes: minutes after that at which a stop is asked for.
        before_end: seconds before the end of the job's allocation at which a stop is asked for, where SLURM says
            when that is; None: as long as steps and saves turn out to take, see `note_durations`.
        save_minutes: minutes after the last save at which another one is asked for.
    """

    def __init__(
        self,
        run: Path | None,
        *,
        to_the_end: bool = False,
        started: float | None = None,
        max_minutes: float | None = None,
        before_end: float | None = 0.0,
        save_minutes: float | None = None,
    ) -> None:
        self._stop_file = RunFiles(run).stop if run else None
        self._save_file = RunFiles(run).save if run else None
        self._to_the_end = to_the_end
        self._max_minutes = max_minutes
        self._save_minutes = save_minutes
        self._before_end = before_end
        self._allocation_end = _allocation_end()
        self._begin = time.time()
        self._step_seconds = self._save_seconds = 0.0
        self._saved = time.monotonic()
        self._start = self._saved if started is None else started
        self._handled_save: int | None = None
        self._signal: int | None = None
        self._previous: dict[int, signal.Handlers | int | object] = {}

    def __enter__(self) -> Requests:
        if threading.current_thread() is threading.main_thread():
            for number in (*stop_signals(), signal.SIGINT):
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._to_the_end:
            ignore(*self._previous)
            return
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal == number == signal.SIGINT:
            raise KeyboardInterrupt
        on_stop(number)
        self._signal = number

    def request(self) -> StopRequest:
        """The requests of this process now."""
        return StopRequest(self.reason() is not None, self._wants_save())

    def reason(self) -> str | None:
        """The reason why the run should stop now, or None."""
        if self._signal is not None:
            return signal.Signals(self._signal).name
        if self._stop_file is None:
            return None
        if _touched(self._stop_file) is not None:
            return "stop requested (pipeline cancel or a stop file)"
        if self._max_minutes is not None and time.monotonic() - self._start > 60 * self._max_minutes:
            return f"launch.max_minutes ({self._max_minutes:g})"
        if self._allocation_end is not None and time.time() > self._allocation_end - self._reserve():
            named = "measured" if self._before_end is None else f"launch.stop_before_end_seconds={self._before_end:g}"
            return f"the end of the allocation, {self._reserve():.0f} s ahead ({named})"
        return None

    def note_durations(self, step: float, save: float) -> None:
        """Note the seconds of a step, with all that follows it, and of the longest save so far, 0 if there was none."""
        self._step_seconds = max(step, self._step_seconds)
        self._save_seconds = save

    def _reserve(self) -> float:
        """Seconds before the end of the allocation that must be enough to make the step and to save."""
        if self._before_end is not None:
            return self._before_end
        assert self._allocation_end is not None
        measured = 2 * (self._step_seconds + self._save_seconds)
        enough = measured if self._save_seconds else max(measured, _UNMEASURED_SECONDS)
        return min(enough, (self._allocation_end - self._begin) / 4)

    def _wants_save(self) -> bool:
        if self._save_file is None:
            return False
        due = self._save_minutes is not None and time.monotonic() - self._saved > 60 * self._save_minutes
        return due or _touched(self._save_file) not in (None, self._handled_save)

    def saved(self) -> None:
        """A save has been made: the request for one is fulfilled."""
        self._saved = time.monotonic()
        if self._save_file is not None:
            self._handled_save = _touched(self._save_file)
            with suppress(OSError):  # a file that cannot be removed counts once
                links.remove(self._save_file, missing_ok=True)

    def remove_stop_file(self) -> None:
        """Remove the stop file, so that the next attempt does not stop at once."""
        if self._stop_file is not None:
            with suppress(OSError):  # the state is saved, which must not end as a failure
                links.remove(self._stop_file, missing_ok=True)


def _touched(file: Path) -> int | None:
    """The time of the last write to a file, or None where there is none."""
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return None


def _allocation_end() -> float | None:
    try:
        return float(os.environ[_ALLOCATION_END])
    except (KeyError, ValueError):
        return None
