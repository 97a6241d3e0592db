"""A keyed bijection of [0, n) that needs no table: balanced Feistel network with cycle walking.

`forward(i)` is the i-th element of a shuffled range and `inverse` finds an element's place in it, both in constant time
and memory for any n up to 2**62. All arithmetic is on unsigned 64-bit integers, so results are the same on every
machine.

Sources: M. Luby and C. Rackoff, "How to construct pseudorandom permutations" (1988) for the network; J. Black and
P. Rogaway, "Ciphers with arbitrary finite domains" (2002) for halves that are not powers of two and for cycle walking;
the round function is the finalizer of SplitMix64 (G. Steele, D. Lea and C. Flood, 2014). This shuffles data; it is not
meant to keep secrets.

Everything here is part of order_version 1: changing a bit of it changes the order of every run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

MAX_SIZE = 2**62
"""Largest n of a `Permutation`."""

_ROUNDS = 12
"""Below 10, the permutations of four elements or fewer are measurably not equally likely."""
_GAMMA = 0x9E3779B97F4A7C15
"""SplitMix64's increment: 2**64 over the golden ratio, made odd."""


def _mix(value: _Words) -> _Words:
    """SplitMix64's finalizer but for its last step, `value ^ (value >> 31)`. Changes `value`."""
    value ^= value >> np.uint64(30)
    value *= np.uint64(0xBF58476D1CE4E5B9)
    value ^= value >> np.uint64(27)
    value *= np.uint64(0x94D049BB133111EB)
    return value


class Permutation:
    """A bijection of [0, n) chosen by a key.

    Let a be the smallest even number with a * a >= n. A number below a * a is a pair (left, right) of numbers below a;
    each of twelve rounds makes it (right, (left + F(right)) mod a), where F scales a 64-bit mix of `right` and the
    round's key down to [0, a). That is a bijection of [0, a * a), whatever F is. A result of n or more is put through
    the network again until it falls below n, which leaves a bijection of [0, n); such results are rare, since a * a is
    less than n + 4 * sqrt(n) + 4. (With an odd a every permutation of the pairs would have the same parity.)

    Args:
        n: Size of the range, 1 to 2**62.
        key: An integer in [0, 2**64), as from `hashing.key`; the rounds' keys are what SplitMix64 gives from there.
    """

    def __init__(self, n: int, key: int) -> None:
        assert 1 <= n <= MAX_SIZE, n
        assert 0 <= key < 2**64, key
        self.n = n
        root = math.isqrt(n - 1) + 1
        self._limit = np.uint64(n)
        self._side = np.uint64(root + root % 2)
        stream = np.array([(key + (r + 1) * _GAMMA) % 2**64 for r in range(_ROUNDS)], np.uint64)
        mixed = _mix(stream)
        self._keys = list(mixed ^ (mixed >> np.uint64(31)))

    def forward(self, positions: npt.NDArray[Any]) -> IntArray:
        """The elements at `positions` of the shuffled range; integers in [0, n), any shape."""
        return self._walk(positions, self._encrypt)

    def inverse(self, elements: npt.NDArray[Any]) -> IntArray:
        """The positions at which `elements` are; integers in [0, n), any shape."""
        return self._walk(elements, self._decrypt)

    def _walk(self, values: npt.NDArray[Any], network: Callable[[_Words], _Words]) -> IntArray:
        assert values.size == 0 or (values.min() >= 0 and values.max() < self.n), f"outside [0, {self.n})"
        result = network(values.astype(np.uint64).ravel())
        outside = np.flatnonzero(result >= self._limit)
        while outside.size:
            again = network(result[outside])
            result[outside] = again
            outside = outside[again >= self._limit]
        return result.reshape(values.shape).astype(np.int64)

    def _encrypt(self, values: _Words) -> _Words:
        left, right = np.divmod(values, self._side)
        for key in self._keys:
            total = left + self._round(right, key)
            # Modulo without a division: the difference wraps to a huge number where there is nothing to subtract.
            left, right = right, np.minimum(total, total - self._side)
        return left * self._side + right

    def _decrypt(self, values: _Words) -> _Words:
        left, right = np.divmod(values, self._side)
        for key in reversed(self._keys):
            total = right - self._round(left, key)
            left, right = np.minimum(total, total + self._side), left
        return left * self._side + right

    def _round(self, value: _Words, key: np.uint64) -> _Words:
        """F: the top 33 bits of the mix of `value` XOR `key`, scaled to [0, a). a is at most 2**31."""
        mixed = _mix(value ^ key)
        mixed >>= np.uint64(31)
        mixed *= self._side
        mixed >>= np.uint64(33)
        return mixed
