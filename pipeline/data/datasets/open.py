"""Folders of the datasets of a run, and opening them. Imports neither torch nor the preprocess stage."""

from __future__ import annotations

from pathlib import Path

from pipeline.common.errors import UserError
from pipeline.config.data import SourceConfig
from pipeline.config.root import Config
from pipeline.data.datasets.dataset import Dataset


def dataset_folder(config: Config, source: SourceConfig, split: str) -> Path:
    """Folder of a source's dataset.

    Args:
        config: the run.
        source: one of its sources.
        split: `train`, or one of `data.splits`.
    """
    return (source.dataset or config.data_dir / source.name) / split


def open_datasets(config: Config, split: str) -> dict[str, Dataset]:
    """A split of each source by name, in the order of the run file.

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
    read = config.data.loader.read
    return {source.name: Dataset.open(dataset_folder(config, source, split), read) for source in config.data.sources}
