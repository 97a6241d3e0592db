"""Measures by fastText models: the language of a document, and scores of classifiers.

Scores are stored, and are facts from then on: rules read them, never the model.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.common.errors import UserError
from pipeline.config.curation.curate import ClassifierConfig, LanguageConfig
from pipeline.data.curate.batch import ChunkOutput, Measurer, TextBatch
from pipeline.data.curate.models.fasttext_file import ModelFile, read_model_file
from pipeline.data.curate.models.predict import Predictor, fasttext_version, try_model

LABEL_PREFIX = "__label__"
LANGUAGE_KEY = "data.curate.language"
NO_LABEL = 2**16 - 1
"""Number of the language of a text that the model knows nothing of."""
LANGUAGE_COLUMNS = [("language", "<u2"), ("language_score", "<u2")]
_VERSION = 1
"""Of how a text is handed to a model."""


def plain_label(label: str) -> str:
    """A label as people write it: `en` for `__label__en`."""
    return label.removeprefix(LABEL_PREFIX)


def classifier_key(number: int) -> str:
    """Key of a classifier in the run file."""
    return f"data.curate.classifiers.{number}"


def score_column(name: str) -> str:
    """Column of a classifier's score."""
    return f"score_{name}"


def score_columns(column: str) -> list[tuple[str, str]]:
    """Columns of a classifier whose score is in a column."""
    return [(column, "<u2")]


def model_columns(language: LanguageConfig | None, classifiers: Sequence[ClassifierConfig]) -> list[tuple[str, str]]:
    """Columns of all models of a run file, none of which is opened."""
    scores = [column for config in classifiers for column in score_columns(score_column(config.name))]
    return [*([] if language is None else LANGUAGE_COLUMNS), *scores]


def language_settings(config: LanguageConfig) -> dict[str, Any]:
    """Settings that the measured language depends on, with `labels` (plain, sorted as the model's), as JSON.

    Raises:
        UserError: the model cannot be used, or has none of the labels to keep.
    """
    model = _tried(config.model, f"{LANGUAGE_KEY}.model")
    labels = [plain_label(label) for label in model.labels]
    for label in config.keep:
        if label not in labels:
            near = difflib.get_close_matches(label, labels, n=3) or labels[:10]
            raise UserError(
                f"{LANGUAGE_KEY}.keep: {label!r} is not a label of {config.model}; it has {len(labels)}, like "
                f"{', '.join(near)}"
            )
    return {**_settings(model, config.characters), "labels": labels}


def classifier_settings(config: ClassifierConfig, number: int) -> dict[str, Any]:
    """Settings that a score depends on, as JSON.

    Raises:
        UserError: the model cannot be used, or does not have the label.
    """
    model = _tried(config.model, f"{classifier_key(number)}.model")
    return {**_settings(model, config.characters), "name": config.name, "label": _label(model, config, number)}


def _tried(path: Path, key: str) -> ModelFile:
    """A model that predicts: here, before worker processes load it."""
    model = read_model_file(path, key)
    try_model(model, key)
    return model


def _settings(model: ModelFile, characters: int | None) -> dict[str, Any]:
    return {"version": _VERSION, "fasttext": fasttext_version(), "model": model.hash, "characters": characters}


def _label(model: ModelFile, config: ClassifierConfig, number: int) -> str:
    """The label as the model has it; `hq` means `__label__hq`, too."""
    for label in (config.label, LABEL_PREFIX + config.label):
        if label in model.labels:
            return label
    raise UserError(
        f"{classifier_key(number)}.label: {config.label!r} is not a label of {config.model}, which has "
        f"{', '.join(model.labels[:20])}"
    )


class LanguageMeasurer(Measurer):
    """Label and score of the language of documents.

    Columns: `language`, the place of the label among the sorted ones of the model (`NO_LABEL`: none), and
    `language_score`, from 0 to 65535.

    Args:
        config: of the language.
        expected: hash of the model file in the plan; None for any.

    Raises:
        UserError: the model cannot be used, or is another one.
    """

    def __init__(self, config: LanguageConfig, expected: str | None = None) -> None:
        key = f"{LANGUAGE_KEY}.model"
        model = _expected(read_model_file(config.model, key), key, expected)
        self._numbers = {label: number for number, label in enumerate(model.labels)} | {"": NO_LABEL}
        self._predictor = Predictor(model, key, config.characters)

    @property
    def columns(self) -> list[tuple[str, str]]:
        """The number of the label and the score."""
        return LANGUAGE_COLUMNS

    def measure(self, batch: TextBatch, table: npt.NDArray[Any], output: ChunkOutput) -> None:
        """Predict each text."""
        found = [self._predictor.best(text) for text in batch.texts]
        table["language"] = [self._numbers[label] for label, _ in found]
        table["language_score"] = [score for _, score in found]


class ClassifierMeasurer(Measurer):
    """Score of a label by a classifier, in the column `score_NAME`, from 0 to 65535.

    Args:
        config: of the classifier.
        number: its place among `data.curate.classifiers`, for messages.
        expected: hash of the model file in the plan; None for any.

    Raises:
        UserError: the model cannot be used, or is another one.
    """

    def __init__(self, config: ClassifierConfig, number: int = 0, expected: str | None = None) -> None:
        key = f"{classifier_key(number)}.model"
        model = _expected(read_model_file(config.model, key), key, expected)
        self._column = score_column(config.name)
        self._label = _label(model, config, number)
        self._predictor = Predictor(model, key, config.characters)

    @property
    def columns(self) -> list[tuple[str, str]]:
        """The score."""
        return score_columns(self._column)

    def measure(self, batch: TextBatch, table: npt.NDArray[Any], output: ChunkOutput) -> None:
        """Predict each text."""
        table[self._column] = np.array(self._predictor.scores(batch.texts, self._label), np.uint16)


def model_measurers(
    language: LanguageConfig | None, classifiers: Sequence[ClassifierConfig], expected: dict[str, str] | None = None
) -> list[Measurer]:
    """Measurers of all models, in the order of their columns.

    Args:
        language: of the run file.
        classifiers: of the run file.
        expected: hashes of model files by `language` or `score_NAME`, from the plan.
    """
    hashes = expected or {}
    found: list[Measurer] = [] if language is None else [LanguageMeasurer(language, hashes.get("language"))]
    for number, config in enumerate(classifiers):
        found.append(ClassifierMeasurer(config, number, hashes.get(score_column(config.name))))
    return found


def _expected(model: ModelFile, key: str, expected: str | None) -> ModelFile:
    if expected is not None and model.hash != expected:
        raise UserError(
            f"{key}: {model.path} has changed since the curation was planned (xxh3 {model.hash}, planned {expected}); "
            "put the planned file back, or remove the curation to begin anew"
        )
    return model
