"""The frozen plan of a source's curation: files and units as preprocess cuts them, and what decides the measures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.common.errors import UserError
from pipeline.config.curation.curate import CurateConfig
from pipeline.config.data import InputConfig
from pipeline.config.root import Config
from pipeline.data.curate.files import curate_folder
from pipeline.data.curate.measurers import measure_settings
from pipeline.data.curate.scope import MAX_SOURCES, MAX_UNITS
from pipeline.data.sources.records import MAX_RECORD_BYTES
from pipeline.data.work.frozen_plan import FrozenPlan
from pipeline.data.work.unit_source import UnitSource
from pipeline.data.work.units import SourceFiles, cut_units, reader_of

HUB_TWICE = "{}: it is streamed from the hub, so it is read twice: here, and by preprocess"


@dataclass(frozen=True)
class CurationPlan(FrozenPlan):
    """Plan of a source's curation. Its `config_hash` is the hash of the measures."""

    folder: Path
    """`SOURCE/curate`."""

    @property
    def name(self) -> str:
        """Name of the source."""
        return self.found.source.name

    @property
    def splits_in_order(self) -> list[str]:
        return []

    @property
    def remade(self) -> str:
        return "to measure again"

    def refusal(self, folder: Path, differences: Iterable[str]) -> UserError:
        return UserError(
            f"{folder} has measures of other input or settings than source {self.name!r} has now:\n"
            + "\n".join(f"  {difference}" for difference in differences)
            + f"\nRestore what differs; or remove {folder} to measure again; or set data.dir to another folder. Bounds "
            "of rules, `keep`, `scopes` and `against` may change without that."
        )


def reading_settings(source: InputConfig, config: Config) -> dict[str, Any]:
    """Settings of the run file that decide the documents of a source and their places."""
    preprocess = config.data.preprocess
    settings: dict[str, Any] = {
        "data.preprocess.seed": preprocess.seed,
        "data.preprocess.unit_bytes": preprocess.unit_bytes,
        "data.preprocess.max_document_bytes": preprocess.max_document_bytes,
        "data.preprocess.on_long_document": preprocess.on_long_document,
        "name": source.name,
        "type": source.type,
        "metadata": sorted(source.metadata),
    }
    if preprocess.max_record_bytes != MAX_RECORD_BYTES:
        settings["data.preprocess.max_record_bytes"] = preprocess.max_record_bytes
    return settings | reader_of(source, config).plan_settings()


def make_curation_plan(found: SourceFiles, config: Config, measures: Mapping[str, Any]) -> CurationPlan:
    """Plan the curation of a source.

    Args:
        found: the source.
        config: the run.
        measures: settings that decide the measures.

    Raises:
        UserError: it has more units than documents can be numbered in.
    """
    pins = found.reader.plan_pins() | found.reader.plan_partitions(found.files)
    settings = reading_settings(found.source, config) | dict(measures) | pins
    units = cut_units(found, config.data.preprocess.seed, config.data.preprocess.unit_bytes)
    if len(units) > MAX_UNITS:
        raise UserError(
            f"source {found.source.name!r} has {len(units):,} units, more than the {MAX_UNITS:,} that curation can "
            "number; raise data.preprocess.unit_bytes"
        )
    return CurationPlan(found, units, settings, curate_folder(config.data_dir / found.source.name))


def check_scope(name: str, sources: tuple[str, ...]) -> None:
    """Refuse a scope of more sources than documents can be numbered in."""
    if len(sources) > MAX_SOURCES:
        raise UserError(f"data.curate.scopes.{name}: {len(sources)} sources; at most {MAX_SOURCES} are compared")


def unit_source(plan: CurationPlan, config: Config) -> UnitSource:
    """Settings of a source for the workers that measure it: records are rejected as preprocess rejects them."""
    settings = config.data.preprocess
    return UnitSource(
        folder=plan.folder,
        reader=plan.found.reader,
        unit_bytes=settings.unit_bytes,
        max_document_bytes=settings.max_document_bytes,
        splits_long=settings.on_long_document == "split",
        config_hash=plan.config_hash,
        fail_on_error=settings.on_error == "fail",
        drops_damaged=settings.on_damaged_file == "drop",
        start_over=f"remove {plan.folder}, which was begun with the files as they are now",
    )


def curate_config(config: Config) -> CurateConfig:
    """`data.curate`.

    Raises:
        UserError: the run file has none.
    """
    if config.data.curate is None:
        raise UserError(
            "data.curate is not set, so there is nothing to decide; add it to the run file (`pipeline config keys "
            "data.curate` shows its keys), like data.curate: {rules: {gopher_quality: {}}}"
        )
    return config.data.curate


def with_items(plan: CurationPlan, config: Config) -> CurationPlan:
    """The plan with the items of evaluations that are there by now; models are not read again."""
    return make_curation_plan(plan.found, config, measure_settings(config, plan.found.source, known=plan.settings))


def plan_sources(config: Config, sources: list[SourceFiles]) -> list[CurationPlan]:
    """Plans of all sources that have files."""
    return [make_curation_plan(found, config, measure_settings(config, found.source)) for found in sources]
