"""Measures of the documents of a source, by the run file: settings, cleaner, measurers and columns."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pipeline.common.errors import UserError
from pipeline.common.imports import has_numba
from pipeline.config.curation.curate import CurateConfig
from pipeline.config.data import InputConfig
from pipeline.config.root import Config
from pipeline.data.curate.batch import Measurer
from pipeline.data.curate.chunk_writer import FIXED_COLUMNS
from pipeline.data.curate.cleaning.clean import Cleaner
from pipeline.data.curate.decontamination.index import INDEX_FILE, index_settings
from pipeline.data.curate.decontamination.measure import CONTAMINATION_COLUMNS, ContaminationMeasurer
from pipeline.data.curate.duplicates.kinds import date_keys
from pipeline.data.curate.duplicates.measure import DuplicateMeasurer, duplicate_columns, duplicate_settings
from pipeline.data.curate.files import CURATE
from pipeline.data.curate.measures import engine_choice, words
from pipeline.data.curate.measures.counters import COUNTER_COLUMNS, CounterMeasurer
from pipeline.data.curate.models.measure import (
    classifier_settings,
    language_settings,
    model_columns,
    model_measurers,
    score_column,
)
from pipeline.data.curate.report.domains import DOMAIN_COLUMNS, DomainMeasurer, address_key
from pipeline.data.curate.url_lists import KEY as URL_LISTS
from pipeline.data.curate.url_lists import URL_LIST_COLUMNS, UrlListMeasurer, UrlLists, url_list_settings

EngineKind = Literal["numba", "python"]
MEASURE_VERSION = "1"
"""Raised whenever a measure of the same text and settings changes that has no version of its own."""
ITEMS = ".items"
"""Folder of the items of evaluations, below what scopes have in common. No scope is called like it."""
LANGUAGE, COUNTERS, CLEAN, DUPLICATES, CONTAMINATION, DOMAIN = (
    "data.curate.language",
    "counters",
    "data.curate.clean",
    "data.curate.duplicates",
    "data.curate.decontaminate",
    "domain",
)
"""Keys of the settings of a plan."""


def classifier_name(name: str) -> str:
    """Key of the settings of a classifier in a plan."""
    return f"data.curate.classifiers.{name}"


def items_folder(config: Config) -> Path:
    """Folder of the items of evaluations and their index."""
    return config.data_dir / CURATE / ITEMS


def measure_settings(
    config: Config, source: InputConfig, *, has_items: bool = True, known: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Settings of the run file that decide the measures of a source, with versions, and hashes of models and items.

    Args:
        config: the run.
        source: of it.
        has_items: whether the items of evaluations are there by now; without them, nothing is said of them.
        known: settings of an earlier plan: models that it has are taken to be as they were, and are not read.

    Raises:
        UserError: a model cannot be used, a key of metadata is not kept, or the items of evaluations are not there.
    """
    curate = config.data.curate
    assert curate is not None, "the stage runs with it alone"
    _check_metadata(curate, source)
    before = known or {}
    settings: dict[str, Any] = {"curate_version": MEASURE_VERSION, COUNTERS: words.settings()}
    if clean := Cleaner(curate.clean, curate.seed).settings():
        settings[CLEAN] = clean
    if curate.language is not None:
        settings[LANGUAGE] = before.get(LANGUAGE) or language_settings(curate.language)
    for number, each in enumerate(curate.classifiers):
        name = classifier_name(each.name)
        settings[name] = before.get(name) or classifier_settings(each, number)
    if duplicates := duplicate_settings(curate.duplicates):
        settings[DUPLICATES] = duplicates
    if curate.decontaminate is not None and has_items:
        settings[CONTAMINATION] = index_settings(curate.decontaminate, items_folder(config) / INDEX_FILE)
    if (key := address_key(source.metadata, curate.duplicates.url)) is not None:
        settings[DOMAIN] = key
    if (lists := curate.url_lists) is not None and source.name in (lists.sources or [source.name]):
        settings[URL_LISTS] = before.get(URL_LISTS) or url_list_settings(lists)
    return settings


def _check_metadata(config: CurateConfig, source: InputConfig) -> None:
    """Refuse keys of metadata that the source does not keep."""
    wanted = [("duplicates.keep", key) for key in date_keys(config.duplicates)]
    if config.duplicates.url is not None:
        wanted.append(("duplicates.url", config.duplicates.url))
    if (lists := config.url_lists) is not None and source.name in (lists.sources or [source.name]):
        wanted.append(("url_lists.key", lists.key))
    for name, key in wanted:
        if key not in source.metadata:
            raise UserError(
                f"data.curate.{name}: source {source.name!r} keeps no key {key!r} of its records; add it to "
                f"`metadata` of the source ({', '.join(source.metadata) or 'none now'})"
            )


