"""Steps of training samples for a data-parallel rank.

The samples of a step, padded with masked ones to a multiple of dp_size x micro_batch_size, are cut in their order into
micro-batches of dp_size x micro_batch_size, and each of those into dp_size contiguous shares: rank r's share of
micro-batch a is the micro_batch_size padded samples from (a * dp_size + r) * micro_batch_size on. So the step is the
same set of samples, under the same global indices, for any number of ranks and any micro-batch size.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from pipeline.config import Config
from pipeline.data.dataset import Dataset
from pipeline.data.instances import Instances, Windows
from pipeline.data.journal import Draws, Journal, Sampler
from pipeline.data.objectives import Causal, Objective, sample_key
from pipeline.data.plan import check_settings
from pipeline.data.tokenizer_stage import check_tokenizer_settings
from pipeline.errors import UserError

PREFETCH = 2
"""Steps that are read ahead."""


@dataclass(frozen=True)
class Batch:
    """Samples of one micro-batch on one rank. B samples, S positions."""

    tokens: torch.Tensor
    """[B, S] int64, inputs."""
    targets: torch.Tensor
    """[B, S] int64, what follows each input."""
    weight: torch.Tensor
    """[B, S] float32, 0 where a target does not count."""
    bounds: torch.Tensor
    """[B, S] int64, for each position the one at which its document begins in this sample: query q sees keys k with
    bounds[q] <= k <= q if attention stays within documents."""
    sources: torch.Tensor
    """[B] int64, index in the loader's `names`; -1 for padding samples."""
    extras: dict[str, torch.Tensor]
    """[B, ...], what an objective adds."""

    @property
    def positions(self) -> torch.Tensor:
        """[B, S] int64, counted from the beginning of each position's document in the sample."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) - self.bounds

    def to(self, device: torch.device) -> Batch:
        """The same on another device."""
        moved = {field.name: getattr(self, field.name).to(device) for field in fields(self) if field.name != "extras"}
        return Batch(**moved, extras={name: value.to(device) for name, value in self.extras.items()})


@dataclass(frozen=True)
class StepData:
    """What a step trains on."""

    step: int
    """Counted from 0."""
    micro_batches: list[Batch]
    """This rank's share."""
    valid_targets: int
    """Targets with weight in the global batch."""
    tokens_by_source: dict[str, int]
    """Targets that the global batch draws from each source, masked ones included."""
    order_hash: int
    """xxh3-64 over (global index, xxh3-64 of the source's name, lap, position) of the global batch's samples, each a
    little-endian u64; equal on all ranks."""
    data_hash: int
    """Sum mod 2**64 of xxh3-64 over (global index, tokens as little-endian int64) of this rank's samples; the sum over
    ranks does not depend on how the step is split."""


