"""Signals that come at the wrong moment."""

import signal
import sys
import time
from typing import Any

import pytest

from pipeline.common.signals import ignore, repeat_lost_interrupts


def test_a_signal_that_comes_while_it_begins_to_be_ignored_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python would print a traceback of one that it has taken note of, but has no handler for any more."""
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    put = signal.signal

    def comes_first(number: int, handler: Any) -> Any:
        signal.raise_signal(number)
        return put(number, handler)

    try:
        with monkeypatch.context() as patched:
            patched.setattr(signal, "signal", comes_first)
            ignore(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert came == [] and signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        put(signal.SIGTERM, before)


def test_a_signal_that_another_thread_has_taken_prints_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: seen.append(str(unraisable.exc_value)))
    ignore()
    ignore()

    class Leaves:
        def __init__(self, message: str) -> None:
            self.message = message

        def __del__(self) -> None:
            raise OSError(self.message)  # nobody can catch it, as nobody can catch CPython's

    for message in ("Signal 15 ignored due to race condition", "disk quota exceeded"):
        Leaves(message)
    assert seen == ["disk quota exceeded"]


def test_an_interrupt_inside_a_finalizer_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    repeat_lost_interrupts()

    class Interrupted:
        def __del__(self) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Interrupted()
        time.sleep(60)
