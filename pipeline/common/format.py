"""Times, sizes and counts, for people."""

from __future__ import annotations

import re
import time


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h 05 min`, `4 d 7 h`."""
    if seconds < 90:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return minutes(round(seconds / 60))


def minutes(count: int) -> str:
    """The same of whole minutes."""
    if count < 60:
        return f"{count} min"
    hours, rest = divmod(count, 60)
    if hours < 48:
        return f"{hours} h {rest:02d} min" if rest else f"{hours} h"
    return f"{hours // 24} d {hours % 24} h" if hours % 24 else f"{hours // 24} d"


def when(seconds: float) -> str:
    """A point in time, in seconds since 1970, by the clock of this machine: `2026-11-23 10:30:00`."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def listed(reason: str) -> str:
    """Why something ended, as a part of a list with semicolons: no full stop before one, nor at the end."""
    return re.sub(r"(?<!\.)\.(?=;|$)", "", reason)


def size(count: float) -> str:
    """A number of bytes for people, in powers of 1,000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def counted(count: int, noun: str) -> str:
    """`1 unit`, `2 units`, `3 batches`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}{'es' if noun.endswith('ch') else 's'}"


def numbered(noun: str, first: int, last: int) -> str:
    """`steps 3 to 7`, `step 3`."""
    return f"{noun} {first:,}" if first == last else f"{noun}s {first:,} to {last:,}"


def percent(share: float) -> str:
    """A share: `12.5 %`."""
    return f"{100 * share:.4g} %"
