"""Losses of a step: by source, by loss weights, by depth of multi-token prediction, and from a teacher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.data.loading.batch import Batch, StepData
from pipeline.train.loop.quantities.quantity import Quantity, QuantityNumbers, Update
from pipeline.train.model.loss import TokenLosses


class SourceLosses(Quantity):
    """Cross entropy over the targets of each source. The mean over all of them is the loss of the step.

    Args:
        names: of the sources, in the order of the loader.
        device: of this rank.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self._names, self._device = names, device
        self._sums = torch.zeros(0)

    def begin(self, data: StepData) -> None:
        """Begin with no target."""
        self._sums = torch.zeros(2, len(self._names), dtype=torch.float64, device=self._device)

    def book(self, losses: TokenLosses, batch: Batch) -> None:
        """Add nats and targets of a micro-batch."""
        # Padding samples have source -1 and weight 0; they add nothing to the source they are booked under.
        index = batch.sources.clamp(min=0)
        self._sums[0].index_add_(0, index, (losses.loss_BS * batch.weight).sum(dim=1, dtype=torch.float64))
        self._sums[1].index_add_(0, index, batch.weight.sum(dim=1, dtype=torch.float64))

    def parts(self) -> list[Tensor]:
        """Nats, then numbers of targets."""
        return [self._sums.flatten()]

    @staticmethod
    def totals(sums: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Nats and number of targets over all sources and ranks, fp64 scalars on the device."""
        nats, targets = sums[0].view(2, -1)
        return nats.sum(), targets.sum()

    def finish(self, sums: Sequence[Tensor], update: Update) -> QuantityNumbers:
        """See `Quantity`."""
        nats, targets = sums[0].view(2, -1)
        return QuantityNumbers({"nats": nats, "targets": targets}, self._read)

    def _read(self, nats: Tensor, targets: Tensor) -> dict[str, Any]:
        by_source = list(zip(self._names, nats.tolist(), targets.tolist(), strict=True))
        return {
            "loss": sum(nats.tolist()) / max(1.0, sum(targets.tolist())),
            "loss_by_source": {name: total / count for name, total, count in by_source if count},
        }


class WeightedLoss(Quantity):
    """The loss by the weights of sources and documents, which is minimized where there are some."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sum: Tensor | None = None
        self._total = 0.0

    def begin(self, data: StepData) -> None:
        """Begin with nothing."""
        self._sum = None
        if data.total_weight is not None:
            self._sum = torch.zeros(1, dtype=torch.float64, device=self._device)
            self._total = data.total_weight

    def book(self, losses: TokenLosses, batch: Batch) -> None:
        """Add the weighted nats of a micro-batch."""
        if self._sum is not None and batch.loss_weight is not None:
            self._sum.add_((losses.loss_BS * batch.loss_weight).sum(dtype=torch.float64))

    def parts(self) -> list[Tensor]:
        """Weighted nats."""
        return [] if self._sum is None else [self._sum]

    def finish(self, sums: Sequence[Tensor], update: Update) -> QuantityNumbers | None:
        """See `Quantity`."""
        if not sums:
            return None
        return QuantityNumbers({"loss": sums[0].squeeze() / self._total}, lambda loss: {"weighted_loss": loss.item()})


class TeacherLosses(Quantity):
    """Divergence from the teacher, and the teacher's cross entropy, over the same targets as the loss of the step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums = torch.zeros(0)
        self._targets = 1

    def begin(self, data: StepData) -> None:
        """Begin with nothing."""
        self._sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        self._targets = max(1, data.valid_targets)

    def book(self, losses: TokenLosses, batch: Batch) -> None:
        """Add the nats of a micro-batch."""
        assert losses.divergence_BS is not None and losses.teacher_BS is not None
        for place, nats_BS in enumerate((losses.divergence_BS, losses.teacher_BS)):
            self._sums[place] += (nats_BS * batch.weight).sum(dtype=torch.float64)

    def parts(self) -> list[Tensor]:
        """Nats of both."""
        return [self._sums]

    def finish(self, sums: Sequence[Tensor], update: Update) -> QuantityNumbers:
        """See `Quantity`."""
        return QuantityNumbers({"means": sums[0] / self._targets}, _teacher_columns)


def _teacher_columns(means: Tensor) -> dict[str, Any]:
    divergence, loss = means.tolist()
    return {"teacher_divergence": divergence, "teacher_loss": loss}


class DepthLosses(Quantity):
    """Cross entropy of each depth of multi-token prediction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._valid: Sequence[int] = ()
        self._means = torch.zeros(0)

    def begin(self, data: StepData) -> None:
        """Begin with nothing."""
        self._valid = data.valid_ahead
        self._means = torch.zeros(len(self._valid), dtype=torch.float64, device=self._device)

    def book(self, losses: TokenLosses, batch: Batch) -> None:
        """Add what a micro-batch has of the mean of each depth."""
        if batch.ahead_weight is None:
            return
        for depth, (loss_BS, count) in enumerate(zip(losses.of_depths, self._valid, strict=True)):
            nats = (loss_BS * batch.ahead_weight[:, depth]).sum(dtype=torch.float64)
            self._means[depth] += nats / max(1, count)

    def parts(self) -> list[Tensor]:
        """This rank's share of the means."""
        return [self._means] if self._valid else []

    def finish(self, sums: Sequence[Tensor], update: Update) -> QuantityNumbers | None:
        """See `Quantity`."""
        return QuantityNumbers({"means": sums[0]}, _depth_columns) if sums else None


def _depth_columns(means: Tensor) -> dict[str, Any]:
    by_depth = means.tolist()
    return {
        "mtp_loss": sum(by_depth) / len(by_depth),
        "mtp_loss_by_depth": {str(depth): loss for depth, loss in enumerate(by_depth, 1)},
    }
