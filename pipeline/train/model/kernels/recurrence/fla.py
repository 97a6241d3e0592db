"""Recurrences by the package fla-core (extra `linear`): Triton kernels for GPUs, of its version 0.6.

Its functions take documents of all rows one after the other, with the places where they begin on the device and on the
host. The host learns them from the first call with a batch's bounds, for which it waits once.

One operation stands for all of them, since a compiler cannot follow the package: its backward pass calls the package
again and differentiates that.

Shapes: B batch, S positions, H heads, P size of a value head, G groups, K key heads, N state size, C channels, W
weights of a channel, D documents of all rows.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.common.errors import UserError, install_extra
from pipeline.train.model.kernels.recurrence.base import RecurrentKernels
from pipeline.train.model.kernels.recurrence.chunks import Chunks
from pipeline.train.torch_compat.core import recorded_by_autograd


def load() -> RecurrentKernels:
    """The kernels, of a package that can be imported.

    Raises:
        UserError: It cannot.
    """
    try:
        for module, function in _FUNCTIONS:
            getattr(importlib.import_module(module), function)
    except Exception as error:  # built for another torch or Triton, it may end in anything
        raise UserError(
            f"train.recurrence.backend=fla needs the package fla-core, which cannot be imported "
            f"({type(error).__name__}: {error}): install the extra linear ({install_extra('linear')}), or set "
            "train.recurrence.backend=plain"
        ) from error
    return RecurrentKernels(_ssd, _delta_rule, _causal_conv)


_SSD = ("fla.ops.simple_gla", "chunk_simple_gla")
_GATED_DELTA_RULE = ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")
_KDA = ("fla.ops.kda", "chunk_kda")
_CONV = ("fla.modules.causal_conv1d", "causal_conv1d")
_FUNCTIONS = (_SSD, _GATED_DELTA_RULE, _KDA, _CONV)


def _call(function: tuple[str, str], *given: Any, **named: Any) -> Any:
    return getattr(importlib.import_module(function[0]), function[1])(*given, **named)


@dataclass(frozen=True)
class _Documents:
    """Documents of all rows in their order, the parts of rows ahead of the first beginning included."""

    ends: Tensor
    """[D + 1] int64: how many positions come before each, and at last all."""
    host_ends: Tensor
    first_B: Tensor
    """Number of the document that each row begins in."""
    last_B: Tensor
    """Number of the document that it ends in."""

    @property
    def count(self) -> int:
        return len(self.ends) - 1


_known: list[tuple[weakref.ref[Tensor], _Documents]] = []
"""Those that were asked for last."""


def _documents(bounds_BS: Tensor) -> _Documents:
    """Those of the bounds; kept for the next layer, which asks for the same."""
    for of_bounds, documents in _known:
        if of_bounds() is bounds_BS:
            return documents
    begins_BS = bounds_BS.cpu() == torch.arange(bounds_BS.shape[1])
    begins_BS[:, 0] = True
    counts_B = begins_BS.sum(1)
    host_ends = F.pad(begins_BS.flatten().nonzero()[:, 0], (0, 1), value=begins_BS.numel())
    last_B = counts_B.cumsum(0) - 1
    numbers = (host_ends, last_B - counts_B + 1, last_B)
    ends, first_B, last_B = (each.to(bounds_BS.device) for each in numbers)
    found = _Documents(ends, host_ends, first_B, last_B)
    _known[:] = [(weakref.ref(bounds_BS), found)]
    return found


def _in_documents(
    call: Callable[..., tuple[Tensor, Tensor]], inputs: Sequence[Tensor], initial_B: Tensor, bounds_BS: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Results [B, S, ...] and the states of rows [B, ...] of a function of inputs [B, S, ...] and initial states."""
    if bounds_BS is None:
        return call(*inputs, initial_state=initial_B, output_final_state=True)
    documents = _documents(bounds_BS)
    entering_B = initial_B * (bounds_BS[:, 0] < 0).view(-1, *[1] * (initial_B.ndim - 1))
    initial_D = initial_B.new_zeros(documents.count, *initial_B.shape[1:]).index_copy(0, documents.first_B, entering_B)
    out_1T, last_D = call(
        *(each.flatten(0, 1)[None] for each in inputs),
        initial_state=initial_D,
        output_final_state=True,
        cu_seqlens=documents.ends,
        cu_seqlens_cpu=documents.host_ends,
    )
    return torch.unflatten(out_1T[0], 0, bounds_BS.shape), last_D.index_select(0, documents.last_B)


