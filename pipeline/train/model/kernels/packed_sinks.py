"""Sinks for kernels of packed documents, from their forward and backward passes; see `tiles`.

Shapes: M queries of all documents, J their keys, H query heads, K key and value heads, E head size, V size of a value
head, N documents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor

from pipeline.train.model.kernels.attention_mask import Terms
from pipeline.train.model.kernels.packing import Packing
from pipeline.train.model.kernels.tiles import sink_gradient


@dataclass(frozen=True)
class PackedArguments:
    """Arguments of a kernel besides queries, keys and values."""

    queries_N: Tensor
    keys_N: Tensor
    longest_queries: int
    longest_keys: int
    scale: float
    soft_cap: float
    """0: none."""
    back: int
    ahead: int
    deterministic: bool

    @property
    def causal(self) -> bool:
        """See `Packing`."""
        return self.ahead == 0

    @property
    def window(self) -> tuple[int, int]:
        """Window of a kernel that gets causality as an argument of its own."""
        return (-1, -1) if (self.back, self.ahead) == (-1, 0) else (self.back, self.ahead)


Forward = Callable[[Tensor, Tensor, Tensor, PackedArguments], tuple[Tensor, Tensor]]
"""Queries [M, H, E], keys, values -> output [M, H, V], and logarithms of the sums of exponentials [H, M], fp32."""
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, PackedArguments], tuple[Tensor, Tensor, Tensor]]
"""Gradient, queries, keys, values, output, sums -> gradients of queries, keys and values."""


def _varlen(q: Tensor, k: Tensor, v: Tensor, packed: PackedArguments) -> tuple[Tensor, Tensor]:
    operation = torch.ops.torch_attn._varlen_attn.default
    how = _varlen_arguments(packed)
    if any(argument.name == "enable_gqa" for argument in operation._schema.arguments):
        how["enable_gqa"] = q.shape[1] != k.shape[1]  # 2.11 has no such argument, and is given the keys of each head
    found = operation(q, k, v, packed.queries_N, packed.keys_N, packed.longest_queries, packed.longest_keys, **how)
    return found[0], found[1]


def _varlen_arguments(packed: PackedArguments) -> dict[str, Any]:
    window = [packed.back, packed.ahead]
    return {"is_causal": window == [-1, 0], "scale": packed.scale, "window_size": window}


def _varlen_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, packed: PackedArguments
) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.zeros(2, dtype=torch.uint64, device=q.device)  # there is no dropout
    given = (gradient, q, k, v, out, sums, packed.queries_N, packed.keys_N, packed.longest_queries, packed.longest_keys)
    operation = torch.ops.torch_attn._varlen_attn_backward.default
    found = operation(*given, rng_state=random, **_varlen_arguments(packed))
    return cast(tuple[Tensor, Tensor, Tensor], tuple(found))


def _flash2(q: Tensor, k: Tensor, v: Tensor, packed: PackedArguments) -> tuple[Tensor, Tensor]:
    found = import_module("flash_attn.flash_attn_interface")._flash_attn_varlen_forward(
        q,
        k,
        v,
        packed.queries_N,
        packed.keys_N,
        packed.longest_queries,
        packed.longest_keys,
        0.0,
        packed.scale,
        causal=packed.causal,
        window_size_left=packed.window[0],
        window_size_right=packed.window[1],
        softcap=packed.soft_cap,
        alibi_slopes=None,
        return_softmax=False,
    )
    return found[0], found[1]


def _flash2_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, packed: PackedArguments
) -> tuple[Tensor, Tensor, Tensor]:
    found = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
    import_module("flash_attn.flash_attn_interface")._flash_attn_varlen_backward(
        gradient,
        q,
        k,
        v,
        out,
        sums,
        *found,
        packed.queries_N,
        packed.keys_N,
        packed.longest_queries,
        packed.longest_keys,
        0.0,
        packed.scale,
        packed.causal,
        *packed.window,
        packed.soft_cap,
        None,
        packed.deterministic,
    )
    return found


def _flash3(q: Tensor, k: Tensor, v: Tensor, packed: PackedArguments) -> tuple[Tensor, Tensor]:
    found = import_module("flash_attn_interface")._flash_attn_forward(
        q,
        k,
        v,
        causal=packed.causal,
        **_flash3_arguments(packed),
    )
    return found[0], found[1]


def _flash3_arguments(packed: PackedArguments) -> dict[str, Any]:
    return {
        "cu_seqlens_q": packed.queries_N,
        "cu_seqlens_k": packed.keys_N,
        "max_seqlen_q": packed.longest_queries,
        "max_seqlen_k": packed.longest_keys,
        "softmax_scale": packed.scale,
        "window_size_left": packed.window[0],
        "window_size_right": packed.window[1],
        "softcap": packed.soft_cap,
    }


def _flash3_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, packed: PackedArguments
) -> tuple[Tensor, Tensor, Tensor]:
    found = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
    import_module("flash_attn_interface")._flash_attn_backward(
        gradient,
        q,
        k,
        v,
        out,
        sums,
        dq=found[0],
        dk=found[1],
        dv=found[2],
        is_causal=packed.causal,
        deterministic=packed.deterministic,
        **_flash3_arguments(packed),
    )
    return found


PASSES: dict[str, tuple[Forward, Backward]] = {
    "varlen": (_varlen, _varlen_backward),
    "flash 2": (_flash2, _flash2_backward),
    "flash 3": (_flash3, _flash3_backward),
}
"""Passes of a kernel, by its name."""


def takes_sinks(kernel: str) -> bool:
    """True if both passes of a version of flash-attn can be called, which has been imported: not those of 4."""
    if kernel == "flash 2":  # the arguments are those from 2.7 on
        return hasattr(import_module("flash_attn.flash_attn_interface"), "_wrapped_flash_attn_varlen_backward")
    if kernel == "flash 3":  # older builds have a function that is no operation, and other arguments
        names = ("_flash_attn_forward", "_flash_attn_backward")
        return all(hasattr(torch.ops.flash_attn_3, name) for name in names)
    return False


def attend_with_sinks(
    qkv: Sequence[Tensor],
    sinks_H: Tensor,
    packing: Packing,
    terms: Terms,
    kernel: str,
    deterministic: bool = False,
) -> Tensor:
    """Every query's sum of the values that it sees, [M, H, V], the sinks among the exponentials."""
    out, _ = _attend(
        *qkv,
        sinks_H,
        packing.queries_N,
        packing.keys_N,
        packing.longest_queries,
        packing.longest_keys,
        terms.scale,
        terms.soft_cap or 0.0,
        *packing.window,
        deterministic,
        kernel,
    )
    return cast(Tensor, out)


