"""Packs of steps and the chunks in them, for some steps at once and without their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from pipeline.data.order.journal import Journal
from pipeline.data.order.packs import PackChunks, PackInstances
from pipeline.data.order.permutation import IntArray
from pipeline.data.order.sampler import End, Sampler
from pipeline.data.order.windows import Instances

_PACKS = 2048
"""Packs of a group of steps at most, or one step."""


class LocatedPacks(NamedTuple):
    """The packs of a step: of the whole global batch, B samples, whatever this rank has of them."""

    samples: range
    """Global indices."""
    sources: IntArray
    """[B] index in the journal's names."""
    chunks: PackChunks
    """Of all packs, one after the other; C of them."""
    offsets: IntArray
    """[C] targets of the pack before each chunk."""
    splits: IntArray
    """[B + 1]: chunks of pack b are chunks[splits[b] : splits[b + 1]]."""
    targets: IntArray
    """[B] targets of each pack."""
    order_hash: int
    """Of the global batch."""

    def chunks_of(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        """Indices of the chunks of some packs, one pack after the other, and for each its place in `rows`."""
        counts = self.splits[rows + 1] - self.splits[rows]
        ends = np.cumsum(counts)
        place = np.repeat(np.arange(len(rows)), counts)
        return np.arange(len(place)) + (self.splits[rows] - (ends - counts))[place], place

    def costs(self) -> IntArray:
        """[B] sum of the squared tokens of each pack's chunks: work of attention within documents."""
        return np.bincount(self.chunks.row, self.chunks.tokens**2, len(self.samples)).astype(np.int64)


class PackLookup:
    """Looks steps of packs up; any step in any order, and fastest in their order.

    Args:
        journal: The run's plan.
        sampler: Of that plan.
        instances: For each segment by source; packs in those that are looked up.
    """

    def __init__(self, journal: Journal, sampler: Sampler, instances: Sequence[Mapping[str, Instances]]) -> None:
        self._journal = journal
        self._sampler = sampler
        self._instances = instances
        self._group = lru_cache(maxsize=2)(self._look_up)

    @cached_property
    def _end(self) -> End | None:
        return self._sampler.end()

    def step(self, step: int) -> LocatedPacks:
        """Look up a step, also one that is skipped.

        Raises:
            UserError: The order ends before the step, or packs are damaged.
        """
        number = self._journal.segment_number(step)
        segment = self._journal.segments[number]
        steps = max(1, _PACKS // segment.batch_size)
        first = step - (step - segment.first_step) % steps
        if self._end is not None:
            if step >= self._end.step:
                first = step
            steps = max(1, min(steps, self._end.step - first))
        if (end_step := self._journal.end_step) is not None:
            steps = max(1, min(steps, end_step - first))
        return self._group(number, first, first + steps)[step - first]

    def targets(self, step: int) -> IntArray:
        """Targets that a step draws from each source of the journal."""
        located = self.step(step)
        return np.bincount(located.sources, located.targets, len(self._journal.names)).astype(np.int64)

    def _look_up(self, number: int, first: int, end: int) -> list[LocatedPacks]:
        """Steps [first, end) of a segment, as far as it goes."""
        journal, names = self._journal, self._journal.names
        size = journal.segments[number].batch_size
        for later in journal.segments[number + 1 : number + 2]:
            end = min(end, later.first_step)
        source, epoch, position = self._sampler.steps(first, end)
        found = []
        for index in np.unique(source).tolist():
            chosen = np.flatnonzero(source == index)
            instances = self._instances[number][names[index]]
            assert isinstance(instances, PackInstances)
            chunks = instances.chunks(instances.places(epoch[chosen], position[chosen]))
            found.append(chunks._replace(row=chosen[chunks.row]))
        joined = PackChunks(*(np.concatenate(each) for each in zip(*found, strict=True)))
        order = np.argsort(joined.row, kind="stable")
        chunks = PackChunks(*(each[order] for each in joined))
        offsets = chunks.offsets(len(source))
        splits = chunks.row.searchsorted(np.arange(len(source) + 1))
        targets = np.bincount(chunks.row, chunks.tokens, len(source)).astype(np.int64)
        hashes = self._sampler.order_hashes(first, end)
        result = []
        for k, order_hash in enumerate(hashes):
            rows = slice(k * size, min((k + 1) * size, len(source)))
            low, high = splits[rows.start], splits[rows.stop]
            mine = PackChunks(*(each[low:high] for each in chunks))
            result.append(
                LocatedPacks(
                    journal.samples(first + k),
                    source[rows],
                    mine._replace(row=mine.row - rows.start),
                    offsets[low:high],
                    splits[rows.start : rows.stop + 1] - low,
                    targets[rows],
                    order_hash,
                )
            )
        return result
