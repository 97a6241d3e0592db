"""Measures and rules of a run file: what is measured of the documents of a source, and what is decided by it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np

from pipeline.common.errors import UserError
from pipeline.common.hashing import file_hash
from pipeline.config.curate import CurateConfig, DuplicatesConfig
from pipeline.config.data import SourceConfig
from pipeline.data.curate.batch import Measurer
from pipeline.data.curate.chunk_writer import FIXED_COLUMNS
from pipeline.data.curate.compiled import has_numba
from pipeline.data.curate.rules.base import Ratio, Rule
from pipeline.data.work.leases import LeaseWatch

EngineKind = Literal["numba", "python"]
MEASURE_VERSION = "1"
"""Raised whenever a measure of the same text and settings changes."""
EMPTY_RULE = "clean.empty"


class TextCleaner(Protocol):
    """Edits of texts."""

    def clean(self, text: str) -> str:
        """Text without what is removed."""


def open_cleaner(config: CurateConfig) -> TextCleaner | None:
    """Edits of the text; None if there are none."""
    clean = config.clean
    if not (clean.mojibake or clean.lines or any(value == "mask" for value in clean.pii.model_dump().values())):
        return None
    from pipeline.data.curate.cleaning.clean import Cleaner

    cleaner: TextCleaner = Cleaner(clean, config.seed)
    return cleaner


def table_type(measurers: list[Measurer]) -> np.dtype[Any]:
    """Type of the records of the table of measures."""
    return np.dtype([*FIXED_COLUMNS, *(column for each in measurers for column in each.columns)])


def measure_settings(config: CurateConfig, source: SourceConfig) -> dict[str, Any]:
    """Settings of the run file that decide the measures of a source, and hashes of the models."""
    clean = config.clean
    settings: dict[str, Any] = {
        "curate_version": MEASURE_VERSION,
        "data.curate.clean": clean.model_dump(mode="json"),
        "data.curate.duplicates.exact": config.duplicates.exact,
        "data.curate.duplicates.url": config.duplicates.url,
    }
    if any(value == "mask" for value in clean.pii.model_dump().values()):
        settings["data.curate.seed"] = config.seed
    near, lines = config.duplicates.near, config.duplicates.lines
    if near is not None:
        settings["data.curate.duplicates.near"] = {"words": near.words, "bands": near.bands, "rows": near.rows}
    if lines is not None:
        settings["data.curate.duplicates.lines.min_bytes"] = lines.min_bytes
    if config.language is not None:
        settings["data.curate.language.model"] = f"{file_hash(config.language.model):016x}"
        settings["data.curate.language.characters"] = config.language.characters
    for each in config.classifiers:
        settings[f"data.curate.classifiers.{each.name}"] = {
            "model": f"{file_hash(each.model):016x}",
            "label": each.label,
            "characters": each.characters,
        }
    _check_metadata(config, source)
    return settings


def _check_metadata(config: CurateConfig, source: SourceConfig) -> None:
    """Refuse keys of metadata that the source does not keep."""
    wanted = {} if config.duplicates.url is None else {"url": config.duplicates.url}
    wanted |= {f"keep: {each}": each.split(":", 1)[1] for each in config.duplicates.keep if ":" in each}
    for name, key in wanted.items():
        if key not in source.metadata:
            raise UserError(
                f"data.curate.duplicates.{name}: source {source.name!r} keeps no key {key!r} of its records; add it to "
                f"`metadata` of the source ({', '.join(source.metadata) or 'none now'})"
            )


class _EmptyRule(Ratio):
    """Documents that cleaning leaves nothing of."""

    def values(self, table: Any) -> Any:
        return (table["state"] == 2).astype(np.float64)


def empty_rule() -> Rule:
    """The rule of documents that are empty after cleaning."""
    return _EmptyRule(EMPTY_RULE, "data.curate.clean", 0, "max", "empty after cleaning (1) or not (0)")


@dataclass(frozen=True)
class ComparedRule(Rule):
    """A rule of duplicates: its values come from comparing documents, not from the table."""

    def values(self, table: Any) -> Any:
        """None.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"{self.name} has no values in the table of measures")


def compared_rules(duplicates: DuplicatesConfig) -> tuple[Rule, ...]:
    """Rules of duplicates, in the order in which they name the reason."""
    key = "data.curate.duplicates"
    rules: list[Rule] = []
    if duplicates.exact is not None:
        rules.append(ComparedRule("duplicates.exact", f"{key}.exact", 1.0, "max", "equal to a kept document (1)"))
    if duplicates.url is not None:
        rules.append(ComparedRule("duplicates.url", f"{key}.url", 1.0, "max", "address of a kept document (1)"))
    if duplicates.near is not None:
        bound = duplicates.near.min_similarity
        about = "estimated Jaccard similarity to a kept document"
        rules.append(ComparedRule("duplicates.near", f"{key}.near.min_similarity", bound, "max", about))
    return tuple(rules)


def local_rules(config: CurateConfig, source: str, settings: Mapping[str, Any]) -> tuple[Rule, ...]:
    """Rules over the measures of a document alone, in the order in which they name the reason.

    Args:
        config: of the run file.
        source: name.
        settings: of its plan.
    """
    return (empty_rule(),)


class Measuring:
    """What a worker process of the pass `measure` has, opened once; a pickled copy opens it again.

    Args:
        config: of the run file.
        settings: of the plans, by source.
        engine: of the measures.
    """

    def __init__(self, config: CurateConfig, settings: Mapping[str, Mapping[str, Any]], engine: EngineKind) -> None:
        self.watch = LeaseWatch()
        self.engine = engine
        self._config = config
        self._settings = settings
        self._measurers: dict[str, list[Measurer]] = {}

    def __reduce__(self) -> tuple[type[Measuring], tuple[Any, ...]]:
        return Measuring, (self._config, self._settings, self.engine)

    @property
    def engine_name(self) -> str:
        """Engine of the measures."""
        return self.engine

    @property
    def may_differ(self) -> bool:
        """True if another machine may measure slightly else: models of floats."""
        return self._config.language is not None or bool(self._config.classifiers)

    @cached_property
    def text_cleaner(self) -> TextCleaner | None:
        """Edits of the text."""
        return open_cleaner(self._config)

    def measurers(self, source: str) -> list[Measurer]:
        """Measures of a source, in the order of their columns."""
        if source not in self._measurers:
            self._measurers[source] = open_measurers(self._config, self._settings[source], self.engine)
        return self._measurers[source]

    def table_type(self, source: str) -> np.dtype[Any]:
        """Type of the records of a source's table."""
        return table_type(self.measurers(source))


def open_measurers(config: CurateConfig, settings: Mapping[str, Any], engine: EngineKind) -> list[Measurer]:
    """Measurers of a source.

    Args:
        config: of the run file.
        settings: of the source's plan.
        engine: of the measures.
    """
    return []


def choose_engine(config: CurateConfig) -> EngineKind:
    """Engine of the measures."""
    return "numba" if config.engine != "python" and has_numba() else "python"
