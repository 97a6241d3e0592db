"""Short causal convolution by channel, with silu, in PyTorch: what recurrent mixers see of the positions before.

The last weight of a channel is that of the position itself, as in `torch.nn.Conv1d`. Inputs of another document count
as 0: a sum begins with the oldest input, and is set to 0 where the next one is the first of a document, so that nothing
of the document before is in it.

It is an operation of its own, of which only the inputs are kept for the backward pass. A compiler for a GPU gets the
plain sum to fuse; on a CPU it would be slower than the operation.

Shapes: B batch, S positions, C channels, K weights of a channel, Q positions at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.train.model.kernels.recurrence.chunks import Chunks

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
    """The convolution [B, S, C], in the type of x, with silu after it.

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
    if torch.compiler.is_compiling() and x_BSC.device.type != "cpu":
        return _plain(x_BSC, weight_CK, bias_C, before_BKC, ages_BS, activation)
    return cast(Tensor, _conv(x_BSC, weight_CK, bias_C, before_BKC, ages_BS, activation))


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


@torch.library.custom_op("pipeline::causal_conv", mutates_args=())
def _conv(
    x_BSC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None,
    before_BKC: Tensor,
    ages_BS: Tensor | None,
    activation: bool,
) -> Tensor:
    """The convolution as `_plain` computes it, a few positions at a time."""
    y_BSC = torch.empty_like(x_BSC, memory_format=torch.contiguous_format)
    taps_KC = _taps(weight_CK, x_BSC)
    for begin, inputs_BTC, young in _parts(x_BSC, before_BKC, ages_BS, taps_KC):
        z_BQC = _sums(inputs_BTC, taps_KC, bias_C, young)
        y_BSC[:, begin : begin + z_BQC.shape[1]] = F.silu(z_BQC, inplace=True) if activation else z_BQC
    return y_BSC