@torch.library.custom_op("pipeline::packed_attention_with_sinks", mutates_args=())
def _attend(
    q_MHE: Tensor,
    k_JKE: Tensor,
    v_JKV: Tensor,
    sinks_H: Tensor,
    queries_N: Tensor,
    keys_N: Tensor,
    longest_queries: int,
    longest_keys: int,
    scale: float,
    soft_cap: float,
    back: int,
    ahead: int,
    deterministic: bool,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    """Output [M, H, V], and logarithms of the sums of exponentials [H, M], those of the sinks among them."""
    packed = PackedArguments(
        queries_N, keys_N, longest_queries, longest_keys, scale, soft_cap, back, ahead, deterministic
    )
    out, sums = PASSES[kernel][0](q_MHE, k_JKE, v_JKV, packed)
    joined = torch.logaddexp(sums, sinks_H[:, None].to(sums.dtype))
    share_MH = (sums - joined).exp_().transpose(0, 1)
    return (out * share_MH[..., None]).to(q_MHE.dtype), joined


@torch.library.custom_op("pipeline::packed_attention_with_sinks_backward", mutates_args=())
def _attend_backward(
    gradient_MHV: Tensor,
    q_MHE: Tensor,
    k_JKE: Tensor,
    v_JKV: Tensor,
    sinks_H: Tensor,
    queries_N: Tensor,
    keys_N: Tensor,
    out_MHV: Tensor,
    sums_HM: Tensor,
    longest_queries: int,
    longest_keys: int,
    scale: float,
    soft_cap: float,
    back: int,
    ahead: int,
    deterministic: bool,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, keys, values and sinks."""
    packed = PackedArguments(
        queries_N, keys_N, longest_queries, longest_keys, scale, soft_cap, back, ahead, deterministic
    )
    given = (gradient_MHV.contiguous(), q_MHE, k_JKE, v_JKV, out_MHV, sums_HM, packed)
    to_sinks = sink_gradient(gradient_MHV, out_MHV, sums_HM.transpose(0, 1), sinks_H)
    return *PASSES[kernel][1](*given), to_sinks


@_attend.register_fake
def _(q_MHE: Tensor, k_JKE: Tensor, v_JKV: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    tokens, heads, _size = q_MHE.shape
    return q_MHE.new_empty(tokens, heads, v_JKV.shape[-1]), q_MHE.new_empty(heads, tokens, dtype=torch.float32)


@_attend_backward.register_fake
def _(
    gradient_MHV: Tensor, q_MHE: Tensor, k_JKE: Tensor, v_JKV: Tensor, sinks_H: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    to_q, to_k, to_v, to_sinks = (x.new_empty(x.shape) for x in (q_MHE, k_JKE, v_JKV, sinks_H))
    return to_q, to_k, to_v, to_sinks


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:6], *output)
    ctx.numbers = inputs[6:]
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, gradient_MHV: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    found = _attend_backward(gradient_MHV, *ctx.saved_tensors, *ctx.numbers)
    return *found, *(None,) * 10


_attend.register_autograd(_differentiate, setup_context=_keep)
