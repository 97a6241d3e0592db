"""Bins of histograms: 1,024 per rule, with fixed edges, so that histograms of chunks can be added up.

A bound that is an edge divides the bins as it divides the documents, also where values are equal to it: a bin of a rule
that keeps `min` has its lower edge, one of a rule that keeps `max` its upper edge.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

BINS = 1024
Scale = Literal["linear", "logarithmic"]
_LINEAR = ("share", "score", "similarity", "probability")
_ABOVE_1 = (1.25, 1.5, 1.75, 2, 2.5, 3, 4, 5, 6, 8, 10, 15, 20, 30, 50, 75, 100, 200, 500, 1000, 10_000, 100_000)


def scale_of(about: str) -> Scale:
    """Scale of a rule's values, by what they are: shares and scores lie in [0, 1], counts and lengths anywhere."""
    return "linear" if any(word in about.lower() for word in _LINEAR) else "logarithmic"


@cache
def edges(scale: Scale) -> npt.NDArray[np.float64]:
    """Inner edges, ascending: float64 of shape (BINS - 1,).

    Linear: 0, 0.001, ... 1, then some above. Logarithmic: 0, then all numbers of two digits from 0.001 to 99,000,000,
    then of one digit. Each is the float of its decimal number, so a bound of the run file can be equal to one.
    """
    if scale == "linear":
        return np.array([number / 1000 for number in range(1001)] + [float(each) for each in _ABOVE_1])
    two = [float(f"{digits}e{power - 1}") for power in range(-3, 8) for digits in range(10, 100)]
    one = [float(f"{digit}e{power}") for power in range(8, 12) for digit in range(1, 10)]
    return np.array([0.0, *two, *one][: BINS - 1])


def bins(values: npt.NDArray[Any], scale: Scale, keeps: str) -> npt.NDArray[np.int64]:
    """Bins of values; NaN is in the last."""
    return np.searchsorted(edges(scale), values, side="right" if keeps == "min" else "left").astype(np.int64)


def kept_at(counts: npt.NDArray[np.int64], keeps: str) -> npt.NDArray[np.int64]:
    """Documents that a bound at each edge keeps: of shape (BINS - 1,).

    Args:
        counts: of shape (BINS,).
        keeps: of the rule.
    """
    below = np.cumsum(counts)[:-1]
    return below if keeps == "max" else counts.sum() - below


def sparse(counts: npt.NDArray[np.int64]) -> list[list[int]]:
    """Bins that have a count, and these counts: for JSON."""
    filled = np.flatnonzero(counts)
    return [filled.tolist(), counts[filled].tolist()]


def dense(found: list[list[int]]) -> npt.NDArray[np.int64]:
    """The inverse of `sparse`."""
    counts = np.zeros(BINS, np.int64)
    counts[np.array(found[0], np.int64)] = np.array(found[1], np.int64)
    return counts
