"""Folders of the datasets of a run, and opening them. Imports neither torch nor the preprocess stage."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.common.errors import UserError
from pipeline.common.objects.urls import ObjectUrl, parse_folder
from pipeline.common.run_files import RunFiles
from pipeline.config.data import HeldOutSourceConfig, InputConfig
from pipeline.config.parsing.code_keys import REMOTE_KEYS, refuse_code_of_others
from pipeline.config.root import Config
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.files import MANIFEST_FILE, TRAIN
from pipeline.data.datasets.node_folder import own_folder
from pipeline.data.datasets.remote.opening import is_there, open_remote


def dataset_place(config: Config, source: InputConfig, split: str) -> Path | ObjectUrl:
    """Folder of a source's dataset, or its URL.

    Args:
        config: the run.
        source: one of its sources.
        split: `train`, or one of `data.splits`; a source that is never trained on has its own.
    """
    split = source.split if isinstance(source, HeldOutSourceConfig) else split
    if isinstance(source.dataset, str):
        return parse_folder(source.dataset).below(split)
    if source.dataset is not None:
        return source.dataset / split
    if config.data_url is not None:
        return config.data_url.below(source.name).below(split)
    return config.data_dir / source.name / split


def dataset_folder(config: Config, source: InputConfig, split: str) -> Path:
    """`dataset_place` of a dataset that has to be on a disk.

    Raises:
        UserError: it is in a bucket.
    """
    place = dataset_place(config, source, split)
    if isinstance(place, ObjectUrl):
        raise UserError(f"{place} is in a bucket; write it to a disk first: `pipeline data pull {place} FOLDER`")
    return place


def has_dataset(config: Config, place: Path | ObjectUrl) -> bool:
    """Tell whether there is a dataset at a place, finished or not.

    Raises:
        UserError: the bucket cannot be read, or others may have written its URL.
    """
    if isinstance(place, Path):
        return place.exists()
    refuse_code_of_others(config, *REMOTE_KEYS)
    return is_there(place, config.data.remote.access)


def is_finished(config: Config, place: Path | ObjectUrl) -> bool:
    """Tell whether there is a finished dataset at a place; see `has_dataset`."""
    return (place / MANIFEST_FILE).is_file() if isinstance(place, Path) else has_dataset(config, place)


def open_dataset(config: Config, place: Path | ObjectUrl, generation: int = -1) -> Dataset:
    """The dataset at a place. Of one in a bucket, what readers need first is fetched to this node.

    Args:
        config: the run.
        place: of the dataset.
        generation: index in the lineage of its manifest.

    Raises:
        UserError: it is not finished, or damaged; or others may have written its URL.
        MachineError: the bucket cannot be reached, or `stage.dir` cannot be used.
    """
    if isinstance(place, Path):
        return Dataset.open(place, config.data.loader.read, generation)
    refuse_code_of_others(config, *REMOTE_KEYS)
    return open_remote(
        place,
        config.data.remote.access,
        stage_folder(config),
        read=config.data.loader.read,
        pack_lengths=config.pack_lengths if place.key.endswith(f"/{TRAIN}") else (),
        generation=generation,
    )


def stage_folder(config: Config) -> Path:
    """Folder of this user's copies of datasets on this node.

    Raises:
        MachineError: it cannot be used.
    """
    return own_folder(config.stage.dir or Path(tempfile.gettempdir()))


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
        folder = dataset_place(config, source, split)
        if source.dataset is not None and not has_dataset(config, folder):
            raise UserError(
                f"data.sources.{number}.dataset: {source.dataset} has no split {split!r}: there is no {folder}; name "
                f"another split (train.validation.split, eval.split), make it (`pipeline data adopt --split {split}`), "
                "or train without validation (train.validation.samples: 0)"
            )
    return {source.name: open_split(config, source, split, begun) for source in config.data.sources}


def has_split(config: Config, split: str) -> bool:
    """True if some source of the run has the split."""
    return any(has_dataset(config, dataset_place(config, source, split)) for source in config.data.sources)


def open_set(config: Config, name: str) -> dict[str, Dataset]:
    """The datasets of a set of `heldout_sets`, by source.

    Raises:
        UserError: one is not there, not finished, or damaged; or the set has no token.
    """
    chosen, found = config.heldout_sets[name], dict[str, Dataset]()
    inputs = {source.name: (key, source) for key, source in config.data.inputs.items()}
    for each in chosen.sources:
        key, source = inputs[each]
        place = dataset_place(config, source, chosen.split)
        if not has_dataset(config, place):
            where = "pipeline preprocess RUN.yaml makes it"
            if source.dataset is not None:
                split = f"{key}.split" if isinstance(source, HeldOutSourceConfig) else f"heldout_sets.{name}.split"
                last = str(place).rpartition("/")[2]
                where = f"correct {key}.dataset or {split}, or make it (`pipeline data adopt --split {last}`)"
            raise UserError(f"heldout_sets.{name}: source {each!r} has no dataset {place}: {where}")
        found[each] = open_dataset(config, place)
    if not any(dataset.tokens for dataset in found.values()):
        folders = ", ".join(str(dataset.folder) for dataset in found.values())
        raise UserError(
            f"heldout_sets.{name} has no token ({folders}), so there is nothing to score; raise "
            f"data.splits.{chosen.split}, name other sources, or remove the set"
        )
    return found


def open_split(config: Config, source: InputConfig, split: str, begun: Mapping[str, Any] | None = None) -> Dataset:
    """A split of one source; see `open_datasets`."""
    place = dataset_place(config, source, split)
    dataset = open_dataset(config, place)
    if not dataset.whole.generations:
        return dataset
    if begun is None:
        begun = RunFiles(config.run.dir).newest_state().get("fingerprints", {}).get("data", {})
    # The training split is written last, and decides for the others.
    trained = dataset if split == TRAIN else open_dataset(config, dataset_place(config, source, TRAIN))
    fingerprints = [manifest.fingerprint for manifest in trained.whole.lineage]
    value = begun_fingerprint(begun.get(source.name))
    generation = fingerprints.index(value) if value in fingerprints else len(fingerprints) - 1
    if generation >= len(dataset.lineage) - 1:
        return dataset
    return open_dataset(config, place, generation)


def begun_fingerprint(value: Any) -> Any:
    """Fingerprint of the data that a run began with, of what a checkpoint has: a pair if it reads what was added."""
    return value["begun"] if isinstance(value, dict) else value
