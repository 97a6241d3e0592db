"""Settings of the run file that decide a source's dataset, and their comparison with those that it was made with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.common.errors import UserError
from pipeline.config.data import HELD_OUT, HeldOutSourceConfig, InputConfig
from pipeline.config.root import Config
from pipeline.data.datasets.manifest import WEIGHT_KEY, Manifest
from pipeline.data.datasets.open import dataset_place, open_dataset
from pipeline.data.preprocess.splits import documents_wanted
from pipeline.data.sources.formats import SOURCE_FORMATS, source_format
from pipeline.data.sources.reader import PARTITIONS, PLUGIN
from pipeline.data.sources.records import MAX_RECORD_BYTES
from pipeline.data.work.frozen_plan import setting_differences
from pipeline.data.work.units import reader_of

_NOT_OF_THE_RUN_FILE = ("code_version", "tokenizer", "ends of splits", "curation", "jinja2")


def unused_weights(config: Config, manifests: Mapping[str, Manifest]) -> list[str]:
    """Warnings about datasets with loss weights that the run file does not use."""
    return [
        f"source {source.name!r}: the documents of its dataset have loss weights, which are not used; to use them, set "
        f"weight_key: {manifests[source.name].settings[WEIGHT_KEY]}"
        for source in config.data.sources
        if source.weight_key is None and source.name in manifests and manifests[source.name].has_weights
    ]


def settings_of(source: InputConfig, config: Config) -> dict[str, Any]:
    """Settings of the run file that decide the content of a source's dataset."""
    preprocess, held_out = config.data.preprocess, isinstance(source, HeldOutSourceConfig)
    settings: dict[str, Any] = {
        "data.splits": {} if held_out else {name: str(split) for name, split in config.data.splits.items()},
        "data.split_by": config.data.split_by,
        "data.preprocess.seed": preprocess.seed,
        "data.preprocess.unit_bytes": preprocess.unit_bytes,
        "data.preprocess.max_document_bytes": preprocess.max_document_bytes,
        "data.preprocess.on_long_document": preprocess.on_long_document,
        "data.preprocess.shuffle": preprocess.shuffle,
        "name": source.name,
        "type": source.type,
        "metadata": sorted(source.metadata),
    }
    if preprocess.max_record_bytes != MAX_RECORD_BYTES:  # datasets of earlier versions do not name it
        settings["data.preprocess.max_record_bytes"] = preprocess.max_record_bytes
    if preprocess.on_damaged_file in ("drop", "salvage") and documents_wanted(config.data) and not held_out:
        # Splits with numbers of documents are counted without these files, or with what is salvaged of them.
        settings["data.preprocess.on_damaged_file"] = preprocess.on_damaged_file
    return settings | reader_of(source, config).plan_settings()


def check_settings(config: Config, manifests: Mapping[str, Manifest]) -> None:
    """Compare the datasets of a run's sources with what the run file asks for by now. Reads no files.

    Datasets made for another run (`dataset`) are what they are; but weights that are asked for must be there.

    Raises:
        UserError: a setting differs.
    """
    for source in config.data.sources:
        made = manifests[source.name].settings
        if source.dataset is not None and source.weight_key not in (None, made.get(WEIGHT_KEY)):
            has = f"those of {made[WEIGHT_KEY]!r}" if manifests[source.name].has_weights else "none"
            raise UserError(
                f"data.sources: {source.name}: weight_key {source.weight_key!r}, but of loss weights of documents "
                f"{source.dataset} has {has}; write that key, or remove weight_key, or make the dataset again with it"
            )
        _check(config, source, manifests[source.name])


def check_heldout_settings(config: Config) -> None:
    """Do the same for the sources that are never trained on.

    Raises:
        UserError: a setting differs, or a dataset is not there.
    """
    for source in config.data.heldout_sources:
        if source.dataset is None:
            _check(config, source, open_dataset(config, dataset_place(config, source, HELD_OUT)).manifest)


def _check(config: Config, source: InputConfig, manifest: Manifest) -> None:
    made = manifest.settings
    if source.dataset is not None or not made:
        return
    asked = settings_of(source, config)
    # Of any format: the type may be one of the differences.
    formats = [*SOURCE_FORMATS.values(), source_format(source.type)]
    left_open = {*_NOT_OF_THE_RUN_FILE, PLUGIN, PARTITIONS, *(name for each in formats for name in each.pinned)}
    known = {name: value for name, value in made.items() if name not in left_open}
    differences = setting_differences(known, asked)
    applies = config.data.curate is not None and config.data.curate.mode == "apply"
    curated = applies and not isinstance(source, HeldOutSourceConfig)
    if curated != ("curation" in made):
        words = {True: "left out what was removed", False: "kept all documents"}
        differences.append(f"data.curate: it {words[not curated]} then, {words[curated]} now")
    if differences:
        raise UserError(
            f"the dataset of source {source.name!r} was made with other settings than the run file has now:\n"
            + "\n".join(f"  {difference}" for difference in differences)
            + "\nSet them back; or run `pipeline preprocess` with this run file, which says how to make it again"
        )
