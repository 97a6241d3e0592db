"""Times, sizes, counts and tables, for people."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")
_END = "<!-- end -->"
"""Line after a table in Markdown that `make docs` writes."""


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h 05 min`, `4 d 7 h`; `0 s` where clocks differ and a time lies ahead."""
    seconds = max(seconds, 0)
    if seconds < 90:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return minutes(round(seconds / 60))


def minutes(count: int) -> str:
    """A duration in whole minutes: `duration` of a number of minutes."""
    if count < 60:
        return f"{count} min"
    hours, rest = divmod(count, 60)
    if hours < 48:
        return f"{hours} h {rest:02d} min" if rest else f"{hours} h"
    return f"{hours // 24} d {hours % 24} h" if hours % 24 else f"{hours // 24} d"


def when(seconds: float) -> str:
    """A point in time, in seconds since 1970, by the clock of this machine: `2026-11-23 10:30:00`."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def cut(text: str, most: int) -> str:
    """A text of at most `most` characters; a longer one ends with an ellipsis."""
    return text if len(text) <= most else text[: most - 1] + "…"


def aligned(rows: Sequence[Sequence[str]], numbers: Sequence[bool] = ()) -> Iterator[str]:
    """Lines of a table without borders, whose columns are as wide as their longest cell.

    Args:
        rows: the head, and rows with as many cells.
        numbers: by column, True to align it at the right; columns after the last one are aligned at the left.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    at_right = [*numbers, *[False] * (len(widths) - len(numbers))]
    for row in rows:
        cells = zip(row, widths, at_right, strict=True)
        yield "  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in cells).rstrip()


def listed(reason: str) -> str:
    """The reason of an end, as a part of a list with semicolons: no full stop before one, nor at the end."""
    return re.sub(r"(?<!\.)\.(?=;|$)", "", reason)


def size(count: float) -> str:
    """A number of bytes for people, in powers of 1,000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def counted(count: int, noun: str) -> str:
    """`1 unit`, `2 units`, `3 batches`, `4 processes`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}{'es' if noun.endswith(('ch', 'ss')) else 's'}"


def numbered(noun: str, first: int, last: int) -> str:
    """`steps 3 to 7`, `step 3`."""
    return f"{noun} {first:,}" if first == last else f"{noun}s {first:,} to {last:,}"


def gib(count: float) -> str:
    """A number of bytes of memory in GiB, without the unit: `0.0123`, `79.6`, `1,024`."""
    value = count / 2**30
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def rounded(count: float, digits: int = 3) -> str:
    """A count with the letters of run files, where that is shorter: `41.9B`, `2.1M`, `512,000`."""
    for letter, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if count >= scale:
            return f"{count / scale:.{digits}g}{letter}"
    return f"{count:,.0f}"


def percent(fraction: float, decimals: int | None = None) -> str:
    """A fraction: `12.5 %`; four digits of it, or a fixed number of decimals."""
    return f"{100 * fraction:.4g} %" if decimals is None else f"{100 * fraction:.{decimals}f} %"


def shape_text(shape: Sequence[int]) -> str:
    """`4096 x 512`; empty for a scalar."""
    return " x ".join(map(str, shape))


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers: `0, 2-5`."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][-1] == number - 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ", ".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else f"{span[0]}" for span in found)


def first_and_last(rows: Sequence[T], most: int) -> tuple[Sequence[T], str, Sequence[T]]:
    """The first rows of a long list, how many are left out in words, and the last ones; of a short list all are first.

    Args:
        rows: the list.
        most: rows of which all are shown; of more, half as many at each end.
    """
    if len(rows) <= most:
        return rows, "", ()
    end = most // 2
    return rows[:end], f"({len(rows) - 2 * end:,} more)", rows[-end:]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def with_tables(text: str, tables: Mapping[str, str]) -> str:
    """A page with its tables replaced.

    Args:
        text: as it is now.
        tables: by the name of their place.
    """
    for name, content in tables.items():
        begin = f"<!-- {name}: written by `make docs` -->"
        before, marker, rest = text.partition(begin)
        _, end, after = rest.partition(_END)
        assert marker and end, f"the page has no lines {begin} and {_END}"
        text = f"{before}{begin}\n\n{content.rstrip()}\n\n{end}{after}"
    return text


def distinct_names(texts: Iterable[str]) -> list[str]:
    """A name for each text, of letters, digits, `_` and `-`, which no other one has."""
    names: dict[str, None] = {}
    for text in texts:
        name = "".join(letter if letter.isalnum() or letter in "_-" else "-" for letter in text) or "data"
        tries = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
        names[next(each for each in tries if each not in names)] = None
    return list(names)
