"""Parts that all recurrent mixers have: convolutions ahead of a state, and states for generation.

Shapes: B batch, S positions, D channels, K taps, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.train.model.context import LayerContext
from pipeline.train.model.kernels.recurrence.chunks import Chunks
from pipeline.train.torch_compat.core import own_part


class RecurrentState:
    """Rows of a recurrence for texts that are continued: of one size, however long they are."""

    def __init__(self) -> None:
        self._memory: tuple[Tensor, Tensor] | None = None

    def read(self, rows: int) -> tuple[Tensor | None, Tensor | None]:
        """The last inputs of the convolutions [rows, K - 1, D], and the states [rows, H, ...]; None before both."""
        return (None, None) if self._memory is None else (self._memory[0][:rows], self._memory[1][:rows])

    def write(self, tail_BKD: Tensor, state_BH: Tensor) -> None:
        """Takes what `read` gives from now on."""
        self._memory = tail_BKD, state_BH

    def join(self, other: RecurrentState, lengths: Sequence[int], more: Sequence[int]) -> None:
        """See `MixerState`."""
        assert other._memory is not None
        joined = [held[: len(more)] for held in other._memory]
        if self._memory is not None:
            joined = [torch.cat((held[: len(lengths)], new)) for held, new in zip(self._memory, joined, strict=True)]
        self._memory = joined[0], joined[1]

    def move(self, source: int, target: int, length: int) -> None:
        """See `MixerState`."""
        assert self._memory is not None
        for held in self._memory:
            held[target] = held[source]


class Convolution(nn.Module):
    """Taps of a causal convolution of each channel (Dao and Gu 2024): weights [D, K], biases [D].

    Attributes:
        own_rows: See `Vector`.
    """

    def __init__(self, channels: int, taps: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, taps))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.own_rows: slice | None = None

    @property
    def own(self) -> tuple[Tensor, Tensor | None]:
        """Weights and biases of the channels that this process has."""
        return own_part(self.weight, self.own_rows), None if self.bias is None else own_part(self.bias, self.own_rows)


def convolve(
    convolutions: Sequence[Convolution], inputs: Sequence[Tensor], context: LayerContext, before_BKD: Tensor | None
) -> tuple[list[Tensor], Tensor]:
    """Silu of the causal convolutions of some inputs [B, S, D], all at once.

    Args:
        convolutions: One for each input.
        inputs: Of them.
        context: Of the layer.
        before_BKD: The last K - 1 inputs ahead of these, for texts that are continued; None: there are none.

    Returns:
        The results, of pieces where there are no states, and all inputs beside each other.
    """
    own = [each.own for each in convolutions]
    weight_DK = torch.cat([weight for weight, _ in own])
    biases = [bias for _, bias in own if bias is not None]
    x_BSD = torch.cat(list(inputs), dim=-1)
    if context.pieces is None:
        chunks = Chunks(x_BSD.shape[1])
    else:
        chunks, x_BSD = context.pieces.chunks, context.pieces.split(x_BSD)
        before_BKD = context.pieces.before(x_BSD, weight_DK.shape[1] - 1)
    bias_D = torch.cat(biases) if biases else None
    out_BSD = context.recurrent.causal_conv(x_BSD, weight_DK, bias_D, before_BKD, chunks)
    return list(torch.split(out_BSD, [len(weight) for weight, _ in own], dim=-1)), x_BSD


def counted(context: LayerContext, x_BS: Tensor) -> Tensor:
    """[B, S, ...] with zeros at positions that do not count: padding on the right."""
    if context.counts is None or min(context.counts) == x_BS.shape[1]:
        return x_BS
    counts_B1 = torch.tensor(context.counts, device=x_BS.device)[:, None]
    counts_BS = torch.arange(x_BS.shape[1], device=x_BS.device) < counts_B1
    return x_BS * counts_BS.view(*x_BS.shape[:2], *(1,) * (x_BS.ndim - 2))


def tail(context: LayerContext, x_BSD: Tensor, before_BKD: Tensor | None, taps: int) -> Tensor:
    """The last K - 1 inputs of each row that count, [B, K - 1, D]; zeros where a text is shorter."""
    whole_BTD = F.pad(x_BSD, (0, 0, taps - 1, 0)) if before_BKD is None else torch.cat((before_BKD, x_BSD), dim=1)
    rows, queries = x_BSD.shape[:2]
    counts_B1 = torch.tensor(context.counts or [queries] * rows, device=x_BSD.device)[:, None]
    last_BK = counts_B1 + torch.arange(taps - 1, device=x_BSD.device)
    return whole_BTD[torch.arange(rows, device=x_BSD.device)[:, None], last_BK]
