"""The signals that ask a process to stop."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

_AGAIN_S = 0.1
"""Seconds until an interrupt comes again; the callback that it came in has returned by then, or it comes once more."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """SIGTERM and SIGUSR2, which schedulers send, and SIGHUP, which the end of a terminal or login sends.

    A process under `nohup` has been started with SIGHUP ignored, and continues to ignore it.
    """
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGUSR2) if ignored else (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP)


def ignore(*numbers: int) -> None:
    """Let signals do nothing from now on.

    Python prints a traceback of one that comes while it is told to ignore it; here it waits, and is dropped. One that
    another thread has taken at that moment cannot wait: its traceback is not printed.
    """
    if not isinstance(sys.unraisablehook, _AllButLateSignals):
        sys.unraisablehook = _AllButLateSignals(sys.unraisablehook)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def repeat_lost_interrupts() -> None:
    """Raise a Ctrl-C again that came inside a finalizer or a weak reference's callback: Python drops what those raise.

    It does so in imports, too, which hold their locks by weak references.
    """
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            # Not from here: what a hook raises is dropped as well.
            main = threading.main_thread().ident
            threading.Timer(_AGAIN_S, signal.pthread_kill, (main, signal.SIGINT)).start()
        else:
            before(unraisable)

    sys.unraisablehook = hook


class _AllButLateSignals:
    """An `unraisablehook` that is silent about signals that came while they began to be ignored."""

    def __init__(self, hook: Callable[[Any], object]) -> None:
        self._hook = hook

    def __call__(self, unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, OSError) and str(error).endswith("ignored due to race condition")):
            self._hook(unraisable)
