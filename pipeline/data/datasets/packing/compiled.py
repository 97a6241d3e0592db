"""`best_fit.place`, compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.common.imports import njit


def place_compiled(sizes: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
    """The pack of each chunk, as `best_fit.place` gives it."""
    result: npt.NDArray[np.int64] = _place(np.ascontiguousarray(sizes, np.int64), length)
    return result


@njit
def _place(sizes: npt.NDArray[np.int64], length: int) -> Any:
    count = len(sizes)
    # Packs of each room are a linked list, the one filled last first. A bit for each room tells whether it has any.
    newest = np.full(length + 1, -1, np.int64)
    older = np.full(count, -1, np.int64)
    words = np.zeros((length >> 6) + 1, np.uint64)
    one = np.uint64(1)
    result = np.empty(count, np.int64)
    begun = 0
    for chunk in range(count):
        size = sizes[chunk]
        word = size >> 6
        bits = words[word] >> np.uint64(size & 63) << np.uint64(size & 63)
        while bits == 0 and word + 1 < len(words):
            word += 1
            bits = words[word]
        if bits == 0:
            room, pack = length, begun
            begun += 1
        else:
            place = 0
            shift = 32
            while shift:  # the lowest bit that is set
                if bits & ((one << np.uint64(shift)) - one) == 0:
                    bits >>= np.uint64(shift)
                    place += shift
                shift >>= 1
            room = (word << 6) + place
            pack = newest[room]
            newest[room] = older[pack]
            if newest[room] < 0:
                words[word] &= ~(one << np.uint64(room & 63))
        result[chunk] = pack
        left = room - size
        if left:
            older[pack] = newest[left]
            newest[left] = pack
            words[left >> 6] |= one << np.uint64(left & 63)
    return result
