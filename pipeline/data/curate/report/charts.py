"""Histograms as SVG whose colours are the page's. Drawn by hand: a report has one for each rule."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.common.page.html import escaped
from pipeline.common.page.words import si
from pipeline.data.curate.report.bins import BINS, Scale, edges

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 440, 230, 48, 12, 26, 28
_FONT = 15
_COLUMNS = 50
_ZERO_WIDTH, _ZERO_GAP = 9, 10
_TICKS = 5
_ROUND = (
    (1.0, 1.3, 1.6, 2.0, 2.5, 3.2, 4.0, 5.0, 6.3, 8.0),
    (1.0, 1.1, 1.3, 1.4, 1.6, 1.8, 2.0, 2.2, 2.5, 2.8, 3.2, 3.5, 4.0, 4.5, 5.0, 5.6, 6.3, 7.1, 7.9, 8.9),
)
"""Limits of columns in a decade, of about equal width on a logarithmic axis, and of two digits as edges of bins are."""
_NARROW = 2.0
"""Decades up to which columns are half as wide."""


def histogram(
    counts: npt.NDArray[np.int64],
    scale: Scale,
    keeps: str,
    bound: float | None,
    title: str,
    unit: str,
    *,
    end: float | None = None,
) -> str:
    """A histogram with its bound. Heights are logarithmic, since few documents lie near a bound.

    Args:
        counts: of shape (BINS,).
        scale: of the values.
        keeps: of the rule; `min` or `max`.
        bound: None for none.
        title: read out by screen readers.
        unit: of the values.
        end: of a linear axis; default: where the values end.
    """
    if not counts.any():
        return "<p class='note'>No document has a value.</p>"
    axis = _Axis.of(counts, scale, keeps, bound, end)
    columns = list(axis.columns(counts, keeps, bound))
    top = max(column.count for column in columns)
    parts = [*_grid(top), *(_bar(column, top) for column in columns), *axis.labels()]
    if bound is not None:
        at = axis.x(bound) if bound > 0 or not axis.zero else _LEFT + _ZERO_WIDTH + _ZERO_GAP / 2
        anchor, shift = ("start", 5) if at < _WIDTH / 2 else ("end", -5)
        parts.append(
            f"<path d='M{at:.1f} {_TOP - 16} V{_HEIGHT - _BOTTOM}' class='bound'/>"
            f"<text x='{at + shift:.1f}' y='{_TOP - 8}' text-anchor='{anchor}' class='mark'>{si(bound)}</text>"
        )
    return _svg(parts, title, f"{unit}; {int(counts.sum()):,} documents")


def bars(labels: Sequence[str], counts: Sequence[int], title: str, unit: str) -> str:
    """Columns of equal width with a label each; heights are logarithmic."""
    top, width = max(counts, default=1), (_WIDTH - _LEFT - _RIGHT) / max(1, len(counts))
    places = [_LEFT + place * width for place in range(len(counts))]
    parts = [*_grid(top)]
    parts += [_bar(_Column(x, x + width, count, False), top) for x, count in zip(places, counts, strict=True)]
    every = -(-len(labels) // 8)
    parts += [_tick(x + width / 2, label) for x, label in list(zip(places, labels, strict=True))[::every]]
    return _svg(parts, title, f"{unit}; {sum(counts):,}")


@dataclass(frozen=True)
class _Column:
    left: float
    right: float
    count: int
    removed: bool


@dataclass(frozen=True)
class _Axis:
    """Horizontal axis of a histogram.

    Attributes:
        scale: of the values.
        limits: values between columns, ascending; each is an edge of bins, or the bound.
        zero: whether a column of zeros stands apart; on a logarithmic axis they have no place.
    """

    scale: Scale
    limits: tuple[float, ...]
    zero: bool

    @classmethod
    def of(
        cls, counts: npt.NDArray[np.int64], scale: Scale, keeps: str, bound: float | None, end: float | None
    ) -> _Axis:
        """The axis on which all values and the bound are seen."""
        inner = edges(scale)
        filled = np.flatnonzero(counts)
        low, high = float(inner[max(0, filled[0] - 1)]), float(inner[min(BINS - 2, filled[-1])])
        if scale == "linear":
            return cls(scale, _linear(low, end or min(high, 1.0), bound), False)
        zeros = 1 if keeps == "max" else 2
        positive = filled[filled >= zeros]
        zero = bool(counts[:zeros].any()) or bound == 0
        low, high = 1.0, 10.0
        if len(positive):
            # An upper edge is a value, a lower one is the least value of the bin.
            at = int(positive[0]) - (keeps == "min")
            low, high = float(inner[max(1, at)]), float(inner[min(BINS - 2, positive[-1])])
        return cls(scale, _logarithmic(low, high, bound), zero)

    def columns(self, counts: npt.NDArray[np.int64], keeps: str, bound: float | None) -> Iterator[_Column]:
        """The columns; all that is outside of the axis is in those at its ends."""
        sums = np.concatenate([[0], np.cumsum(counts)])
        before = sums[[_first_after(limit, self.scale, keeps) for limit in self.limits]]
        total, start = int(sums[-1]), 0
        if self.zero:
            start = int(sums[1 if keeps == "max" else 2])
            beyond = bound is not None and keeps == "min" and bound > 0
            yield _Column(_LEFT + 1, _LEFT + _ZERO_WIDTH, start, beyond)
        before[0], before[-1] = start, total
        for place, (left, right) in enumerate(zip(self.limits, self.limits[1:], strict=False)):
            upper = bound is not None and left >= bound
            removed = bound is not None and upper == (keeps == "max")
            yield _Column(self.x(left), self.x(right), int(before[place + 1] - before[place]), removed)

    def x(self, value: float) -> float:
        """Place of a value on the picture."""
        start = _LEFT + (_ZERO_WIDTH + _ZERO_GAP if self.zero else 0)
        low, high, at = (self._transformed(each) for each in (self.limits[0], self.limits[-1], value))
        return start + (_WIDTH - _RIGHT - start) * min(1.0, max(0.0, (at - low) / (high - low)))

    def labels(self) -> Iterator[str]:
        """Names of values, as many as there is room for."""
        if self.zero:
            yield _tick(_LEFT + _ZERO_WIDTH / 2, "0")
        end = _LEFT + _ZERO_WIDTH + 4 if self.zero else -math.inf
        for value in self._ticks():
            at, text = self.x(value), si(value)
            half = 0.3 * _FONT * len(text)
            if at - half > end and at + half < _WIDTH:
                yield _tick(at, text)
                end = at + half + 6

    def _ticks(self) -> list[float]:
        low, high = self.limits[0], self.limits[-1]
        if self.scale == "linear":
            step = _nice((high - low) / _TICKS)
            return [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
        digits = (1,) if high / low > 10**2.5 else (1, 2, 5)
        found = (float(f"{digit}e{power}") for power in range(-3, 12) for digit in digits)
        return [value for value in found if low <= value <= high]

    def _transformed(self, value: float) -> float:
        return value if self.scale == "linear" else math.log10(max(value, 1e-4))


def _linear(low: float, high: float, bound: float | None) -> tuple[float, ...]:
    """Limits a multiple of 0.01 apart."""
    ends = [low, high, *([] if bound is None else [min(max(bound, 0.0), 1.0)])]
    first, last = math.floor(min(ends) * 100), max(math.ceil(max(ends) * 100), math.floor(min(ends) * 100) + 10)
    size = max(1, -(-(last - first) // _COLUMNS))
    limits = {number / 100 for number in range(first, last + size, size)}
    return tuple(sorted(limits | ({bound} if bound is not None and 0 < bound < 1 else set())))


def _logarithmic(low: float, high: float, bound: float | None) -> tuple[float, ...]:
    """Round limits around all values."""
    ends = [low, high, *([bound] if bound else [])]
    low, high = max(0.001, min(ends)), max(ends)
    digits = _ROUND[math.log10(high / low) <= _NARROW]
    limits = [float(f"{digit:.1f}e{power}") for power in range(-3, 12) for digit in digits]
    first = max(0, sum(limit <= low for limit in limits) - 1)
    last = min(len(limits) - 1, max(first + 8, sum(limit <= high for limit in limits)))
    chosen = set(limits[first : last + 1]) | ({bound} if bound else set())
    return tuple(sorted(chosen))


def _first_after(limit: float, scale: Scale, keeps: str) -> int:
    """First bin of the values on the upper side of a limit."""
    side = "right" if keeps == "max" else "left"
    return int(np.searchsorted(edges(scale), limit, side=side)) + (keeps == "min")  # type: ignore[call-overload]


def _nice(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(max(step, 1e-9)))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * 0.999)


def _height(count: int, top: int) -> float:
    if count <= 0:
        return 0.0
    return (_HEIGHT - _TOP - _BOTTOM) * (math.log10(count) + 0.15) / (math.log10(max(top, 1)) + 0.15)


def _bar(column: _Column, top: int) -> str:
    if not column.count:
        return ""
    height, kind = _height(column.count, top), "goes" if column.removed else "stays"
    return (
        f"<rect x='{column.left + 0.3:.1f}' y='{_HEIGHT - _BOTTOM - height:.1f}' "
        f"width='{max(0.8, column.right - column.left - 0.6):.1f}' height='{height:.1f}' class='{kind}'/>"
    )


def _tick(x: float, text: str) -> str:
    return f"<text x='{x:.1f}' y='{_HEIGHT - 8}' text-anchor='middle' class='tick'>{text}</text>"


def _grid(top: int) -> Iterator[str]:
    powers = int(math.log10(max(top, 1)))
    for power in range(0, powers + 1, max(1, -(-powers // 4))):
        y = _HEIGHT - _BOTTOM - _height(10**power, top)
        yield f"<path d='M{_LEFT} {y:.1f} H{_WIDTH - _RIGHT}' class='rule'/>"
        yield f"<text x='{_LEFT - 6}' y='{y + 5:.1f}' text-anchor='end' class='tick'>{si(10**power)}</text>"
    yield f"<path d='M{_LEFT} {_HEIGHT - _BOTTOM} H{_WIDTH - _RIGHT}' class='axis'/>"


def _svg(parts: Sequence[str], title: str, words: str) -> str:
    name = escaped(f"{title}: {words}")
    box = f"viewBox='0 0 {_WIDTH} {_HEIGHT}' font-size='{_FONT}'"
    return f"<svg role='img' aria-label='{name}' {box}>{''.join(parts)}</svg>"
