"""Folders of the datasets of a run, and opening them. Imports neither torch nor the preprocess stage."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.common.errors import UserError
from pipeline.common.run_files import RunFiles
from pipeline.config.data import HeldOutSourceConfig, InputConfig
from pipeline.config.root import Config
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.files import TRAIN
from pipeline.data.datasets.manifest import read_manifest


def dataset_folder(config: Config, source: InputConfig, split: str) -> Path:
    """Folder of a source's dataset.

    Args:
        config: the run.
        source: one of its sources.
        split: `train`, or one of `data.splits`; a source that is never trained on has its own.
    """
    split = source.split if isinstance(source, HeldOutSourceConfig) else split
    return (source.dataset or config.data_dir / source.name) / split


def open_datasets(config: Config, split: str, begun: Mapping[str, Any] | None = None) -> dict[str, Dataset]:
    """A split of each source by name, in the order of the run file.

    Args:
        config: the run.
        split: `train`, or one of `data.splits`.
        begun: fingerprints of the run's data by source, as a checkpoint has them; by default those of the newest one.
            A dataset that has grown since is opened at the generation that the run began with.

    Raises:
        UserError: one is not finished, or damaged.
    """
    for number, source in enumerate(config.data.sources):
        folder = dataset_folder(config, source, split)
        if source.dataset is not None and not folder.exists():
            raise UserError(
                f"data.sources.{number}.dataset: {source.dataset} has no split {split!r}: there is no {folder}; name "
                f"another split (train.validation.split, eval.split), make it (`pipeline data adopt --split {split}`), "
                "or train without validation (train.validation.samples: 0)"
            )
    return {source.name: open_split(config, source, split, begun) for source in config.data.sources}


def has_split(config: Config, split: str) -> bool:
    """True if some source of the run has the split."""
    return any(dataset_folder(config, source, split).exists() for source in config.data.sources)


def open_set(config: Config, name: str) -> dict[str, Dataset]:
    """The datasets of a set of `heldout_sets`, by source.

    Raises:
        UserError: one is not there, not finished, or damaged; or the set has no token.
    """
    chosen, found = config.heldout_sets[name], dict[str, Dataset]()
    inputs = {source.name: (key, source) for key, source in config.data.inputs.items()}
    for each in chosen.sources:
        key, source = inputs[each]
        folder = dataset_folder(config, source, chosen.split)
        if not folder.exists():
            where = "pipeline preprocess RUN.yaml makes it"
            if source.dataset is not None:
                split = f"{key}.split" if isinstance(source, HeldOutSourceConfig) else f"heldout_sets.{name}.split"
                where = f"correct {key}.dataset or {split}, or make it (`pipeline data adopt --split {folder.name}`)"
            raise UserError(f"heldout_sets.{name}: source {each!r} has no dataset {folder}: {where}")
        found[each] = Dataset.open(folder, config.data.loader.read)
    if not any(dataset.tokens for dataset in found.values()):
        folders = ", ".join(str(dataset.folder) for dataset in found.values())
        raise UserError(
            f"heldout_sets.{name} has no token ({folders}), so there is nothing to score; raise "
            f"data.splits.{chosen.split}, name other sources, or remove the set"
        )
    return found


def open_split(config: Config, source: InputConfig, split: str, begun: Mapping[str, Any] | None = None) -> Dataset:
    """A split of one source; see `open_datasets`."""
    folder = dataset_folder(config, source, split)
    dataset = Dataset.open(folder, config.data.loader.read)
    if not dataset.whole.generations:
        return dataset
    if begun is None:
        begun = RunFiles(config.run.dir).newest_state().get("fingerprints", {}).get("data", {})
    # The training split is written last, and decides for the others.
    lineage = read_manifest(dataset_folder(config, source, TRAIN)).lineage if split != TRAIN else dataset.whole.lineage
    fingerprints = [manifest.fingerprint for manifest in lineage]
    value = begun_fingerprint(begun.get(source.name))
    generation = fingerprints.index(value) if value in fingerprints else len(lineage) - 1
    if generation >= len(dataset.lineage) - 1:
        return dataset
    return Dataset.open(folder, config.data.loader.read, generation)


def begun_fingerprint(value: Any) -> Any:
    """Fingerprint of the data that a run began with, of what a checkpoint has: a pair if it reads what was added."""
    return value["begun"] if isinstance(value, dict) else value
