"""Dates in metadata as whole seconds, which order documents: no float, no time zone of the machine."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any

DATE_VERSION = 1
_FIRST = datetime(1, 1, 1, tzinfo=UTC)
_UNIX = int((datetime(1970, 1, 1, tzinfo=UTC) - _FIRST).total_seconds())
_LATEST = int((datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC) - _FIRST).total_seconds())
_DAY = re.compile(r"(\d{4})(?:[-/.]?(\d{1,2})(?:[-/.]?(\d{1,2}))?)?", re.ASCII)
_CLOCK = re.compile(r"[T ](\d{2}):?(\d{2})(?::?(\d{2})(?:[.,]\d+)?)?\s*(Z|UTC|GMT|[+-]\d{2}(?::?\d{2})?)?", re.ASCII)


def seconds(value: Any) -> int:
    """Seconds since the year 1, plus 1, of a date; 0, the oldest, where it is none.

    Args:
        value: a string like `2024`, `2024-02`, `2024-02-29`, `20240229`, one of these with a time, the date of a mail,
            or a number: seconds since 1970, or thousandths of them. A date without a time zone is in UTC.
    """
    if isinstance(value, bool):
        return 0
    if isinstance(value, int | float):
        return _of_number(value)
    return _of_text(value.strip()[:64]) if isinstance(value, str) else 0


def _of_number(value: float) -> int:
    if not abs(value) < 2**53:
        return 0
    whole = int(value)
    if abs(whole) > 10**11:  # after the year 5000, if they were seconds
        whole //= 1000
    found = whole + _UNIX
    return found + 1 if 0 <= found <= _LATEST else 0


def _of_text(text: str) -> int:
    day = _DAY.match(text)
    if day is None or (text.isascii() and text.isdigit() and len(text) not in (4, 6, 8)):
        return _of_mail(text)
    clock = _CLOCK.fullmatch(text, day.end())
    if clock is None and day.end() != len(text):
        return 0
    try:
        moment = datetime(int(day[1]), int(day[2] or 1), int(day[3] or 1), tzinfo=UTC)
        if clock is not None:
            moment += timedelta(hours=int(clock[1]), minutes=int(clock[2]), seconds=int(clock[3] or 0))
            moment -= _offset(clock[4])
        return int((moment - _FIRST).total_seconds()) + 1
    except (ValueError, OverflowError):
        return 0


def _offset(zone: str | None) -> timedelta:
    if zone is None or zone[0] not in "+-":
        return timedelta()
    digits = zone[1:].replace(":", "").ljust(4, "0")
    offset = timedelta(hours=int(digits[:2]), minutes=int(digits[2:]))
    return -offset if zone[0] == "-" else offset


def _of_mail(text: str) -> int:
    if text.isdigit():
        return _of_number(int(text)) if text.isascii() else 0
    try:
        moment = parsedate_to_datetime(text)
        moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
        return int((moment - _FIRST).total_seconds()) + 1
    except (ValueError, TypeError, IndexError, OverflowError):
        return 0
