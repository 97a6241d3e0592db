"""Numbers as a report shows them."""

from __future__ import annotations

import math
import re
import time

from pipeline.common.format import duration, percent
from pipeline.common.redaction import masked

NONE = "–"
"""Sign for a figure that is missing."""
_TURNS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
"""Characters that turn the direction of what comes after them."""
_UNSEEN = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff{_TURNS}]")
"""Those, controls but for tabs and line ends, and halves of pairs."""


def si(value: float, digits: int = 4) -> str:
    """Short, for axes: `250k`, `1.5B`, `0.002`."""
    size = abs(value)
    for limit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if size >= limit * 0.9999:
            return f"{value / limit:.{digits}g}{letter}"
    if 0 < size < 1e-3:
        mantissa, exponent = f"{value:.{digits - 2}e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.{digits}g}"


def count(value: float | None) -> str:
    """A whole number, with commas."""
    return NONE if value is None or not math.isfinite(value) else f"{value:,.0f}"


def figure(value: float | None) -> str:
    """Six digits."""
    if value is None or not math.isfinite(value):
        return NONE
    return f"{value:,.0f}" if abs(value) >= 1e6 else f"{value:.6g}"


def in_percent(value: float | None) -> str:
    """A fraction."""
    return NONE if value is None or not math.isfinite(value) else percent(value, 1)


def seconds(value: float | None) -> str:
    """A length of time."""
    return NONE if value is None or not math.isfinite(value) else duration(max(0.0, value))


def moment(value: float | None) -> str:
    """A point in time, in UTC: a report is read in other places."""
    if value is None or not math.isfinite(value):
        return NONE
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(value))
    except (OverflowError, ValueError, OSError):
        return NONE


def clean(text: str) -> str:
    """Text of others as it may be shown.

    Without what is not a character to show (controls, halves of pairs, turns of direction), and `masked`.
    """
    return masked(_UNSEEN.sub("\ufffd", text))
