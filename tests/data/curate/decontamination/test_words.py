"""Words of the comparison with items, and engines that hash them as plain Python does."""

from __future__ import annotations

import unicodedata
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.curate.decontamination.matching import numba_agrees, reference_words
from pipeline.data.curate.decontamination.numpy_engine import ngram_hashes, window_hashes, word_hashes
from pipeline.data.curate.decontamination.words import find_words, fold_table, ngram_hash
from pipeline.data.tokenization import hard_texts

MARKS = "\u0301\u00ad\u200d\ufeff"


def plain_words(text: str) -> list[str]:
    return ["".join(map(chr, word.codes)) for word in find_words(text)]


def numba_words(text: str) -> list[int]:
    engine = pytest.importorskip("pipeline.data.curate.decontamination.numba_engine")
    data = np.frombuffer(text.encode(), np.uint8)
    out = np.zeros(len(data) + 1, np.uint64)
    return list(out[: engine.hash_words(data, fold_table(), out)].tolist())


def hard() -> list[str]:
    return ["", *hard_texts._TEXTS, *hard_texts._pieces(), *hard_texts._scripts(False), " ".join(hard_texts._pieces())]


def test_words_are_letters_and_digits() -> None:
    assert plain_words("The Quick-brown fox's, NAÏVE_x 3.14!") == [
        "the",
        "quick",
        "brown",
        "fox",
        "s",
        "naive",
        "x",
        "3",
        "14",
    ]
    assert plain_words("中文 kata カナ ๑๒") == ["中", "文", "kata", "カ", "ナ", "12"]
    assert plain_words("ภาษาไทย") != list("ภาษาไทย")
    assert plain_words(" \n\t…—") == []


def test_case_accents_and_what_is_not_seen_do_not_count() -> None:
    text = "Crème brûlée, À la carte: Ångström"
    forms = [text, text.upper(), text.lower(), unicodedata.normalize("NFD", text), unicodedata.normalize("NFKC", text)]
    forms += [mark.join(text) for mark in MARKS]
    assert len({tuple(plain_words(form)) for form in forms}) == 1


def test_digits_stay() -> None:
    assert plain_words("12 + 30 = 42") == ["12", "30", "42"]
    assert plain_words("१२") == ["12"]


def test_places_lead_to_the_text() -> None:
    text = "  Crème e\u0301t\u0301e, 中文!"
    assert [text[word.start : word.end] for word in find_words(text)] == ["Crème", "e\u0301t\u0301e", "中", "文"]


def test_engines_give_the_words_of_the_reference() -> None:
    assert numba_agrees()
    texts = hard()
    expected = [reference_words(text) for text in texts]
    words, starts = word_hashes(texts)
    assert [words[a:b].tolist() for a, b in pairwise(starts)] == expected
    assert [numba_words(text) for text in texts] == expected


@settings(max_examples=300)
@given(st.lists(st.text(st.sampled_from("aÉß中カ1 \n.\u0301\u00ad\U0001f600ก"), max_size=30), max_size=6))
def test_engines_agree(texts: list[str]) -> None:
    words, starts = word_hashes(texts)
    expected = [reference_words(text) for text in texts]
    assert [words[a:b].tolist() for a, b in pairwise(starts)] == expected
    assert [numba_words(text) for text in texts] == expected


def test_long_texts_are_hashed_as_short_ones() -> None:
    text = "word " * 30_000 + "x" * 400_000
    assert word_hashes(["a", text, "b"])[0].tolist() == [
        *reference_words("a"),
        *reference_words(text),
        *reference_words("b"),
    ]


@pytest.mark.parametrize("length", [1, 5, 13])
def test_ngrams_are_those_of_the_reference(length: int) -> None:
    words = np.random.default_rng(0).integers(2**64, size=40, dtype=np.uint64)
    expected = [ngram_hash(words[start : start + length].tolist()) for start in range(40 - length + 1)]
    assert ngram_hashes(words, length).tolist() == expected
    windows = np.lib.stride_tricks.sliding_window_view(words, length)
    assert window_hashes(windows).tolist() == expected
    assert len(ngram_hashes(words[: length - 1], length)) == 0


def test_an_ngram_is_not_a_longer_one_of_the_same_words() -> None:
    assert ngram_hash([5, 0]) != ngram_hash([5])
