"""Counters without compiled code: what `reference` defines, by built-in functions that run over many words at once.

N-grams are looked for only where the shorter ones at the same place occur twice, which is rare in most text.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections import Counter
from collections.abc import Sequence

from pipeline.data.curate.measures import reference
from pipeline.data.curate.measures import words as w

_BLANK = re.compile("\n\n+")
_LOREM = re.compile(w.LOREM_IPSUM, re.IGNORECASE | re.ASCII)
_WHITESPACE = "".join(c for c in map(chr, range(0x3001)) if c.isspace())
_BEHIND = w.CLOSERS + _WHITESPACE
_TEXT, _ALPHA, _END = 1, 2, 4
_SYMBOLS = {0, _END}
_last, _first = operator.itemgetter(-1), operator.itemgetter(0)


class _Kinds(dict[str, int]):
    """Kinds of words: `_TEXT`, `_ALPHA` and `_END` of a sentence, added up."""

    def __missing__(self, word: str) -> int:
        if len(self) >= 2**17:  # some 15 MB
            self.clear()
        if word.isalpha():
            kind = _ALPHA + _TEXT
        else:
            kind = any(map(str.isalpha, word)) * (_ALPHA + _TEXT) or any(map(str.isalnum, word)) * _TEXT
            kind += (word.rstrip(w.CLOSERS)[-1:] in w.TERMINAL) * _END
        if len(word) <= 32:
            self[word] = kind
        return kind


_kinds = _Kinds()


def count(text: str) -> dict[str, int]:
    """All counters of a text by name."""
    newlines = text.count("\n")
    words = w.split_words(text)
    counts = {"characters": len(text), "newlines": newlines, "line_characters": len(text) - newlines}
    counts |= _of_words(words)
    counts |= {
        "stop_words": len(set(words).intersection(w.STOP_WORDS)),
        "hashes": text.count("#"),
        "ellipses": sum(map(text.count, w.ELLIPSES)),
        "curly_brackets": sum(map(text.count, w.CURLY_BRACKETS)),
        "lorem_ipsum": len(_LOREM.findall(text)) if " " in text else 0,
    }
    counts |= _of_lines(text)
    counts["sentences"] += counts.pop("ends")
    counts |= _of_grams(words[: w.COMPARED])
    return {name: min(value, reference.SATURATED) for name, value in counts.items()}


def _of_words(words: Sequence[str]) -> dict[str, int]:
    kinds = list(map(_kinds.__getitem__, words))
    each = [kinds.count(kind) for kind in range(8)]
    characters, symbols = sum(map(len, words)), each[0] + each[_END]
    if symbols:
        characters -= sum(map(len, itertools.compress(words, map(_SYMBOLS.__contains__, kinds))))
    return {
        "words": len(words),
        "text_words": len(words) - symbols,
        "text_word_characters": characters,
        "alpha_words": each[_ALPHA + _TEXT] + each[_ALPHA + _TEXT + _END],
        "ends": sum(each[_END:]),
    }


def _of_lines(text: str) -> dict[str, int]:
    raw = list(map(str.rstrip, text.split("\n")))
    lines = list(filter(None, raw))
    cores = list(filter(None, [line.rstrip(_BEHIND) for line in lines]))
    paragraphs = _BLANK.split("\n".join(raw).strip("\n")) if len(raw) > len(lines) else ["\n".join(lines)]
    counts = {
        "lines": len(lines),
        "sentences": len(cores) - sum(map(w.TERMINAL.__contains__, map(_last, cores))),
        "bullet_lines": sum(map(w.BULLETS.__contains__, map(_first, map(str.lstrip, lines)))),
        "ellipsis_lines": sum([line.endswith(w.ELLIPSES) for line in lines]),
        "punctuated_lines": sum(map(w.TERMINAL.__contains__, map(_last, lines))),
        "short_lines": sum(map(w.SHORT_LINE.__ge__, map(len, lines))),
        "paragraphs": len(paragraphs) if lines else 0,
    }
    for name, blocks in (("line", lines), ("paragraph", paragraphs)):
        compared = blocks[: w.COMPARED]
        found = reference.duplicates(compared) if len(set(compared)) < len(compared) else (0, 0)
        counts[f"duplicate_{name}s"], counts[f"duplicate_{name}_characters"] = found
    return counts


def _of_grams(words: Sequence[str]) -> dict[str, int]:
    """Counters of n-grams. `places` are those at which the n-gram occurs twice or more, all others at most once."""
    counts = {f"top_{n}_gram_characters": 0 for n in (2, 3, 4)}
    counts |= {f"duplicate_{n}_gram_characters": 0 for n in range(5, 11)}
    places: Sequence[int] = range(len(words))
    for n in (2, 3, 4):
        if len(words) < n:
            return counts
        places = _longer(places)
        grams = _grams(words, places, n)
        times = Counter(grams)
        top = max(times, key=times.__getitem__, default=())
        if not top or times[top] == 1:  # all are different: the first one
            top = tuple(words[:n])
        counts[f"top_{n}_gram_characters"] = max(times[top], 1) * len(" ".join(top))
        places = list(itertools.compress(places, map((1).__lt__, map(times.__getitem__, grams))))
    for n in range(5, 11):
        places = _longer(places)
        found = _duplicate_characters(places, _grams(words, places, n), n)
        if not found:  # then longer ones are different, too
            break
        counts[f"duplicate_{n}_gram_characters"] = found
    return counts


def _longer(places: Sequence[int]) -> Sequence[int]:
    """Places at which a longer n-gram can occur twice: those whose next one is there, too."""
    if isinstance(places, range):
        return places[:-1]
    return [place for place, following in itertools.pairwise(places) if following == place + 1]


def _grams(words: Sequence[str], places: Sequence[int], n: int) -> list[tuple[str, ...]]:
    """N-grams of words that begin at places."""
    if isinstance(places, range):
        return list(zip(*(words[i:] for i in range(n)), strict=False))
    return [tuple(words[i : i + n]) for i in places]


def _duplicate_characters(places: Sequence[int], grams: Sequence[tuple[str, ...]], n: int) -> int:
    seen: set[tuple[str, ...]] = set()
    characters = free = 0
    for i, gram in zip(places, grams, strict=True):
        if i < free:
            continue
        if gram in seen:
            characters += sum(map(len, gram))
            free = i + n
        else:
            seen.add(gram)
    return characters