def _run_ssd(given: Sequence[Tensor], bounds_BS: Tensor | None) -> list[Tensor]:
    x_BSHP, dt_BSH, a_H, b_BSGN, c_BSGN, initial_BHPN = given
    repeats = x_BSHP.shape[2] // b_BSGN.shape[2]
    b_BSHN, c_BSHN = (m_BSGN.to(x_BSHP.dtype).repeat_interleave(repeats, dim=2) for m_BSGN in (b_BSGN, c_BSGN))
    v_BSHP, g_BSH = (x_BSHP * dt_BSH[..., None]).to(x_BSHP.dtype), dt_BSH * a_H

    def call(q: Tensor, k: Tensor, v: Tensor, g: Tensor, **named: Any) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = _call(_SSD, q=q, k=k, v=v, g=g, scale=1.0, **named)
        return out

    y_BSHP, last_BHNP = _in_documents(call, (c_BSHN, b_BSHN, v_BSHP, g_BSH), initial_BHPN.mT.contiguous(), bounds_BS)
    return [y_BSHP, last_BHNP.mT.contiguous()]


def _run_delta_rule(given: Sequence[Tensor], bounds_BS: Tensor | None, scale: float) -> list[Tensor]:
    q_BSKN, k_BSKN, v_BSHP, g, beta_BSH, initial_BHNP = given
    by_channel = g.ndim == 4

    def call(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **named: Any) -> tuple[Tensor, Tensor]:
        function = _KDA if by_channel else _GATED_DELTA_RULE
        out: tuple[Tensor, Tensor] = _call(function, q=q, k=k, v=v, g=g, beta=beta, scale=scale, **named)
        return out

    inputs = (q_BSKN.to(v_BSHP.dtype), k_BSKN.to(v_BSHP.dtype), v_BSHP, g, beta_BSH)
    return list(_in_documents(call, inputs, initial_BHNP, bounds_BS))


def _run_conv(given: Sequence[Tensor], bounds_BS: Tensor | None, activation: bool) -> list[Tensor]:
    x_BSC, weight_CW, bias_C, before_BWC = given
    if bounds_BS is not None:
        # What is ahead of the document that goes on in the sequence is another's.
        place_W = torch.arange(-before_BWC.shape[1], 0, device=x_BSC.device)
        before_BWC = before_BWC * (place_W >= bounds_BS[:, :1])[..., None]
    # A state of the package has room for one input more, which is not read.
    initial_BCW = F.pad(before_BWC.transpose(1, 2), (1, 0))

    def call(x: Tensor, **named: Any) -> tuple[Tensor, Tensor]:
        silu = "silu" if activation else None
        out: tuple[Tensor, Tensor] = _call(_CONV, x=x, weight=weight_CW, bias=bias_C, activation=silu, **named)
        return out

    return [_in_documents(call, (x_BSC,), initial_BCW, bounds_BS)[0]]


def _compute(
    kernel: str, given: Sequence[Tensor], bounds_BS: Tensor | None, scale: float, activation: bool
) -> list[Tensor]:
    if kernel == "ssd":
        return _run_ssd(given, bounds_BS)
    if kernel == "delta_rule":
        return _run_delta_rule(given, bounds_BS, scale)
    return _run_conv(given, bounds_BS, activation)


@torch.library.custom_op("pipeline::fla", mutates_args=())
def _fla(
    kernel: str, given: Sequence[Tensor], bounds_BS: Tensor | None, scale: float, activation: bool
) -> list[Tensor]:
    """Results of a kernel, of its tensors; the last one is what is ahead of the sequence."""
    return [each.contiguous() for each in _compute(kernel, given, bounds_BS, scale, activation)]


