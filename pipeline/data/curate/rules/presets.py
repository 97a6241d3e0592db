"""Published rules as bounds of counters: Gopher's, C4's and those that FineWeb adds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pipeline.config.curation.rules import RulesConfig
from pipeline.data.curate.rules.base import DocumentRule, Ratio

EMPTY = 2
"""`state` of a document of which cleaning leaves nothing."""


@dataclass(frozen=True)
class Measure:
    """Value that a preset has a bound for: a counter, or one by another.

    Attributes:
        about: it in words.
        numerator: counter.
        denominator: counter; empty for the numerator itself.
    """

    about: str
    numerator: str
    denominator: str = ""

    @property
    def formula(self) -> str:
        """It by the names of counters."""
        return f"{self.numerator} / {self.denominator}" if self.denominator else self.numerator


MEASURES: dict[str, dict[str, Measure]] = {
    "gopher_quality": {
        "min_words": Measure("words with a letter or a number", "text_words"),
        "max_words": Measure("words with a letter or a number", "text_words"),
        "min_word_length": Measure("mean length of a word", "text_word_characters", "text_words"),
        "max_word_length": Measure("mean length of a word", "text_word_characters", "text_words"),
        "max_hashes": Measure("`#` per word", "hashes", "words"),
        "max_ellipses": Measure("ellipses per word", "ellipses", "words"),
        "max_bullet_lines": Measure("share of lines that begin with a bullet", "bullet_lines", "lines"),
        "max_ellipsis_lines": Measure("share of lines that end with an ellipsis", "ellipsis_lines", "lines"),
        "min_alpha_words": Measure("share of words with a letter", "alpha_words", "words"),
        "min_stop_words": Measure("different stop words", "stop_words"),
    },
    "gopher_repetition": {
        "max_duplicate_lines": Measure("share of lines that occurred before", "duplicate_lines", "lines"),
        "max_duplicate_paragraphs": Measure(
            "share of paragraphs that occurred before", "duplicate_paragraphs", "paragraphs"
        ),
        "max_duplicate_line_characters": Measure(
            "share of characters in lines that occurred before", "duplicate_line_characters", "characters"
        ),
        "max_duplicate_paragraph_characters": Measure(
            "share of characters in paragraphs that occurred before", "duplicate_paragraph_characters", "characters"
        ),
        **{
            f"max_top_{n}_grams": Measure(
                f"share of characters in the most frequent {n}-gram (above 1 if its occurrences overlap)",
                f"top_{n}_gram_characters",
                "characters",
            )
            for n in (2, 3, 4)
        },
        **{
            f"max_duplicate_{n}_grams": Measure(
                f"share of characters in {n}-grams that occurred before", f"duplicate_{n}_gram_characters", "characters"
            )
            for n in range(5, 11)
        },
    },
    "c4": {
        "min_sentences": Measure("sentences", "sentences"),
        "max_curly_brackets": Measure("curly brackets", "curly_brackets"),
        "max_lorem_ipsum": Measure("times of lorem ipsum", "lorem_ipsum"),
    },
    "fineweb": {
        "min_punctuated_lines": Measure("share of lines that end with a terminal mark", "punctuated_lines", "lines"),
        "max_short_lines": Measure("share of short lines", "short_lines", "lines"),
        "max_duplicate_line_characters": Measure(
            "share of characters in lines that occurred before", "duplicate_line_characters", "line_characters"
        ),
        "max_newlines_per_word": Measure("line ends per word", "newlines", "words"),
    },
}
"""Measures by preset and bound, in the order in which the rules are asked."""


@dataclass(frozen=True)
class EmptyRule(DocumentRule):
    """The rule that removes documents of which cleaning leaves nothing. Presets do not look at those."""

    def values(self, table: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        empty: npt.NDArray[np.float64] = (table["state"] == EMPTY).astype(np.float64)
        return empty


def empty_rule(key: str) -> EmptyRule:
    """The rule `clean.empty`, by the key of the section of edits."""
    return EmptyRule("clean.empty", key, 0, "max", "empty after edits")


def preset_rules(rules: RulesConfig, key: str) -> tuple[DocumentRule, ...]:
    """Rules of presets, in their order: by preset, then by bound.

    Args:
        rules: presets and their bounds; those that are null have no rule.
        key: of the section, `data.curate.rules` say.
    """
    found: list[DocumentRule] = []
    for preset, measures in MEASURES.items():
        section = getattr(rules, preset)
        for name in measures if section is not None else ():
            bound = getattr(section, name)
            if bound is not None:
                found.append(_rule(preset, name, bound, f"{key}.{preset}.{name}"))
    return tuple(found)


def _rule(preset: str, name: str, bound: float, key: str) -> DocumentRule:
    measure = MEASURES[preset][name]
    keeps: Literal["min", "max"] = "min" if name.startswith("min_") else "max"
    return Ratio(f"{preset}.{name}", key, bound, keeps, measure.about, measure.numerator, measure.denominator)
