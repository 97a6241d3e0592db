"""The signals that ask a process to stop."""

from __future__ import annotations

import signal
from contextlib import suppress

from pipeline.console import let_go_of_terminal


def stop_signals() -> tuple[signal.Signals, ...]:
    """SIGTERM and SIGUSR2, which schedulers send, and SIGHUP, which the end of a terminal or login sends.

    A process under `nohup` has been started with SIGHUP ignored, and goes on ignoring it.
    """
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGUSR2) if ignored else (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP)


def on_stop(number: int) -> None:
    """What a handler of these signals does first: nothing that is printed from now on fails for want of a terminal."""
    if number == signal.SIGHUP:
        with suppress(OSError):
            let_go_of_terminal()
