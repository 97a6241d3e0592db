"""Loss weights of the targets of a step: those of sources, times those of documents.

Every rank knows the sum over the global batch without asking the others: it is the same number for any layout. Where
only sources have weights, it follows from counts. Where documents have some, the weights of all windows of the global
batch are looked up on each rank, 4 bytes for each target; and objectives that arrange windows arrange all of them.

Shapes: R rows of a step, L targets, N depths of multi-token prediction, S positions of the model, B samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from pipeline.data.loading.ahead import ahead_weight
from pipeline.data.loading.batch import Batch
from pipeline.data.loading.objectives.base import FloatArray
from pipeline.data.loading.skip_masks import Masks, Ranges, causal_targets, without
from pipeline.data.order.journal import Journal
from pipeline.data.order.locate import Located
from pipeline.data.order.permutation import IntArray
from pipeline.data.order.windows import Instances, Windows


class StepWeights(NamedTuple):
    """Loss weights of a step."""

    total: float
    """Sum over the targets of the global batch that count."""
    total_ahead: tuple[float, ...]
    """The same by depth of multi-token prediction."""
    positions: FloatArray
    """[R, S] by position of each row, whether it counts or not; or [R, 1] where all of a row have one weight."""
    ahead: FloatArray | None
    """[R, N, L]"""

    def weighed(self, batch: Batch, rows: range) -> Batch:
        """A micro-batch with its loss weights.

        Args:
            batch: Without them.
            rows: Its samples; what the batch has besides is padding.
        """
        mine = slice(rows.start, rows.stop)
        return weighed(batch, self.positions[mine], None if self.ahead is None else self.ahead[mine])


def weighed(batch: Batch, positions: FloatArray, ahead: FloatArray | None) -> Batch:
    """A micro-batch with the loss weights of its first rows; the others are padding.

    Args:
        batch: Without them.
        positions: [rows, S] or [rows, 1], as `StepWeights.positions`.
        ahead: [rows, N, L]
    """
    count, weight = len(positions), batch.weight.clone()
    weight[:count] *= torch.from_numpy(positions)
    if ahead is None or batch.ahead_weight is None:
        return replace(batch, loss_weight=weight)
    of_ahead = batch.ahead_weight.clone()
    of_ahead[:count] *= torch.from_numpy(ahead)
    return replace(batch, loss_weight=weight, ahead_loss_weight=of_ahead)


class LossWeights:
    """Loss weights of a run's steps.

    Args:
        journal: The run's plan.
        instances: For each segment by source.
        masks: Of the same: what counts.
        ahead: Depths of multi-token prediction.
    """

    def __init__(
        self, journal: Journal, instances: Sequence[Mapping[str, Instances]], masks: Masks, ahead: int
    ) -> None:
        self._journal = journal
        self._instances = instances
        self._masks = masks
        self._ahead = ahead
        self._weighs = [segment.weighs for segment in journal.segments]
        # By segment and index in the journal's names; in fp32, as the tensors are.
        self._of_sources = [
            np.array([s.sources[name].loss_weight if name in s.sources else 1 for name in journal.names], np.float32)
            for s in journal.segments
        ]
        self._with_documents = [
            [
                index
                for index, name in enumerate(journal.names)
                if name in s.sources and s.sources[name].document_weights
            ]
            for s in journal.segments
        ]
        self.by_document = any(map(bool, self._with_documents))
        """True if documents have weights in some segment: then all rows of its steps are needed."""

    def of_step(
        self, number: int, located: Located, masked: list[Ranges] | None, valid: IntArray
    ) -> StepWeights | None:
        """The weights of a step; None if all are 1.

        Args:
            number: Of the segment.
            located: The step.
            masked: Of it, from `Masks.masked`.
            valid: Of it, from `Masks.valid`.
        """
        if not self._weighs[number]:
            return None
        of_source = self._of_sources[number]
        if not self._with_documents[number] and not self._ahead:
            total = math.fsum(weight * count for weight, count in zip(of_source.tolist(), valid.tolist(), strict=True))
            return StepWeights(total, (), of_source[located.sources][:, None], None)
        length = self._journal.segments[number].sequence_length
        tokens = self._of_tokens(number, located, length + 1 + self._ahead)
        positions, totals, totals_ahead = [], [], []
        ahead = [tokens[:, 2 + depth : 2 + depth + length] for depth in range(self._ahead)]
        by_depth = np.stack(ahead, axis=1) if ahead else None
        for row, of_tokens in enumerate(tokens):
            skipped = masked[row] if masked else []
            of_positions, counts = self._row(number, located, row, of_tokens, length, skipped)
            positions.append(of_positions)
            counted = of_positions if counts is None else of_positions * counts
            totals.append(float(counted.sum(dtype=np.float64)))
            if by_depth is not None:
                begins = located.begins_of(row, length + 1 + self._ahead)
                counts = ahead_weight(begins, length, self._ahead, causal_targets(skipped))
                totals_ahead.append((by_depth[row] * counts).sum(axis=1, dtype=np.float64).tolist())
        of_depths = tuple(map(math.fsum, zip(*totals_ahead, strict=True)))
        return StepWeights(math.fsum(totals), of_depths, np.stack(positions), by_depth)

    def _of_tokens(self, number: int, located: Located, size: int) -> FloatArray:
        """[R, size] of the tokens of each row."""
        of_source = self._of_sources[number]
        result = np.repeat(of_source[located.sources][:, None], size, axis=1)
        for source in self._with_documents[number]:
            rows = np.flatnonzero(located.sources == source)
            if not rows.size:
                continue
            instances, factor = self._instances[number][self._journal.names[source]], of_source[source]
            assert isinstance(instances, Windows), "of packs see `PackReader`"
            pieces = instances.pieces(located.places[rows], self._ahead)
            for row, column, part, start, length in zip(*(each.tolist() for each in pieces), strict=True):
                out = result[rows[row], column : column + length]
                instances.fill_weights(part, start, out)
                out *= factor
        return result

    def _row(
        self, number: int, located: Located, row: int, of_tokens: FloatArray, length: int, masked: Ranges
    ) -> tuple[FloatArray, FloatArray | None]:
        """Weights [S] of the positions of a row, and which of them count, 0 or 1; None: all."""
        objective = self._masks.objective(number, located, row)
        if not masked and not objective.arranges and objective.fixed_valid(length) == length:
            return of_tokens[1 : length + 1], None
        arranged = self._masks.arranged(number, located, row)
        return of_tokens[np.maximum(arranged.raw, 0)], without(arranged, masked)
