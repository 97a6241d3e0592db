"""Weights of the targets of a step under its objectives and the run's skips, and how many targets count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pipeline.data.loading.objectives.base import Arranged, FloatArray, Objective, sample_key
from pipeline.data.order.journal import Journal
from pipeline.data.order.locate import Located
from pipeline.data.order.permutation import IntArray
from pipeline.data.order.segments import Skip
from pipeline.data.order.windows import Instances, Windows, begins_of, distinct_starts

Ranges = list[tuple[int, int]]
"""[first, end) each."""


class Masks:
    """Weights and counts of a step's targets, without reading tokens wherever the objective allows it.

    Args:
        journal: The run's plan.
        instances: For each segment by source.
        objectives: The same: what may mask targets.
    """

    def __init__(
        self,
        journal: Journal,
        instances: Sequence[Mapping[str, Instances]],
        objectives: Sequence[Mapping[str, Objective]],
    ) -> None:
        self._journal = journal
        self._instances = instances
        # By segment and index in the journal's names.
        self._objectives = [[by_name.get(name) for name in journal.names] for by_name in objectives]
        self._ranges: dict[tuple[int, int], IntArray] = {}  # by segment and identity of the skip, which may be long

    def masked(self, step: int, located: Located, ahead: int) -> list[Ranges] | None:
        """For each row of `located` the tokens [first, end) of the window that skips mask; None if there are no skips.

        A window has L + 1 tokens, and `ahead` behind them. Target t of causal prediction is token t + 1.

        Args:
            step: Of the run.
            located: The same.
            ahead: Tokens behind an instance that are targets besides.
        """
        skips = self._journal.masks(step)
        if not skips:
            return None
        number = self._journal.segment_number(step)
        rows = zip(located.samples.tolist(), located.sources.tolist(), located.places.tolist(), strict=True)
        return [
            [
                masked
                for skip in skips
                for masked in self._masked_tokens(skip, number, index, self._journal.names[source], place, ahead)
            ]
            for index, source, place in rows
        ]

    def valid(self, step: int, located: Located, masked: list[Ranges] | None) -> IntArray:
        """Targets of the global batch that count, by source [names].

        Args:
            step: Of the run.
            located: The same.
            masked: From `masked`.
        """
        number = self._journal.segment_number(step)
        length = self._journal.segments[number].sequence_length
        counts, counted = np.zeros(len(located.drawn), np.int64), []
        for source, samples in enumerate(located.drawn):
            if samples:
                fixed = self._of_source(number, source).fixed_valid(length)
                counts[source] += 0 if fixed is None else fixed * samples
                counted += [source] if fixed is None else []
        if counted:
            self._count(number, located, counted, length, counts)
        for row, ranges in enumerate(masked or ()):
            if ranges:
                arranged = self.arranged(number, located, row)
                lost = int(np.count_nonzero(arranged.weight)) - int(np.count_nonzero(without(arranged, ranges)))
                counts[located.sources[row]] -= lost
        return counts

    def _count(self, number: int, located: Located, sources: list[int], length: int, counts: IntArray) -> None:
        """Add the targets that count in the rows of some sources, of which objectives have to count them."""
        objectives = {id(each): each for each in (self._of_source(number, source) for source in sources)}
        if len(objectives) == 1 and set(located.sources.tolist()) <= set(sources):
            (objective,) = objectives.values()
            found = objective.valid(located.begins, located.splits, length, lambda row: self.key(located, row))
            np.add.at(counts, located.sources, found)
            return
        for objective in objectives.values():
            mine = [source for source in sources if self._of_source(number, source) is objective]
            rows = np.flatnonzero(np.isin(located.sources, mine))
            np.add.at(counts, located.sources[rows], self._counts(objective, located, rows, length))

    def _counts(self, objective: Objective, located: Located, rows: IntArray, length: int) -> IntArray:
        """Targets that count in some rows, all of this objective."""
        begins = [located.begins_of(row, length + 1) for row in rows.tolist()]
        splits = np.cumsum([0, *map(len, begins)])
        keys = [self.key(located, row) for row in rows.tolist()]
        return objective.valid(np.concatenate(begins), splits, length, keys.__getitem__)

    def valid_by_row(self, step: int, located: Located, masked: list[Ranges] | None) -> IntArray:
        """Targets that count in each row of `located`; for the arguments see `valid`."""
        number = self._journal.segment_number(step)
        length = self._journal.segments[number].sequence_length
        counts = np.empty(len(located.sources), np.int64)
        for source in set(located.sources.tolist()):
            rows, objective = (located.sources == source).nonzero()[0], self._of_source(number, source)
            fixed = objective.fixed_valid(length)
            counts[rows] = self._counts(objective, located, rows, length) if fixed is None else fixed
        for row, ranges in enumerate(masked or ()):
            if ranges:
                counts[row] = np.count_nonzero(without(self.arranged(number, located, row), ranges))
        return counts

    def key(self, located: Located, row: int) -> int:
        """The `sample_key` of a row."""
        return sample_key(self._journal.seed, int(located.samples[row]))

    def objective(self, number: int, located: Located, row: int) -> Objective:
        """The objective of a row of a step of segment `number`."""
        return self._of_source(number, int(located.sources[row]))

    def arranged(self, number: int, located: Located, row: int, ids: IntArray | None = None) -> Arranged:
        """A row of a step as the model gets it, but for skips.

        Args:
            number: Of the segment.
            located: The step.
            row: Of it.
            ids: Its tokens [L + 1]; without them, those of the result mean nothing, and the rest is right.
        """
        length = self._journal.segments[number].sequence_length
        objective = self.objective(number, located, row)
        if ids is None:
            ids = np.zeros(length + 1, np.int64)
            if objective.reads:
                name = self._journal.names[int(located.sources[row])]
                instances = self._instances[number][name]
                assert isinstance(instances, Windows)
                instances.fill(int(located.places[row]), ids)
        return objective.arrange(ids, located.begins_of(row, length + 1), self.key(located, row))

    def _of_source(self, number: int, source: int) -> Objective:
        objective = self._objectives[number][source]
        assert objective is not None, "a source that is drawn has an objective"
        return objective

    def _masked_tokens(self, skip: Skip, number: int, index: int, name: str, place: int, ahead: int) -> Ranges:
        """The tokens [first, end) of a sample that a skip masks, and of those `ahead`."""
        whole = [(0, self._journal.segments[number].sequence_length + 1 + ahead)]
        if skip.samples is not None:
            return whole if skip.samples[0] <= index < skip.samples[1] else []
        if skip.source != name:
            return []
        if not skip.documents:
            return whole
        instances = self._instances[number][name]
        assert isinstance(instances, Windows)
        if (number, id(skip)) not in self._ranges:
            self._ranges[number, id(skip)] = instances.ranges_of(skip.documents)
        # The targets of the window that begins a token earlier are this one's tokens.
        return instances.targets_of(place - 1, self._ranges[number, id(skip)], ahead + 1)


def arranged_window(
    objective: Objective, instances: Instances, epoch: int, position: int, seed: int, index: int
) -> Arranged:
    """A sample as the model gets it, but for skips.

    Args:
        objective: Of its source.
        instances: The same.
        epoch: Of the sample.
        position: The same.
        seed: Of the run.
        index: Global index of the sample.
    """
    assert isinstance(instances, Windows)
    place = instances.places(np.array([epoch]), np.array([position]))
    pieces = instances.pieces(place)
    size = int(pieces.column[-1] + pieces.length[-1])
    ids = np.empty(size, np.int64)
    instances.fill(int(place[0]), ids)
    _, begins = distinct_starts(*begins_of(pieces, *instances.starts_in(pieces)), 1, size)
    return objective.arrange(ids, begins, sample_key(seed, index))


def causal_targets(tokens: Ranges) -> Ranges:
    """Tokens of a window as targets of causal prediction: target t is token t + 1."""
    return [(max(first - 1, 0), end - 1) for first, end in tokens]


def without(arranged: Arranged, masked: Ranges) -> FloatArray:
    """Weights [S] of a window without the tokens [first, end) that skips mask."""
    weight = arranged.weight.copy()
    for first, end in masked:
        weight[(arranged.raw >= first) & (arranged.raw < end)] = 0
    return weight
