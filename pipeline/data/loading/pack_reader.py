"""Steps of packs for a data-parallel rank: targets, inputs, weights and counts.

A row has the L targets of a pack, padding with weight 0 at its end, and as inputs what precedes each target in its
document; before the first token of a document that is the end-of-document token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from pipeline.data.loading.arranged_packs import outside_of_vocabulary, read_chunks
from pipeline.data.loading.arranged_rows import stack
from pipeline.data.loading.batch import Batch, StepData
from pipeline.data.loading.loss_weights import weighed
from pipeline.data.loading.objectives.base import (
    Arranged,
    BoolArray,
    FloatArray,
    Objective,
    PackObjective,
    PackRow,
    PackSizes,
    sample_key,
)
from pipeline.data.loading.objectives.causal import Causal
from pipeline.data.loading.pack_masks import MaskArray, PackMasks
from pipeline.data.loading.pair_rows import References, StepPairs, second_begins
from pipeline.data.loading.stream_shape import StreamShape
from pipeline.data.order.balance import rank_rows
from pipeline.data.order.journal import Journal
from pipeline.data.order.locate import RankSamples
from pipeline.data.order.locate_packs import LocatedPacks, PackLookup
from pipeline.data.order.packs import PackChunks, PackInstances
from pipeline.data.order.permutation import IntArray
from pipeline.data.order.sampler import Sampler
from pipeline.data.order.segments import Segment
from pipeline.data.order.windows import Instances
from pipeline.data.tokenization.chat_encoding import TRAINED


class _Step:
    """A located step with what the run's skips leave of it."""

    def __init__(
        self,
        number: int,
        located: LocatedPacks,
        ends: BoolArray,
        masked: BoolArray | None,
        weights: npt.NDArray[np.float32] | None,
    ) -> None:
        self.number = number
        self.located = located
        self.ends = ends
        """[C] whether the chunk ends its document; False for all where no objective asks."""
        self.masked = masked
        """[C] whether the chunk is not trained on; None for no chunk."""
        self.weights = weights
        """[C] loss weight of the chunk; None if all are 1."""

    @property
    def chunks_that_count(self) -> int:
        """Chunks of the global batch that are trained on."""
        return len(self.located.chunks.row) if self.masked is None else int(np.count_nonzero(~self.masked))

    def sizes(self, length: int, rows: IntArray) -> PackSizes:
        """Sizes of some packs, by which objectives count targets."""
        chunks, which = self.located.chunks, self.located.chunks_of(rows)[0]
        counts = self.located.splits[rows + 1] - self.located.splits[rows]
        return PackSizes(
            length,
            self.located.targets[rows],
            np.append(0, np.cumsum(counts)),
            chunks.tokens[which],
            chunks.first[which] > 0,
            self.ends[which],
        )


@dataclass(frozen=True)
class _Tokens:
    """Tokens of some packs."""

    flat: npt.NDArray[np.int64]
    """[packs, L] targets, 0 for padding."""
    leads: IntArray
    """[chunks] what precedes each chunk's first token."""
    which: IntArray
    """[chunks] numbers of the chunks in the step."""
    place: IntArray
    """[chunks] pack of each."""

    def inputs(self, offsets: IntArray, targets: IntArray) -> npt.NDArray[np.int64]:
        """[packs, L] what precedes each target.

        Args:
            offsets: [chunks] first target of each in its pack.
            targets: [packs] without padding.
        """
        inputs = np.empty_like(self.flat)
        inputs[:, 1:] = self.flat[:, :-1]
        inputs[self.place, offsets] = self.leads
        short = np.flatnonzero(targets < self.flat.shape[1])
        inputs[short, targets[short]] = 0
        return inputs


