"""Quantities of a step: what it measures over all ranks, beside the update that it makes.

A quantity is one class. The step asks all of them in one order, which is the same on every rank:

    begin      before the passes of the step
    book       after the loss of each micro-batch
    gradients  when the gradients are whole, and not clipped yet
    parts      what this rank adds to the one sum over all ranks
    finish     after the update, with what that sum came to

Nothing in these five reads a device: a GPU would run out of work while the host waits. `finish` returns tensors and a
function, and the loop calls the function when the tensors have arrived on the host, one step later on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pipeline.data.loading.batch import Batch, StepData
from pipeline.train.model.loss import TokenLosses
from pipeline.train.optim.gradients import Gradients


@dataclass(frozen=True)
class Update:
    """The verdict of a step on its update, on the device."""

    norm: Tensor
    """fp64 scalar, global L2 norm of the gradient before clipping, without the loss scale."""
    finite: Tensor
    """Bool scalar: loss and gradient are finite."""
    is_made: Tensor
    """Bool scalar: the weights change. False for a spike, and for what is not finite."""
    zscores: Tensor | None
    """[2] fp64, see `spikes.SpikeVerdict`; None where spikes are not looked for."""
    loss_scale: Tensor | None
    """fp32 scalar: the factor on the loss, with fp16."""


@dataclass(frozen=True)
class QuantityNumbers:
    """Numbers of a quantity in a step, on the device or on the host."""

    tensors: Mapping[str, Tensor]
    read: Callable[..., dict[str, Any]]
    """Given the tensors on the host, by name, returns columns of metrics.jsonl."""


class Quantity:
    """Something that a step measures. Each method does nothing unless a quantity needs it.

    Numbers travel to the host as fp64, which holds whole numbers up to 2**53. Names of columns are a quantity's own.
    """

    def begin(self, data: StepData) -> None:
        """Prepare for the passes of a step."""

    def book(self, losses: TokenLosses, batch: Batch) -> None:
        """Book the losses of a micro-batch. Of the ranks of a tp axis, which have the same, only the first is asked."""

    def gradients(self, gradients: Gradients) -> None:
        """Look at the gradients of this rank, which are summed over its micro-batches."""

    def parts(self) -> list[Tensor]:
        """Tensors that are added up over all ranks, fp64, as many and as long on every rank.

        On the device, or on the host: the step sends all of those in one copy.
        """
        return []

    def finish(self, sums: Sequence[Tensor], update: Update) -> QuantityNumbers | None:
        """The numbers of the step.

        Args:
            sums: the sums of what `parts` gave on all ranks.
            update: the verdict on the step's update, which has been made by now.
        """
        return None

    def skipped(self, data: StepData) -> None:
        """Take note of a step of which nothing is trained on. Every rank calls this."""

    def warning(self, step: int, row: Mapping[str, Any], seconds: float) -> str | None:
        """A warning that follows from the numbers, or None.

        Args:
            step: number of the step, from 1.
            row: columns of all quantities.
            seconds: that the step took.
        """
        return None
