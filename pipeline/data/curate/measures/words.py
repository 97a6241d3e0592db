r"""Words, lines and paragraphs as all rules, reports and line edits see them.

**A word is a run of characters between whitespace**, as `str.split()` gives them. The published bounds were set on such
words (Gopher, C4), and the definition of a word changes a corpus more than any bound: with a tokenizer of linguistics,
punctuation counts as words, words get shorter, fewer of them have a letter, and documents that are fine by the same
bounds go. Whitespace words also need no model, and are the same on every machine.

**Languages without spaces** are split further, by blocks of Unicode alone: each character of Han, kana, bopomofo, Thai,
Lao, Burmese or Khmer is a word, with the combining marks behind it. What stands between them is a word as elsewhere:
`日本とEnglish` has the words `日`, `本`, `と`, `English`. The name of this splitter is `whitespace+characters`. Such
words are short, so `gopher_quality.min_word_length` must be null for sources in these languages.

**A line** ends at `\n`, and at nothing else: `\r`, vertical tabs and the separators of Unicode are whitespace within
it. (`str.splitlines()` would also cut at control characters that stray into text, and the count of line ends would not
be that of lines.) Whitespace at its end is not part of it, so `\r\n` is a line end like any other; whitespace at its
beginning is. Blank lines do not count as lines: they are how a text is set, not what it says.

**A paragraph** is a block of lines between blank lines. **Characters** are code points.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Iterable, Iterator

SPLITTER = "whitespace+characters"
VERSION = 1
"""Of the definitions here and of the counters. It rises when one of them changes."""
COMPARED = 2**20
"""Words, lines and paragraphs of a document that are compared with each other; further ones are counted only. It bounds
the memory of a document, and is ten times the longest document that Gopher keeps."""

_BLOCKS = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Burmese
    (0x1780, 0x17FF),  # Khmer
    (0x3040, 0x312F),  # hiragana, katakana, bopomofo
    (0x31A0, 0x31BF),  # bopomofo
    (0x31F0, 0x31FF),  # katakana
    (0xA9E0, 0xA9FF),  # Burmese
    (0xAA60, 0xAA7F),
    (0xFF66, 0xFF9F),  # katakana of half width
    (0x1AFF0, 0x1B16F),  # kana
)
_IDEOGRAPHS = ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x3FFFD))
"""Without any marks."""
# Characters with the property Sentence_Terminal of Unicode.
_TERMINAL = (
    "21 2e 3f 589 61d-61f 6d4 700-702 7f9 837 839 83d-83e 964-965 104a-104b 1362 1367-1368 166e 1735-1736 17d4-17d6 "
    "17d9-17da 1803 1809 1944-1945 1aa8-1aab 1b5a-1b5b 1b5e-1b5f 1b7d-1b7e 1c3b-1c3c 1c7e-1c7f 203c-203d 2047-2049 "
    "2e2e 2e3c 2e53-2e54 3002 a4ff a60e-a60f a6f3 a6f7 a876-a877 a8ce-a8cf a92f a9c8-a9c9 aa5d-aa5f aaf0-aaf1 abeb "
    "fe52 fe56-fe57 ff01 ff0e ff1f ff61 10a56-10a57 10f55-10f59 10f86-10f89 11047-11048 110be-110c1 11141-11143 "
    "111c5-111c6 111cd 111de-111df 11238-11239 1123b-1123c 112a9 1144b-1144c 115c2-115c3 115c9-115d7 11641-11642 "
    "1173c-1173e 11944 11946 11a42-11a43 11a9b-11a9c 11c41-11c42 11ef7-11ef8 11f43-11f44 16a6e-16a6f 16af5 "
    "16b37-16b38 16b44 16e98 1bc9f 1da88"
)


def _code_points(ranges: str) -> Iterator[int]:
    for each in ranges.split():
        first, _, last = each.partition("-")
        yield from range(int(first, 16), int(last or first, 16) + 1)


TERMINAL = frozenset(map(chr, _code_points(_TERMINAL)))
"""Marks that end a sentence: full stops, question and exclamation marks of all scripts."""
CLOSERS = "\"'”’»)]}）」』】］｝〉》"
"""Quotes and brackets that may stand behind the mark at the end of a sentence."""
BULLETS = ("•", "-")
ELLIPSES = ("...", "…")
STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
SHORT_LINE = 30
"""Characters of the longest short line."""
CURLY_BRACKETS = "{}"
LOREM_IPSUM = "lorem ipsum"


@functools.cache
def unspaced() -> tuple[str, str]:
    """Characters of languages without spaces: those that begin a word, and marks that belong to the word before."""
    within = [chr(c) for first, last in _BLOCKS for c in range(first, last + 1)]
    marks = [c for c in within if unicodedata.category(c)[0] == "M"]
    others = [chr(c) for first, last in _IDEOGRAPHS for c in range(first, last + 1)]
    begin = set(within).difference(marks)
    return "".join([*sorted(begin), *others]), "".join(marks)


@functools.cache
def _patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """One that finds a character which is a word, one that finds the words of a text with such characters."""
    begin, marks = map(_ranges, unspaced())
    return re.compile(f"[{begin}]"), re.compile(f"[{begin}][{marks}]*|[^{begin}]+")


def _ranges(characters: Iterable[str]) -> str:
    """A class of `re`, without its brackets."""
    parts: list[list[int]] = []
    for code in sorted(map(ord, characters)):
        if parts and parts[-1][1] == code - 1:
            parts[-1][1] = code
        else:
            parts.append([code, code])
    return "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in parts)


def split_words(text: str) -> list[str]:
    """Words of a text, in order."""
    if text.isascii():
        return text.split()
    find, words = _patterns()
    return [word for run in text.split() for word in words.findall(run)] if find.search(text) else text.split()


def split_lines(text: str) -> list[str]:
    """Lines of a text that are not blank."""
    return [line for line in map(str.rstrip, text.split("\n")) if line]


def split_paragraphs(text: str) -> list[str]:
    """Paragraphs of a text, with a line feed between the lines of each."""
    paragraphs: list[list[str]] = [[]]
    for line in map(str.rstrip, text.split("\n")):
        if line:
            paragraphs[-1].append(line)
        elif paragraphs[-1]:
            paragraphs.append([])
    return ["\n".join(lines) for lines in paragraphs if lines]


def settings() -> dict[str, str | int]:
    """Versions of all that the counters depend on besides the text, for the hash of the measures.

    New versions of Unicode, which come with Python, know more letters.
    """
    return {"words": SPLITTER, "version": VERSION, "unicode": unicodedata.unidata_version}
