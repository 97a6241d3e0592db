"""Errors of shared file systems that pass: tried again, and named when they do not pass."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pipeline.common.errors import MachineError

PAUSES_S = (0.1, 1.0, 5.0)
"""Waits before the second, third and fourth attempt."""
PASSING = frozenset({errno.EIO, errno.ESTALE})
"""A server that was away, and a handle from before it came back."""

Result = TypeVar("Result")


def retried(action: Callable[[], Result], path: Path, what: str, again: Callable[[], object] | None = None) -> Result:
    """The result of reading a file.

    Args:
        action: What reads. It is called again after `PAUSES_S` when the error is one of `PASSING`.
        path: The file.
        what: What is read of it, for the message.
        again: Called before each further attempt, to open the file anew. What it raises counts as the attempt's error.

    Raises:
        MachineError: All attempts failed. Other errors come through as they are.
    """
    for pause in (*PAUSES_S, None):
        try:
            return action()
        except OSError as error:
            if error.errno not in PASSING:
                raise
            if pause is None:
                name = errno.errorcode[error.errno]
                raise MachineError(
                    f"{path}: {what} failed {len(PAUSES_S) + 1} times, {name}: {error.strerror}; check the file system "
                    "of this node, and start again to resume from the latest checkpoint"
                ) from error
        time.sleep(pause)
        if again is not None:
            with contextlib.suppress(OSError):  # then the next attempt fails as well
                again()
    raise AssertionError
