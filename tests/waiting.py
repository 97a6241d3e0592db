"""Waiting for what another process or thread is about to do."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def until(
    condition: Callable[[], T],
    process: subprocess.Popen[Any] | None = None,
    *,
    why: str = "waited in vain",
    seconds: float = 300.0,
    pause: float = 0.02,
) -> T:
    """What a condition gives as soon as that is true.

    Args:
        condition: asked again and again.
        process: that has to run meanwhile; if it ends, what it printed is shown.
        why: the message of a failure.
        seconds: after which it is one; generous, since nothing depends on speed.
        pause: seconds from one question to the next.
    """
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < end, why
        time.sleep(pause)
    return found


def runs(pid: int) -> bool:
    """Whether a process has not ended yet, be it that nobody has asked for its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
