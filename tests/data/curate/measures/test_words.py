"""Words, lines and paragraphs against plain loops over characters."""

from __future__ import annotations

import unicodedata

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.curate.measures.hard_texts import texts
from pipeline.data.curate.measures.words import TERMINAL, split_lines, split_paragraphs, split_words, unspaced
from tests.data.curate.measures.mixed_texts import mixed

BEGIN, MARKS = map(set, unspaced())


def plain_words(text: str) -> list[str]:
    """The definition, one character after the other."""
    words: list[str] = []
    inside = alone = False  # a word is open; it is one of a language without spaces
    for c in text:
        if c.isspace():
            inside = False
        elif c in BEGIN or not inside or (alone and c not in MARKS):
            words.append(c)
            inside, alone = True, c in BEGIN
        else:
            words[-1] += c
    return words


def test_words_are_those_of_a_plain_loop() -> None:
    for text in texts():
        assert split_words(text) == plain_words(text)


@settings(deadline=None, max_examples=100)
@given(mixed)
def test_words_of_mixed_texts(text: str) -> None:
    assert split_words(text) == plain_words(text)


@settings(deadline=None)
@given(st.text())
def test_words_are_those_of_split_where_there_are_spaces(text: str) -> None:
    if not BEGIN.intersection(text):
        assert split_words(text) == text.split()


def test_languages_without_spaces() -> None:
    assert split_words("日本とEnglish text。") == ["日", "本", "と", "English", "text。"]
    assert split_words("ที่นี่ ดี") == ["ที่", "นี่", "ดี"]
    assert split_words("한국어 텍스트") == ["한국어", "텍스트"]  # Korean has spaces
    assert all(unicodedata.category(c)[0] == "M" for c in MARKS)
    assert {"漢", "か", "カ", "ㄅ", "ｶ", "ก", "ກ", "က", "ក", "\U00020000"} <= BEGIN


def test_lines_and_paragraphs() -> None:
    text = " a \r\n\t\r\nb\n \nb\x85c\n\n\nd"
    assert split_lines(text) == [" a", "b", "b\x85c", "d"]
    assert split_paragraphs(text) == [" a", "b", "b\x85c", "d"]
    assert split_paragraphs("\n\na\nb\n\nc\n") == ["a\nb", "c"]
    assert split_paragraphs("") == split_paragraphs(" \n\n") == split_lines("\n \n") == []


def test_terminal_marks_are_punctuation() -> None:
    # Those that this Python does not know yet are unassigned.
    assert {unicodedata.category(c) for c in TERMINAL} <= {"Po", "Cn"}
    assert {".", "?", "!", "。", "؟", "।", "！"} <= TERMINAL
    assert not {",", "…", '"', ":", ";"} & TERMINAL
