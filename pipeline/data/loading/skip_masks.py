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

    def of(self, step: int, located: Located) -> list[FloatArray | None] | None:
        """For each row of `located` the weights [L], or None where all targets count; None if they do in all rows."""
        skips = self._journal.masks(step)
        if not self._objective.masks and not skips:
            return None
        number = self._journal.segment_number(step)
        rows = zip(located.samples.tolist(), located.sources.tolist(), located.places.tolist(), strict=True)
        weights = []
        for row, (index, source, place) in enumerate(rows):
            weight = self._objective_weight(number, index, located.begins_of(row))
            for skip in skips:
                weight = self._masked(weight, skip, number, index, self._journal.names[source], place)
            weights.append(weight)
        return weights

    def _objective_weight(self, number: int, index: int, begins: IntArray) -> FloatArray | None:
        if not self._objective.masks:
            return None
        bounds = bounds_of(begins, self._journal.segments[number].sequence_length + 1)
        return self._objective.weight(bounds, sample_key(self._journal.seed, index))

    def _masked(
        self, weight: FloatArray | None, skip: Skip, number: int, index: int, name: str, place: int
    ) -> FloatArray | None:
        """The weights with what a skip masks of sample `index`, which lies at `place` of source `name`."""
        length = self._journal.segments[number].sequence_length
        masked = [(0, length)]
        if skip.samples is not None:
            masked = masked if skip.samples[0] <= index < skip.samples[1] else []
        elif skip.source != name:
            masked = []
        elif skip.documents:
            instances = self._instances[number][name]
            if (number, id(skip)) not in self._ranges:
                self._ranges[number, id(skip)] = instances.ranges_of(skip.documents)
            masked = instances.targets_of(place, self._ranges[number, id(skip)])
        if masked:
            weight = np.ones(length, np.float32) if weight is None else weight.copy()
            for first, end in masked:
                weight[first:end] = 0
        return weight
