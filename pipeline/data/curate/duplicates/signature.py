"""MinHash signatures: their definition, in plain Python. The engines in `signatures` give the same values.

A definition of our own, for signatures are kept and compared with those of later years:

- the hash of a word is that of its folded code points c_0, c_1 ...: mix(sum of c_i * LETTER^i, WORD)
- the hash of k words w_0 ... w_(k-1) is the upper 32 bits of mix(sum of w_j * PLACE^(k-1-j), SHINGLE)
- value i of a signature is the least of (a_i * x + b_i) mod 2^32 over all shingles x of the text

where `mix` is `pipeline.common.hashing.mix` and sums are modulo 2^64. A text with fewer words than a shingle has one
shingle of all its words; one without words has no signature: all values are 2^32 - 1.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from pipeline.common.hashing import mix
from pipeline.data.curate.duplicates.normalize import words

SIGNATURE_VERSION = 1
NO_VALUE = 2**32 - 1
"""Each value of a text that has no signature."""
LETTER = 0x9E3779B97F4A7C15 | 1
PLACE = 0xD1342543DE82EF95
WORD = 0x8F14E45FCEEA167A
SHINGLE = 0x45C48CCE2E2D7FBD
_FACTOR, _SUMMAND = 0x2545F4914F6CDD1D, 0x5851F42D4C957F2D
_BAND_PLACE, _BAND = 0xAF251AF3B0F025B5, 0x14057B7EF767814F
_CHECK_PLACE, _CHECK = 0xC2B2AE3D27D4EB4F, 0x27D4EB2F165667C5
_MASK = 2**64 - 1
_BLOCK = 2**12


@functools.cache
def permutations(values: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """(a, b), uint32 of shape (values,); a is odd. Those of fewer values are the first of these."""
    places = np.arange(values, dtype=np.uint64)
    a = (mix(places, _FACTOR) >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
    b = (mix(places, _SUMMAND) >> np.uint64(32)).astype(np.uint32)
    return a, b


def powers(base: int, count: int) -> npt.NDArray[np.uint64]:
    """base^0, base^1 ... modulo 2^64, uint64 of shape (count,)."""
    factors = np.full(count, base, np.uint64)
    factors[:1] = 1
    return np.cumprod(factors, dtype=np.uint64)


def _mix(value: int, key: int) -> int:
    return int(mix(np.array([value & _MASK], np.uint64), key)[0])


def shingle_hashes(text: str, size: int) -> list[int]:
    """Hashes of the shingles of a text, in plain Python.

    Args:
        text: any.
        size: words of a shingle.
    """
    hashes = [
        _mix(sum(ord(letter) * pow(LETTER, place, 2**64) for place, letter in enumerate(word)), WORD)
        for word in words(text)
    ]
    size = min(size, len(hashes))
    if not size:
        return []
    shingles = (hashes[start : start + size] for start in range(len(hashes) - size + 1))
    return [
        _mix(sum(word * pow(PLACE, size - 1 - place, 2**64) for place, word in enumerate(shingle)), SHINGLE) >> 32
        for shingle in shingles
    ]


def reference_signature(text: str, size: int, values: int) -> list[int]:
    """Signature of a text, in plain Python."""
    shingles = shingle_hashes(text, size)
    pairs = zip(*(each.tolist() for each in permutations(values)), strict=True)
    return [min(((a * x + b) % 2**32 for x in shingles), default=NO_VALUE) for a, b in pairs]


def has_signature(signatures: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
    """Tell which rows are signatures, shape (documents,)."""
    found: npt.NDArray[np.bool_] = (signatures != np.uint32(NO_VALUE)).any(axis=1)
    return found


def band_hashes(signatures: npt.NDArray[np.uint32], bands: int) -> npt.NDArray[np.uint64]:
    """Hashes of (number of the band, its values), uint64 of shape (documents, bands).

    Args:
        signatures: uint32 of shape (documents, bands * rows).
        bands: number.
    """
    rows = signatures.shape[1] // bands
    factors = powers(_BAND_PLACE, rows + 1)[1:]
    found = np.zeros((len(signatures), bands), np.uint64)
    for start in range(0, len(signatures), _BLOCK):
        block = signatures[start : start + _BLOCK].reshape(-1, bands, rows)
        total = np.zeros(block.shape[:2], np.uint64)
        for row in range(rows):
            total += block[:, :, row].astype(np.uint64) * factors[row]
        total += mix(np.arange(bands, dtype=np.uint64), _BAND)
        found[start : start + _BLOCK] = mix(total, _BAND)
    return found


def signature_checks(signatures: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Check values of signatures, shape (documents,): they tell a damaged one, wherever it is read alone."""
    factors = powers(_CHECK_PLACE, signatures.shape[1])
    found = np.zeros(len(signatures), np.uint32)
    for start in range(0, len(signatures), _BLOCK):
        total = (signatures[start : start + _BLOCK].astype(np.uint64) * factors).sum(axis=1, dtype=np.uint64)
        found[start : start + _BLOCK] = (mix(total, _CHECK) >> np.uint64(32)).astype(np.uint32)
    return found
