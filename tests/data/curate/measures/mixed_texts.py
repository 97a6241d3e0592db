"""Texts like real ones, for hypothesis: few words, which occur again, in lines and paragraphs, and odd characters."""

from __future__ import annotations

from hypothesis import strategies as st

PIECES = (
    "the", "The", "of", "and", "to", "a", "cat", "cat.", "dog?", "“so!”", "(end.)", "...", "…", "#", "{", "}", "-", "•",
    "12",
    "½", "Lorem ipsum", "lorem", "ipsum", "é", "e\u0301", "漢字", "。", "ที่", "\u0e31", "\x00", "\ufeff", "😀", "x" * 31,
)  # fmt: skip
SPACES = (
    " ",
    " ",
    " ",
    " ",
    "",
    "\n",
    "\n",
    "\n\n",
    "\r\n",
    " \n",
    "\n \n",
    "\t",
    "\x0b",
    "\x1c",
    "\x85",
    "\u2028",
    "\u3000",
)

mixed = st.lists(st.tuples(st.sampled_from(PIECES), st.sampled_from(SPACES)), max_size=80).map(
    lambda pairs: "".join(word + space for word, space in pairs)
)
"""Words and spaces of all kinds."""
repetitive = st.lists(st.sampled_from(("a", "b", "cc")), max_size=120).map(" ".join)
"""N-grams that occur again and overlap."""
anything = st.text(st.characters(exclude_categories=("Cs",)), max_size=200)
"""All code points that have a UTF-8."""
