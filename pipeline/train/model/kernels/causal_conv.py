"""Short causal convolution by channel, with silu, in PyTorch: what recurrent mixers see of the positions before.

The last weight of a channel is that of the position itself, as in `torch.nn.Conv1d`. Inputs of another document count
as 0: a sum begins with the oldest input, and is set to 0 where the next one is the first of a document, so that nothing
of the document before is in it.

Outside of a compiler only the inputs are kept for the backward pass; a compiler fuses the plain sum.

Shapes: B batch, S positions, C channels, K weights of a channel, Q positions at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.train.model.kernels.chunks import Chunks

_POSITIONS = {"cpu": 64, "cuda": 1 << 16}
"""That are computed at a time: on a CPU they stay in its cache."""


def causal_conv(
    x_BSC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None,
    before_BKC: Tensor | None,
    chunks: Chunks,
    activation: bool = True,
) -> Tensor:
    """The convolution [B, S, C], in the type of x, with silu behind it.

    Args:
        x_BSC: Inputs.
        weight_CK: Weights, that of the oldest input first.
        bias_C: Added to the sums.
        before_BKC: The K - 1 inputs ahead of the sequence; None: zeros.
        chunks: Those of the sequence, for its documents.
        activation: Whether silu is applied.
    """
    if before_BKC is None:
        before_BKC = x_BSC.new_zeros(x_BSC.shape[0], weight_CK.shape[1] - 1, x_BSC.shape[2])
    ages_BS = None
    if chunks.bounds_BS is not None:
        ages_BS = torch.arange(x_BSC.shape[1], device=x_BSC.device) - chunks.bounds_BS
    if torch.compiler.is_compiling():
        return _plain(x_BSC, weight_CK, bias_C, before_BKC, ages_BS, activation)
    return cast(Tensor, _Conv.apply(x_BSC, weight_CK, bias_C, before_BKC, ages_BS, activation))  # type: ignore[no-untyped-call]


def _plain(
    x_BSC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None,
    before_BKC: Tensor,
    ages_BS: Tensor | None,
    activation: bool,
) -> Tensor:
    dtype = torch.promote_types(x_BSC.dtype, torch.float32)
    S, taps_KC = x_BSC.shape[1], weight_CK.to(dtype).t().unbind()
    inputs_BTC = torch.cat((before_BKC.to(x_BSC.dtype), x_BSC), 1)
    z_BSC = torch.zeros((), dtype=dtype, device=x_BSC.device) if bias_C is None else bias_C.to(dtype)
    for number, tap_C in enumerate(taps_KC):
        part_BSC = inputs_BTC[:, number : number + S] * tap_C
        if ages_BS is not None and number < len(taps_KC) - 1:
            part_BSC = torch.where((ages_BS >= len(taps_KC) - 1 - number)[..., None], part_BSC, 0.0)
        z_BSC = z_BSC + part_BSC
    return (F.silu(z_BSC) if activation else z_BSC).to(x_BSC.dtype)


class _Conv(torch.autograd.Function):
    """`_plain`, a few positions at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        x_BSC: Tensor,
        weight_CK: Tensor,
        bias_C: Tensor | None,
        before_BKC: Tensor,
        ages_BS: Tensor | None,
        activation: bool,
    ) -> Tensor:
        ctx.save_for_backward(x_BSC, weight_CK, bias_C, before_BKC, ages_BS)
        ctx.activation = activation
        y_BSC = torch.empty_like(x_BSC, memory_format=torch.contiguous_format)
        taps_KC = _taps(weight_CK, x_BSC)
        for begin, inputs_BTC, ages_BQ in _parts(x_BSC, before_BKC, ages_BS, taps_KC):
            z_BQC = _sums(inputs_BTC, taps_KC, bias_C, ages_BQ)
            y_BSC[:, begin : begin + z_BQC.shape[1]] = F.silu(z_BQC, inplace=True) if activation else z_BQC
        return y_BSC

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_BSC, weight_CK, bias_C, before_BKC, ages_BS = ctx.saved_tensors
        taps_KC = _taps(weight_CK, x_BSC)
        into_taps_KC, into_bias_C = torch.zeros_like(taps_KC), torch.zeros_like(taps_KC[0])
        (B, S, C), oldest = x_BSC.shape, len(taps_KC) - 1
        # Of the inputs ahead as well. Parts add to each other's where they meet.
        into_BTC = x_BSC.new_zeros(B, oldest + S, C, dtype=taps_KC.dtype)
        for begin, inputs_BTC, ages_BQ in _parts(x_BSC, before_BKC, ages_BS, taps_KC):
            end = begin + inputs_BTC.shape[1] - oldest
            dz_BQC = gradients[0][:, begin:end].to(taps_KC.dtype)
            if ctx.activation:
                dz_BQC = torch.ops.aten.silu_backward(dz_BQC, _sums(inputs_BTC, taps_KC, bias_C, ages_BQ))
            elif ages_BQ is not None:
                dz_BQC = dz_BQC.clone()
            into_bias_C += dz_BQC.sum((0, 1))
            for age, tap_C in enumerate(reversed(taps_KC.unbind())):
                if age:
                    _clear(dz_BQC, ages_BQ, age)
                number = oldest - age
                into_BTC[:, begin + number : end + number].addcmul_(dz_BQC, tap_C)
                into_taps_KC[number] += (dz_BQC * inputs_BTC[:, number : number + end - begin]).sum((0, 1))
        into_before_BKC, into_x_BSC = into_BTC[:, :oldest], into_BTC[:, oldest:]
        return (
            into_x_BSC.to(x_BSC.dtype),
            into_taps_KC.t().to(weight_CK.dtype),
            None if bias_C is None else into_bias_C.to(bias_C.dtype),
            into_before_BKC.to(before_BKC.dtype),
            None,
            None,
        )


