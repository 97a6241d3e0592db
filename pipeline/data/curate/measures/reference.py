"""Counters of a text in plain Python. This is their definition; engines that are quick must give the same numbers.

What the papers leave open is settled here. Shares are of characters as in `datatrove`, whose filters the published
corpora were made with; where we differ from it, `docs/curation-rules.md` says why.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from pipeline.data.curate.measures import words as w

SATURATED = 2**32 - 1


def count(text: str) -> dict[str, int]:
    """All counters of a text by name, in the order of `counters.COUNTERS`."""
    words, lines, paragraphs = w.split_words(text), w.split_lines(text), w.split_paragraphs(text)
    with_text = [word for word in words if any(map(str.isalnum, word))]
    counts = {
        "characters": len(text),
        "newlines": text.count("\n"),
        "line_characters": len(text) - text.count("\n"),
        "words": len(words),
        "text_words": len(with_text),
        "text_word_characters": sum(map(len, with_text)),
        "alpha_words": sum(any(map(str.isalpha, word)) for word in words),
        "stop_words": len({*w.STOP_WORDS}.intersection(words)),
        "hashes": text.count("#"),
        "ellipses": sum(text.count(each) for each in w.ELLIPSES),
        "curly_brackets": sum(text.count(each) for each in w.CURLY_BRACKETS),
        "lorem_ipsum": len(re.findall(w.LOREM_IPSUM, text, re.IGNORECASE | re.ASCII)),
        "sentences": sum(map(sentences, lines)),
        "lines": len(lines),
        "bullet_lines": sum(line.lstrip().startswith(w.BULLETS) for line in lines),
        "ellipsis_lines": sum(line.endswith(w.ELLIPSES) for line in lines),
        "punctuated_lines": sum(line[-1] in w.TERMINAL for line in lines),
        "short_lines": sum(len(line) <= w.SHORT_LINE for line in lines),
        "paragraphs": len(paragraphs),
    }
    for name, blocks in (("line", lines), ("paragraph", paragraphs)):
        counts[f"duplicate_{name}s"], counts[f"duplicate_{name}_characters"] = duplicates(blocks[: w.COMPARED])
    compared = words[: w.COMPARED]
    counts |= {f"top_{n}_gram_characters": top_gram_characters(compared, n) for n in (2, 3, 4)}
    counts |= {f"duplicate_{n}_gram_characters": duplicate_gram_characters(compared, n) for n in range(5, 11)}
    return {name: min(value, SATURATED) for name, value in counts.items()}


def sentences(line: str) -> int:
    """Sentences of a line: its words that end with a terminal mark, and one more if the last word does not.

    Quotes and brackets behind the mark are left out. An abbreviation counts as an end: there is no model here.
    """
    ends, last = 0, ""
    for word in w.split_words(line):
        core = word.rstrip(w.CLOSERS)
        last = core[-1:] or last
        ends += core[-1:] in w.TERMINAL
    return ends + (last != "" and last not in w.TERMINAL)


def duplicates(blocks: Sequence[str]) -> tuple[int, int]:
    """Lines or paragraphs that occurred before in the document, and the characters in them."""
    seen: set[str] = set()
    number = characters = 0
    for block in blocks:
        if block in seen:
            number += 1
            characters += len(block)
        seen.add(block)
    return number, characters


def top_gram_characters(words: Sequence[str], n: int) -> int:
    """Characters in the most frequent n-gram: its own, with spaces between words, times its occurrences.

    Among equally frequent ones it is the first of the document.
    """
    grams = Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
    if not grams:
        return 0
    gram, times = grams.most_common(1)[0]
    return times * len(" ".join(gram))


def duplicate_gram_characters(words: Sequence[str], n: int) -> int:
    """Characters in n-grams that occurred before, without spaces.

    The words of one that did are skipped then, so none counts twice.
    """
    seen: set[tuple[str, ...]] = set()
    characters = i = 0
    while i + n <= len(words):
        gram = tuple(words[i : i + n])
        if gram in seen:
            characters += sum(map(len, gram))
            i += n
        else:
            seen.add(gram)
            i += 1
    return characters
