"""Ticks of axes and their labels. `report.js` has the same rules for what it draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from pipeline.common.page.words import si

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_LEAST = 3
"""Labels of an axis."""
_IN_A_DECADE = ((1,), (1, 3), (1, 2, 5), (1, 2, 3, 4, 5, 6, 8))


def linear_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers at equal distances within the ends of an axis: three or more, and about `most` at most."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low]
    rough = (high - low) / (most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    place = next(place for place, factor in enumerate(_STEPS) if factor * power >= rough * (1 - 1e-9))
    found: list[float] = []
    for factor in (_STEPS[place], _STEPS[place - 1] if place else 0.5):
        step = factor * power
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        found = [number * step for number in range(first, last + 1)]
        if len(found) >= _LEAST:
            break
    return found


def log_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Round numbers for a logarithmic axis, never fewer than three where its ends differ by more than rounding.

    Args:
        low: end of the axis, above 0.
        high: end of the axis.
        most: labels.
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for factors in reversed(_IN_A_DECADE):
        found = [f * 10.0**power for power in range(first, last + 1) for f in factors]
        found = [tick for tick in found if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
        if _LEAST <= len(found) <= most:
            return found
    decades = [10.0**power for power in range(first, last + 1) if low <= 10.0**power <= high]
    if len(decades) > most:
        return decades[:: -(-len(decades) // most)]
    return [tick for tick in linear_ticks(low, high, most) if tick > 0]


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Short labels, with as many digits as tell them apart."""
    gap = min((abs(b - a) for a, b in pairwise(ticks) if a != b), default=0.0)
    most = max((abs(tick) for tick in ticks), default=0.0)
    digits = max(4, min(12, 2 + math.ceil(math.log10(most / gap)))) if gap and most else 4
    return [si(tick, digits) for tick in ticks]
