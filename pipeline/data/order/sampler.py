"""The order of the run: global sample index -> (source, epoch, position), and back. A pure function of the journal."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from pipeline.common.errors import UserError
from pipeline.data.order.journal import Journal
from pipeline.data.order.permutation import IntArray

_BLOCK = 1024
"""Least number of positions looked up at once, and that for each 64 sources."""
_RECORD = 4
"""Numbers of a sample that `Sampler.order_hash` hashes."""


class Draws(NamedTuple):
    """Contents of samples; three arrays of one length."""

    source: IntArray
    """Index into `Journal.names`."""
    epoch: IntArray
    """Epoch of the source."""
    position: IntArray
    """Position in the epoch."""


class End(NamedTuple):
    """The end of an order."""

    step: int
    """The first step that cannot be made, counted from 0."""
    sample: int
    """Global index of the sample that is missing first."""
    tokens: int
    """Slots drawn by all steps before `step`."""
    kind: Literal["stop", "exhausted"]
    """A source with `on_exhausted: stop` would have to give more than it may, or no source has anything left."""
    reason: str
    """For messages: who has given everything."""


class _Block(NamedTuple):
    """Neighbouring steps of one segment."""

    draws: Draws
    records: npt.NDArray[np.uint64]
    """[samples, 4], what `order_hash` hashes."""


class Sampler:
    """The order of the run. Safe to use from several threads.

    Args:
        journal: The plan.
        counts: Instances in an epoch, for each segment by source name; by default the journal's.
    """

    def __init__(self, journal: Journal, counts: Sequence[Mapping[str, int]] | None = None) -> None:
        self.journal = journal
        self._counts = [segment.epoch_samples for segment in journal.segments] if counts is None else counts
        assert len(self._counts) == len(journal.segments)
        self._orders = [segment.order() for segment in journal.segments]
        self._first_samples = [segment.first_sample for segment in journal.segments]
        self._name_hashes = np.array([xxhash.xxh3_64_intdigest(name.encode()) for name in journal.names], np.uint64)
        # Steps are smaller than what a look-up costs least for, so blocks of whole steps are kept.
        self._steps_in_block = [
            -(-_BLOCK * (1 + len(segment.sources) // 64) // segment.batch_size) for segment in journal.segments
        ]
        self._block = lru_cache(maxsize=8)(self._block_at)

    def step(self, step: int) -> Draws:
        """The samples of a step, as views of arrays that nobody may change.

        Raises:
            UserError: All sources are exhausted before its last sample.
        """
        return self.steps(step, step + 1)

    def steps(self, first: int, end: int) -> Draws:
        """The samples of steps [first, end) of one segment, at least one step, one after the other, as `step`.

        Raises:
            UserError: All sources are exhausted before the last of them.
        """
        found = [Draws(*(array[rows] for array in block.draws)) for block, rows in self._blocks(first, end)]
        return found[0] if len(found) == 1 else Draws(*(np.concatenate(each) for each in zip(*found, strict=True)))

    def order_hash(self, step: int) -> int:
        """A hash of which samples the step is made of.

        Returns:
            xxh3-64 over the samples in their order: global index, xxh3-64 of the source's name, epoch, position, each a
            little-endian u64.

        Raises:
            UserError: All sources are exhausted before its last sample.
        """
        return self.order_hashes(step, step + 1)[0]

    def order_hashes(self, first: int, end: int) -> list[int]:
        """`order_hash` of steps [first, end) of one segment."""
        hashes: list[int] = []
        size = self.journal.segments[self.journal.segment_number(first)].batch_size
        for block, rows in self._blocks(first, end):
            records = block.records[rows]
            hashes += [xxhash.xxh3_64_intdigest(records[i : i + size].data) for i in range(0, len(records), size)]
        return hashes

    def slots(self, step: int) -> dict[str, int]:
        """Slots drawn from each source by all steps before `step`, in closed form: L per sample."""
        if step == 0:
            return dict.fromkeys(self.journal.names, 0)
        number = self.journal.segment_number(step - 1)
        segment, order = self.journal.segments[number], self._orders[number]
        total = dict(self._slots_before[number])
        samples = self.journal.samples_of(segment, step)
        self._check(number, step - 1, samples)
        for name, count in zip(order.names, order.counts(samples), strict=True):
            total[name] += count * segment.sequence_length
        return total

    def find(self, source: str, segment: int, epoch: int, positions: IntArray) -> IntArray:
        """Samples of the run that instances are: the inverse of `step`.

        Args:
            source: Name of a source.
            segment: Index in `Journal.segments`.
            epoch: Epoch of the source.
            positions [n]: Positions in that epoch.

        Returns:
            [n]: global sample indices; -1 for instances that are not drawn in that segment. The last segment of a
            journal has no end but that of whole epochs; `end` says whether the run has another.
        """
        result = np.full(len(positions), -1, np.int64)
        state = self.journal.segments[segment].sources.get(source)
        if state is None:
            return result
        draws = (epoch - state.lap) * self._counts[segment][source] + positions - state.cursor
        drawn = np.flatnonzero(draws >= 0)
        order, first = self._orders[segment], self._first_samples[segment]
        places = order.position_of(order.names.index(source), draws[drawn])
        length = self._length(segment)
        there = (places >= 0) & (places < length) if length is not None else places >= 0
        result[drawn[there]] = first + places[there]
        return result

    def end(self) -> End | None:
        """End of the order; None if it has none."""
        for number, (segment, order) in enumerate(zip(self.journal.segments, self._orders, strict=True)):
            ends: list[tuple[int, Literal["stop", "exhausted"], str]] = []
            for index, (name, source) in enumerate(segment.sources.items()):
                if source.stops and source.cap is not None:
                    place = int(order.position_of(index, np.array([source.cap]))[0])
                    reason = f"source {name!r} has reached its max_epochs (on_exhausted: stop)"
                    ends += [(place, "stop", reason)] if place >= 0 else []
            if order.capacity is not None:
                names = ", ".join(segment.sources)
                ends.append((order.capacity, "exhausted", f"all sources have reached their max_epochs ({names})"))
            length = self._length(number)
            place, kind, reason = min(ends, default=(-1, "stop", ""))
            if place >= 0 and (length is None or place < length):
                sample = segment.first_sample + place
                step = self.journal.step_of(sample)
                return End(step, sample, self.journal.tokens(step), kind, reason)
        return None

    def _length(self, number: int) -> int | None:
        """Samples of a segment; None for the last one of a run without an end."""
        ends = [*self._first_samples[number + 1 : number + 2], self.journal.end_sample]
        return None if ends[0] is None else ends[0] - self._first_samples[number]

    def _blocks(self, step: int, end: int) -> Iterator[tuple[_Block, slice]]:
        """The blocks that steps [step, end) of one segment are in, and their rows."""
        number = self.journal.segment_number(step)
        segment = self.journal.segments[number]
        steps = self._steps_in_block[number]
        while step < end:
            block, place = divmod(step - segment.first_step, steps)
            found = self._block(number, block)
            last = min(place + end - step, steps)
            rows = slice(place * segment.batch_size, last * segment.batch_size)
            step += last - place
            if rows.stop > len(found.records):
                self._check(number, step - 1, (block * steps + last) * segment.batch_size)
            yield found, rows

    def _check(self, number: int, step: int, samples: int) -> None:
        capacity = self._orders[number].capacity
        if capacity is not None and samples > capacity:
            raise UserError(
                f"all sources are exhausted at sample {self._first_samples[number] + capacity:,} of the run, so step "
                f"{step + 1:,} (after {self.journal.tokens(step):,} tokens) cannot be made: shorten train.duration, "
                "add sources, or raise max_epochs"
            )

    def _block_at(self, number: int, block: int) -> _Block:
        segment, order, counts = self.journal.segments[number], self._orders[number], self._counts[number]
        size = self._steps_in_block[number] * segment.batch_size
        start = block * size
        limits = [limit for limit in (self._length(number), order.capacity) if limit is not None]
        index, draw = order.at(start, max(0, min([size, *(limit - start for limit in limits)])))
        states = list(segment.sources.values())
        place = np.array([state.cursor for state in states])[index] + draw
        in_epoch = np.array([counts[name] for name in order.names])[index]
        epoch = np.array([state.lap for state in states])[index] + place // in_epoch
        position = place % in_epoch
        source = np.array([bisect_right(self.journal.names, name) - 1 for name in order.names])[index]
        records = np.empty((len(index), _RECORD), "<u8")
        records[:, 0] = np.arange(segment.first_sample + start, segment.first_sample + start + len(index))
        records[:, 1] = self._name_hashes[source]
        records[:, 2] = epoch
        records[:, 3] = position
        return _Block(Draws(source, epoch, position), records)

    @cached_property
    def _slots_before(self) -> list[dict[str, int]]:
        """Slots drawn from each source before each segment."""
        result = [dict.fromkeys(self.journal.names, 0)]
        for number, segment in enumerate(self.journal.segments[:-1]):
            order, total = self._orders[number], dict(result[-1])
            length = self._length(number)
            assert length is not None
            for name, count in zip(order.names, order.counts(length), strict=True):
                total[name] += count * segment.sequence_length
            result.append(total)
        return result