@_fla.register_fake
def _(kernel: str, given: Sequence[Tensor], bounds_BS: Tensor | None, scale: float, activation: bool) -> list[Tensor]:
    out = given[2] if kernel == "delta_rule" else given[0]
    states = [] if kernel == "causal_conv" else [given[-1]]
    return [each.new_empty(each.shape) for each in (out, *states)]


@torch.library.custom_op("pipeline::fla_backward", mutates_args=())
def _fla_backward(
    kernel: str,
    gradients: Sequence[Tensor],
    given: Sequence[Tensor],
    bounds_BS: Tensor | None,
    scale: float,
    activation: bool,
) -> list[Tensor]:
    """Gradients of the tensors."""
    with recorded_by_autograd():
        leaves = [each.detach().requires_grad_() for each in given]
        outputs = _compute(kernel, leaves, bounds_BS, scale, activation)
        found = torch.autograd.grad(outputs, leaves, list(gradients), allow_unused=True, materialize_grads=True)
    return [each.contiguous() for each in found]


@_fla_backward.register_fake
def _(
    kernel: str,
    gradients: Sequence[Tensor],
    given: Sequence[Tensor],
    bounds_BS: Tensor | None,
    scale: float,
    activation: bool,
) -> list[Tensor]:
    return [each.new_empty(each.shape) for each in given]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.kernel, given, bounds_BS, ctx.scale, ctx.activation = inputs
    ctx.save_for_backward(bounds_BS, *given)


def _differentiate(ctx: Any, gradients: list[Tensor]) -> tuple[Any, ...]:
    bounds_BS, *given = ctx.saved_tensors
    return None, _fla_backward(ctx.kernel, gradients, given, bounds_BS, ctx.scale, ctx.activation), None, None, None


_fla.register_autograd(_differentiate, setup_context=_keep)


def _ssd(
    x_BSHP: Tensor,
    dt_BSH: Tensor,
    a_H: Tensor,
    b_BSGN: Tensor,
    c_BSGN: Tensor,
    chunks: Chunks,
    initial_BHPN: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `ssd.py`."""
    if initial_BHPN is None:
        (B, _, H, P), N = x_BSHP.shape, b_BSGN.shape[3]
        initial_BHPN = dt_BSH.new_zeros(B, H, P, N)
    y_BSHP, last_BHPN = _fla("ssd", [x_BSHP, dt_BSH, a_H, b_BSGN, c_BSGN, initial_BHPN], chunks.bounds_BS, 1.0, False)
    return y_BSHP, last_BHPN


def _delta_rule(
    q_BSKN: Tensor,
    k_BSKN: Tensor,
    v_BSHP: Tensor,
    g: Tensor,
    beta_BSH: Tensor,
    chunks: Chunks,
    initial_BHNP: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """See `kernels/delta_rule.py`."""
    (B, _, H, P), N = v_BSHP.shape, q_BSKN.shape[3]
    if initial_BHNP is None:
        initial_BHNP = g.new_zeros(B, H, N, P)
    given = [q_BSKN, k_BSKN, v_BSHP, g, beta_BSH, initial_BHNP]
    out_BSHP, last_BHNP = _fla("delta_rule", given, chunks.bounds_BS, N**-0.5 if scale is None else scale, False)
    return out_BSHP, last_BHNP


def _causal_conv(
    x_BSC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    before_BWC: Tensor | None,
    chunks: Chunks,
    activation: bool = True,
) -> Tensor:
    """See `kernels/causal_conv.py`."""
    if bias_C is None:
        bias_C = torch.zeros_like(weight_CW[:, 0])
    if before_BWC is None:
        before_BWC = x_BSC.new_zeros(x_BSC.shape[0], weight_CW.shape[1] - 1, x_BSC.shape[2])
    out: list[Tensor] = _fla("causal_conv", [x_BSC, weight_CW, bias_C, before_BWC], chunks.bounds_BS, 1.0, activation)
    return out[0]
