"""Words and n-grams by NumPy, on blocks of text that fit a cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from pipeline.common.hashing import mix
from pipeline.data.curate.decontamination.words import (
    LENGTH_BASE,
    MASK,
    NGRAM_BASE,
    WORD_BASE,
    fold_table,
)
from pipeline.data.curate.duplicates.normalize import ALONE, DROPPED, SEPARATOR

_BLOCK = 2**16
"""Characters."""
Hashes = npt.NDArray[np.uint64]


def word_hashes(texts: Sequence[str]) -> tuple[Hashes, npt.NDArray[np.int64]]:
    """Hashes of the words of texts.

    Returns:
        uint64 of shape (words,), and int64 of shape (texts + 1,): where the words of each text begin.
    """
    found, counts = [], [np.zeros(1, np.int64)]
    for block in _blocks(texts):
        hashes, each = _block_words(block)
        found.append(hashes)
        counts.append(each)
    words = np.concatenate(found) if found else np.zeros(0, np.uint64)
    return words, np.cumsum(np.concatenate(counts))


def ngram_hashes(words: Hashes, length: int) -> Hashes:
    """Hashes of all n-grams of adjacent words: uint64 of shape (words - length + 1,)."""
    count = len(words) - length + 1
    if count <= 0:
        return np.zeros(0, np.uint64)
    powers, inverse = _powers(NGRAM_BASE, len(words))
    sums = np.zeros(len(words) + 1, np.uint64)
    np.cumsum(words * powers, out=sums[1:])
    totals = (sums[length:] - sums[:count]) * inverse[:count]
    return mix(totals, length * LENGTH_BASE & MASK)


def window_hashes(windows: Hashes) -> Hashes:
    """Hashes of n-grams, given as uint64 of shape (n-grams, words)."""
    length = windows.shape[1]
    powers, _ = _powers(NGRAM_BASE, length)
    return mix((windows * powers).sum(axis=1, dtype=np.uint64), length * LENGTH_BASE & MASK)


def _blocks(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Texts in blocks; a longer one alone."""
    start = size = 0
    for place, text in enumerate(texts):
        if size and size + len(text) > _BLOCK:
            yield texts[start:place]
            start, size = place, 0
        size += len(text) + 1
    if start < len(texts):
        yield texts[start:]


def _block_words(texts: Sequence[str]) -> tuple[Hashes, npt.NDArray[np.int64]]:
    """Hashes of the words of a block, and how many each text has."""
    # A line end separates words, so no word reaches from one text into the next.
    codes = fold_table()[np.frombuffer("\n".join(texts).encode("utf-32-le"), "<u4")]
    ends = np.cumsum([len(text) + 1 for text in texts])
    kept = codes != DROPPED
    if not kept.all():
        ends = np.append(np.cumsum(kept), kept.sum() + 1)[np.minimum(ends - 1, len(kept))]
        codes = codes[kept]
    inside, single = codes != SEPARATOR, codes >= ALONE
    starts = inside.copy()
    starts[1:] &= ~inside[:-1] | single[1:] | single[:-1]
    places = np.flatnonzero(starts)
    counts = np.diff(np.searchsorted(places, ends), prepend=0)
    if not len(places):
        return np.zeros(0, np.uint64), counts
    powers, inverse = _powers(WORD_BASE, len(codes))
    terms = (codes & np.uint32(ALONE - 1)).astype(np.uint64) * powers
    return mix(np.add.reduceat(terms, places) * inverse[places], 0), counts


def _powers(base: int, count: int) -> tuple[Hashes, Hashes]:
    """Powers of an odd number and of its inverse modulo 2 ** 64, `count` of each."""
    if count > 4 * _BLOCK:
        return _new_powers(base, count)
    size = max(_BLOCK, 1 << (count - 1).bit_length())
    powers, inverse = _kept_powers(base, size)
    return powers[:count], inverse[:count]


@lru_cache
def _kept_powers(base: int, count: int) -> tuple[Hashes, Hashes]:
    return _new_powers(base, count)


def _new_powers(base: int, count: int) -> tuple[Hashes, Hashes]:
    return _series(base, count), _series(pow(base, -1, 2**64), count)


def _series(base: int, count: int) -> Hashes:
    factors = np.full(count, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors)