class PackReader:
    """Reads steps of packs, of which a rank has some.

    Args:
        journal: The run's plan.
        sampler: Of that plan.
        instances: For each segment by source.
        objectives: The same.
        shapes: Of what objectives make of a pack, for each segment.
        rank_samples: This rank's samples, for each segment, before they are balanced.
        end_of_document: Token id before the first token of a document.
        vocab_size: Token ids must be below; None to take them as they are.
        balanced: Whether samples go to ranks by the work of attention within documents.
        ahead: Depths of multi-token prediction.
        references: Of sources of pairs that are trained by preference; None: there are none.
    """

    def __init__(
        self,
        journal: Journal,
        sampler: Sampler,
        instances: Sequence[Mapping[str, Instances]],
        objectives: Sequence[Mapping[str, Objective]],
        *,
        shapes: Sequence[StreamShape],
        rank_samples: Sequence[RankSamples],
        end_of_document: int,
        vocab_size: int | None,
        balanced: bool,
        ahead: int,
        references: References | None = None,
    ) -> None:
        self._journal = journal
        self._pairs = None if references is None else StepPairs(references, journal.names)
        self._lookup = PackLookup(journal, sampler, instances)
        self._masks = PackMasks(journal, instances)
        self._instances = instances
        self._objectives = objectives
        self._shapes = shapes
        self._rank_samples = rank_samples
        self._end_of_document = end_of_document
        self._vocab_size = vocab_size
        self._balanced = balanced
        self._ahead = ahead

    def targets(self, step: int) -> IntArray:
        """Targets that a step of packs draws from each source of the journal."""
        return self._lookup.targets(step)

    def rows(self, step: int) -> list[IntArray]:
        """Numbers in the step of the samples of each of the rank's micro-batches, ascending."""
        costs = self._lookup.step(step).costs() if self._balanced else None
        mine = self._rank_samples[self._journal.segment_number(step)]
        return rank_rows(mine.first(len(self._journal.samples(step))), costs)

    def read(self, step: int) -> StepData:
        """The data of a step of packs."""
        journal, located = self._journal, self._lookup.step(step)
        drawn = dict(zip(journal.names, self.targets(step).tolist(), strict=True))
        if journal.is_skipped(step):
            return StepData(step, [], 0, drawn, located.order_hash, samples=journal.samples(step), skipped=True)
        number = journal.segment_number(step)
        weights = chunk_weights(journal.segments[number], journal.names, self._instances[number], located)
        here = _Step(number, located, self._ends(number, located), self._masked(step, located), weights)
        micro_batches, data_hash = [], 0
        for rows in self.rows(step):
            batch, hashes = self._batch(here, rows)
            micro_batches.append(batch)
            data_hash += hashes
        data = StepData(
            step,
            micro_batches,
            int(self._counts(here).sum()),
            drawn,
            located.order_hash,
            data_hash % 2**64,
            tuple(map(int, self._ahead_totals(here, None))),
            samples=journal.samples(step),
            pairs=0 if self._pairs is None else here.chunks_that_count,
        )
        if weights is None:
            return data
        return replace(data, total_weight=self._total(here), total_ahead=self._ahead_totals(here, weights))

    def _objective(self, here: _Step, row: int) -> PackObjective:
        name = self._journal.names[int(here.located.sources[row])]
        return cast(PackObjective, self._objectives[here.number][name])

    def _ends(self, number: int, located: LocatedPacks) -> BoolArray:
        """[C] whether chunks end their documents, where an objective asks."""
        ends = np.zeros(len(located.chunks.row), bool)
        for source, name in enumerate(self._journal.names):
            if name in self._objectives[number] and not self._objectives[number][name].shifts:
                mine = np.flatnonzero(located.sources[located.chunks.row] == source)
                instances = self._instances[number][name]
                assert isinstance(instances, PackInstances)
                ends[mine] = instances.end_documents(PackChunks(*(each[mine] for each in located.chunks)))
        return ends

    def _masked(self, step: int, located: LocatedPacks) -> BoolArray | None:
        """[C] whether skips of the run have a chunk; None if there are no skips."""
        skips = self._journal.masks(step)
        if not skips:
            return None
        chunks = located.chunks
        masked = np.zeros(len(chunks.row), bool)
        for skip in skips:
            if skip.samples is not None:
                index = located.samples.start + chunks.row
                masked |= (skip.samples[0] <= index) & (index < skip.samples[1])
                continue
            if skip.source not in self._journal.names:
                continue
            of_source = located.sources[chunks.row] == self._journal.names.index(skip.source)
            if skip.documents:
                ranges = np.array(sorted(skip.documents), np.int64)
                # Ranges may overlap, but their ends as far as they are reached only grow.
                ends = np.maximum.accumulate(ranges[:, 1])
                before = ranges[:, 0].searchsorted(chunks.document, side="right") - 1
                of_source &= (before >= 0) & (chunks.document < ends[before])
            masked |= of_source
        return masked

    def counts(self, step: int) -> IntArray:
        """Targets that count in each sample of a step that is not skipped."""
        number, located = self._journal.segment_number(step), self._lookup.step(step)
        return self._counts(_Step(number, located, self._ends(number, located), self._masked(step, located), None))

    def _counts(self, here: _Step) -> IntArray:
        """Targets that count in each pack of the global batch."""
        located, length = here.located, self._journal.segments[here.number].sequence_length
        counts = np.zeros(len(located.sources), np.int64)
        by_objective: dict[int, list[int]] = {}
        for source in np.unique(located.sources).tolist():
            by_objective.setdefault(id(self._objectives[here.number][self._journal.names[source]]), []).append(source)
        for sources in by_objective.values():
            rows = np.flatnonzero(np.isin(located.sources, sources))
            key_of = partial(self._key_at, located.samples.start + rows)
            counts[rows] = self._objective(here, int(rows[0])).valid_packs(here.sizes(length, rows), key_of)
        if here.masked is not None:
            for row in np.unique(located.chunks.row[here.masked]).tolist():
                counts[row] = np.count_nonzero(self._without(here, row, self._arranged_row(here, row).weight))
        if self._masks.has(here.number):
            trained, mine = self._trained(here)
            rows = np.unique(located.chunks.row[mine])
            counts[rows] = np.bincount(located.chunks.row, trained, len(counts))[rows]
        return counts

    def _trained(self, here: _Step) -> tuple[IntArray, BoolArray]:
        """[C] targets of chunks that are trained on, none of those that skips have; and whether masks say so."""
        trained = self._masks.trained(here.number, here.located)
        if here.masked is not None:
            trained[here.masked] = 0
        return trained, self._masks.chunks(here.number, here.located)

    def _key(self, index: int) -> int:
        return sample_key(self._journal.seed, index)

    def _key_at(self, samples: IntArray, row: int) -> int:
        return self._key(int(samples[row]))

    def _total(self, here: _Step) -> float:
        """Sum of the loss weights of the targets of the global batch that count."""
        total, rows = 0.0, np.arange(len(here.located.samples))
        if self._masks.has(here.number):
            assert here.weights is not None
            trained, mine = self._trained(here)
            total = float(trained[mine] @ here.weights[mine].astype(np.float64))
            rows = np.setdiff1d(rows, here.located.chunks.row[mine])
        for row in rows.tolist():
            counts = self._without(here, row, self._arranged_row(here, row).weight)
            total += float((counts * self._row_weights(here, row, len(counts))).sum(dtype=np.float64))
        return total

    def _row_weights(self, here: _Step, row: int, length: int) -> npt.NDArray[np.float32]:
        """Loss weights [L] of the targets of a pack; 1 for padding."""
        assert here.weights is not None
        mine = slice(*here.located.splits[row : row + 2].tolist())
        result = np.ones(length, np.float32)
        of_targets = np.repeat(here.weights[mine], here.located.chunks.tokens[mine])
        result[: len(of_targets)] = of_targets
        return result

    def _ahead_totals(self, here: _Step, weights: npt.NDArray[np.float32] | None) -> tuple[float, ...]:
        """By depth, targets of the global batch that count, or their loss weights: of a chunk of n tokens n - d."""
        counts = self._masks.trained_ahead(here.number, here.located, self._ahead)
        of_chunks = np.ones(counts.shape[1]) if weights is None else weights.astype(np.float64)
        if here.masked is not None:
            counts, of_chunks = counts[:, ~here.masked], of_chunks[~here.masked]
        return tuple(float(each @ of_chunks) for each in counts)

    def _tokens(self, here: _Step, rows: IntArray) -> _Tokens:
        """Token ids of packs of the step."""
        located, length = here.located, self._journal.segments[here.number].sequence_length
        which, place = located.chunks_of(rows)
        sources = located.sources[rows][place]
        by_name = self._instances[here.number]
        dtype = np.result_type(*(instances.dtype for instances in by_name.values()))
        flat = np.zeros(len(rows) * length, dtype)
        leads = np.empty(len(which), np.int64)
        firsts = place * length + located.offsets[which]
        for source in np.unique(sources).tolist():
            mine = np.flatnonzero(sources == source)
            chunks = PackChunks(*(each[which[mine]] for each in located.chunks))
            instances = by_name[self._journal.names[source]]
            leads[mine] = read_chunks(instances, chunks, firsts[mine], flat, self._end_of_document)
        tokens = _Tokens(flat.reshape(len(rows), length).astype(np.int64), leads, which, place)
        self._check_vocabulary(here, rows, tokens)
        return tokens

    def _check_vocabulary(self, here: _Step, rows: IntArray, tokens: _Tokens) -> None:
        """Refuse token ids that the model does not know."""
        bound = self._vocab_size
        if bound is None or not len(rows):
            return
        flat = tokens.flat.ravel()
        # As unsigned numbers, negative ones are above all others.
        if int(flat.view(np.uint64).max()) < bound:
            return
        located = here.located
        at = int(np.flatnonzero((flat < 0) | (flat >= bound))[0])
        firsts = tokens.place * tokens.flat.shape[1] + located.offsets[tokens.which]
        chunk = int(tokens.which[firsts.searchsorted(at, side="right") - 1])
        name = self._journal.names[int(located.sources[located.chunks.row[chunk]])]
        raise outside_of_vocabulary(
            name, int(located.chunks.document[chunk]), self._instances[here.number][name], int(flat[at]), bound
        )

    def _row(self, here: _Step, row: int, ids: IntArray | None, leads: IntArray | None) -> PackRow:
        """A pack for its objective."""
        located, length = here.located, self._journal.segments[here.number].sequence_length
        mine = slice(*located.splits[row : row + 2].tolist())
        begins = located.offsets[mine]
        return PackRow(
            np.zeros(length, np.int64) if ids is None else ids,
            begins,
            np.zeros(len(begins), np.int64) if leads is None else leads,
            located.chunks.first[mine] > 0,
            here.ends[mine],
            int(located.targets[row]),
        )

    def _arranged_row(self, here: _Step, row: int) -> Arranged:
        """A pack of the step whose weights are right; its tokens are read where weights depend on them."""
        objective = self._objective(here, row)
        tokens = self._tokens(here, np.array([row])) if objective.reads else None
        ids, leads = (None, None) if tokens is None else (tokens.flat[0], tokens.leads)
        return objective.arrange_pack(self._row(here, row, ids, leads), self._key(here.located.samples[row]))

    def _without(self, here: _Step, row: int, weight: FloatArray) -> FloatArray:
        """Weights [L] of a pack without the chunks that skips have; a target always stands at its place."""
        if here.masked is None:
            return weight
        mine = slice(*here.located.splits[row : row + 2].tolist())
        weight = weight.copy()
        for first, count, masked in zip(
            here.located.offsets[mine].tolist(),
            here.located.chunks.tokens[mine].tolist(),
            here.masked[mine].tolist(),
            strict=True,
        ):
            if masked:
                weight[first : first + count] = 0
        return weight

    def _batch(self, here: _Step, rows: IntArray) -> tuple[Batch, int]:
        """A micro-batch, and the sum of its samples' hashes."""
        located, mine = here.located, self._rank_samples[here.number]
        size, length = mine.micro_batch_size, self._journal.segments[here.number].sequence_length
        count = len(rows)
        tokens = self._tokens(here, rows)
        offsets, targets = located.offsets[tokens.which], located.targets[rows]
        inputs = tokens.inputs(offsets, targets)
        index = located.samples.start + rows
        hashed = np.concatenate([index[:, None], inputs, tokens.flat], axis=1)
        data_hash = sum(map(xxhash.xxh3_64_intdigest, hashed))
        raw = self._masks.rows(here.number, located, rows, length) if self._masks.has(here.number) else None
        mask = None if raw is None else (raw == TRAINED).astype(np.uint8)
        fields: dict[str, Any]
        if any(objective.arranges for objective in self._objectives[here.number].values()):
            arranged = []
            splits = np.append(0, np.cumsum(located.splits[rows + 1] - located.splits[rows])).tolist()
            for place, row in enumerate(rows.tolist()):
                leads = tokens.leads[splits[place] : splits[place + 1]]
                pack = self._row(here, row, tokens.flat[place], leads)
                one = self._objective(here, row).arrange_pack(pack, self._key(located.samples[row]))
                weight = self._without(here, row, one.weight)
                if mask is not None and isinstance(self._objective(here, row), Causal):
                    weight = weight * mask[place]
                    later = self._masks.begins(here.number, located, tokens.which)
                    later = offsets[later[tokens.place[later] == place]] + 1
                    one = one._replace(begins=np.union1d(one.begins, later))
                arranged.append(one._replace(weight=weight))
            fields = stack(arranged, size, self._shapes[here.number])
        else:
            weights = np.zeros((size, length), np.float32)
            for place, row in enumerate(rows.tolist()):
                objective = self._objective(here, row)
                assert isinstance(objective, Causal), "others arrange"
                weights[place] = self._without(here, row, objective.pack_weight(self._row(here, row, None, None)))
            if mask is not None:
                weights[:count] *= mask
            short = np.flatnonzero(targets < length)
            begins = [tokens.place * length + offsets, short * length + targets[short], np.arange(count, size) * length]
            later = self._masks.begins(here.number, located, tokens.which)
            begins.append(tokens.place[later] * length + offsets[later] + 1)
            begins += [] if raw is None else [second_begins(raw.ravel())]
            fields = {
                "tokens": torch.from_numpy(_filled(inputs, size)),
                "targets": torch.from_numpy(_filled(tokens.flat, size)),
                "weight": torch.from_numpy(weights),
                "starts": torch.from_numpy(np.sort(np.concatenate(begins)).astype(np.int32)),
            }
        if self._pairs is not None and raw is not None:
            pairs = self._pairs.of(located, tokens.which, tokens.place, here.masked, raw)
            whole = _filled(pairs.conversation.reshape(count, length), size, 2 * len(pairs.reference))
            fields |= {"conversation": torch.from_numpy(whole), "reference": torch.from_numpy(pairs.reference)}
        batch = Batch(
            sources=torch.from_numpy(_filled(located.sources[rows], size, -1)),
            extras={},
            samples=torch.from_numpy(_filled(index, size, -1)),
            real=count,
            **self._ahead_fields(here, rows, tokens, size, mask),
            **fields,
        )
        if here.weights is not None:
            positions = np.ones((count, batch.weight.shape[1]), np.float32)
            for place, row in enumerate(rows.tolist()):
                positions[place] = self._row_weights(here, row, batch.weight.shape[1])
            # Targets ahead that count are of the same chunk.
            ahead = np.repeat(positions[:, None, :], self._ahead, axis=1) if self._ahead else None
            batch = weighed(batch, positions, ahead)
        return batch, data_hash

    def _ahead_fields(
        self, here: _Step, rows: IntArray, tokens: _Tokens, size: int, mask: MaskArray | None
    ) -> dict[str, Any]:
        """Targets of multi-token prediction and their weights, [size, depths, L] each: those within a chunk count."""
        if not self._ahead:
            return {}
        count, length = tokens.flat.shape
        targets, weight = (
            np.zeros((size, self._ahead, length), np.int64),
            np.zeros((size, self._ahead, length), np.float32),
        )
        left = np.zeros(count * length, np.int64)  # by target, tokens of its chunk from it on
        sizes = here.located.chunks.tokens[tokens.which]
        firsts = tokens.place * length + here.located.offsets[tokens.which]
        kept = np.ones(len(sizes), bool) if here.masked is None else ~here.masked[tokens.which]
        for first, chunk in zip(firsts[kept].tolist(), sizes[kept].tolist(), strict=True):
            left[first : first + chunk] = np.arange(chunk, 0, -1)
        left[firsts[self._masks.chunks(here.number, here.located)[tokens.which]]] = 0
        for depth in range(1, self._ahead + 1):
            targets[:count, depth - 1, : max(length - depth, 0)] = tokens.flat[:, depth:]
            weight[:count, depth - 1] = left.reshape(count, length) > depth
            if mask is not None:
                weight[:count, depth - 1, : max(length - depth, 0)] *= mask[:, depth:]
        return {"ahead_targets": torch.from_numpy(targets), "ahead_weight": torch.from_numpy(weight)}


def chunk_weights(
    segment: Segment, names: Sequence[str], instances: Mapping[str, Instances], located: LocatedPacks
) -> npt.NDArray[np.float32] | None:
    """Loss weights [C] of the chunks of a step; None if all are 1."""
    if not segment.weighs:
        return None
    chunks, sources = located.chunks, located.sources[located.chunks.row]
    weights = np.ones(len(sources), np.float32)
    for source, name in enumerate(names):
        mine = np.flatnonzero(sources == source)
        if not mine.size:
            continue
        state, packs = segment.sources[name], instances[name]
        assert isinstance(packs, PackInstances)
        weights[mine] = np.float32(state.loss_weight)
        if state.document_weights:
            weights[mine] *= packs.weights(PackChunks(*(each[mine] for each in chunks)))
    return weights


def _filled(rows: npt.NDArray[np.int64], size: int, value: int = 0) -> npt.NDArray[np.int64]:
    """Rows, and behind them `size` in all of one value."""
    if len(rows) == size:
        return rows
    return np.concatenate([rows, np.full((size - len(rows), *rows.shape[1:]), value, np.int64)])
