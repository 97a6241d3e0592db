r"""Lines that are removed from documents: by the rules of C4, or by those of RefinedWeb.

Lines end at `\n`. A line is kept as it is or goes as a whole, so line numbers say all there is to say. C4 also removes
marks of citations (`[1]`, `[edit]`) within lines, and RefinedWeb the boilerplate within short ones; that would change
text that stays, and is not done. Cleaning what was cleaned changes nothing.

Rules of C4 (Raffel et al. 2020, 2.2, and its code): a line stays if it ends with a terminal mark or an end quotation
mark, but not with an ellipsis, has at least 3 words, none longer than 1,000 characters, and mentions neither
JavaScript nor cookie policies and terms of use. Blank lines go.

Rules of RefinedWeb (Penedo et al. 2023, G.2), for English: a line goes if it is mainly upper case, a number, a counter
(`3 likes`), one word, or short with a phrase of navigation (`sign in ...`, `... read more`, `items in cart`). If more
than 5 % of the words of a document are in such lines, all of it goes. Blank lines stay.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from pipeline.data.curate.measures import words as w

C4_MIN_WORDS = 3
C4_MAX_WORD = 1000
C4_ENDS = (".", "?", "!", '"', "'", "”", "’")
_C4_POLICY = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
REFINEDWEB_SHORT = 10
"""Words of the longest line in which phrases are looked for."""
REFINEDWEB_WORDS = 20
"""One word in this many may be in lines that go: 5 %."""
_COUNTED = (
    "likes?|shares?|comments?|retweets?|reposts?|quotes?|bookmarks?|upvotes?|downvotes?|downloads?|views?|followers?"
    "|replies|reply|votes?|points?|subscribers?|favou?rites?"
)
_COUNTER = re.compile(rf"\W*\d[\d.,]*\s?[km]?\+?\s+(?:{_COUNTED})\W*", re.IGNORECASE | re.ASCII)
_PHRASE = re.compile(
    r"\W*(?:sign[ -]?(?:in|up)|log[ -]?in)\b.*|.*\bread more\W*|.*\bitems? in (?:your )?cart\b.*",
    re.IGNORECASE | re.ASCII,
)
_VERSIONS = {"c4": 1, "refinedweb": 1}
_Removed = dict[int, str]


def clean_lines(text: str, presets: Sequence[str]) -> str:
    """A text without the lines that presets remove.

    Args:
        text: of a document.
        presets: `c4`, `refinedweb`, or both; each sees what the one before leaves.
    """
    lines = text.split("\n")
    removed = _removed(lines, presets)
    return "\n".join([line for number, line in enumerate(lines) if number not in removed]) if removed else text


def removed_lines(text: str, presets: Sequence[str]) -> list[tuple[int, str]]:
    """Lines that `clean_lines` removes: their numbers, from 1, and the rules that do, like `c4.few_words`."""
    return [(number + 1, rule) for number, rule in sorted(_removed(text.split("\n"), presets).items())]


def line_settings(presets: Sequence[str]) -> dict[str, Any]:
    """Versions of all that `clean_lines` depends on besides the text, for the hash of the measures."""
    return {"presets": [[name, _VERSIONS[name]] for name in presets], "words": w.settings()} if presets else {}


def _removed(lines: Sequence[str], presets: Sequence[str]) -> _Removed:
    removed: _Removed = {}
    for preset in presets:
        left = {number: line for number, line in enumerate(lines) if number not in removed}
        removed |= _PRESETS[preset](left)
    return removed


def _c4(lines: dict[int, str]) -> _Removed:
    rules = ((number, _c4_rule(line.strip())) for number, line in lines.items())
    return {number: f"c4.{rule}" for number, rule in rules if rule}


def _c4_rule(line: str) -> str:
    """Rule of C4 that removes a line, the quickest to ask first."""
    if not line:
        return "blank"
    if not line.endswith(C4_ENDS) or line.endswith("..."):
        return "no_terminal_mark"
    words = w.split_words(line)
    if len(words) < C4_MIN_WORDS:
        return "few_words"
    if len(line) > C4_MAX_WORD and max(map(len, words)) > C4_MAX_WORD:
        return "long_word"
    lower = line.lower()
    if "javascript" in lower:
        return "javascript"
    return "policy" if any(phrase in lower for phrase in _C4_POLICY) else ""


def _refinedweb(lines: dict[int, str]) -> _Removed:
    removed, words, flagged = {}, 0, 0
    for number, line in lines.items():
        here = w.split_words(line)
        words += len(here)
        if here and (rule := _refinedweb_rule(line, here)):
            removed[number] = f"refinedweb.{rule}"
            flagged += len(here)
    if flagged * REFINEDWEB_WORDS <= words:
        return removed
    return {number: removed.get(number, "refinedweb.document") for number in lines}


def _refinedweb_rule(line: str, words: Sequence[str]) -> str:
    """Rule of RefinedWeb that removes a line that is not blank."""
    if len(words) == 1:
        return "one_word"
    if not any(map(str.isalpha, line)):
        return "number" if any(map(str.isalnum, line)) else ""
    if sum(map(str.isupper, line)) * 2 > sum(map(len, words)):
        return "uppercase"
    if len(words) > REFINEDWEB_SHORT:
        return ""
    if _COUNTER.fullmatch(line):
        return "counter"
    return "phrase" if _PHRASE.fullmatch(line) else ""


_PRESETS: dict[str, Callable[[dict[int, str]], _Removed]] = {"c4": _c4, "refinedweb": _refinedweb}
