"""Counters: engines against the reference, and the reference against plain counts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.common.imports import has_numba
from pipeline.data.curate.measures import counters, engine_choice, numba_counters, python_counters, reference, words
from pipeline.data.curate.measures.counters import COUNTERS, CounterMeasurer
from pipeline.data.curate.measures.engine_choice import CountersDiffer, as_batch
from pipeline.data.curate.measures.hard_texts import texts
from tests.data.curate.measures.mixed_texts import anything, mixed, repetitive

assert has_numba()
OWN = numba_counters.scratch()


def by_numba(texts: list[str], own: numba_counters.Scratch = OWN) -> list[dict[str, int]]:
    batch = as_batch(texts)
    rows = numba_counters.count_batch(batch.data, batch.starts, own)
    counts = [dict(zip(numba_counters.NAMES, row.tolist(), strict=True)) for row in rows]
    return [each | {"line_characters": each["characters"] - each["newlines"]} for each in counts]


def check(texts: list[str]) -> None:
    expected = [reference.count(text) for text in texts]
    assert [python_counters.count(text) for text in texts] == expected
    assert by_numba(texts) == expected


def test_engines_on_hard_texts() -> None:
    check(texts())


@settings(deadline=None, max_examples=150)
@given(st.lists(st.one_of(mixed, repetitive, anything), max_size=4))
def test_engines_on_texts_of_hypothesis(texts: list[str]) -> None:
    check(texts)


def test_names() -> None:
    assert list(reference.count("")) == list(COUNTERS)
    assert {*numba_counters.NAMES, "line_characters"} == set(COUNTERS)
    assert numba_counters._SHORT == words.SHORT_LINE
    assert [word.to_bytes(4, "little").strip(b"\0").decode() for word in numba_counters._STOP_WORDS] == list(
        words.STOP_WORDS
    )


def test_counts_by_hand() -> None:
    text = "- The cat and the dog.\n• Lorem ipsum {x} # ...\n\nThe end…\nThe end…\n"
    assert {name: value for name, value in reference.count(text).items() if value} == {
        "characters": 66, "newlines": 5, "line_characters": 61, "words": 16, "text_words": 12,
        "text_word_characters": 43, "alpha_words": 12, "stop_words": 2, "hashes": 1, "ellipses": 3,
        "curly_brackets": 2, "lorem_ipsum": 1, "sentences": 4, "lines": 4, "bullet_lines": 2, "ellipsis_lines": 3,
        "punctuated_lines": 2, "short_lines": 4, "paragraphs": 2, "duplicate_lines": 1,
        "duplicate_line_characters": 8, "top_2_gram_characters": 16, "top_3_gram_characters": 9,
        "top_4_gram_characters": 13,
    }  # fmt: skip


@pytest.mark.parametrize("count", [reference.count, python_counters.count, lambda text: by_numba([text])[0]])
def test_ngrams_by_hand(count: Callable[[str], dict[str, int]]) -> None:
    counts = count("a b a b a b c d")
    # a b: three times three characters. Four and more words do not occur twice.
    assert [counts[f"top_{n}_gram_characters"] for n in (2, 3, 4)] == [9, 10, 14]
    assert counts["duplicate_5_gram_characters"] == 0
    counts = count(" ".join("abcdefghij" * 3))
    assert [counts[f"duplicate_{n}_gram_characters"] for n in range(5, 11)] == [20, 18, 14, 16, 18, 20]
    assert count("bb a bb a")["top_2_gram_characters"] == 8
    assert count("a bbb a bbb a")["top_2_gram_characters"] == 10  # `a bbb`, before `bbb a` that is as frequent
    assert count("a")["top_2_gram_characters"] == 0


@pytest.mark.parametrize("size", [8, 64, 100])
def test_what_is_compared_is_bounded(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "COMPARED", size)
    own = numba_counters.scratch()
    cases = [text for text in texts() if len(text) < 5000]
    expected = [reference.count(text) for text in cases]
    assert [python_counters.count(text) for text in cases] == expected == by_numba(cases, own)
    assert reference.count("a b " * 200)["words"] == 400


def test_counts_saturate(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = engine_choice.choose("numba")
    huge = np.full((1, len(numba_counters.NAMES)), 2**33, np.int64)
    monkeypatch.setattr(numba_counters, "count_batch", lambda *_: huge)
    counts = engine.count(as_batch(["a"]))
    assert counts["words"].tolist() == [2**32 - 1] and counts["line_characters"].tolist() == [0]
    monkeypatch.setattr(reference, "SATURATED", 3)
    assert reference.count("abcdef")["characters"] == python_counters.count("abcdef")["characters"] == 3


@pytest.mark.slow
def test_deep_repetition_and_long_words_take_linear_time() -> None:
    # In quadratic time these would take hours.
    for text in (
        "a " * 300_000,
        "x" * 2_000_000,
        "\n" * 500_000,
        "a\n\n" * 200_000,
        "漢" * 200_000,
        "a b c d e f " * 50_000,
    ):
        assert python_counters.count(text) == by_numba([text])[0]


@pytest.mark.parametrize("engine", ["numba", "python"])
def test_measurer(engine: engine_choice.CounterEngineName) -> None:
    measurer = CounterMeasurer(engine)
    assert measurer.engine.name == engine and not measurer.note
    cases = texts()[:40]
    table = np.zeros(len(cases), [("state", "u1"), *measurer.columns])
    measurer.measure(as_batch(cases), table, None)
    for text, record in zip(cases, table, strict=True):
        assert {name: int(record[name]) for name in COUNTERS} == reference.count(text)
    measurer.measure(as_batch([]), table[:0], None)


def test_sample_is_of_every_chunk() -> None:
    measurer = CounterMeasurer("python")
    batch = as_batch(["a"] * 5000)
    first = measurer._sample(batch)
    assert 0 < len(first) < 50 and first == measurer._sample(batch)  # the next chunk begins
    assert len(measurer._sample(as_batch(["a"]))) == 1
    measurer._last_row = 2
    later = as_batch(["a", "b", "c", "d"])
    later.rows[:] += 3
    assert len(measurer._sample(later)) == 0
    assert counters.SAMPLED_BYTES < 2**20


def test_wrong_engine_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    measurer = CounterMeasurer("numba")
    right = measurer.engine.count

    def wrong(batch: object) -> engine_choice.Counts:
        counts = right(batch)
        counts["hashes"] += np.uint32(1)
        return counts

    monkeypatch.setattr(measurer.engine, "count", wrong)
    table = np.zeros(2, measurer.columns)
    with pytest.raises(CountersDiffer, match=r"document [01] .* counts hashes as 1, plain Python as 0") as error:
        measurer.measure(as_batch(["a", "b"]), table, None)
    assert error.value.counter == "hashes" and "data.curate.engine: python" in str(error.value)
    assert "counts hashes as" in engine_choice.check(measurer.engine)


def test_bytes_that_can_be_written_are_counted_by_the_same_code() -> None:
    batch = as_batch(["a b.", "c\n"])
    compiled = len(numba_counters._count.signatures)
    rows = numba_counters.count_batch(batch.data.copy(), batch.starts, OWN)
    assert np.array_equal(rows, numba_counters.count_batch(batch.data, batch.starts[:], OWN))
    assert len(numba_counters._count.signatures) == max(compiled, 1)
