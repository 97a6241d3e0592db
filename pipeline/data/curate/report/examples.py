"""Examples of what rules remove: the documents with the smallest keys, the same however chunks are grouped.

An example is `[late, distance, key, unit, row, value]`, and the list orders them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.common.hashing import key, mix

REMOVED, NEAR = 20, 10
"""Examples of documents that a rule removes, and on either side of its bound."""
MOST = {"removed": REMOVED, "inside": NEAR, "beyond": NEAR}
"""Kinds of examples; `inside` and `beyond` are those nearest to the bound that it keeps and removes."""
_CHUNKS = 64
"""Chunks that most examples are of: their texts are read for the report."""
Example = list[Any]


def is_early(seed: int, unit: int, chunk: int, chunks: int) -> bool:
    """Tell whether examples are taken from a chunk first: of large sources about one chunk of many.

    Args:
        seed: of the curation.
        unit: number of the unit.
        chunk: number of the chunk.
        chunks: of the source.
    """
    return key(seed, "chunks with examples", unit, chunk) % max(1, chunks // _CHUNKS) == 0


class ExampleSampler:
    """Choice of examples in a chunk.

    Args:
        seed: of the curation.
        unit: number of the unit.
        first: row in the unit of the chunk's first record.
        early: `is_early` of the chunk.
    """

    def __init__(self, seed: int, unit: int, first: int, early: bool) -> None:
        self._seed = seed
        self._unit = unit
        self._first = first
        self._late = int(not early)

    def choose(
        self, name: str, rows: npt.NDArray[np.int64], values: npt.NDArray[Any], distances: npt.NDArray[Any], most: int
    ) -> list[Example]:
        """Examples among documents.

        Args:
            name: of the rule.
            rows: of the documents in the chunk, of shape (documents,).
            values: of these documents.
            distances: the smallest come first.
            most: number of examples.
        """
        if len(rows) > most:  # those that are as far as the last one decide by their keys
            near = distances <= np.partition(distances, most - 1)[most - 1]
            rows, values, distances = rows[near], values[near], distances[near]
        places = (rows + self._first).astype(np.uint64) | np.uint64(self._unit << 32)
        keys = mix(places, key(self._seed, "examples", name))
        order = np.lexsort((keys, distances))[:most]
        return [
            [
                self._late,
                float(distances[at]),
                int(keys[at]),
                self._unit,
                self._first + int(rows[at]),
                _value(values[at]),
            ]
            for at in order
        ]


def first_of(kind: str, lists: Iterable[list[Example]]) -> list[Example]:
    """The examples of several chunks.

    Args:
        kind: one of `MOST`.
        lists: of the chunks.
    """
    return sorted(example for each in lists for example in each)[: MOST[kind]]


def _value(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None
