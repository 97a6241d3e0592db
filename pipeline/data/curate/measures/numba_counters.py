"""Counters by compiled loops over UTF-8: words and lines are found in the order of the bytes, then n-grams are hashed.

Words, lines and n-grams are compared by 64-bit hashes. Import this module only where `has_numba()`.

The cache of numba knows this file alone, so constants that compiled functions use stand here and nowhere else.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.common.imports import njit
from pipeline.data.curate.measures import words as w

_SPACE, _ALPHA, _TEXT, _BEGINS, _MARK, _TERMINAL, _CLOSER, _ANY = 1, 2, 4, 8, 16, 32, 64, 128
"""Kinds of characters: whitespace, letters, letters and numbers, those that are words, marks behind these, marks that
end a sentence, what may stand behind them, and what is none of these."""
_NEWLINE, _BLANK, _DOT, _HASH, _OPEN, _CLOSE, _DASH = 10, 32, 46, 35, 123, 125, 45
_BULLET, _ELLIPSIS = 0x2022, 0x2026
_SHORT = 30
_long: Any = np.int64
_unsigned: Any = np.uint64
_STOP_WORDS = tuple(
    int.from_bytes(word.encode(), "little") for word in ("the", "be", "to", "of", "and", "that", "have", "with")
)
_PRIME, _MIX, _STEP = np.uint64(0x100000001B3), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x9E3779B97F4A7C17)
_SEED = np.uint64(0xCBF29CE484222325)
_0, _1, _29, _32 = np.uint64(0), np.uint64(1), np.uint64(29), np.uint64(32)

# Names of what `_scan` counts, by place, then what the functions behind it do.
SCANNED = (
    "characters", "newlines", "words", "text_words", "text_word_characters", "alpha_words", "stop_words", "hashes",
    "ellipses", "curly_brackets", "lorem_ipsum", "sentences", "lines", "bullet_lines", "ellipsis_lines",
    "punctuated_lines", "short_lines", "paragraphs",
)  # fmt: skip
(
    _CHARACTERS, _NEWLINES, _WORDS, _TEXT_WORDS, _TEXT_WORD_CHARACTERS, _ALPHA_WORDS, _STOPS, _HASHES,
    _ELLIPSES, _CURLY, _LOREM, _SENTENCES, _LINES, _BULLETS, _ELLIPSIS_LINES,
    _PUNCTUATED, _SHORT_LINES, _PARAGRAPHS,
) = range(18)  # fmt: skip
_DUPLICATE_LINES, _DUPLICATE_PARAGRAPHS, _TOP, _DUPLICATE = 18, 20, 22 - 2, 25 - 5
NAMES = (
    *SCANNED,
    *(f"duplicate_{name}{what}" for name in ("line", "paragraph") for what in ("s", "_characters")),
    *(f"top_{n}_gram_characters" for n in (2, 3, 4)),
    *(f"duplicate_{n}_gram_characters" for n in range(5, 11)),
)
"""Names of the columns that `count_batch` gives."""


class Scratch(NamedTuple):
    """Memory that is used for one document after the other; the sizes bound what is compared.

    Attributes:
        kinds: of characters by code point.
        words: uint64 of shape (words,): their hashes.
        sizes: their characters.
        blocks: uint64 of shape (2, lines): hashes of lines and of paragraphs.
        lengths: their characters.
        grams: uint64 of shape (words,): hashes of n-grams by the place of their first word.
        places: of n-grams that are looked at.
        slots: in the table of these n-grams.
        table: uint64 of shape (slots,): hashes; 0 is free.
        times: occurrences by slot.
        firsts: first place by slot.
    """

    kinds: npt.NDArray[np.uint8]
    words: npt.NDArray[np.uint64]
    sizes: npt.NDArray[np.uint32]
    blocks: npt.NDArray[np.uint64]
    lengths: npt.NDArray[np.uint32]
    grams: npt.NDArray[np.uint64]
    places: npt.NDArray[np.int32]
    slots: npt.NDArray[np.int32]
    table: npt.NDArray[np.uint64]
    times: npt.NDArray[np.int32]
    firsts: npt.NDArray[np.int32]


def scratch() -> Scratch:
    """Memory for documents of any size, of which only what is used is taken from the machine."""
    n, slots = w.COMPARED, max(16, 1 << (2 * w.COMPARED - 1).bit_length())
    long, short = np.uint64, np.int32
    return Scratch(
        kinds(),
        np.empty(n, long),
        np.empty(n, np.uint32),
        np.empty((2, n), long),
        np.empty((2, n), np.uint32),
        np.empty(n, long),
        np.empty(n, short),
        np.empty(n, short),
        np.empty(slots, long),
        np.empty(slots, short),
        np.empty(slots, short),
    )


@functools.cache
def kinds() -> npt.NDArray[np.uint8]:
    """Kinds of characters by code point: uint8 of shape (0x110000,)."""
    last = 0x40000  # nothing behind it is a letter, a number or whitespace
    found = np.zeros(0x110000, np.uint8)
    characters = [chr(code) for code in range(last)]
    for kind, test in ((_SPACE, str.isspace), (_ALPHA | _TEXT, str.isalpha), (_TEXT, str.isalnum)):
        found[:last] |= np.fromiter(map(test, characters), np.uint8, last) * np.uint8(kind)
    begin, marks = w.unspaced()
    for kind, chosen in ((_BEGINS, begin), (_MARK, marks), (_TERMINAL, w.TERMINAL), (_CLOSER, w.CLOSERS)):
        found[np.fromiter(map(ord, chosen), np.int64)] |= np.uint8(kind)
    found[found == 0] = _ANY
    return found


@njit
def _decode(data: Any, at: int) -> Any:
    """Code point that begins at a byte above 127, and its bytes."""
    lead = _long(data[at])
    one = _long(data[at + 1]) & 63
    if lead < 0xE0:
        return (lead & 31) << 6 | one, 2
    two = _long(data[at + 2]) & 63
    if lead < 0xF0:
        return (lead & 15) << 12 | one << 6 | two, 3
    return (lead & 7) << 18 | one << 12 | two << 6 | (_long(data[at + 3]) & 63), 4


@njit
def _mixed(value: Any) -> Any:
    value = (value ^ (value >> _32)) * _MIX
    return value ^ (value >> _29)


@njit
def _hashed(data: Any, begin: int, end: int) -> Any:
    """Hash of bytes, eight at a time."""
    value = _SEED ^ _unsigned(end - begin)
    at = begin
    while at + 8 <= end:
        eight = _0
        for k in range(8):
            eight |= _unsigned(data[at + k]) << _unsigned(8 * k)
        value = (value ^ eight) * _MIX
        value ^= value >> _29
        at += 8
    while at < end:
        value = (value ^ _unsigned(data[at])) * _PRIME
        at += 1
    return _mixed(value)


@njit
def _is_lorem(data: Any, begin: int, at: int, end: int) -> Any:
    """Tell whether `lorem` stands before a space and `ipsum` behind it, in any case."""
    if at - begin < 5 or end - at < 6:
        return False
    for k, letter in enumerate((108, 111, 114, 101, 109, 32, 105, 112, 115, 117, 109)):
        if data[at - 5 + k] | 32 != letter:
            return False
    return True


@njit
def _is_ellipsis(data: Any, begin: int, end: int) -> Any:
    """Tell whether bytes end with an ellipsis."""
    if end - begin < 3:
        return False
    a, b, c = data[end - 3], data[end - 2], data[end - 1]
    return (a == _DOT and b == _DOT and c == _DOT) or (a == 0xE2 and b == 0x80 and c == 0xA6)


@njit
def _stop_word(data: Any, begin: int, end: int) -> Any:
    """A bit for each stop word; 0 for other words."""
    if end - begin < 2 or end - begin > 4:
        return 0
    packed = 0
    for k in range(end - begin):
        packed |= _long(data[begin + k]) << (8 * k)
    for k, word in enumerate(_STOP_WORDS):
        if packed == word:
            return 1 << k
    return 0


@njit
def _close_paragraph(own: Scratch, counts: Any, value: Any, length: int) -> None:
    number = counts[_PARAGRAPHS]
    counts[_PARAGRAPHS] += 1
    if number < len(own.words):
        own.blocks[1, number], own.lengths[1, number] = value, length


@njit
def _scan(data: Any, begin: int, end: int, own: Scratch, counts: Any) -> None:
    """Find words, lines and paragraphs, and count all that needs no comparison of them.

    Args:
        data: bytes of documents.
        begin: of this one.
        end: of it.
        own: `words`, `sizes`, `blocks` and `lengths` are filled.
        counts: to be added to.
    """
    characters = stops = dots = 0
    word_begin, word_first, word_kinds, core, unspaced = -1, 0, 0, 0, False
    value = _SEED
    line_begin, line_first, line_end, line_last, last_kind, open_sentence = begin, 0, begin, 0, 0, False
    paragraph, paragraph_length = _0, 0
    at, dot = begin, -2
    while at <= end:
        # A line end behind the text, which is not counted, closes what is open.
        code, step = _NEWLINE, 1
        if at < end:
            code = _long(data[at])
            if code >= 128:
                code, step = _decode(data, at)
        kind = _long(own.kinds[code])
        if word_begin >= 0 and (kind & (_SPACE | _BEGINS) or (unspaced and not kind & _MARK)):
            number = counts[_WORDS]
            counts[_WORDS] += 1
            if number < len(own.words):
                own.words[number], own.sizes[number] = _mixed(value), characters - word_first
            if word_kinds & _TEXT:
                counts[_TEXT_WORDS] += 1
                counts[_TEXT_WORD_CHARACTERS] += characters - word_first
                if word_kinds & _ALPHA:
                    counts[_ALPHA_WORDS] += 1
                stops |= _stop_word(data, word_begin, at)
            if core:
                open_sentence = not core & _TERMINAL
                if core & _TERMINAL:
                    counts[_SENTENCES] += 1
            word_begin, line_end, line_last = -1, at, characters
        if kind & _SPACE:
            if code == _NEWLINE:
                if line_end > line_begin:
                    length = line_last - line_first
                    line = _hashed(data, line_begin, line_end)
                    number = counts[_LINES]
                    counts[_LINES] += 1
                    if number < len(own.words):
                        own.blocks[0, number], own.lengths[0, number] = line, length
                    counts[_SHORT_LINES] += length <= _SHORT
                    counts[_PUNCTUATED] += (last_kind & _TERMINAL) != 0
                    counts[_ELLIPSIS_LINES] += _is_ellipsis(data, line_begin, line_end)
                    counts[_SENTENCES] += open_sentence
                    paragraph_length += length + (paragraph_length > 0)
                    paragraph = _mixed(paragraph * _STEP + line)
                elif paragraph_length:
                    _close_paragraph(own, counts, paragraph, paragraph_length)
                    paragraph, paragraph_length = _0, 0
                open_sentence = False
                line_begin = line_end = at + 1
                line_first = characters + 1
                counts[_NEWLINES] += at < end
            elif code == _BLANK and _is_lorem(data, begin, at, end):
                counts[_LOREM] += 1
        else:
            if word_begin < 0:
                if line_end == line_begin:
                    counts[_BULLETS] += code in (_DASH, _BULLET)
                    line_end = at + step
                word_begin, word_first, word_kinds, core = at, characters, 0, 0
                value = _SEED
                unspaced = kind & _BEGINS != 0
            for k in range(step):
                value = (value ^ _unsigned(data[at + k])) * _PRIME
            word_kinds |= kind
            last_kind = kind
            if not kind & _CLOSER:
                core = kind
            if not kind & _TEXT:
                if code == _DOT:
                    dots = dots + 1 if dot == at - 1 else 1
                    dot = at
                    if dots == 3:
                        counts[_ELLIPSES] += 1
                        dots = 0
                elif code == _ELLIPSIS:
                    counts[_ELLIPSES] += 1
                elif code == _HASH:
                    counts[_HASHES] += 1
                elif code in (_OPEN, _CLOSE):
                    counts[_CURLY] += 1
        at += step
        characters += 1
    if paragraph_length:
        _close_paragraph(own, counts, paragraph, paragraph_length)
    counts[_CHARACTERS] = characters - 1
    for k in range(len(_STOP_WORDS)):
        counts[_STOPS] += stops >> k & 1


@njit
def _slots(number: int) -> Any:
    """Slots of a table, a power of two."""
    slots = 16
    while slots < 2 * number:
        slots *= 2
    return slots


@njit
def _place(table: Any, slots: int, value: Any) -> Any:
    """Slot of a value in a table, or the free one for it: `table[slot]` is 0."""
    mask = _unsigned(slots - 1)
    slot = (value ^ (value >> _32)) & mask
    while table[slot] != _0 and table[slot] != value:
        slot = (slot + _1) & mask
    return _long(slot)


@njit
def _duplicates(values: Any, lengths: Any, number: int, table: Any, out: Any) -> None:
    """Count values that occurred before, and their lengths."""
    slots = _slots(number)
    table[:slots] = _0
    for k in range(number):
        value = values[k] | _1
        slot = _place(table, slots, value)
        if table[slot] == value:
            out[0] += 1
            out[1] += _long(lengths[k])
        table[slot] = value


@njit
def _top(own: Scratch, number: int) -> Any:
    """Place and occurrences of the most frequent n-gram, the first of equals, among those at `places`.

    Args:
        own: `slots` and `times` are filled.
        number: of places; without any, all n-grams are different.
    """
    table, times, firsts = own.table, own.times, own.firsts
    slots = _slots(number)
    table[:slots] = _0
    top, most = 0, 1
    for k in range(number):
        place = _long(own.places[k])
        value = own.grams[place] | _1
        slot = _place(table, slots, value)
        own.slots[k] = slot
        if table[slot] == _0:
            table[slot], times[slot], firsts[slot] = value, 1, place
        else:
            times[slot] += 1
            if times[slot] > most or (times[slot] == most and firsts[slot] < top):
                top, most = _long(firsts[slot]), _long(times[slot])
    return top, most


@njit
def _longer(own: Scratch, number: int, n: int) -> Any:
    """Make n-grams of (n-1)-grams at `places`; returns the number of places at which that can be.

    If an n-gram occurs twice, so do the (n-1)-grams at its place and at the next one, and both are in `places`.
    """
    kept = 0
    for k in range(number - 1):
        place = _long(own.places[k])
        if own.places[k + 1] == place + 1:
            own.grams[place] = own.grams[place] * _STEP + own.words[place + n - 1]
            own.places[kept] = place
            kept += 1
    return kept


@njit
def _repeated(own: Scratch, number: int, n: int) -> Any:
    """Characters in n-grams that occurred before, without counting a word twice."""
    table = own.table
    slots = _slots(number)
    table[:slots] = _0
    characters = free = 0
    for k in range(number):
        place = _long(own.places[k])
        if place < free:
            continue
        value = own.grams[place] | _1
        slot = _place(table, slots, value)
        if table[slot] == _0:
            table[slot] = value
            continue
        for word in range(place, place + n):
            characters += _long(own.sizes[word])
        free = place + n
    return characters


@njit
def _count_grams(own: Scratch, words: int, out: Any) -> None:
    """Count characters of n-grams.

    Only places where shorter ones occur twice or more are looked at: elsewhere the n-gram is the only one.
    """
    for k in range(words):
        own.grams[k], own.places[k] = own.words[k], k
    number = words
    for n in range(2, 5):
        if words < n:
            return
        number = _longer(own, number, n)
        top, most = _top(own, number)
        length = n - 1
        for k in range(top, top + n):
            length += _long(own.sizes[k])
        out[_TOP + n] = length * most
        kept = 0
        for k in range(number):
            if own.times[own.slots[k]] > 1:
                own.places[kept] = own.places[k]
                kept += 1
        number = kept
    for n in range(5, 11):
        number = _longer(own, number, n)
        out[_DUPLICATE + n] = _repeated(own, number, n)
        if out[_DUPLICATE + n] == 0:
            return  # then longer ones are different, too


@njit
def _count(data: Any, starts: Any, own: Scratch, counts: Any) -> None:
    most = len(own.words)
    for k in range(len(starts) - 1):
        out = counts[k]
        _scan(data, starts[k], starts[k + 1], own, out)
        lines, paragraphs = min(out[_LINES], most), min(out[_PARAGRAPHS], most)
        _duplicates(own.blocks[0], own.lengths[0], lines, own.table, out[_DUPLICATE_LINES:])
        _duplicates(own.blocks[1], own.lengths[1], paragraphs, own.table, out[_DUPLICATE_PARAGRAPHS:])
        _count_grams(own, min(out[_WORDS], most), out)


def count_batch(data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], own: Scratch) -> npt.NDArray[np.int64]:
    """Counters of documents, not saturated: int64 of shape (documents, counters), in the order of `NAMES`.

    Args:
        data: texts as UTF-8, one behind the other.
        starts: where each begins, and the end.
        own: memory.
    """
    counts = np.zeros((len(starts) - 1, len(NAMES)), np.int64)
    view = np.ascontiguousarray(data).view()
    view.flags.writeable = False  # numba would compile once more for the other kind
    _count(view, np.array(starts, np.int64), own, counts)
    return counts
