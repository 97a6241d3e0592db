"""Words of texts for the comparison with items, and hashes of their n-grams; defined here in plain Python.

Words are those of near duplicates (`duplicates/normalize.py`: runs of letters and digits, without case and accents),
but for two things. Digits stay what they are: items about numbers differ in nothing else. Of the scripts without spaces
only Chinese and Japanese have a word per character: 13 of them are a phrase, but 13 letters of Thai are three words,
which are in many texts.

A hash of a word is the sum of `code point * WORD_BASE ** place`, mixed; that of an n-gram the sum of `word *
NGRAM_BASE ** place`, mixed with its length; modulo 2 ** 64. Sums without an order of evaluation are the same in loops
over bytes and in NumPy's operations on a whole text.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from pipeline.data.curate.duplicates.normalize import ALONE, DROPPED, NORMALIZATION_VERSION, SEPARATOR, folding_table

WORDS_VERSION = 1
WORD_BASE = 0x9E3779B97F4A7C15
NGRAM_BASE = 0xD6E8FEB86659FD93
LENGTH_BASE = 0xA0761D6478BD642F
MASK = 2**64 - 1
_FIRST_IDEOGRAPH = 0x2E80


@cache
def fold_table() -> npt.NDArray[np.uint32]:
    """uint32 of shape (code points,): `SEPARATOR`, `DROPPED`, or the folded code point, with `ALONE` for a word."""
    table = folding_table().copy()
    table[:_FIRST_IDEOGRAPH] &= np.uint32(ALONE - 1)
    for code in np.flatnonzero(table == ord("0")).tolist():
        table[code] = ord("0") + unicodedata.decimal(chr(code), 0)
    return table


def word_settings() -> dict[str, int]:
    """Settings that words depend on, as JSON."""
    return {"words_version": WORDS_VERSION, "normalization": NORMALIZATION_VERSION}


def mixed(number: int) -> int:
    """SplitMix64's finalizer (Steele, Lea, Flood 2014)."""
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & MASK
    number = (number ^ number >> 27) * 0x94D049BB133111EB & MASK
    return number ^ number >> 31


@dataclass
class Word:
    """A word of a text.

    Attributes:
        start: of it, in characters.
        end: of it, exclusive.
        codes: its folded code points.
    """

    start: int
    end: int
    codes: list[int]


def find_words(text: str) -> list[Word]:
    """Words of a text: the definition that engines prove themselves against."""
    table = fold_table()
    found: list[Word] = []
    is_open = False
    for place, character in enumerate(text):
        code = int(table[ord(character)])
        if code == DROPPED:
            continue
        if code == SEPARATOR:
            is_open = False
            continue
        if not is_open or code & ALONE:
            found.append(Word(place, place, []))
        found[-1].end = place + 1
        found[-1].codes.append(code & ~ALONE)
        is_open = not code & ALONE
    return found


def word_hash(codes: Sequence[int]) -> int:
    """Hash of a word, by its folded code points."""
    total, power = 0, 1
    for code in codes:
        total, power = total + code * power, power * WORD_BASE & MASK
    return mixed(total & MASK)


def ngram_hash(words: Sequence[int]) -> int:
    """Hash of an n-gram, by the hashes of its words."""
    total, power = len(words) * LENGTH_BASE, 1
    for word in words:
        total, power = total + word * power, power * NGRAM_BASE & MASK
    return mixed(total & MASK)
