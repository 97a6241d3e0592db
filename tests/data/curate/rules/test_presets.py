"""Presets: each rule at its bound, and all of them against a plain implementation of the published definitions."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.curation.rules import RulesConfig
from pipeline.data.curate.measures import reference
from pipeline.data.curate.measures.counters import COUNTERS
from pipeline.data.curate.rules.base import DocumentRule
from pipeline.data.curate.rules.evaluate import evaluate
from pipeline.data.curate.rules.presets import MEASURES, preset_rules

ALL = RulesConfig.model_validate({name: {} for name in MEASURES})
RULES = preset_rules(ALL, "data.curate.rules")


def table(texts: Sequence[str]) -> np.ndarray:
    records = np.zeros(len(texts), [("state", "u1"), *((name, "<u4") for name in COUNTERS)])
    for record, text in zip(records, texts, strict=True):
        for name, value in reference.count(text).items():
            record[name] = value
    return records


def fired(text: str, rules: Sequence[DocumentRule] = RULES) -> set[str]:
    fires = evaluate(rules, table([text]))[:, 0]
    return {rule.name for rule, fire in zip(rules, fires, strict=True) if fire}


def words(count: int, length: int = 5) -> list[str]:
    """Different words."""
    return [
        f"{'abcdefghij'[k // 100 % 10]}{'abcdefghij'[k // 10 % 10]}{'abcdefghij'[k % 10]}".ljust(length, "z")
        for k in range(count)
    ]


def lines(total: int, marked: int, mark: Callable[[str], str]) -> str:
    return "\n".join(mark(word) if k < marked else word for k, word in enumerate(words(total)))


def again(total: int, repeated: int, separator: str) -> str:
    """Blocks of which some are the first one again."""
    return separator.join([*words(total - repeated), *["aaazz"] * repeated])


def padded(size: int, before: str, after: str, separator: str = " ") -> str:
    """Two texts with one long word between them, `size` characters in all."""
    return separator.join((before, "y" * (size - len(before) - len(after) - 2 * len(separator)), after))


def gram(n: int, characters: int) -> str:
    """Different words, with that many characters."""
    return " ".join("abcdefghij"[k] * (characters // n + (k < characters % n)) for k in range(n))


CASES: dict[str, tuple[str, str]] = {
    "gopher_quality.min_words": (" ".join(words(50)), " ".join(words(49)) + " - ="),
    "gopher_quality.max_words": ("a " * 100_000, "a " * 100_001),
    "gopher_quality.min_word_length": ("abc " * 9, "abc " * 9 + "ab"),
    "gopher_quality.max_word_length": ("éééééééééé " * 9, "éééééééééé " * 9 + "ééééééééééé"),
    "gopher_quality.max_hashes": (" ".join([*words(9), "#a"]), " ".join([*words(9), "##"])),
    "gopher_quality.max_ellipses": (" ".join([*words(9), "a..."]), " ".join([*words(9), "a...…"])),
    "gopher_quality.max_bullet_lines": (lines(10, 9, lambda a: f" • {a}"), lines(10, 10, lambda a: f"-{a}")),
    "gopher_quality.max_ellipsis_lines": (lines(10, 3, lambda a: f"{a}… "), lines(10, 4, lambda a: f"{a}...")),
    "gopher_quality.min_alpha_words": (" ".join([*words(8), "12", "-"]), " ".join([*words(7), "12", "-", "½"])),
    "gopher_quality.min_stop_words": ("of the the", "the the The of, with."),
    "gopher_repetition.max_duplicate_lines": (again(10, 3, "\n"), again(10, 4, "\n")),
    "gopher_repetition.max_duplicate_paragraphs": (again(10, 3, "\n\n"), again(10, 4, "\n \n")),
    "gopher_repetition.max_duplicate_line_characters": (
        padded(100, "x" * 20, "x" * 20, "\n"), padded(99, "x" * 20, "x" * 20, "\n"),
    ),
    "gopher_repetition.max_duplicate_paragraph_characters": (
        padded(100, "x" * 20, "x" * 20, "\n\n"), padded(99, "x" * 20, "x" * 20, "\n\n"),
    ),
    "gopher_repetition.max_top_2_grams": (padded(50, "ab cd", "ab cd"), padded(49, "ab cd", "ab cd")),
    "gopher_repetition.max_top_3_grams": (padded(100, "abc de fg", "abc de fg"), padded(99, "abc de fg", "abc de fg")),
    "gopher_repetition.max_top_4_grams": (padded(100, "a b c de", "a b c de"), padded(99, "a b c de", "a b c de")),
    **{
        f"gopher_repetition.max_duplicate_{n}_grams": tuple(
            padded(size, gram(n, 20 - n), gram(n, 20 - n)) for size in (100, 99)
        )
        for n in range(5, 11)
    },
    "c4.min_sentences": ("A b. C d! E f? G h.” I j", "A b. C d! E f? G h.”"),
    "c4.max_curly_brackets": ("a (b) [c]", "a }"),
    "c4.max_lorem_ipsum": ("lorem  ipsum", "Lorem ipsum dolor"),
    "fineweb.min_punctuated_lines": (lines(25, 3, lambda a: f"{a}. "), lines(25, 2, lambda a: f"{a}.")),
    "fineweb.max_short_lines": (
        lines(100, 67, lambda a: a.ljust(30, "y")).replace("zz\n", "z" * 30 + "\n") + "z" * 30,
        lines(100, 68, lambda a: a.ljust(30, "y")).replace("zz\n", "z" * 30 + "\n") + "z" * 30,
    ),
    "fineweb.max_duplicate_line_characters": (
        padded(1002, "x" * 10, "x" * 10, "\n"), padded(1001, "x" * 10, "x" * 10, "\n"),
    ),
    "fineweb.max_newlines_per_word": (
        "\n".join(words(3)) + "\n" + " ".join(words(7)), "\n".join(words(4)) + "\n" + " ".join(words(6)),
    ),
}  # fmt: skip
"""By rule: a text whose value is the bound, and one that is just beyond."""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rules_at_their_bounds(rule: DocumentRule) -> None:
    at, beyond = CASES[rule.name]
    records = table([at, beyond])
    assert rule.values(records[:1]).tolist() == [rule.bound]
    assert rule.fires(records).tolist() == [False, True]
    # Bounds a little stricter or looser turn both.
    step = 1e-9 if rule.keeps == "max" else -1e-9
    assert dataclasses.replace(rule, bound=rule.bound - step).fires(records).tolist() == [True, True]
    loose = rule.values(records[1:])[0]
    assert dataclasses.replace(rule, bound=loose).fires(records).tolist() == [False, False]


OFF: dict[str, dict[str, None]] = {preset: dict.fromkeys(bounds) for preset, bounds in MEASURES.items()}


def test_every_bound_is_a_rule() -> None:
    assert [rule.name for rule in RULES] == [
        f"{preset}.{name}" for preset, bounds in MEASURES.items() for name in bounds
    ]
    for preset, bounds in MEASURES.items():
        assert list(bounds) == list(type(getattr(ALL, preset)).model_fields)
    assert all(rule.key == f"data.curate.rules.{rule.name}" for rule in RULES)
    for bounds in MEASURES.values():
        for measure in bounds.values():
            assert {measure.numerator, measure.denominator} <= {"", *COUNTERS}


def test_null_switches_a_rule_off() -> None:
    assert preset_rules(RulesConfig(), "r") == ()
    assert preset_rules(RulesConfig.model_validate({preset: OFF[preset] for preset in OFF}), "r") == ()
    only = RulesConfig.model_validate({"c4": {"min_sentences": None, "max_curly_brackets": 3}})
    assert [(rule.name, rule.key, rule.bound) for rule in preset_rules(only, "r")] == [
        ("c4.max_curly_brackets", "r.c4.max_curly_brackets", 3),
        ("c4.max_lorem_ipsum", "r.c4.max_lorem_ipsum", 0),
    ]


def test_empty_documents() -> None:
    assert fired("") == {
        "gopher_quality.min_words",
        "gopher_quality.min_word_length",
        "gopher_quality.min_alpha_words",
        "gopher_quality.min_stop_words",
        "c4.min_sentences",
        "fineweb.min_punctuated_lines",
    }


def published(text: str) -> set[str]:
    """Rules that fire, by the papers, for ASCII text without whitespace at the ends of lines."""
    tokens, rows = text.split(), [line for line in text.splitlines() if line]
    blocks = [block.strip("\n") for block in text.split("\n\n") if block.strip("\n")]
    real = [token for token in tokens if any(c.isalnum() for c in token)]
    mean = sum(len(token) for token in real) / max(len(real), 1)

    def share(matching: Sequence[object], of: Sequence[object]) -> float:
        return len(matching) / max(len(of), 1)

    def seen(items: Sequence[str]) -> list[str]:
        return [item for k, item in enumerate(items) if item in items[:k]]

    def top(n: int) -> float:
        grams = [" ".join(tokens[k : k + n]) for k in range(len(tokens) - n + 1)]
        return max((len(g) * c for g, c in Counter(grams).most_common(1)), default=0) / max(len(text), 1)

    def repeated(n: int) -> float:
        found, k, known = 0, 0, set()
        while k + n <= len(tokens):
            one = tuple(tokens[k : k + n])
            found += len("".join(one)) if one in known else 0
            k += n if one in known else 1
            known.add(one)
        return found / max(len(text), 1)

    def characters(items: Sequence[str], of: int) -> float:
        return sum(len(item) for item in items) / max(of, 1)

    values = {
        "gopher_quality.min_words": len(real) < 50,
        "gopher_quality.max_words": len(real) > 100_000,
        "gopher_quality.min_word_length": mean < 3,
        "gopher_quality.max_word_length": mean > 10,
        "gopher_quality.max_hashes": text.count("#") / max(len(tokens), 1) > 0.1,
        "gopher_quality.max_ellipses": text.count("...") / max(len(tokens), 1) > 0.1,
        "gopher_quality.max_bullet_lines": share([row for row in rows if row.strip()[0] == "-"], rows) > 0.9,
        "gopher_quality.max_ellipsis_lines": share([row for row in rows if row[-3:] == "..."], rows) > 0.3,
        "gopher_quality.min_alpha_words": share([t for t in tokens if any(c.isalpha() for c in t)], tokens) < 0.8,
        "gopher_quality.min_stop_words": len({"the", "be", "to", "of", "and", "that", "have", "with"} & {*tokens}) < 2,
        "gopher_repetition.max_duplicate_lines": share(seen(rows), rows) > 0.3,
        "gopher_repetition.max_duplicate_paragraphs": share(seen(blocks), blocks) > 0.3,
        "gopher_repetition.max_duplicate_line_characters": characters(seen(rows), len(text)) > 0.2,
        "gopher_repetition.max_duplicate_paragraph_characters": characters(seen(blocks), len(text)) > 0.2,
        "gopher_repetition.max_top_2_grams": top(2) > 0.2,
        "gopher_repetition.max_top_3_grams": top(3) > 0.18,
        "gopher_repetition.max_top_4_grams": top(4) > 0.16,
        **{f"gopher_repetition.max_duplicate_{n}_grams": repeated(n) > (20 - n) / 100 for n in range(5, 11)},
        "c4.max_curly_brackets": "{" in text or "}" in text,
        "c4.max_lorem_ipsum": "lorem ipsum" in text.lower(),
        "fineweb.min_punctuated_lines": share([row for row in rows if row[-1] in ".!?"], rows) < 0.12,
        "fineweb.max_short_lines": share([row for row in rows if len(row) <= 30], rows) > 0.67,
        "fineweb.max_duplicate_line_characters": characters(seen(rows), len(text.replace("\n", ""))) > 0.01,
        "fineweb.max_newlines_per_word": text.count("\n") / max(len(tokens), 1) > 0.3,
    }
    return {name for name, fires in values.items() if fires}


PIECES = (
    "the",
    "of",
    "cat",
    "dog.",
    "word",
    "No!",
    "-",
    "#",
    "...",
    "12",
    "Lorem ipsum",
    "{",
    "a",
    "somewhat longer text",
    "x" * 25,
)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.lists(st.sampled_from(PIECES), max_size=12).map(" ".join), max_size=30).map("\n".join))
def test_rules_are_the_published_ones(text: str) -> None:
    assert fired(text) - {"c4.min_sentences"} == published(text)
