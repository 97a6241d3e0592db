"""Examples of what rules remove: the documents with the smallest keys, the same however chunks are grouped.

Those whose texts are stored come before others.

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
        late: of shape (records,): examples are taken from records with 0 first, then from those with 1.
    """

    def __init__(self, seed: int, unit: int, first: int, late: npt.NDArray[np.uint8]) -> None:
        self._seed = seed
        self._unit = unit
        self._first = first
        self._late = late

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
        late = self._late[rows]
        if len(rows) > most:
            first = np.flatnonzero(late == 0)
            near = first[_nearest(distances[first], most)]
            if len(near) < most:
                rest = np.flatnonzero(late)
                near = np.concatenate([near, rest[_nearest(distances[rest], most)]])
            rows, values, distances, late = rows[near], values[near], distances[near], late[near]
        places = (rows + self._first).astype(np.uint64) | np.uint64(self._unit << 32)
        keys = mix(places, key(self._seed, "examples", name))
        order = np.lexsort((keys, distances, late))[:most]
        return [
            [
                int(late[at]),
                float(distances[at]),
                int(keys[at]),
                self._unit,
                self._first + int(rows[at]),
                float(values[at]) if np.isfinite(values[at]) else None,
            ]
            for at in order
        ]


def _nearest(distances: npt.NDArray[Any], most: int) -> npt.NDArray[np.int64]:
    """Places of the smallest distances, and of all that equal the last of them: their keys decide."""
    if len(distances) <= most:
        return np.arange(len(distances))
    return np.flatnonzero(distances <= np.partition(distances, most - 1)[most - 1])


def first_of(kind: str, lists: Iterable[list[Example]]) -> list[Example]:
    """The examples of several chunks.

    Args:
        kind: one of `MOST`.
        lists: of the chunks.
    """
    return sorted(example for each in lists for example in each)[: MOST[kind]]
