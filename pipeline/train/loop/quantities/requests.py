"""Requests to stop or to save, agreed on by all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.data.loading.batch import StepData
from pipeline.train.host.host_copy import to_device
from pipeline.train.loop.quantities.quantity import Quantity, QuantityNumbers, Update
from pipeline.train.run.stop_requests import StopRequest


class AgreedRequests(Quantity):
    """The requests of all ranks together. Ranks learn of them at the same step, and so act on them at the same step.

    Args:
        request: of this rank, now.
        device: of this rank.
    """

    def __init__(self, request: Callable[[], StopRequest], device: torch.device) -> None:
        self._request, self._device = request, device
        self.agreed = StopRequest(False, False)
        """As of the last step whose numbers have been read."""

    def parts(self) -> list[Tensor]:
        """One number per kind of request; looked at when the passes have been issued, as late as it can be."""
        return [torch.tensor([*map(float, self._request())], dtype=torch.float64)]

    def finish(self, sums: Sequence[Tensor], update: Update) -> QuantityNumbers:
        """See `Quantity`."""
        return QuantityNumbers({"counts": sums[0]}, self._read)

    def skipped(self, data: StepData) -> None:
        """Agree without a step; this reads the device."""
        (counts,) = (to_device(part, self._device) for part in self.parts())
        dist.all_reduce(counts)
        self._read(counts)

    def saved(self) -> None:
        """A save has been made: the requests for one are fulfilled."""
        self.agreed = StopRequest(self.agreed.stop, save=False)

    def forget(self) -> None:
        """Forget what was agreed on, when the run goes back."""
        self.agreed = StopRequest(False, False)

    def _read(self, counts: Tensor) -> dict[str, Any]:
        self.agreed = StopRequest(*(count > 0 for count in counts.tolist()))
        return {}
