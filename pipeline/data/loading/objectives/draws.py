"""Keyed draws of objectives: independent streams of 64-bit numbers for a sample, and choices without replacement.

Draw i of stream s is `mix(s * 2**40 + i, key)`. Nothing else decides: no generator has a state, so any sample can be
arranged at any time, on any rank.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from pipeline.common.hashing import mix
from pipeline.data.order.permutation import IntArray

U64Array = npt.NDArray[np.uint64]

_STREAM = 2**40


def stream(key: int, number: int, count: int) -> U64Array:
    """The first `count` draws of a stream.

    Args:
        key: The sample's.
        number: Of the stream.
        count: At most 2**40.
    """
    return mix(_counter(count), (key + number * _STREAM) % 2**64)


def draws_at(key: int, number: int, places: IntArray) -> U64Array:
    """Draws of a stream at some places."""
    return mix(places.astype(np.uint64), (key + number * _STREAM) % 2**64)


def below(draws: U64Array, bounds: IntArray | int) -> IntArray:
    """Uniform whole numbers in [0, bound), bounds below 2**31: the upper 32 bits of each draw times its bound."""
    scaled = (draws >> np.uint64(32)).astype(np.int64) * bounds
    return scaled >> 32


def fraction(share: float) -> np.uint64:
    """A share in units of 2**-53, below which the upper 53 bits of a draw are with that probability."""
    return np.uint64(share * 2**53)


def tagged(draws: U64Array) -> U64Array:
    """Draws with their places in the lowest bits: sorted they are a keyed order, in which nothing ties."""
    mask = tag_mask(len(draws))
    return (draws & ~mask) | _counter(len(draws))


def tag_mask(count: int) -> np.uint64:
    """The bits in which `tagged` has the places of `count` draws."""
    return np.uint64((1 << max(1, (count - 1).bit_length())) - 1)


@lru_cache(maxsize=64)
def _counter(count: int) -> U64Array:
    numbers = np.arange(count, dtype=np.uint64)
    numbers.flags.writeable = False
    return numbers
