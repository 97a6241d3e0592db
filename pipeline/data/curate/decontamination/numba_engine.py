"""Words and n-grams by numba: one loop over the bytes of UTF-8. Imported only where numba is installed."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.common.imports import njit
from pipeline.data.curate.decontamination.words import LENGTH_BASE, NGRAM_BASE, WORD_BASE
from pipeline.data.curate.duplicates.normalize import ALONE, DROPPED

_ALONE = np.uint32(ALONE)
_CODE = np.uint32(ALONE - 1)
_DROPPED = np.uint32(DROPPED)
_ZERO = np.uint32(0)
_WORD_BASE = np.uint64(WORD_BASE)
_NGRAM_BASE = np.uint64(NGRAM_BASE)
_INVERSE = np.uint64(pow(NGRAM_BASE, -1, 2**64))
_LENGTH_BASE = np.uint64(LENGTH_BASE)


@njit
def _mixed(z: Any) -> Any:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@njit
def hash_words(data: npt.NDArray[np.uint8], table: npt.NDArray[np.uint32], out: npt.NDArray[np.uint64]) -> int:
    """Write the hashes of the words of a text, valid UTF-8, to `out`, which has room for one per byte.

    Returns:
        how many there are.
    """
    count = 0
    total, power = np.uint64(0), np.uint64(1)
    is_open = False
    place, size = 0, len(data)
    while place < size:
        byte = data[place]
        if byte < 0x80:
            code = np.uint32(byte)
            place += 1
        elif byte < 0xE0:
            code = np.uint32((byte & 0x1F) << 6 | (data[place + 1] & 0x3F))
            place += 2
        elif byte < 0xF0:
            code = np.uint32((byte & 0x0F) << 12 | (data[place + 1] & 0x3F) << 6 | (data[place + 2] & 0x3F))
            place += 3
        else:
            high = np.uint32((byte & 0x07) << 18 | (data[place + 1] & 0x3F) << 12)
            code = np.uint32(high | np.uint32((data[place + 2] & 0x3F) << 6 | (data[place + 3] & 0x3F)))
            place += 4
        folded = table[code]
        if folded == _DROPPED:
            continue
        if is_open and (folded == _ZERO or folded >= _ALONE):
            out[count] = _mixed(total)
            count += 1
            is_open = False
        if folded >= _ALONE:
            out[count] = _mixed(np.uint64(folded & _CODE))
            count += 1
        elif folded != _ZERO:
            if not is_open:
                total, power = np.uint64(0), np.uint64(1)
                is_open = True
            total += np.uint64(folded) * power
            power *= _WORD_BASE
    if is_open:
        out[count] = _mixed(total)
        count += 1
    return count


@njit
def ngram_hash(words: npt.NDArray[np.uint64], start: int, length: int) -> Any:
    """Hash of the n-gram of `length` words from `start`."""
    total, power = np.uint64(length) * _LENGTH_BASE, np.uint64(1)
    for place in range(start, start + length):
        total += words[place] * power
        power *= _NGRAM_BASE
    return _mixed(total)


@njit
def _find(hashes: npt.NDArray[np.uint64], wanted: Any) -> int:
    low, high = 0, len(hashes)
    while low < high:
        middle = (low + high) // 2
        if hashes[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low if low < len(hashes) and hashes[low] == wanted else -1


@njit
def find_ngrams(
    words: npt.NDArray[np.uint64],
    prefix: int,
    lengths: npt.NDArray[np.int64],
    bitmap: npt.NDArray[np.uint8],
    hashes: npt.NDArray[np.uint64],
    out: npt.NDArray[np.uint32],
) -> int:
    """Write the numbers of the n-grams of a text that are in an index to `out`, as far as there is room.

    The first `prefix` words of each n-gram have a bit in `bitmap`; few places of a text pass it.

    Returns:
        how many there are.
    """
    count = 0
    shift = np.uint64(64)
    bits = len(bitmap) * 8
    while bits > 1:
        bits >>= 1
        shift -= np.uint64(1)
    total, top = np.uint64(0), np.uint64(1)
    for place in range(min(prefix, len(words))):
        total += words[place] * top
        if place < prefix - 1:
            top *= _NGRAM_BASE
    salt = np.uint64(prefix) * _LENGTH_BASE
    for start in range(len(words) - prefix + 1):
        slot = _mixed(total + salt) >> shift
        if bitmap[slot >> np.uint64(3)] >> np.uint8(slot & np.uint64(7)) & np.uint8(1):
            for length in lengths:
                if start + length <= len(words):
                    found = _find(hashes, ngram_hash(words, start, length))
                    if found >= 0:
                        if count < len(out):
                            out[count] = np.uint32(found)
                        count += 1
        if start + prefix < len(words):
            total = (total - words[start]) * _INVERSE + words[start + prefix] * top
    return count