def choose_engine(which: Literal["auto", "numba", "python"]) -> tuple[EngineKind, str]:
    """Engine of the measures, and why `auto` did not take numba; empty if it did.

    Raises:
        UserError: numba is asked for and cannot be used.
    """
    engine, note = engine_choice.open_once(which)
    return ("numba" if has_numba() and engine.name == "numba" else "python"), note


def comparison_engine(which: Literal["auto", "numba", "python"]) -> EngineKind:
    """Engine that compares documents. Its results are those of the other, so it is loaded, and not checked on texts.

    Raises:
        UserError: numba is asked for and cannot be used.
    """
    if which == "python" or not has_numba():
        return choose_engine(which)[0] if which == "numba" else "python"
    try:
        from pipeline.data.curate.duplicates.components.compiled import NumbaComponents

        NumbaComponents(1).add(np.zeros(1, np.uint32), np.zeros(1, np.uint32))
    except Exception:  # whatever a compiler that does not fit this machine raises; asked for, it says why
        return choose_engine(which)[0]
    return "numba"


class Measuring:
    """State of a worker process of the pass `measure`, opened once; a pickled copy opens it again.

    Args:
        config: the run.
        settings: of the plans, by source.
        engine: of the measures.
    """

    def __init__(self, config: Config, settings: Mapping[str, Mapping[str, Any]], engine: EngineKind) -> None:
        assert config.data.curate is not None, "the stage runs with it alone"
        self.engine = engine
        self._config = config
        self._curate = config.data.curate
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
        return self._curate.language is not None or bool(self._curate.classifiers)

    @cached_property
    def cleaner(self) -> Cleaner:
        """Edits of the text."""
        return Cleaner(self._curate.clean, self._curate.seed)

    @cached_property
    def _shared(self) -> list[Measurer]:
        """Measurers that all sources have."""
        curate, found = self._curate, [*self._models()]
        found.append(CounterMeasurer(self.engine))
        if duplicate_settings(curate.duplicates):
            found.append(DuplicateMeasurer(curate.duplicates, self.engine))
        if curate.decontaminate is not None:
            expected = next(iter(self._settings.values()))[CONTAMINATION]["index"]
            found.append(ContaminationMeasurer(items_folder(self._config) / INDEX_FILE, self.engine, expected))
        return found

    def _models(self) -> list[Measurer]:
        settings = next(iter(self._settings.values()))
        expected = {"language": settings[LANGUAGE]["model"]} if LANGUAGE in settings else {}
        for each in self._curate.classifiers:
            expected[score_column(each.name)] = settings[classifier_name(each.name)]["model"]
        return model_measurers(self._curate.language, self._curate.classifiers, expected)

    def measurers(self, source: str) -> list[Measurer]:
        """Measures of a source, in the order of their columns."""
        if source not in self._measurers:
            settings, found = self._settings[source], [*self._shared]
            if (key := settings.get(DOMAIN)) is not None:
                found.append(DomainMeasurer(key))
            if (lists := settings.get(URL_LISTS)) is not None:
                found.append(UrlListMeasurer(self._url_lists, lists["key"]))
            self._measurers[source] = found
        return self._measurers[source]

    @cached_property
    def _url_lists(self) -> UrlLists:
        """Lists of addresses, in memory; all sources have the same."""
        assert self._curate.url_lists is not None, "the plan of a source has them"
        expected = next(each[URL_LISTS] for each in self._settings.values() if URL_LISTS in each)
        return UrlLists(self._curate.url_lists, expected)

    def table_type(self, source: str) -> np.dtype[Any]:
        """Type of the records of a source's table: that of its measurers, none of which is opened for it."""
        curate = self._curate
        columns = [*FIXED_COLUMNS, *model_columns(curate.language, curate.classifiers), *COUNTER_COLUMNS]
        columns += duplicate_columns(curate.duplicates)
        columns += [] if curate.decontaminate is None else CONTAMINATION_COLUMNS
        settings = self._settings[source]
        columns += [] if settings.get(DOMAIN) is None else DOMAIN_COLUMNS
        return np.dtype([*columns, *([] if settings.get(URL_LISTS) is None else URL_LIST_COLUMNS)])


def table_type(measurers: list[Measurer]) -> np.dtype[Any]:
    """Type of the records of the table of measures."""
    return np.dtype([*FIXED_COLUMNS, *(column for each in measurers for column in each.columns)])
