"""Packs as a part of the preprocess stage: its last step, for the training data that it makes."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from pipeline.common.console import say
from pipeline.common.errors import UserError
from pipeline.config.root import Config
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.files import TRAIN
from pipeline.data.datasets.open import dataset_place, open_dataset
from pipeline.data.datasets.packing.blocks import check_length
from pipeline.data.datasets.packing.verify import check_packs
from pipeline.data.packing.command import plan_in_words
from pipeline.data.packing.make import PackMaker, packs_in_words
from pipeline.data.work.job_run import worker_count


class PackPass:
    """The packs of a run; without `data.loader.packing: best_fit` all of it does nothing.

    Args:
        config: the run.

    Raises:
        UserError: packs cannot have a sequence length of the run.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._lengths = config.pack_lengths
        for length in self._lengths:
            check_length(length)
        self._trained_on = {source.name for source in config.data.sources}

    def run(self, source: str, console: Console) -> None:
        """Make what is missing of the packs of a source, which is finished.

        Raises:
            UserError: a document is too long for packs of a length.
            MachineError: a job failed again and again.
        """
        for length in self._lengths_of(source):
            maker = self._maker(source, length)
            if maker.state().index is None:
                index = maker.make(console, worker_count(self._config))
                say(console, f"{source}: {packs_in_words(index)}")

    def missing(self, source: str) -> list[int]:
        """Lengths for which the dataset of a source has no packs, or cannot be opened."""
        lengths = self._lengths_of(source)
        try:
            return [length for length in lengths if self._maker(source, length).state().index is None]
        except UserError:
            return lengths

    def plan_in_words(self, source: str) -> list[str]:
        """A line for each length, with what there is to do."""
        lengths = self._lengths_of(source)
        try:
            return [plan_in_words(self._maker(source, length)) for length in lengths]
        except UserError:  # there is no dataset yet, or it has to be made again
            return [f"packs of {length:,} tokens: to make" for length in lengths]

    def adopted_problems(self) -> Iterator[str]:
        """The datasets made elsewhere that have no packs, with the commands that make them."""
        for number, source in enumerate(self._config.data.sources):
            if source.dataset is not None and self._lengths:
                try:
                    dataset = open_dataset(self._config, dataset_place(self._config, source, TRAIN))
                    check_packs({"": dataset}, self._lengths)
                except UserError as error:
                    yield f"data.sources.{number}.dataset: {error}"

    def _lengths_of(self, source: str) -> list[int]:
        """Lengths of the packs of a source; none of `data.heldout_sources`, which are read in windows."""
        return self._lengths if source in self._trained_on else []

    def _maker(self, source: str, length: int) -> PackMaker:
        return PackMaker(Dataset.open(self._config.data_dir / source / TRAIN), length)
