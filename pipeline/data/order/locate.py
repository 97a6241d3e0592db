"""Places of the samples of steps and of the documents in them, for many steps at once and without their tokens.

A look-up in NumPy costs little more for a thousand windows than for one, so neighbouring steps are looked up together.
The first group is one step. Each next one is twice as large while that is quick: so a run starts at once, and a file
system that answers slowly is asked for little at a time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.data.order.journal import Journal
from pipeline.data.order.permutation import IntArray
from pipeline.data.order.sampler import Sampler
from pipeline.data.order.windows import Instances

_WINDOWS = 1024
"""Samples of a group at most, or one step."""
_QUICK_S = 0.02
"""A group that takes longer is followed by a smaller one."""


class RankSamples:
    """A rank's samples of every step of a segment.

    The samples of a step, padded with masked ones to a multiple of ranks x micro-batch size, are cut in their order
    into micro-batches of ranks x micro-batch size, and each of those into contiguous pieces, one for each rank.

    Args:
        batch_size: Samples of a step, over all ranks.
        micro_batch_size: Samples of a micro-batch on one rank.
        rank: In [0, ranks).
        ranks: That share each step.
    """

    def __init__(self, batch_size: int, micro_batch_size: int, rank: int, ranks: int) -> None:
        self.batch_size = batch_size
        self.micro_batch_size = micro_batch_size
        padded = -(-batch_size // (micro_batch_size * ranks)) * micro_batch_size * ranks
        firsts = range(rank * micro_batch_size, padded, micro_batch_size * ranks)
        self.micro_batches = [range(min(i, batch_size), min(i + micro_batch_size, batch_size)) for i in firsts]
        """Numbers in the step of the samples of each micro-batch; what is missing is padding."""
        firsts_in_samples = accumulate((len(one) for one in self.micro_batches), initial=0)
        self.rows = [
            range(first, first + len(one)) for first, one in zip(firsts_in_samples, self.micro_batches, strict=False)
        ]
        """Places of these in `samples`."""
        self.samples = np.array([sample for samples in self.micro_batches for sample in samples], np.int64)
        """All of them, ascending."""


class Located(NamedTuple):
    """A step without its tokens. R rows: the samples of the rank, or all if there may be masks."""

    samples: IntArray
    """[R] numbers in the step, ascending."""
    micro_batches: list[range]
    """The rows of each of the rank's micro-batches."""
    sources: IntArray
    """[R] index in the journal's names."""
    places: list[int]
    """[R], from `Instances.places`."""
    begins: IntArray
    """Tokens of instances at which documents begin, or the instances themselves; row after row."""
    splits: list[int]
    """[R + 1]: those of row r are begins[splits[r] : splits[r + 1]]."""
    starts: list[npt.NDArray[np.int32]]
    """`Batch.starts` of each of the rank's micro-batches, but for padding."""
    drawn: list[int]
    """Samples of each source in the global batch."""

    def begins_of(self, row: int) -> IntArray:
        """The tokens of an instance at which a document begins in it, the first one included."""
        return self.begins[self.splits[row] : self.splits[row + 1]]


class _Group(NamedTuple):
    """Steps [first, end) that were looked up together, but for skipped ones."""

    first: int
    end: int
    steps: dict[int, Located]


