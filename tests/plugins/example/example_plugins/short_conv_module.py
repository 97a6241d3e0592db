"""The module of the gated short convolution.

Shapes: B batch, S positions, D width, C channels, K taps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from example_plugins.short_conv import ShortConvSpec
from pipeline.train.model.context import LayerContext
from pipeline.train.model.states import MixerState
from pipeline.train.torch_compat.core import own_part


class Tail:
    """State of texts that are continued: the last inputs of the convolution, [rows, K - 1, C]."""

    def __init__(self, taps: int) -> None:
        self._before = taps - 1
        self._tail: Tensor | None = None

    def append(self, x_BSC: Tensor, counts: Sequence[int]) -> Tensor:
        """The inputs behind those that are held, [B, K - 1 + S, C]; the last ones of each row that count are held."""
        rows = len(x_BSC)
        tail = x_BSC.new_zeros(rows, self._before, x_BSC.shape[2]) if self._tail is None else self._tail[:rows]
        whole = torch.cat((tail, x_BSC), dim=1)
        self._tail = torch.stack([whole[row, count : count + self._before] for row, count in enumerate(counts)])
        return whole

    def join(self, other: Tail, lengths: Sequence[int], more: Sequence[int]) -> None:
        """See `MixerState`."""
        assert other._tail is not None
        own = other._tail[:0] if self._tail is None else self._tail[: len(lengths)]
        self._tail = torch.cat((own, other._tail[: len(more)]))

    def move(self, source: int, target: int, length: int) -> None:
        """See `MixerState`."""
        assert self._tail is not None
        self._tail[target] = self._tail[source]


class ShortConv(nn.Module):
    """See `ShortConvSpec`. With tensor parallelism C are the channels that a rank has."""

    def __init__(self, spec: ShortConvSpec) -> None:
        super().__init__()
        self.spec = spec
        for matrix in spec.matrices:
            self.add_module(matrix.name, nn.Linear(matrix.columns, matrix.rows, bias=False))
        self.taps = nn.Parameter(torch.empty(spec.channels, spec.taps))

    def new_state(self, max_length: int | None) -> Tail:
        """An empty state for generation."""
        return Tail(self.spec.taps)

    def forward(self, x_BSD: Tensor, context: LayerContext, state: MixerState | None = None) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        wb, wc, wu, wo = (self.get_submodule(matrix.name) for matrix in self.spec.matrices)
        b_BSC, c_BSC, u_BSC = wb(x_BSD), wc(x_BSD), wu(x_BSD)
        inner_BSC = b_BSC * u_BSC
        if state is None:
            whole = F.pad(inner_BSC, (0, 0, self.spec.taps - 1, 0))
        else:
            assert isinstance(state, Tail)
            whole = state.append(inner_BSC, context.counts or [inner_BSC.shape[1]] * len(inner_BSC))
        out_BSD: Tensor = wo(c_BSC * self._convolved(whole, inner_BSC.shape[1], context.bounds_BS))
        return out_BSD

    def _convolved(self, whole: Tensor, length: int, bounds_BS: Tensor | None) -> Tensor:
        """The convolution [B, S, C] of K - 1 + S inputs; those of other documents count as zeros."""
        taps_CK = own_part(self.taps)  # with tp the rows of this rank
        places_S = torch.arange(length, device=whole.device)
        terms = []
        for tap in range(self.spec.taps):
            back = self.spec.taps - 1 - tap
            term = whole[:, tap : tap + length] * taps_CK[:, tap]
            if bounds_BS is not None and back:
                term = term * (places_S - back >= bounds_BS)[..., None]
            terms.append(term)
        return torch.stack(terms).sum(0)
