"""Requests that are sent again: with growing pauses, for as long as the patience of the settings allows."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from pipeline.common.errors import UserError
from pipeline.common.objects.access import RemoteAccess
from pipeline.common.objects.failures import Action, failure, kind_of
from pipeline.common.objects.urls import ObjectUrl

R = TypeVar("R")
_FIRST_S, _LONGEST_S = 0.1, 20.0
"""Bounds of the pause after the first failure, and of any."""
_RENEWED = 2
"""Refusals of a user that are final: credentials are fetched anew after the first."""


class Abandoned(Exception):
    """Nobody waits for the answer to a request any more."""


@dataclass
class RequestCounts:
    """Counts of requests of this process, and of bytes that came (`bytes`) and were sent (`written`)."""

    sent: int = 0
    failed: int = 0
    bytes: int = 0
    written: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def count(self, *, sent: int = 0, failed: int = 0, bytes: int = 0, written: int = 0) -> None:
        """Add to the counts."""
        with self.lock:
            self.sent, self.failed = self.sent + sent, self.failed + failed
            self.bytes, self.written = self.bytes + bytes, self.written + written


COUNTS = RequestCounts()


def retrying(
    request: Callable[[], R],
    url: ObjectUrl,
    action: Action,
    access: RemoteAccess,
    *,
    renew: Callable[[], object] = lambda: None,
    progress: Callable[[], int] = lambda: 0,
    abandoned: threading.Event | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> R:
    """The answer to a request, which is sent again where that may help.

    Args:
        request: sends it; after a failure it is called again, and may continue where it was.
        url: for messages.
        action: for messages.
        access: has the patience.
        renew: opens the store anew, with the credentials that there are then.
        progress: a number that grows while something comes; the patience begins anew with it.
        abandoned: set when nobody waits any more.
        clock: seconds of a clock that never goes back.

    Raises:
        UserError: it failed for good; the message says what can be done.
        Abandoned: nobody waits any more.
    """
    attempts = denied = pauses = 0
    since, before = clock(), progress()
    while True:
        if abandoned is not None and abandoned.is_set():
            raise Abandoned
        COUNTS.count(sent=1)
        attempts += 1
        try:
            return request()
        except (UserError, Abandoned, TypeError):
            raise
        except Exception as error:
            COUNTS.count(failed=1)
            kind, _ = kind_of(error)
            if progress() > before:
                since, before, pauses = clock(), progress(), 0
            if kind in ("denied", "unauthenticated", "no credentials"):
                denied += 1
            may_pass = kind in ("passing", "expired") or (denied and denied < _RENEWED)
            if not may_pass or clock() - since > access.patience_s:
                raise failure(error, url, action, attempts) from None
            if kind != "passing":
                renew()
        # Full jitter: workers that failed together do not come back together.
        pause = random.uniform(0, min(_LONGEST_S, _FIRST_S * 2.0**pauses))
        pauses += 1
        if abandoned is None:
            time.sleep(pause)
        else:
            abandoned.wait(pause)
