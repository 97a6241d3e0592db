"""The time that each rank works in a step, without waiting for the others, and the slowest rank.

Every rank takes as long for a step as the slowest one, since they wait for one another: their step times say nothing
about who it is. The time that each of them does not wait does.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_SCHEDSTAT = Path("/proc/thread-self/schedstat")
"""The kernel's times of this thread: nanoseconds on a core, nanoseconds of waiting for one, turns."""
_STEPS = 20
"""Steps in a row in which a rank must be the slowest before it is reported."""
_RATIO = 1.5
"""Factor over the median that it must work."""
_SHARE = 0.1
"""Share of the step that its work beyond the median must take: below that nobody waits for it."""
_QUIET = 100
"""Steps in which it is not reported again."""


class WorkClock:
    """Seconds that this thread has worked since it was asked last; always asked in the thread that trains.

    That is time on a core, and time of waiting for one that others keep busy. A thread that waits in a collective of
    gloo sleeps, which does not count; nor does a disk that keeps it waiting, so time of waiting for data is added by
    the caller. On a GPU this is the work of the host alone: a GPU that is slower than the others is not seen. A thread
    that waits for a GPU keeps its core busy, so that is left out by the caller, too.
    """

    def __init__(self) -> None:
        self._last = _worked()

    def take(self) -> float:
        """Since the last call, or since this object was made."""
        now = _worked()
        seconds, self._last = now - self._last, now
        return max(0.0, seconds)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """A context whose time does not count as work."""
        before = _worked()
        try:
            yield
        finally:
            self._last += _worked() - before


class WallClock:
    """Seconds since it was asked last, without those in which the process was stopped.

    Args:
        stopped: seconds of that so far.
    """

    def __init__(self, stopped: Callable[[], float]) -> None:
        self._stopped = stopped
        self._last, self._last_stopped = time.monotonic(), stopped()
        self._suspended = 0.0

    def take(self) -> float:
        """Since the last call, or since this object was made."""
        stopped, now = self._stopped(), time.monotonic()
        suspended = max(0.0, stopped - self._last_stopped)
        seconds = max(0.0, now - self._last - suspended)
        self._last, self._last_stopped = now, stopped
        self._suspended += suspended
        return seconds

    def suspended(self) -> dict[str, float]:
        """Metrics of the time that `take` has left out since this was asked last; {} where the process always ran."""
        seconds, self._suspended = self._suspended, 0.0
        return {"suspended": seconds} if seconds else {}


def _worked() -> float:
    return time.thread_time() + _waited_for_a_core()


def _waited_for_a_core() -> float:
    try:
        return int(_SCHEDSTAT.read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):  # not Linux, or a kernel without these statistics
        return 0.0


def summary(seconds: list[float]) -> dict[str, Any]:
    """Median and maximum of the seconds by rank, the slowest rank and its ratio to the median; {} for one rank.

    The lower one of two medians: of two ranks, that of the faster.
    """
    if len(seconds) < 2:
        return {}
    median, longest = statistics.median_low(seconds), max(seconds)
    ratio = longest / median if median > 0 else 1.0
    return {"median": median, "max": longest, "slowest": seconds.index(longest), "ratio": ratio}


class Stragglers:
    """Sees the summary of every step and tells of a rank that keeps the others waiting, step after step.

    Args:
        host: Of a rank, or None where that is not known; asked when there is something to tell.
    """

    def __init__(self, host: Callable[[int], str | None]) -> None:
        self._host = host
        self._last: deque[tuple[int, float]] = deque(maxlen=_STEPS)
        self._reported_step: int | None = None

    def see(self, step: int, work: dict[str, Any], seconds: float) -> str | None:
        """A warning, or None.

        Args:
            step: Number of the step.
            work: Its `summary`.
            seconds: How long it took all ranks.
        """
        if work["ratio"] <= _RATIO or work["max"] - work["median"] <= _SHARE * seconds:
            self._last.clear()
            return None
        self._last.append((work["slowest"], work["ratio"]))
        ranks, ratios = zip(*self._last, strict=True)
        if len(ranks) < _STEPS or len(set(ranks)) > 1:
            return None
        if self._reported_step is not None and 0 <= step - self._reported_step < _QUIET:
            return None
        self._reported_step = step
        rank, host = ranks[0], self._host(ranks[0])
        return (
            f"rank {rank}{f' on {host}' if host else ''} works {statistics.median(ratios):.1f} times as long as the "
            f"median rank, in each of the last {_STEPS} steps, and the others wait for it. Look at what else runs "
            "there, and at its clock rate; with pp, its stage may have more to do than the others"
        )
