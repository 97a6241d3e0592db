"""Requests to stop: they set a flag, and the loop looks at it between steps.

Nothing else happens in a signal handler: a collective or a save there would meet the loop halfway through a step.
"""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)


class StopRequest:
    """A context manager that listens for SIGTERM, SIGUSR2, Ctrl-C and the run folder's `stop` file.

    A second Ctrl-C does not wait for the step to end.

    Args:
        stop_file: the file, or None for a process that leaves looking at it to another one.
        to_the_end: the process has nothing else to do and ends after this. From then on signals are ignored: who asks
            twice must not kill ranks that wait for the last one to close its files.
    """

    def __init__(self, stop_file: Path | None, *, to_the_end: bool = False) -> None:
        self._file = stop_file
        self._to_the_end = to_the_end
        self._signal: int | None = None
        self._previous: dict[int, signal.Handlers | int | object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_IGN if self._to_the_end else handler)  # type: ignore[arg-type]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal == number == signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = number

    def reason(self) -> str | None:
        """Why the run should stop now, or None."""
        if self._signal is not None:
            return signal.Signals(self._signal).name
        return "stop file" if self._file is not None and self._file.exists() else None

    def consume(self) -> None:
        """Remove the stop file, so that the next attempt does not stop at once."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)
