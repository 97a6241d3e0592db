"""Weights of the targets of a step: those that an objective or the run's skips mask have 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pipeline.data.loading.objectives import FloatArray, Objective, sample_key
from pipeline.data.order.journal import Journal
from pipeline.data.order.locate import Located
from pipeline.data.order.permutation import IntArray
from pipeline.data.order.segments import Skip
from pipeline.data.order.windows import Instances, bounds_of


class Masks:
    """Weights of the targets of samples, known without reading tokens.

    Args:
        journal: The run's plan.
        instances: For each segment by source.
        objective: What may mask targets.
    """

    def __init__(self, journal: Journal, instances: Sequence[Mapping[str, Instances]], objective: Objective) -> None:
        self._journal = journal
        self._instances = instances
        self._objective = objective
        self._ranges: dict[tuple[int, int], IntArray] = {}  # by segment and identity of the skip, which may be long

    def masked(self, step: int, located: Located, ahead: int) -> list[list[tuple[int, int]]] | None:
        """For each row of `located` the targets [first, end) that skips mask; None if there are no skips.

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
                for masked in self._masked_targets(skip, number, index, self._journal.names[source], place, ahead)
            ]
            for index, source, place in rows
        ]

    def of(
        self, step: int, located: Located, masked: list[list[tuple[int, int]]] | None
    ) -> list[FloatArray | None] | None:
        """For each row of `located` the weights [L], or None where all targets count; None if they do in all rows.

        Args:
            step: Of the run.
            located: The same.
            masked: From `masked`; targets behind the instance are left out.
        """
        if not self._objective.masks and masked is None:
            return None
        number = self._journal.segment_number(step)
        length = self._journal.segments[number].sequence_length
        weights = []
        for row, index in enumerate(located.samples.tolist()):
            weight = self._objective_weight(number, index, located, row)
            if masked is not None and masked[row]:
                weight = np.ones(length, np.float32) if weight is None else weight.copy()
                for first, end in masked[row]:
                    weight[first:end] = 0
            weights.append(weight)
        return weights

    def _objective_weight(self, number: int, index: int, located: Located, row: int) -> FloatArray | None:
        if not self._objective.masks:
            return None
        size = self._journal.segments[number].sequence_length + 1
        bounds = bounds_of(located.begins_of(row, size), size)
        return self._objective.weight(bounds, sample_key(self._journal.seed, index))

    def _masked_targets(
        self, skip: Skip, number: int, index: int, name: str, place: int, ahead: int
    ) -> list[tuple[int, int]]:
        """The targets [first, end) that a skip masks of a sample, and of those `ahead`."""
        whole = [(0, self._journal.segments[number].sequence_length + ahead)]
        if skip.samples is not None:
            return whole if skip.samples[0] <= index < skip.samples[1] else []
        if skip.source != name:
            return []
        if not skip.documents:
            return whole
        instances = self._instances[number][name]
        if (number, id(skip)) not in self._ranges:
            self._ranges[number, id(skip)] = instances.ranges_of(skip.documents)
        return instances.targets_of(place, self._ranges[number, id(skip)], ahead)
