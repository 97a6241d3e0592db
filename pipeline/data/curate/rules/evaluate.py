"""Rules applied to tables of measures: which fire, which is the first, and which removes a document alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.data.curate.rules.base import DocumentRule
from pipeline.data.curate.rules.presets import EMPTY, EmptyRule

_BLOCK = 2**14
"""Records at a time: a few MB, and temporary arrays of that size only."""


def evaluate(rules: Sequence[DocumentRule], table: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Rules that fire, each on its own.

    No rule fires for a rejected record, and `clean.empty` alone for a document that is empty after cleaning.

    Args:
        rules: in their order.
        table: of measures, with `state` and the columns that the rules read.

    Returns:
        bool of shape (rules, records).
    """
    fires = np.zeros((len(rules), len(table)), np.bool_)
    for block in _blocks(len(table)):
        records = table[block]
        document, empty = records["state"] == 0, records["state"] == EMPTY
        for place, rule in enumerate(rules):
            fires[place, block] = rule.fires(records) & (empty if isinstance(rule, EmptyRule) else document)
    return fires


def first_fires(fires: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint16]:
    """Number of the first rule that fires, from 1; 0 for none: uint16 of shape (records,)."""
    first = np.zeros(fires.shape[1], np.uint16)
    for place in reversed(range(len(fires))):
        first[fires[place]] = place + 1
    return first


def fires_alone(fires: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Tell for which records one rule fires and no other."""
    once, more = (np.zeros(fires.shape[1], np.bool_) for _ in range(2))
    for row in fires:
        more |= once & row
        once |= row
    return once & ~more


def first_values(
    rules: Sequence[DocumentRule], table: npt.NDArray[Any], first: npt.NDArray[np.uint16]
) -> npt.NDArray[np.float32]:
    """Values of the rules that fire first; 0 where none does: float32 of shape (records,)."""
    values = np.zeros(len(table), np.float32)
    for place, rule in enumerate(rules):
        chosen = np.flatnonzero(first == place + 1)
        for block in _blocks(len(chosen)):
            values[chosen[block]] = rule.values(table[chosen[block]])
    return values


def _blocks(size: int) -> Iterator[slice]:
    return (slice(begin, min(begin + _BLOCK, size)) for begin in range(0, size, _BLOCK))