@_conv.register_fake
def _(x_BSC: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(x_BSC, memory_format=torch.contiguous_format)


@torch.library.custom_op("pipeline::causal_conv_backward", mutates_args=())
def _conv_backward(
    dy_BSC: Tensor,
    x_BSC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None,
    before_BKC: Tensor,
    ages_BS: Tensor | None,
    activation: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weights, biases and the inputs before, that of biases also where there are none."""
    taps_KC = _taps(weight_CK, x_BSC)
    into_taps_KC, into_bias_C = torch.zeros_like(taps_KC), torch.zeros_like(taps_KC[0])
    (B, S, C), oldest = x_BSC.shape, len(taps_KC) - 1
    # Of the inputs before as well. Parts add to each other's where they meet.
    into_BTC = x_BSC.new_zeros(B, oldest + S, C, dtype=taps_KC.dtype)
    for begin, inputs_BTC, young in _parts(x_BSC, before_BKC, ages_BS, taps_KC):
        end = begin + inputs_BTC.shape[1] - oldest
        dz_BQC = dy_BSC[:, begin:end].to(taps_KC.dtype)
        if activation:
            dz_BQC = torch.ops.aten.silu_backward(dz_BQC, _sums(inputs_BTC, taps_KC, bias_C, young))
        elif young is not None:
            dz_BQC = dz_BQC.clone(memory_format=torch.contiguous_format)
        into_bias_C += dz_BQC.sum((0, 1))
        for age, tap_C in enumerate(reversed(taps_KC.unbind())):
            if age and young is not None:
                young.clear(dz_BQC, age)
            number = oldest - age
            into_BTC[:, begin + number : end + number].addcmul_(dz_BQC, tap_C)
            into_taps_KC[number] += (dz_BQC * inputs_BTC[:, number : number + end - begin]).sum((0, 1))
    return (
        into_BTC[:, oldest:].to(x_BSC.dtype, copy=True, memory_format=torch.contiguous_format),
        into_taps_KC.t().to(weight_CK.dtype, copy=True, memory_format=torch.contiguous_format),
        into_bias_C.to(weight_CK.dtype if bias_C is None else bias_C.dtype, copy=True),
        into_BTC[:, :oldest].to(before_BKC.dtype, copy=True, memory_format=torch.contiguous_format),
    )


@_conv_backward.register_fake
def _(
    dy_BSC: Tensor, x_BSC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, before_BKC: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    biases = weight_CK.new_empty(len(weight_CK), dtype=weight_CK.dtype if bias_C is None else bias_C.dtype)
    x, weight, before = (each.new_empty(each.shape) for each in (x_BSC, weight_CK, before_BKC))
    return x, weight, biases, before


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.activation = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, dy_BSC: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias, before = _conv_backward(dy_BSC, *ctx.saved_tensors, ctx.activation)
    return x, weight, bias if ctx.needs_input_grad[2] else None, before, None, None


_conv.register_autograd(_differentiate, setup_context=_keep)


def _taps(weight_CK: Tensor, x_BSC: Tensor) -> Tensor:
    """[K, C] in the type of sums."""
    return weight_CK.to(torch.promote_types(x_BSC.dtype, torch.float32)).t().contiguous()


@dataclass(frozen=True)
class _Young:
    """Positions of a part whose document has too few positions before them for some taps."""

    of_age: tuple[Tensor, ...]
    """By age of a tap, from 1 on: on a CPU the numbers of the positions without an input of it, elsewhere a mask."""

    @classmethod
    def of(cls, ages_BQ: Tensor, oldest: int) -> _Young:
        masks = [ages_BQ < age for age in range(1, oldest + 1)]
        if ages_BQ.device.type == "cpu":
            return cls(tuple(mask_BQ.flatten().nonzero()[:, 0] for mask_BQ in masks))
        return cls(tuple(mask_BQ[..., None] for mask_BQ in masks))

    def clear(self, z_BQC: Tensor, age: int) -> None:
        """Set the sums of positions to 0 that have no input of an age."""
        if z_BQC.device.type == "cpu":
            z_BQC.view(-1, z_BQC.shape[-1]).index_fill_(0, self.of_age[age - 1], 0)
        else:
            z_BQC.masked_fill_(self.of_age[age - 1], 0)


def _parts(
    x_BSC: Tensor, before_BKC: Tensor, ages_BS: Tensor | None, taps_KC: Tensor
) -> Iterator[tuple[int, Tensor, _Young | None]]:
    """Parts of a sequence: the first position, the inputs with the K - 1 before them, and where a document is young.

    A CPU looks for that where a document begins in the part; a GPU is not asked.
    """
    S, oldest, on_cpu = x_BSC.shape[1], len(taps_KC) - 1, x_BSC.device.type == "cpu"
    size = _POSITIONS["cpu" if on_cpu else "cuda"]
    begins = range(0, S, size)
    begun = [ages_BS is not None] * len(begins)
    if ages_BS is not None and on_cpu:
        young_S = F.pad((ages_BS < oldest).any(0), (0, -S % size))
        begun = young_S.view(-1, size).any(1).tolist()
    for begin, young in zip(begins, begun, strict=True):
        inputs_BTC = x_BSC[:, max(0, begin - oldest) : begin + size].to(taps_KC.dtype)
        if begin < oldest:
            inputs_BTC = torch.cat((before_BKC[:, begin:].to(taps_KC.dtype), inputs_BTC), 1)
        found = _Young.of(ages_BS[:, begin : begin + size], oldest) if young and ages_BS is not None else None
        yield begin, inputs_BTC, found


def _sums(inputs_BTC: Tensor, taps_KC: Tensor, bias_C: Tensor | None, young: _Young | None) -> Tensor:
    """Sums of a part."""
    length, oldest = inputs_BTC.shape[1] - len(taps_KC) + 1, len(taps_KC) - 1
    z_BQC = inputs_BTC[:, :length] * taps_KC[0]
    for number, tap_C in enumerate(taps_KC.unbind()[1:], start=1):
        if young is not None:
            young.clear(z_BQC, oldest - number + 1)
        z_BQC.addcmul_(inputs_BTC[:, number : number + length], tap_C)
    return z_BQC if bias_C is None else z_BQC.add_(bias_C)
