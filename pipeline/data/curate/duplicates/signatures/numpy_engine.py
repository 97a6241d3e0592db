"""Signatures by NumPy, in blocks that fit a core's cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from pipeline.common.hashing import mix
from pipeline.data.curate.batch import TextBatch
from pipeline.data.curate.duplicates.normalize import split_words
from pipeline.data.curate.duplicates.signature import (
    LETTER,
    NO_VALUE,
    PLACE,
    SHINGLE,
    WORD,
    permutations,
    powers,
)

_BLOCK_BYTES = 2**16
"""Text of a block, unless one document has more."""
_BLOCK_SHINGLES = 2**14


class NumpySigner:
    """Signatures of documents.

    Args:
        size: words of a shingle.
        values: of a signature.
    """

    def __init__(self, size: int, values: int) -> None:
        self._size = size
        self._values = values
        self._a, self._b = permutations(values)
        self._letter_powers = powers(LETTER, 256)
        self._place_powers = powers(PLACE, size)

    def sign(self, batch: TextBatch) -> npt.NDArray[np.uint32]:
        """Signatures, uint32 of shape (documents, values)."""
        found = np.full((len(batch.rows), self._values), NO_VALUE, np.uint32)
        for first, end in _blocks(batch.starts):
            shingles, starts = self._shingles(batch.texts[first:end])
            self._minima(shingles, starts, found[first:end])
        return found

    def shingles(self, batch: TextBatch) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """Hashes of the shingles of all documents, and where those of each begin, shape (documents + 1,)."""
        found, counts = [np.zeros(0, np.uint32)], [np.zeros(0, np.int64)]
        for first, end in _blocks(batch.starts):
            shingles, starts = self._shingles(batch.texts[first:end])
            found.append(shingles)
            counts.append(np.diff(starts))
        return np.concatenate(found), np.append(0, np.cumsum(np.concatenate(counts)))

    def _shingles(self, texts: Sequence[str]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """Hashes of the shingles of all texts, and where those of each text begin, shape (texts + 1,)."""
        hashes, before = self._words(texts)
        counts = np.diff(before)
        shingles = np.maximum(counts - (self._size - 1), np.minimum(counts, 1))
        starts = np.append(0, np.cumsum(shingles))
        total = np.zeros(max(len(hashes) - self._size + 1, 0), np.uint64)
        for place in range(self._size):
            total += hashes[place : place + len(total)] * self._place_powers[self._size - 1 - place]
        # The shingle that begins at word i of a text with enough words is at place i of `total`.
        places = np.arange(int(starts[-1])) + np.repeat(before[:-1] - starts[:-1], shingles)
        short = np.flatnonzero((counts > 0) & (counts < self._size))
        places[starts[short]] = 0
        sums = total[places] if len(total) else np.zeros(len(places), np.uint64)
        for text in short.tolist():
            few = hashes[before[text] : before[text + 1]]
            sums[starts[text]] = (few * self._place_powers[: len(few)][::-1]).sum(dtype=np.uint64)
        return (mix(sums, SHINGLE) >> np.uint64(32)).astype(np.uint32), starts

    def _words(self, texts: Sequence[str]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        letters, starts, before = split_words(texts)
        if not len(starts):
            return np.zeros(0, np.uint64), before
        lengths = np.diff(starts, append=len(letters))
        longest = int(lengths.max())
        if longest > len(self._letter_powers):
            self._letter_powers = powers(LETTER, longest)
        places = np.arange(len(letters)) - np.repeat(starts, lengths)
        products = letters.astype(np.uint64) * self._letter_powers[places]
        return mix(np.add.reduceat(products, starts), WORD), before

    def _minima(
        self, shingles: npt.NDArray[np.uint32], starts: npt.NDArray[np.int64], found: npt.NDArray[np.uint32]
    ) -> None:
        """Set the least value of each text under each permutation."""
        texts = np.flatnonzero(np.diff(starts))
        begins = starts[:-1][texts]
        for low in range(0, len(shingles), _BLOCK_SHINGLES):
            high = min(low + _BLOCK_SHINGLES, len(shingles))
            # Texts with shingles in this block; the first may have begun before it.
            first = int(np.searchsorted(begins, low, "right")) - 1
            end = int(np.searchsorted(begins, high, "left"))
            inside = np.maximum(begins[first:end] - low, 0)
            block = shingles[low:high]
            least = np.empty((end - first, self._values), np.uint32)
            for value in range(self._values):
                numbers = block * self._a[value]
                numbers += self._b[value]
                least[:, value] = np.minimum.reduceat(numbers, inside)
            here = texts[first:end]
            found[here] = np.minimum(found[here], least)


def _blocks(starts: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Ranges of documents of about `_BLOCK_BYTES` each."""
    first, count = 0, len(starts) - 1
    while first < count:
        end = int(np.searchsorted(starts, starts[first] + _BLOCK_BYTES, "right")) - 1
        end = min(max(end, first + 1), count)
        yield first, end
        first = end
