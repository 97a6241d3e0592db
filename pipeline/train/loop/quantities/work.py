"""Work of each rank in a step, which shows a rank that keeps the others waiting."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.data.loading.batch import StepData
from pipeline.train.loop.quantities.quantity import Quantity, QuantityNumbers, Update
from pipeline.train.monitor.straggler import Stragglers, WorkClock, summary


class RankWork(Quantity):
    """Seconds that each rank worked from the beginning of the step before to that of this one.

    Args:
        host: of a rank, or None where it is not known; for the warning.
    """

    def __init__(self, host: Callable[[int], str | None]) -> None:
        self.clock = WorkClock()
        self._stragglers = Stragglers(host)
        self._waited = self._seconds = 0.0

    def add_wait(self, seconds: float) -> None:
        """Count the time in which this rank waited for the data of the coming step."""
        self._waited = seconds

    def begin(self, data: StepData) -> None:
        """Take the time since the last step began."""
        self._seconds = self.clock.take() + self._waited

    def parts(self) -> list[Tensor]:
        """One place per rank, of which this one fills its own."""
        seconds = torch.zeros(dist.get_world_size(), dtype=torch.float64)
        seconds[dist.get_rank()] = self._seconds
        return [seconds]

    def finish(self, sums: Sequence[Tensor], update: Update) -> QuantityNumbers | None:
        """See `Quantity`."""
        return QuantityNumbers({"seconds": sums[0]}, _columns) if len(sums[0]) > 1 else None

    def warning(self, step: int, row: Mapping[str, Any], seconds: float) -> str | None:
        """A warning of the slowest rank, see `Stragglers`."""
        return self._stragglers.see(step, row["work"], seconds) if "work" in row else None


def _columns(seconds: Tensor) -> dict[str, Any]:
    return {"work": summary(seconds.tolist())}
