"""Words of a text as near duplicates and `exact: normalized` see them: letters and digits, whatever their form.

Words are runs of letters and numbers; all else separates them. Case is folded, a digit of any script is `0`, a letter
with a mark is the letter, and marks, joiners and soft hyphens are dropped. In scripts that are written without spaces
between words (Han, kana, Thai, Lao, Khmer, Burmese, Tibetan and more) each character is a word, so that a shingle of
five words is one of five characters there.

What a character is comes from Unicode 3.2, which Python has in every version: the same text has the same words with
every Python. Characters that came later are letters, except in blocks of symbols and marks.
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

NORMALIZATION_VERSION = 1
SEPARATOR = 0
DROPPED = 1
ALONE = 2**31
"""Flag of a character that is a word."""
_DIGIT = ord("0")
_FROZEN = unicodedata.ucd_3_2_0
_LAST = 0x2FFFF
"""Behind it there are letters, and what the ranges below name."""
_ALONE_RANGES = (
    (0x0E00, 0x0EFF), (0x0F00, 0x0FFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x1950, 0x19DF), (0x1A20, 0x1AAF),
    (0x2E80, 0x2FDF), (0x3005, 0x3007), (0x3021, 0x3029), (0x3040, 0x312F), (0x31A0, 0x31FF), (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF), (0xA000, 0xA4CF), (0xA9E0, 0xA9FF), (0xAA60, 0xAADF), (0xF900, 0xFAFF), (0xFF66, 0xFF9D),
    (0x1AFF0, 0x1B16F), (0x20000, 0x3FFFF),
)  # fmt: skip
_LATER_SYMBOLS = ((0x2000, 0x2BFF), (0x2E00, 0x2E7F), (0x3000, 0x303F), (0xFE10, 0xFE1F), (0x1F000, 0x1FBFF))
_LATER_MARKS = (
    (0x0300, 0x036F), (0x0483, 0x0489), (0x0591, 0x05BD), (0x0610, 0x061A), (0x064B, 0x065F), (0x08D3, 0x08FF),
    (0x1AB0, 0x1AFF), (0x1DC0, 0x1DFF), (0x20D0, 0x20FF), (0xFE20, 0xFE2F), (0xE0000, 0xE01EF),
)  # fmt: skip


@functools.cache
def folding_table() -> npt.NDArray[np.uint32]:
    """uint32 of shape (code points,): `SEPARATOR`, `DROPPED`, or the folded code point, with `ALONE` if it is a word.

    About 0.3 s the first time in a process.
    """
    table = np.arange(0x110000, dtype=np.uint32)
    category = _FROZEN.category
    for code in range(_LAST + 1):
        kind = category(chr(code))
        if kind[0] == "L":
            if not (0x3400 <= code <= 0x9FFF or 0xAC00 <= code <= 0xD7A3):  # which fold to themselves
                table[code] = _folded(chr(code))
        elif kind == "Nd":
            table[code] = _DIGIT
        elif kind[0] == "M" or kind == "Cf":
            table[code] = DROPPED
        elif kind[0] != "N" and kind != "Cn":
            table[code] = SEPARATOR
    for ranges, value in ((_LATER_SYMBOLS, SEPARATOR), (_LATER_MARKS, DROPPED)):
        for low, high in ranges:
            for code in range(low, high + 1):
                if category(chr(code)) == "Cn":
                    table[code] = value
    table[0xAD] = DROPPED  # the soft hyphen, a dash in 3.2
    table[0xE0000:0xE01F0] = DROPPED
    table[0xF0000:] = SEPARATOR  # private use
    for low, high in _ALONE_RANGES:
        part = table[low : high + 1]
        part[part > DROPPED] |= np.uint32(ALONE)
    # A digit is a digit, in Thai too.
    table[(table & np.uint32(ALONE - 1)) == _DIGIT] = _DIGIT
    return table


def _folded(letter: str) -> int:
    """Letter without case and marks, if that is one letter."""
    bare = "".join(each for each in _FROZEN.normalize("NFD", letter) if _FROZEN.category(each)[0] != "M")
    for folded in (bare.casefold(), letter.casefold()):
        if len(folded) == 1 and _FROZEN.category(folded)[0] == "L":
            return ord(folded)
    return ord(letter)


def words(text: str) -> list[str]:
    """Words of a text: the definition, in plain Python, which the engines equal."""
    table = folding_table()
    found: list[str] = []
    joins = False
    for character in text:
        folded = int(table[ord(character)])
        if folded == DROPPED:
            continue
        if folded == SEPARATOR:
            joins = False
        elif folded >= ALONE:
            found.append(chr(folded - ALONE))
            joins = False
        elif joins:
            found[-1] += chr(folded)
        else:
            found.append(chr(folded))
            joins = True
    return found


def split_words(
    texts: Sequence[str],
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Words of several texts, by NumPy.

    Returns:
        uint32 of shape (letters,): folded code points of all words, one behind the other.
        int64 of shape (words,): where each word begins in them.
        int64 of shape (texts + 1,): number of words before each text, and of all.
    """
    # Between two texts there is a separator.
    codes = np.frombuffer("\0".join([*texts, ""]).encode("utf-32-le", "surrogatepass"), "<u4")
    folded = folding_table()[codes]
    kept = folded != DROPPED
    ends = np.cumsum([len(text) + 1 for text in texts], dtype=np.int64)
    if not kept.all():
        ends = np.cumsum(kept)[ends - 1] if len(ends) else ends
        folded = folded[kept]
    is_letter = folded != SEPARATOR
    is_alone = folded >= ALONE
    begins = is_letter & is_alone
    begins[:1] |= is_letter[:1]
    begins[1:] |= is_letter[1:] & (~is_letter[:-1] | is_alone[:-1])
    before = np.zeros(len(texts) + 1, np.int64)
    if len(ends):
        before[1:] = np.cumsum(begins)[ends - 1]
    letters = folded[is_letter] & np.uint32(ALONE - 1)
    return letters, np.flatnonzero(begins[is_letter]), before


def normalized(texts: Sequence[str]) -> list[bytes]:
    """Words of each text with a zero between them, as UTF-32."""
    letters, starts, before = split_words(texts)
    shift = np.zeros(len(letters), np.int64)
    shift[starts] = 1
    joined = np.zeros(len(letters) + len(starts), "<u4")
    joined[np.arange(len(letters)) + np.cumsum(shift)] = letters  # a zero before each word
    places = np.append(starts + np.arange(len(starts)), len(joined))[before]
    pairs = zip(places[:-1].tolist(), places[1:].tolist(), strict=True)
    return [joined[low + 1 : high].tobytes() for low, high in pairs]
