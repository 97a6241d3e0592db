"""Signatures by compiled code: one pass through the bytes of a text."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.common.compiled import njit
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
"""Shingles that are put into the signature at a time."""


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
def _sign(data: Any, starts: Any, table: Any, size: int, a: Any, b: Any, signatures: Any) -> None:
    ring = np.zeros(size, np.uint64)
    held = np.zeros(_HELD, np.uint32)
    oldest = _ONE  # PLACE^size: the factor of the word that leaves
    for _ in range(size):
        oldest *= _PLACE
    for document in range(len(starts) - 1):
        place, end = starts[document], starts[document + 1]
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
            if count >= _HELD - 2:  # a character closes a word, and may be one
                _put(held, count, a, b, signatures[document])
                count = 0
            if place >= end and not inside:
                break
        if 0 < words < size:
            held[0] = np.uint32(_mix(total, _SHINGLE) >> _S32)
            count = 1
        _put(held, count, a, b, signatures[document])


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
        _sign(batch.data, batch.starts, folding_table(), self._size, *permutations(self._values), found)
        return found
