"""Texts on which ways to count words, lines and n-grams disagree, if they ever do. Always the same ones."""

from __future__ import annotations

import functools
import unicodedata

import numpy as np

from pipeline.common.hashing import key, mix
from pipeline.data.curate.measures import words as w

_SPACES = "\t\n\x0b\x0c\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2000\u2007\u200a\u2028\u2029\u202f\u205f\u3000"
_NO_SPACES = "\x00\x7f\u200b\u200d\u2060\ufeff\u180e\u00ad\ufffe\U0010ffff"
_TEXTS = (
    "", "\n", " \n\n \n", "a", ".", "•", "…", "\x00", "a\n", "\na", "\r\n\r\n", "- a\n•b\n -c\n--\n—d", "....",
    "a... b…\nc ...\n… d.\n..\n. ..", "......", "#a## #\n{}{{ }", "lorem ips", "orem ipsum",
    "Lorem Ipsum lorem  ipsum xLOREM ipsumx lorem ipsum", "A b. C? “D!” (E.) f.) g\nno end\n) ] \"\nend.\n)\n",
    "Dr. No said “no”...", "the be to of and that have with", "The the thee he th the.", "x \nx\n x\nx\t\n\nx",
    "a\n\na\n\na b\n \na\n\n\n\na b", "日本語とEnglish。「はい。」\nภาษาไทยน้ำ ที่นี่\nမြန်မာ ខ្មែរ។", "½ ² Ⅷ 一 ٣ x² — ( ) 𝟘",
    "a漢b字 c\u0e31\u0e31 \u0e01\u0e31\u0e31a\u0e31 漢\u0e31漢", "é e\u0301 ǅ ﬁ Straße 😀 👨\u200d👩\u200d👧 \u0301",
    "x" * 70_000, "x " * 3000, "\n" * 3000, "x\n" * 3000, "a b c d e f g h i j k l\n" * 40, "ab ab " * 11 + "ba",
    "y" * 30 + "\n" + "y" * 31 + "\n" + "é" * 30 + " \n" + "漢" * 31, ". " * 99, "a b c d e f g h i j " * 2,
    "a " * 9 + "b " + "a " * 10,
)  # fmt: skip
_WORDS = (
    "a", "b", "of", "the", "The", "cat.", "dog?”", "…", "-", "•", "漢字", "é", "12", "\n", "\n", "\n\n", "\r\n", " ",
    "{", "#",
)  # fmt: skip
COMPOSED = 300


@functools.cache
def texts() -> list[str]:
    """Some 500 texts, 300 KB."""
    spaces = [f"{c}a{c}b.{c}\n{c}{c}\nc{c}{c}d{c}" for c in (*_SPACES, *_NO_SPACES)]
    marks = [f"a{c} b{c}”{c}\n{c}\n{c}c" for c in (*sorted(w.TERMINAL), *w.CLOSERS)]
    return [*_TEXTS, *spaces, " ".join(marks), *_scripts(), *_composed(2, 80), *_composed(len(_WORDS), 200)]


def _scripts() -> list[str]:
    """One assigned character of every 64 code points, and the neighbours of each block without spaces."""
    begin, marks = w.unspaced()
    edges = [chr(ord(c) + d) for c in (begin[0], begin[-1], *marks) for d in (-1, 0, 1)]
    some = [chr(c + int(mix(np.array([c], np.uint64), 1)[0]) % 64) for c in range(0, 0x34000, 64)]
    usable = [c for c in (*some, *edges) if unicodedata.category(c) not in ("Cs", "Cn")]
    groups = [usable[i : i + 8] for i in range(0, len(usable), 8)]
    return ["\n".join(f"a{c} {c} 1{c}{c}\n{c}b.{c}" for c in group) for group in groups]


def _composed(vocabulary: int, most: int) -> list[str]:
    """Texts of few different words, chosen by key: n-grams, lines and paragraphs occur again at all places."""
    made = []
    for number in range(COMPOSED // 2):
        numbers = mix(np.arange(most + 1, dtype=np.uint64), key("counters", vocabulary, number))
        chosen = (numbers[1 : 2 + int(numbers[0]) % most] >> np.uint64(20)) % np.uint64(vocabulary)
        pieces = [_WORDS[int(k)] for k in chosen]
        made.append((" " if number % 3 else "").join(pieces))
    return made
