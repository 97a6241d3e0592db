"""Places of the samples of steps and of the documents in them, for many steps at once and without their tokens.

A look-up in NumPy costs little more for a thousand windows than for one, so neighbouring steps are looked up together.
The first group is one step. Each next one is twice as large while that is quick: so a run starts at once, and a file
system that answers slowly is asked for little at a time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.data.datasets.dataset import Pieces
from pipeline.data.order.journal import Journal
from pipeline.data.order.permutation import IntArray
from pipeline.data.order.sampler import Sampler
from pipeline.data.order.windows import Instances, Windows, begins_of, distinct_starts

_WINDOWS = 4096
"""Samples of a group at most, or one step."""
_QUICK_S = 0.05
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
        count: Samples of a step that ends the run, whose other places are padding; by default `batch_size`.
    """

    def __init__(self, batch_size: int, micro_batch_size: int, rank: int, ranks: int, count: int | None = None) -> None:
        self.batch_size = batch_size
        self.count = count = batch_size if count is None else count
        self.micro_batch_size = micro_batch_size
        self.rank, self.ranks = rank, ranks
        padded = -(-batch_size // (micro_batch_size * ranks)) * micro_batch_size * ranks
        firsts = range(rank * micro_batch_size, padded, micro_batch_size * ranks)
        self.micro_batches = [range(min(i, count), min(i + micro_batch_size, count)) for i in firsts]
        """Numbers in the step of the samples of each micro-batch; what is missing is padding."""
        firsts_in_samples = accumulate((len(one) for one in self.micro_batches), initial=0)
        self.rows = [
            range(first, first + len(one)) for first, one in zip(firsts_in_samples, self.micro_batches, strict=False)
        ]
        """Places of these in `samples`."""
        self.samples = np.array([sample for samples in self.micro_batches for sample in samples], np.int64)
        """All of them, ascending."""

    def first(self, count: int) -> RankSamples:
        """Those of a step that has only its first `count` samples, in as many micro-batches."""
        if count == self.count:
            return self
        return RankSamples(self.batch_size, self.micro_batch_size, self.rank, self.ranks, count)


class Located(NamedTuple):
    """A step without its tokens. R rows: the samples of the rank, or all if there may be masks."""

    samples: IntArray
    """[R] global indices, ascending."""
    micro_batches: list[range]
    """The rows of each of the rank's micro-batches."""
    sources: IntArray
    """[R] index in the journal's names."""
    places: IntArray
    """[R], from `Instances.places`."""
    begins: IntArray
    """Tokens of instances, and of those ahead, at which documents begin, or the instances themselves; row after row."""
    splits: IntArray
    """[R + 1]: those of row r are begins[splits[r] : splits[r + 1]]."""
    starts: list[npt.NDArray[np.int32]]
    """`Batch.starts` of each of the rank's micro-batches, but for padding."""
    pieces: list[IntArray]
    """[n, 4] of each of the rank's micro-batches, tokens that lie together in a file: index in the journal's names,
    number of the part, and [first, end) of its tokens. One after the other they are the micro-batch's instances of
    L + 1 tokens each, with those ahead."""
    drawn: list[int]
    """Samples of each source in the global batch."""
    order_hash: int
    """Of the global batch."""

    def begins_of(self, row: int, size: int) -> IntArray:
        """The tokens of an instance, the first `size`, at which a document begins in it; 0 is among them."""
        begins = self.begins[self.splits[row] : self.splits[row + 1]]
        return begins[: int(np.searchsorted(begins, size))]


@dataclass
class _Group:
    """Steps [first, end) that were looked up together, but for skipped ones."""

    first: int
    end: int
    steps: dict[int, int]
    """Numbers k of the steps, in [0, K)."""
    micro_batches: list[range]
    """Rows of each micro-batch in a step."""
    samples: IntArray
    """[K, R], as all that follows as `Located` has it."""
    sources: IntArray
    """[K, R]"""
    places: IntArray
    """[K, R]"""
    begins: IntArray
    splits: IntArray
    """[K * R + 1]: rows of all steps in `begins`."""
    starts: npt.NDArray[np.int32]
    start_splits: list[int]
    """[K * R + 1]: rows of all steps in `starts`."""
    pieces: IntArray
    piece_splits: list[int]
    """[K * R + 1]: rows of all steps in `pieces`."""
    drawn: list[list[int]]
    """[K][names]"""
    order_hashes: list[int]
    """[K]"""

    def step(self, step: int) -> Located:
        """A step of the group that is not skipped."""
        k = self.steps[step]
        samples = self.samples[k]
        row = k * len(samples)
        of_starts, of_pieces = self.start_splits, self.piece_splits
        starts, pieces = [], []
        for rows in self.micro_batches:
            low, high = row + rows.start, row + rows.stop
            starts.append(self.starts[of_starts[low] : of_starts[high]])
            pieces.append(self.pieces[of_pieces[low] : of_pieces[high]])
        return Located(
            samples,
            self.micro_batches,
            self.sources[k],
            self.places[k],
            self.begins,
            self.splits[row : row + len(samples) + 1],
            starts,
            pieces,
            self.drawn[k],
            self.order_hashes[k],
        )


class Lookup:
    """Looks steps up; any step in any order, and fastest in their order.

    Args:
        journal: The run's plan.
        sampler: Of that plan.
        instances: For each segment by source.
        rank_samples: This rank's samples, for each segment.
        everything: Whether other ranks' samples are looked up in all steps; they are where the journal masks some.
        ahead: Tokens behind each instance that are looked up besides.
    """

    def __init__(
        self,
        journal: Journal,
        sampler: Sampler,
        instances: Sequence[Mapping[str, Instances]],
        rank_samples: Sequence[RankSamples],
        *,
        everything: bool,
        ahead: int = 0,
    ) -> None:
        self._journal = journal
        self._sampler = sampler
        self._instances = instances
        self._rank_samples = rank_samples
        self._everything = everything
        self._ahead = ahead
        self._end = sampler.end()
        self._group: _Group | None = None
        self._expected = 0
        self._size = 1

    def step(self, step: int, last: int | None) -> Located | None:
        """Look up a step; None for one that is skipped.

        Args:
            step: Counted from 0.
            last: Nothing is looked up from this step on.

        Raises:
            UserError: The order ends before the step, or a dataset is damaged.
        """
        group = self._group
        if group is not None and step in group.steps:
            return group.step(step)
        if self._journal.is_skipped(step):
            if step == self._expected:
                self._expected += 1
            return None
        self._size = self._size if step == self._expected else 1
        began = time.perf_counter()
        group = self._group = self._look_up(step, last)
        quick = time.perf_counter() - began < _QUICK_S
        self._size = 2 * (group.end - step) if quick else max(1, (group.end - step) // 2)
        self._expected = group.end
        return group.step(step)

    def _look_up(self, first: int, last: int | None) -> _Group:
        journal = self._journal
        number = journal.segment_number(first)
        mine, length = self._rank_samples[number], journal.segments[number].sequence_length
        everything = self._everything or bool(journal.masks(first))
        samples = np.arange(mine.batch_size) if everything else mine.samples
        micro_batches = mine.micro_batches if everything else mine.rows
        rows = len(samples)
        steps, end = self._steps(first, last, number, rows, everything)

        numbers = np.array(steps) - first
        # [K, samples of the global batch] each, and then row after row of all steps.
        drawn = [array.reshape(end - first, -1)[numbers] for array in self._sampler.steps(first, end)]
        source, epoch, position = (array[:, samples].ravel() for array in drawn)
        places, pieces, (row, begin) = self._locate(number, source, epoch, position)

        every = np.arange(len(source) + 1)
        # Each micro-batch begins at a multiple of its size.
        row_of = np.tile(samples % mine.micro_batch_size, len(steps))
        # The last token of an instance is a target only.
        inputs = (begin < length).nonzero()[0]
        input_row = row[inputs]
        names = len(journal.names)
        counts = np.bincount((np.arange(len(steps))[:, None] * names + drawn[0]).ravel(), minlength=len(steps) * names)
        hashes = self._sampler.order_hashes(first, end)
        return _Group(
            first,
            end,
            {step: k for k, step in enumerate(steps)},
            micro_batches,
            samples=journal.samples(first).start + numbers[:, None] * mine.batch_size + samples,
            sources=source.reshape(len(steps), rows),
            places=places.reshape(len(steps), rows),
            begins=begin,
            splits=row.searchsorted(every),
            starts=(row_of[input_row] * length + begin[inputs]).astype(np.int32),
            start_splits=input_row.searchsorted(every).tolist(),
            pieces=np.stack([source[pieces.row], pieces.part, pieces.start, pieces.start + pieces.length], axis=1),
            piece_splits=pieces.row.searchsorted(every).tolist(),
            drawn=counts.reshape(-1, names).tolist(),
            order_hashes=[hashes[k] for k in numbers.tolist()],
        )

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
        steps, end, limit = [first], first + 1, min(ends)
        if not journal.skips:
            end = max(end, limit)
            return list(range(first, end)), end
        while end < limit and (everything or not journal.masks(end)):
            if not journal.is_skipped(end):
                steps.append(end)
            end += 1
        return steps, end

    def _locate(
        self, number: int, source: IntArray, epoch: IntArray, position: IntArray
    ) -> tuple[IntArray, Pieces, tuple[IntArray, IntArray]]:
        """Places of samples, their pieces, and the documents that begin in them.

        Returns:
            Places; pieces, whose rows are samples; and (sample, token) of each document that begins in one, and of each
            sample. Pieces and documents are ascending.
        """
        places = np.empty(len(source), np.int64)
        none = np.empty(0, np.int64)
        found, rows, columns = [Pieces(*[none] * 5)], [none], [none]
        by_source = np.argsort(source, kind="stable")
        names, firsts = np.unique(source[by_source], return_index=True)
        for index, (low, high) in zip(names.tolist(), pairwise([*firsts.tolist(), len(source)]), strict=True):
            chosen = by_source[low:high]
            instances = self._instances[number][self._journal.names[index]]
            assert isinstance(instances, Windows)
            places[chosen] = of_source = instances.places(epoch[chosen], position[chosen])
            pieces = instances.pieces(of_source, self._ahead)
            row, column = begins_of(pieces, *instances.starts_in(pieces))
            rows.append(chosen[row])
            columns.append(column)
            found.append(pieces._replace(row=chosen[pieces.row]))
        size = self._journal.segments[number].sequence_length + 1 + self._ahead
        pieces = Pieces(*(np.concatenate(each) for each in zip(*found, strict=True)))
        order = np.argsort(pieces.row * size + pieces.column)
        begins = distinct_starts(np.concatenate(rows), np.concatenate(columns), len(source), size)
        return places, Pieces(*(each[order] for each in pieces)), begins