class Loader:
    """Steps of a run for one data-parallel rank, each a pure function of the journal, the data and the step.

    Args:
        journal: The run's plan.
        instances: By source name.
        objective: What becomes of an instance.
        dp_rank: This rank, in [0, dp_size).
        dp_size: Ranks that share each step.
        micro_batch_size: Samples of one micro-batch on one rank.
    """

    def __init__(
        self,
        journal: Journal,
        instances: Mapping[str, Instances],
        objective: Objective,
        *,
        dp_rank: int = 0,
        dp_size: int = 1,
        micro_batch_size: int,
    ) -> None:
        assert 0 <= dp_rank < dp_size and micro_batch_size >= 1
        self.journal = journal
        self.names = journal.names
        self._instances = [instances[name] for name in self.names]
        self._objective = objective
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self.micro_batch_size = micro_batch_size
        counts = {name: instances[name].count for name in self.names}
        self._sampler = Sampler(journal, [counts] * len(journal.segments))
        self._name_hashes = np.array([xxhash.xxh3_64_intdigest(name.encode()) for name in self.names], np.uint64)

    def batches(self, step: int) -> StepData:
        """The step's data; any step, in any order."""
        samples = self.journal.samples(step)
        draws = self._sampler.step(step)
        length = self.journal.segments[self.journal.segment_number(step)].sequence_length
        drawn = np.bincount(draws.source, minlength=len(self.names))
        micro, ranks = self.micro_batch_size, self._dp_size
        micro_batches, data_hash = [], 0
        for first in range(self._dp_rank * micro, -(-len(samples) // (micro * ranks)) * micro * ranks, micro * ranks):
            batch, part = self._batch(samples, draws, range(first, first + micro), length)
            micro_batches.append(batch)
            data_hash += part
        return StepData(
            step=step,
            micro_batches=micro_batches,
            valid_targets=self._valid_targets(samples, draws) if self._objective.masks else len(samples) * length,
            tokens_by_source={name: int(n) * length for name, n in zip(self.names, drawn, strict=True)},
            order_hash=self._order_hash(samples, draws),
            data_hash=data_hash % 2**64,
        )

    def iterate(self, first: int, last: int) -> Iterator[StepData]:
        """Steps [first, last) in order; one thread reads ahead, by at most `PREFETCH` steps.

        What goes wrong in the thread is raised here. The thread ends with the iterator, also when it is closed early.
        """
        ready: queue.Queue[StepData | BaseException] = queue.Queue()
        room = threading.Semaphore(PREFETCH)
        closed = threading.Event()

        def read_ahead() -> None:
            try:
                for step in range(first, last):
                    room.acquire()
                    if closed.is_set():
                        return
                    ready.put(self.batches(step))
            except BaseException as error:
                ready.put(error)

        thread = threading.Thread(target=read_ahead, name="loader", daemon=True)
        thread.start()
        try:
            for _ in range(first, last):
                item = ready.get()
                if isinstance(item, BaseException):
                    raise item
                room.release()
                yield item
        finally:
            closed.set()
            room.release()
            thread.join()

    def tokens(self, step: int) -> int:
        """Targets drawn by all steps before `step`, masked ones included."""
        return self.journal.tokens(step)

    def tokens_by_source(self, step: int) -> dict[str, int]:
        """`tokens` by source, in closed form."""
        return self._sampler.targets(step)

    def epochs_by_source(self, step: int) -> dict[str, float]:
        """`tokens_by_source` over each source's tokens."""
        targets = self._sampler.targets(step)
        return {name: targets[name] / i.tokens for name, i in zip(self.names, self._instances, strict=True)}

    def describe(self, step: int) -> list[dict[str, Any]]:
        """The step's samples as JSON: global index, source, lap, position, and the pieces of documents in it."""
        draws = self._sampler.step(step)
        return [
            {
                "sample": index,
                "source": self.names[source],
                "lap": lap,
                "position": position,
                "spans": [span._asdict() for span in self._instances[source].at(lap, position)],
            }
            for index, source, lap, position in zip(
                self.journal.samples(step), *(array.tolist() for array in draws), strict=True
            )
        ]

    def _batch(self, samples: range, draws: Draws, rows: range, length: int) -> tuple[Batch, int]:
        """The padded samples `rows` of a step, and the sum of their hashes."""
        tokens, targets, bounds = np.zeros((3, len(rows), length), np.int64)
        weight = np.zeros((len(rows), length), np.float32)
        sources = np.full(len(rows), -1, np.int64)
        arrays: dict[str, npt.NDArray[Any]] = {
            "tokens": tokens,
            "targets": targets,
            "bounds": bounds,
            "weight": weight,
        }
        extras: dict[str, npt.NDArray[Any]] = {}
        data_hash = 0
        for row, sample in enumerate(rows[: max(0, len(samples) - rows.start)]):
            source = sources[row] = int(draws.source[sample])
            index = samples[sample]
            ids, begins = self._instances[source].read(int(draws.lap[sample]), int(draws.position[sample]))
            digest = xxhash.xxh3_64(index.to_bytes(8, "little"))
            digest.update(ids.astype("<i8", copy=False).data)
            data_hash += digest.intdigest()
            sample_arrays = self._objective.arrays(ids, begins, sample_key(self.journal.seed, index))
            for name, value in sample_arrays.items():
                if name not in arrays:
                    arrays[name] = extras[name] = np.zeros((len(rows), *value.shape), value.dtype)
                arrays[name][row] = value
        return (
            Batch(
                tokens=torch.from_numpy(tokens),
                targets=torch.from_numpy(targets),
                weight=torch.from_numpy(weight),
                bounds=torch.from_numpy(bounds),
                sources=torch.from_numpy(sources),
                extras={name: torch.from_numpy(value) for name, value in extras.items()},
            ),
            data_hash,
        )

    def _valid_targets(self, samples: range, draws: Draws) -> int:
        total = 0
        for index, source, lap, position in zip(samples, *(array.tolist() for array in draws), strict=True):
            bounds = self._instances[source].bounds(lap, position)
            weight = self._objective.weight(bounds, sample_key(self.journal.seed, index))
            total += int(np.count_nonzero(weight))
        return total

    def _order_hash(self, samples: range, draws: Draws) -> int:
        records = np.empty((len(samples), 4), "<u8")
        records[:, 0] = np.arange(samples.start, samples.stop)
        records[:, 1] = self._name_hashes[draws.source]
        records[:, 2] = draws.lap
        records[:, 3] = draws.position
        return xxhash.xxh3_64_intdigest(records.data)


def open_loader(config: Config, datasets: Mapping[str, Dataset], *, dp_rank: int = 0, dp_size: int = 1) -> Loader:
    """The loader of a run that starts now.

    Args:
        config: The run file.
        datasets: The training split of each of its sources.
        dp_rank: This rank, in [0, dp_size).
        dp_size: Ranks that share each step.

    Raises:
        UserError: A source is too short for a window or too small for the blend, sources have different tokenizers, or
            the run file has other settings than the datasets were made with.
    """
    _check_tokenizers(datasets)
    check_settings(config, {name: dataset.manifest for name, dataset in datasets.items()})
    check_tokenizer_settings(config)
    instances = {
        name: Windows(dataset, config.train.sequence_length, config.run.seed, name)
        for name, dataset in datasets.items()
    }
    return Loader(
        Journal.plan(config, datasets),
        instances,
        Causal(mask_document_start=config.train.loss.mask_document_start),
        dp_rank=dp_rank,
        dp_size=dp_size,
        micro_batch_size=config.train.micro_batch_size or -(-config.train.batch_size // dp_size),
    )


def _check_tokenizers(datasets: Mapping[str, Dataset]) -> None:
    (first, one), *others = datasets.items()
    for name, dataset in others:
        if dataset.manifest.tokenizer.fingerprint != one.manifest.tokenizer.fingerprint:
            raise UserError(
                f"sources {first!r} and {name!r} were tokenized with different tokenizers "
                f"({one.manifest.tokenizer.fingerprint} and {dataset.manifest.tokenizer.fingerprint}): "
                "preprocess both with the same tokenizer section, or leave one out of data.sources"
            )
