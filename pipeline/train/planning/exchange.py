"""The exchange of rows between experts on fake tensors, which say nothing of what tokens choose."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.train.model.mlps.experts.dispatch import Sizes
from pipeline.train.parallel.experts import AllToAll, RowCounts


@dataclass(frozen=True)
class BalancedExchange(AllToAll):
    """An exchange in which this process sends equally many rows to each, and gets `over_mean` times the mean."""

    over_mean: float = 1.0
    """Rows that come over those that go."""

    def sizes(self, counts_E: Tensor, rows: int) -> Sizes:
        """See `Exchange`; nothing is asked of the others, and the host waits for nothing."""
        ranks = self.group.size()
        go, come = _even(rows, ranks), _even(round(rows * self.over_mean), ranks)
        ends_E = torch.empty(len(counts_E) // ranks, dtype=torch.int32)
        order_M, inverse_M = torch.empty(2, sum(come), dtype=torch.int64).unbind()
        return RowCounts(ends_E, sum(come), go, come, order_M, inverse_M)


def _even(number: int, parts: int) -> list[int]:
    return [number // parts + (part < number % parts) for part in range(parts)]
