"""Rules over languages and scores that models gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.config.curation.curate import ClassifierConfig, LanguageConfig
from pipeline.data.curate.models.measure import LANGUAGE_KEY, classifier_key, score_column
from pipeline.data.curate.models.predict import ONE
from pipeline.data.curate.rules.base import DocumentRule


@dataclass(frozen=True)
class ScoreRule(DocumentRule):
    """A rule over a stored score, whose values are from 0 to 1.

    Attributes:
        column: of the score.
    """

    column: str = ""

    def values(self, table: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Scores."""
        return table[self.column].astype(np.float64) / ONE


@dataclass(frozen=True)
class LanguageRule(ScoreRule):
    """A rule that keeps some languages. Its values are the scores of the labels, whichever these are.

    Attributes:
        kept: numbers of the labels to keep.
    """

    kept: tuple[int, ...] = ()

    def fires(self, table: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Tell which documents have another language, or a score below the bound."""
        other: npt.NDArray[np.bool_] = ~np.isin(table["language"], np.array(self.kept, np.uint16))
        return other | super().fires(table)


def language_rules(config: LanguageConfig | None, labels: Sequence[str]) -> tuple[DocumentRule, ...]:
    """The rule of the language, if languages are chosen.

    Args:
        config: of the run file.
        labels: `language_settings(config)["labels"]`.
    """
    if config is None or not config.keep:
        return ()
    kept = tuple(number for number, label in enumerate(labels) if label in config.keep)
    key = f"{LANGUAGE_KEY}.min_score"
    about = f"score of the language, if it is {' or '.join(config.keep)}"
    return (LanguageRule("language", key, config.min_score, "min", about, "language_score", kept),)


def classifier_rules(configs: Sequence[ClassifierConfig]) -> tuple[DocumentRule, ...]:
    """Rules of scores that have a bound."""
    rules: list[DocumentRule] = []
    for number, config in enumerate(configs):
        key, column, about = classifier_key(number), score_column(config.name), f"score of {config.name}"
        name = f"classifiers.{config.name}"
        if config.min_score is not None:
            low = config.min_score
            rules.append(ScoreRule(f"{name}.min_score", f"{key}.min_score", low, "min", about, column))
        if config.max_score is not None:
            high = config.max_score
            rules.append(ScoreRule(f"{name}.max_score", f"{key}.max_score", high, "max", about, column))
    return tuple(rules)


def language_name(record: np.void, labels: Sequence[str]) -> str:
    """Label of the language of a document, by its record in the table of measures; empty for none."""
    number = int(record["language"])
    return labels[number] if number < len(labels) else ""