def _taps(weight_CK: Tensor, x_BSC: Tensor) -> Tensor:
    """[K, C] in the type of sums."""
    return weight_CK.to(torch.promote_types(x_BSC.dtype, torch.float32)).t().contiguous()


def _parts(
    x_BSC: Tensor, before_BKC: Tensor, ages_BS: Tensor | None, taps_KC: Tensor
) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """Parts of a sequence: the first position, the inputs with the K - 1 before them, and ages where they count.

    On a CPU they count where a document begins in the part; a GPU is not asked.
    """
    oldest, on_cpu = len(taps_KC) - 1, x_BSC.device.type == "cpu"
    size = _POSITIONS["cpu" if on_cpu else "cuda"]
    for begin in range(0, x_BSC.shape[1], size):
        end = begin + size
        inputs_BTC = x_BSC[:, max(0, begin - oldest) : end].to(taps_KC.dtype)
        if begin < oldest:
            inputs_BTC = torch.cat((before_BKC[:, begin:].to(taps_KC.dtype), inputs_BTC), 1)
        ages_BQ = None if ages_BS is None else ages_BS[:, begin:end]
        if ages_BQ is not None and on_cpu and not (ages_BQ < oldest).any():
            ages_BQ = None
        yield begin, inputs_BTC, ages_BQ


def _sums(inputs_BTC: Tensor, taps_KC: Tensor, bias_C: Tensor | None, ages_BQ: Tensor | None) -> Tensor:
    """Sums of a part."""
    length, oldest = inputs_BTC.shape[1] - len(taps_KC) + 1, len(taps_KC) - 1
    z_BQC = inputs_BTC[:, :length] * taps_KC[0]
    for number, tap_C in enumerate(taps_KC.unbind()[1:], start=1):
        _clear(z_BQC, ages_BQ, oldest - number + 1)
        z_BQC.addcmul_(inputs_BTC[:, number : number + length], tap_C)
    return z_BQC if bias_C is None else z_BQC.add_(bias_C)


def _clear(z_BQC: Tensor, ages_BQ: Tensor | None, age: int) -> None:
    """Set the rows of positions to 0 whose document has fewer positions before them."""
    if ages_BQ is None:
        return
    if z_BQC.device.type == "cpu":
        z_BQC.view(-1, z_BQC.shape[-1]).index_fill_(0, (ages_BQ < age).flatten().nonzero()[:, 0], 0)
    else:
        z_BQC.masked_fill_((ages_BQ < age)[..., None], 0)
