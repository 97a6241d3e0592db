"""Random 32-bit words that are a function of what they are for, with the same bits on every device.

Words are in int64, where factors below 2**31 keep every product within the type: nothing goes around.
"""

from __future__ import annotations

import hashlib

from torch import Tensor

WORD = 0xFFFFFFFF
"""The bits of a word."""


def text_word(text: str) -> int:
    """The word of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


def mix(words: Tensor) -> Tensor:
    """A permutation of words that scatters neighbours."""
    words = words ^ (words >> 16)
    words = (words * 0x7FEB352D) & WORD
    words = words ^ (words >> 15)
    words = (words * 0x31848BAB) & WORD
    return words ^ (words >> 14)
