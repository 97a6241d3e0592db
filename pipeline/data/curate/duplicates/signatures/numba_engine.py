"""Signatures by compiled code: one pass through the bytes of a text."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.common.imports import njit
from pipeline.data.curate.batch import TextBatch
from pipeline.data.curate.duplicates.normalize import ALONE, DROPPED, SEPARATOR, folding_table
from pipeline.data.curate.duplicates.signature import LETTER, NO_VALUE, PLACE, SHINGLE, WORD, permutations

# In compiled code an unsigned and a signed integer of 64 bits make a float: every constant has its type.
_LETTER, _PLACE = np.uint64(LETTER), np.uint64(PLACE)
_WORD, _SHINGLE = np.uint64(WORD), np.uint64(SHINGLE)
_ALONE, _DROPPED, _SEPARATOR = np.uint32(ALONE), np.uint32(DROPPED), np.uint32(SEPARATOR)
_CODE = np.uint32(ALONE - 1)
_ZERO, _ONE = np.uint64(0), np.uint64(1)
_S30, _S27, _S31, _S32 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(32)
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_HELD = 512
"""Shingles that are put into the signature at a time: they stay in the fastest cache."""


@njit
def _mix(z: Any, key: Any) -> Any:
    z = z + key
    z = (z ^ (z >> _S30)) * _M1
    z = (z ^ (z >> _S27)) * _M2
    return z ^ (z >> _S31)


@njit
def _put(held: Any, count: int, a: Any, b: Any, signature: Any) -> None:
    """Put shingles into a signature."""
    for value in range(len(a)):
        factor, summand, least = a[value], b[value], signature[value]
        for place in range(count):
            number = np.uint32(held[place] * factor + summand)
            least = min(least, number)
        signature[value] = least


@njit
def _decode(data: Any, place: int) -> Any:
    """(code point, bytes of it) of UTF-8 that is valid, but for surrogates."""
    byte = np.uint32(data[place])
    if byte < 0x80:
        return byte, 1
    if byte < 0xE0:
        return (byte & np.uint32(0x1F)) << np.uint32(6) | np.uint32(data[place + 1]) & np.uint32(0x3F), 2
    tail = (np.uint32(data[place + 1]) & np.uint32(0x3F)) << np.uint32(6) | np.uint32(data[place + 2]) & np.uint32(0x3F)
    if byte < 0xF0:
        return (byte & np.uint32(0x0F)) << np.uint32(12) | tail, 3
    tail = tail << np.uint32(6) | np.uint32(data[place + 3]) & np.uint32(0x3F)
    return (byte & np.uint32(0x07)) << np.uint32(18) | tail, 4


@njit
def _shingles(data: Any, place: int, end: int, table: Any, ring: Any, oldest: Any, held: Any) -> int:
    """Put the hashes of the shingles of one text into `held`; returns their number.

    Args:
        data: of the batch.
        place: where the text begins in it.
        end: of the text.
        table: of folding.
        ring: room for the hashes of the words of a shingle.
        oldest: PLACE^words of a shingle: the factor of the word that leaves.
        held: room for a shingle per byte.
    """
    size = len(ring)
    count, words, slot = 0, 0, 0
    total, word, power = _ZERO, _ZERO, _ONE
    inside = False
    ring[:] = _ZERO
    while True:
        closes = False
        folded = _SEPARATOR
        if place < end:
            byte = data[place]
            if byte < 0x80:
                folded = table[byte]
                place += 1
            else:
                code, width = _decode(data, place)
                folded = table[code]
                place += width
            if folded == _DROPPED:
                continue
            closes = inside and (folded == _SEPARATOR or folded >= _ALONE)
        else:
            closes = inside
        if closes:
            inside = False
            hashed = _mix(word, _WORD)
            total = total * _PLACE + hashed - ring[slot] * oldest
            ring[slot] = hashed
            slot = slot + 1 if slot + 1 < size else 0
            words += 1
            if words >= size:
                held[count] = np.uint32(_mix(total, _SHINGLE) >> _S32)
                count += 1
        if folded >= _ALONE:
            hashed = _mix(np.uint64(folded & _CODE), _WORD)
            total = total * _PLACE + hashed - ring[slot] * oldest
            ring[slot] = hashed
            slot = slot + 1 if slot + 1 < size else 0
            words += 1
            if words >= size:
                held[count] = np.uint32(_mix(total, _SHINGLE) >> _S32)
                count += 1
        elif folded != _SEPARATOR:
            if inside:
                word += np.uint64(folded) * power
                power *= _LETTER
            else:
                inside = True
                word, power = np.uint64(folded), _LETTER
        if place >= end and not inside:
            break
    if 0 < words < size:
        held[0] = np.uint32(_mix(total, _SHINGLE) >> _S32)
        count = 1
    return count


@njit
def _oldest(size: int) -> Any:
    factor = _ONE
    for _ in range(size):
        factor *= _PLACE
    return factor


@njit
def _sign(data: Any, starts: Any, table: Any, size: int, a: Any, b: Any, held: Any, signatures: Any) -> None:
    ring, oldest = np.zeros(size, np.uint64), _oldest(size)
    for document in range(len(starts) - 1):
        count = _shingles(data, starts[document], starts[document + 1], table, ring, oldest, held)
        for low in range(0, count, _HELD):
            high = min(low + _HELD, count)
            _put(held[low:high], high - low, a, b, signatures[document])


@njit
def _gather(data: Any, starts: Any, table: Any, size: int, held: Any, ends: Any) -> None:
    ring, oldest = np.zeros(size, np.uint64), _oldest(size)
    before = 0
    for document in range(len(starts) - 1):
        before += _shingles(data, starts[document], starts[document + 1], table, ring, oldest, held[before:])
        ends[document + 1] = before


class NumbaSigner:
    """Signatures of documents.

    Args:
        size: words of a shingle.
        values: of a signature.
    """

    def __init__(self, size: int, values: int) -> None:
        self._size = size
        self._values = values

    def sign(self, batch: TextBatch) -> npt.NDArray[np.uint32]:
        """Signatures, uint32 of shape (documents, values)."""
        found = np.full((len(batch.rows), self._values), NO_VALUE, np.uint32)
        longest = int(np.diff(batch.starts).max(initial=0))
        held = np.empty(longest + 1, np.uint32)
        _sign(batch.data, batch.starts, folding_table(), self._size, *permutations(self._values), held, found)
        return found

    def shingles(self, batch: TextBatch) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """Hashes of the shingles of all documents, and where those of each begin, shape (documents + 1,)."""
        ends = np.zeros(len(batch.rows) + 1, np.int64)
        held = np.empty(len(batch.data) + 1, np.uint32)
        _gather(batch.data, batch.starts, folding_table(), self._size, held, ends)
        return held[: ends[-1]], ends