class Lookup:
    """Looks steps up; any step in any order, and fastest in their order.

    Args:
        journal: The run's plan.
        sampler: Of that plan.
        instances: For each segment by source.
        rank_samples: This rank's samples, for each segment.
        everything: Whether other ranks' samples are looked up in all steps; they are where the journal masks some.
    """

    def __init__(
        self,
        journal: Journal,
        sampler: Sampler,
        instances: Sequence[Mapping[str, Instances]],
        rank_samples: Sequence[RankSamples],
        *,
        everything: bool,
    ) -> None:
        self._journal = journal
        self._sampler = sampler
        self._instances = instances
        self._rank_samples = rank_samples
        self._everything = everything
        self._end = sampler.end()
        self._group = _Group(0, 0, {})
        self._expected = 0
        self._size = 1

    def step(self, step: int, last: int | None) -> Located:
        """Look up a step that is not skipped.

        Args:
            step: Counted from 0.
            last: Nothing is looked up from this step on.

        Raises:
            UserError: The order ends before the step, or a dataset is damaged.
        """
        group = self._group
        if not group.first <= step < group.end:
            self._size = self._size if step == self._expected else 1
            began = time.perf_counter()
            group = self._group = self._look_up(step, last)
            quick = time.perf_counter() - began < _QUICK_S
            self._size = 2 * (group.end - step) if quick else max(1, (group.end - step) // 2)
            self._expected = group.end
        return group.steps[step]

    def pass_over(self, step: int) -> None:
        """A skipped step: the next one is the one behind it."""
        if step == self._expected:
            self._expected += 1

    def _look_up(self, first: int, last: int | None) -> _Group:
        journal = self._journal
        number = journal.segment_number(first)
        mine, length = self._rank_samples[number], journal.segments[number].sequence_length
        everything = self._everything or bool(journal.masks(first))
        samples = np.arange(mine.batch_size) if everything else mine.samples
        micro_batches = mine.micro_batches if everything else mine.rows
        rows = len(samples)
        steps, end = self._steps(first, last, number, rows, everything)

        draws = [self._sampler.step(step) for step in steps]
        source = np.concatenate([draw.source[samples] for draw in draws])
        epoch = np.concatenate([draw.epoch[samples] for draw in draws])
        position = np.concatenate([draw.position[samples] for draw in draws])
        places, row, begin = self._locate(number, source, epoch, position)

        every = np.arange(len(source) + 1)
        splits = np.searchsorted(row, every).tolist()
        # The last token of an instance is a target only. Each micro-batch begins at a multiple of its size.
        inputs = begin < length
        column_of = np.tile(samples % mine.micro_batch_size * length, len(steps))
        starts = (column_of[row[inputs]] + begin[inputs]).astype(np.int32)
        start_splits = np.searchsorted(row[inputs], every).tolist()
        place_list = places.tolist()
        found = {}
        for k, (step, draw) in enumerate(zip(steps, draws, strict=True)):
            i = k * rows
            found[step] = Located(
                samples,
                micro_batches,
                source[i : i + rows],
                place_list[i : i + rows],
                begin,
                splits[i : i + rows + 1],
                [starts[start_splits[i + each.start] : start_splits[i + each.stop]] for each in micro_batches],
                np.bincount(draw.source, minlength=len(journal.names)).tolist(),
            )
        return _Group(first, end, found)

    def _steps(self, first: int, last: int | None, number: int, rows: int, everything: bool) -> tuple[list[int], int]:
        """The steps that are not skipped in the next group, and where it ends.

        A group stays within its segment and within what is asked for, and needs all samples or the rank's throughout.
        """
        journal, segments = self._journal, self._journal.segments
        ends = [first + max(1, min(self._size, _WINDOWS // max(1, rows)))]
        if number + 1 < len(segments):
            ends.append(segments[number + 1].first_step)
        if last is not None:
            ends.append(last)
        if self._end is not None:
            ends.append(self._end.step)
        steps, end = [first], first + 1
        while end < min(ends) and (everything or not journal.masks(end)):
            if not journal.is_skipped(end):
                steps.append(end)
            end += 1
        return steps, end

    def _locate(
        self, number: int, source: IntArray, epoch: IntArray, position: IntArray
    ) -> tuple[IntArray, IntArray, IntArray]:
        """Places of samples; and, ascending, (sample, token) of each document that begins in one, and each sample."""
        places = np.empty(len(source), np.int64)
        rows, tokens = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for index in np.unique(source).tolist():
            chosen = np.flatnonzero(source == index)
            instances = self._instances[number][self._journal.names[index]]
            places[chosen] = instances.places(epoch[chosen], position[chosen])
            row, token = instances.starts(places[chosen])
            rows.append(chosen[row])
            tokens.append(token)
        row = np.concatenate(rows)
        order = np.argsort(row, kind="stable")
        return places, row[order], np.concatenate(tokens)[order]
