"""Steps of training samples for a data-parallel rank.

A step is the same set of samples, under the same global indices, for any number of ranks and any micro-batch size;
`locate.RankSamples` says which of them a rank has. Where they lie is looked up for many steps at once, which leaves
copying tokens, hashing them and comparing them with the vocabulary to each step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.remote.dataset import RemoteDataset
from pipeline.data.datasets.validate import check_tokenizers
from pipeline.data.loading.ahead import ahead_weight, valid_ahead
from pipeline.data.loading.arranged_packs import arranged_pack, outside_of_vocabulary
from pipeline.data.loading.arranged_rows import stack
from pipeline.data.loading.batch import Batch, StepData
from pipeline.data.loading.drawn_targets import DrawnTargets
from pipeline.data.loading.fetch_ahead import FetchAhead, StepPieces
from pipeline.data.loading.loss_weights import LossWeights
from pipeline.data.loading.node_copier import NodeCopier, open_copier
from pipeline.data.loading.objectives.base import Objective, sample_key
from pipeline.data.loading.objectives.choice import make_objectives
from pipeline.data.loading.pack_reader import PackReader
from pipeline.data.loading.pair_rows import References
from pipeline.data.loading.prefetch import read_ahead
from pipeline.data.loading.skip_masks import Masks, Ranges, arranged_window, causal_targets, without
from pipeline.data.order.journal import Journal
from pipeline.data.order.locate import Located, Lookup, RankSamples
from pipeline.data.order.packs import instances_of
from pipeline.data.order.phases import micro_batch_size, plan_journal
from pipeline.data.order.sampler import Sampler
from pipeline.data.order.windows import Instances

_MAX_POSITIONS = 2**31 - 1
"""Positions of a micro-batch at most: `Batch.starts` is int32."""


class Loader:
    """Steps of a run for one data-parallel rank, each a pure function of the journal, the data and the step.

    Args:
        journal: The run's plan.
        instances: For each segment by source.
        objectives: What becomes of a window, for each segment by source; or one for all of them.
        dp_rank: This rank, in [0, dp_size).
        dp_size: Ranks that share each step.
        micro_batch_size: Samples of one micro-batch on one rank, for each segment.
        vocab_size: Token ids must be below; None to take them as they are.
        prefetch: Steps that `iterate` reads ahead.
        device: Where batches will go. For a GPU, `iterate` gives them in page-locked memory.
        ahead: Depths of multi-token prediction: tokens behind each instance that batches have as targets.
        end_of_document: Token id before the first token of a document in a pack.
        balanced: Whether packs go to ranks by the work of attention within documents.
        remote: Datasets that lie in a bucket, by source.
        fetched_steps: Steps whose tokens are asked for ahead of the one that is read, of such datasets.
        copier: Copies these datasets to this node while `iterate` reads.
        references: Of sources of pairs that are trained by preference.
    """

    def __init__(
        self,
        journal: Journal,
        instances: Sequence[Mapping[str, Instances]],
        objectives: Objective | Sequence[Mapping[str, Objective]],
        *,
        dp_rank: int = 0,
        dp_size: int = 1,
        micro_batch_size: Sequence[int],
        vocab_size: int | None = None,
        prefetch: int = 2,
        device: torch.device | None = None,
        ahead: int = 0,
        end_of_document: int = 0,
        balanced: bool = False,
        remote: Mapping[str, RemoteDataset] | None = None,
        fetched_steps: int = 16,
        copier: NodeCopier | None = None,
        references: References | None = None,
    ) -> None:
        assert 0 <= dp_rank < dp_size and min(micro_batch_size) >= 1
        assert len(micro_batch_size) == len(instances) == len(journal.segments)
        if not isinstance(objectives, Sequence):
            objectives = [dict.fromkeys(by_name, objectives) for by_name in instances]
        self.journal = journal
        self.names = journal.names
        self._instances = instances
        self._objectives = objectives
        self._shapes = [
            next(iter(by_name.values())).shape(segment.sequence_length)
            for by_name, segment in zip(objectives, journal.segments, strict=True)
        ]
        self._arranges = [any(one.arranges for one in by_name.values()) for by_name in objectives]
        assert not (ahead and any(self._arranges)), "targets ahead are those of the text"
        self._vocab_size = vocab_size
        self._prefetch = prefetch
        self._pin = device is not None and device.type == "cuda"
        self._rank_samples = [
            RankSamples(segment.batch_size, micro, dp_rank, dp_size)
            for segment, micro in zip(journal.segments, micro_batch_size, strict=True)
        ]
        self._sampler = Sampler(journal)
        self._ahead = ahead
        self._end_of_document = end_of_document
        self._packed = [segment.packed for segment in journal.segments]
        # By segment, whether as many targets count in each window; else they are counted, in the global batch.
        self._fixed = [
            all(one.fixed_valid(segment.sequence_length) is not None for one in by_name.values())
            for by_name, segment in zip(objectives, journal.segments, strict=True)
        ]
        self._packs = PackReader(
            journal,
            self._sampler,
            instances,
            objectives,
            shapes=self._shapes,
            rank_samples=self._rank_samples,
            end_of_document=end_of_document,
            vocab_size=vocab_size,
            balanced=balanced,
            ahead=ahead,
            references=references,
        )
        self._copier = copier
        self._fetch: FetchAhead | None = None
        if remote:
            pieces = StepPieces(journal, self._sampler, instances, self._rank_samples, ahead=ahead, balanced=balanced)
            self._fetch = FetchAhead(pieces, remote, fetched_steps)
        self.drawn_targets = DrawnTargets(journal, self._sampler, self._packs.targets)
        self._masks = Masks(journal, instances, objectives)
        self._loss_weights = LossWeights(journal, instances, self._masks, ahead)
        everything = ahead > 0 or not all(self._fixed) or self._loss_weights.by_document
        self._lookup = Lookup(journal, self._sampler, instances, self._rank_samples, everything=everything, ahead=ahead)
        # By segment and index in `names`; a source that the segment does not have is None.
        self._part_views = [
            [by_name[name].part_view if name in by_name else None for name in self.names] for by_name in instances
        ]
        # A dtype that has room for the ids of all its sources, so that a batch is checked and widened at once.
        self._dtypes = [np.result_type(*(i.dtype for i in by_name.values())) for by_name in instances]
        self._limits = [_unsigned_limit(dtype, vocab_size) for dtype in self._dtypes]
        self._ones = lru_cache(maxsize=8)(torch.ones)

    def micro_batch_size(self, step: int) -> int:
        """Samples of one micro-batch of a step on one rank."""
        return self._rank_samples[self.journal.segment_number(step)].micro_batch_size

    def batches(self, step: int) -> StepData:
        """The step's data; any step, in any order."""
        return self._read(step, None)

    def iterate(self, first: int, last: int) -> Generator[StepData, None, None]:
        """Steps [first, last) in order; one thread reads ahead, see `read_ahead`."""

        def read(step: int) -> StepData:
            data = self._read(step, last)
            return data.pin() if self._pin else data

        if self._copier is not None:
            self._copier.begin(first, last)
        try:
            yield from read_ahead(read, first, last, self._prefetch, self._give_up)
        finally:
            if self._copier is not None:
                self._copier.end()

    def _give_up(self) -> None:
        """End what reading may wait for."""
        if self._fetch is not None:
            self._fetch.give_up()

    def tokens_by_source(self, step: int) -> dict[str, int]:
        """Targets drawn from each source by all steps before `step`, masked ones included.

        In closed form for windows; packs are counted from the last step on that was asked for.
        """
        return self.drawn_targets.before(step)

    def epochs_by_source(self, step: int) -> dict[str, float]:
        """`tokens_by_source` over each source's tokens: those of the slices that it has been read from so far."""
        tokens: dict[str, dict[Any, int]] = {name: {} for name in self.names}
        for segment, _ in self.journal.drawn(step):
            for name, state in segment.sources.items():
                tokens[name][state.documents] = state.tokens
        drawn = self.tokens_by_source(step)
        return {name: drawn[name] / max(1, sum(tokens[name].values())) for name in self.names}

    def describe(self, step: int) -> list[dict[str, Any]]:
        """The step's samples as JSON: global index, source, epoch, position, and the pieces of documents in it.

        Where the objective chooses what is predicted, also `predicted`: these tokens [first, end) of the window's
        L + 1, numbered from 0, or of the pack's L targets, numbered from 1; skips left aside.
        """
        draws = self._sampler.step(step)
        number = self.journal.segment_number(step)
        instances = self._instances[number]
        return [
            {
                "sample": index,
                "source": self.names[source],
                "lap": epoch,
                "position": position,
                "spans": [span._asdict() for span in instances[self.names[source]].at(epoch, position)],
                **self._described(number, index, self.names[source], epoch, position),
            }
            for index, source, epoch, position in zip(
                self.journal.samples(step), *(array.tolist() for array in draws), strict=True
            )
        ]

    def _described(self, number: int, index: int, name: str, epoch: int, position: int) -> dict[str, Any]:
        """Tokens of a sample that an objective chooses to predict."""
        objective = self._objectives[number][name]
        if not objective.chooses:
            return {}
        instances, seed = self._instances[number][name], self.journal.seed
        if instances.packed:
            length = self.journal.segments[number].sequence_length
            key = sample_key(seed, index)
            arranged = arranged_pack(
                objective, instances, epoch, position, length=length, end_of_document=self._end_of_document, key=key
            )
        else:
            arranged = arranged_window(objective, instances, epoch, position, seed, index)
        return {"predicted": arranged.predicted_tokens}

    def _read(self, step: int, last: int | None) -> StepData:
        """The step's data. Steps from `last` on will not be asked for."""
        if self._fetch is not None:
            self._fetch.before(step, last)
        if self._copier is not None:
            self._copier.at(step)
        number = self.journal.segment_number(step)
        length = self.journal.segments[number].sequence_length
        if self._packed[number]:
            data = self._packs.read(step)
            self.drawn_targets.note(step, data.tokens_by_source)
            return data
        located = self._lookup.step(step, last)
        if located is None:
            return self._skipped(step, length)
        masked = self._masks.masked(step, located, self._ahead)
        valid = self._masks.valid(step, located, masked)
        weights = self._loss_weights.of_step(number, located, masked, valid)
        micro_batches, data_hash = [], 0
        for micro_batch, rows in enumerate(located.micro_batches):
            batch, hashes = self._batch(step, number, located, micro_batch, masked)
            micro_batches.append(batch if weights is None else weights.weighed(batch, rows))
            data_hash += hashes
        valid_targets = sum(valid.tolist())
        drawn = dict(zip(self.names, [count * length for count in located.drawn], strict=True))
        counts = self._valid_ahead(located, length, masked) if self._ahead else ()
        data = StepData(
            step,
            micro_batches,
            valid_targets,
            drawn,
            located.order_hash,
            data_hash % 2**64,
            counts,
            samples=self.journal.samples(step),
        )
        if weights is None:
            return data
        return replace(data, total_weight=weights.total, total_ahead=weights.total_ahead)

    def _valid_ahead(self, located: Located, length: int, masked: list[Ranges] | None) -> tuple[int, ...]:
        """By depth, targets of the global batch that count."""
        counts = valid_ahead(located.begins, located.splits, length, self._ahead)
        for row, ranges in enumerate(masked or ()):
            if ranges:
                splits = located.splits[row : row + 2]
                weight = ahead_weight(located.begins[slice(*splits)], length, self._ahead, causal_targets(ranges))
                counts += np.count_nonzero(weight, axis=1) - valid_ahead(located.begins, splits, length, self._ahead)
        return tuple(counts.tolist())

    def _skipped(self, step: int, length: int) -> StepData:
        """A step of which nothing is read."""
        drawn = np.bincount(self._sampler.step(step).source, minlength=len(self.names)).tolist()
        tokens = {name: count * length for name, count in zip(self.names, drawn, strict=True)}
        order_hash, samples = self._sampler.order_hash(step), self.journal.samples(step)
        return StepData(step, [], 0, tokens, order_hash, samples=samples, skipped=True)

    def _batch(
        self,
        step: int,
        number: int,
        located: Located,
        micro_batch: int,
        masked: list[Ranges] | None,
    ) -> tuple[Batch, int]:
        """A micro-batch, and the sum of its samples' hashes."""
        rows, size = located.micro_batches[micro_batch], self._rank_samples[number].micro_batch_size
        length = self.journal.segments[number].sequence_length
        count, width = len(rows), length + 1 + self._ahead
        sources = located.sources[rows.start : rows.stop]
        starts = located.starts[micro_batch]
        samples = located.samples[rows.start : rows.stop]
        views, dtype = self._part_views[number], self._dtypes[number]
        found = [views[source](part, start, end) for source, part, start, end in located.pieces[micro_batch].tolist()]
        if count < size:
            found.append(np.zeros((size - count) * width, dtype))
            padding = np.full(size - count, -1)
            sources, samples = np.concatenate([sources, padding]), np.concatenate([samples, padding])
            starts = np.concatenate([starts, np.arange(count, size, dtype=np.int32) * length])
        flat = np.concatenate(found, dtype=dtype)
        raw = flat.reshape(size, width)
        unsigned, bound = self._limits[number]
        if bound is not None and int(np.maximum.reduce(flat.view(unsigned))) >= bound:
            raise self._outside_of_vocabulary(step, located, rows, raw)
        # Before its tokens each row has the index of the sample, which is hashed with them; what lies ahead is not.
        ids = np.empty((size, length + 2), np.int64)
        ids[:, 0] = samples
        ids[:, 1:] = raw[:, : length + 1]
        data_hash = sum(map(xxhash.xxh3_64_intdigest, ids[:count]))
        targets, weight = self._targets_ahead(rows, raw, length, located, masked) if self._ahead else (None, None)
        fields: dict[str, Any]
        if self._arranges[number]:
            fields = self._arranged(number, located, rows, ids, masked)
        else:
            fields = {
                "tokens": torch.from_numpy(ids[:, 1:-1]),
                "targets": torch.from_numpy(ids[:, 2:]),
                "weight": self._weight(rows, size, length, number, located, masked),
                "starts": torch.from_numpy(starts),
            }
        return (
            Batch(
                sources=torch.from_numpy(sources),
                extras={},
                samples=torch.from_numpy(samples),
                real=count,
                ahead_targets=targets,
                ahead_weight=weight,
                **fields,
            ),
            data_hash,
        )

    def _arranged(
        self,
        number: int,
        located: Located,
        rows: range,
        ids: npt.NDArray[np.int64],
        masked: list[Ranges] | None,
    ) -> dict[str, Any]:
        """Fields of a micro-batch whose windows are arranged.

        Args:
            number: Of the segment.
            located: The step.
            rows: Of it, those of the micro-batch.
            ids: [size, 1 + L + 1], with the sample's index before its tokens.
            masked: From `Masks.masked`.
        """
        arranged = []
        for row, out in zip(rows, ids, strict=False):
            one = self._masks.arranged(number, located, row, out[1:])
            arranged.append(one._replace(weight=without(one, masked[row])) if masked and masked[row] else one)
        return stack(arranged, len(ids), self._shapes[number])

    def _targets_ahead(
        self,
        rows: range,
        raw: npt.NDArray[Any],
        length: int,
        located: Located,
        masked: list[Ranges] | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Targets of multi-token prediction and their weights, [size, depths, length] each; 0 for padding."""
        shifted = [raw[:, 2 + number : 2 + number + length] for number in range(self._ahead)]
        weight = np.zeros((len(raw), self._ahead, length), np.float32)
        for place, row in enumerate(rows):
            begins = located.begins_of(row, length + 1 + self._ahead)
            weight[place] = ahead_weight(begins, length, self._ahead, causal_targets(masked[row] if masked else []))
        return torch.from_numpy(np.stack(shifted, axis=1).astype(np.int64)), torch.from_numpy(weight)

    def _weight(
        self, rows: range, size: int, length: int, number: int, located: Located, masked: list[Ranges] | None
    ) -> torch.Tensor:
        """[size, length] of windows that are not arranged: of the rows, and 0 for padding."""
        fixed = self._fixed[number]
        if fixed and masked is None and len(rows) == size:
            return self._ones(size, length)
        result = torch.zeros(size, length)
        result[: len(rows)] = 1
        for place, row in enumerate(rows):
            if not fixed:
                result[place] = torch.from_numpy(self._masks.arranged(number, located, row).weight)
            for first, end in causal_targets(masked[row] if masked else []):
                result[place, first:end] = 0
        return result

    def _outside_of_vocabulary(self, step: int, located: Located, rows: range, raw: npt.NDArray[Any]) -> UserError:
        """The error about a batch with an id that the model does not know."""
        row, column = (int(i) for i in np.argwhere((raw < 0) | (raw >= self._vocab_size))[0])
        sample = int(located.samples[rows[row]]) - self.journal.samples(step).start
        draws = self._sampler.step(step)
        name = self.names[int(draws.source[sample])]
        instances = self._instances[self.journal.segment_number(step)][name]
        spans = instances.at(int(draws.epoch[sample]), int(draws.position[sample]), self._ahead)
        document = spans[bisect_right([*accumulate(span.length for span in spans)], column)].document
        assert self._vocab_size is not None
        return outside_of_vocabulary(name, document, instances, int(raw[row, column]), self._vocab_size)


def _unsigned_limit(dtype: np.dtype[Any], vocab_size: int | None) -> tuple[np.dtype[Any], int | None]:
    """Type in which ids are compared, and their bound; as unsigned numbers, negative ones are above all others."""
    unsigned = np.dtype(dtype.str.replace("i", "u"))
    return unsigned, None if vocab_size is None else min(vocab_size, int(np.iinfo(dtype).max) + 1)


def open_loader(
    config: Config,
    datasets: Mapping[str, Dataset],
    *,
    journal: Journal | None = None,
    dp_rank: int = 0,
    dp_size: int = 1,
    device: torch.device | None = None,
    whole_steps: bool = False,
    references: References | None = None,
) -> Loader:
    """The loader of a run.

    Args:
        config: The run file.
        datasets: The training split of each of its sources.
        journal: The run's plan; by default that of a run that starts now.
        dp_rank: This rank, in [0, dp_size).
        dp_size: Ranks that share each step.
        device: Where the batches will go.
        whole_steps: Each step is one micro-batch, whatever the run file says.
        references: Of sources of pairs that are trained by preference.

    Raises:
        UserError: A source is too short for a window or too small for the blend, sources have different tokenizers, the
            tokenizer lacks what the objective needs, or a micro-batch is too large.
    """
    check_tokenizers(datasets)
    journal = journal or plan_journal(config, datasets)
    tokenizer = next(iter(datasets.values())).manifest.tokenizer
    sizes = [micro_batch_size(config, journal, number, dp_size) for number in range(len(journal.segments))]
    if whole_steps:
        sizes = [-(-segment.batch_size // dp_size) for segment in journal.segments]
    for size, segment in zip(sizes, journal.segments, strict=True):
        if size * segment.sequence_length > _MAX_POSITIONS:
            raise UserError(
                f"a micro-batch of {size:,} windows of {segment.sequence_length:,} tokens has more than "
                f"{_MAX_POSITIONS:,} positions: lower train.micro_batch_size, or that of the phase; the result is the "
                "same"
            )
    remote = {name: dataset for name, dataset in datasets.items() if isinstance(dataset, RemoteDataset)}
    instances, balanced = instances_of(journal, datasets), config.model.document_attention
    ahead = 0 if config.model.mtp is None else config.model.mtp.depth

    def pieces_of(rank: int) -> StepPieces:
        samples = [
            RankSamples(segment.batch_size, micro, rank, dp_size)
            for segment, micro in zip(journal.segments, sizes, strict=True)
        ]
        return StepPieces(journal, Sampler(journal), instances, samples, ahead=ahead, balanced=balanced)

    return Loader(
        journal,
        instances,
        make_objectives(config, journal, datasets),
        dp_rank=dp_rank,
        dp_size=dp_size,
        micro_batch_size=sizes,
        vocab_size=tokenizer.vocab_size,
        prefetch=config.data.loader.prefetch,
        device=device,
        ahead=ahead,
        end_of_document=tokenizer.end_of_document,
        balanced=balanced,
        remote=remote,
        fetched_steps=config.stage.ahead,
        copier=open_copier(config, journal, remote, pieces_of, dp_rank),
        references=references,
    )
