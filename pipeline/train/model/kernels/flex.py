"""torch's FlexAttention (Dong et al. 2024): a kernel that a compiler makes for a mask given as a function.

What a block of queries does not see of the keys at all is skipped. On a CPU there is no backward pass; what
ran on a GPU: docs/gpu-results.md.

Shapes: see `attention_mask`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from pipeline.train.model.kernels.attention_mask import AttentionMask, Terms
from pipeline.train.torch_compat.compiler import keep_compiled_code_private, lift_recompile_limits


class Flex:
    """FlexAttention with a mask by blocks, which is made once in a forward pass."""

    def prepare(self, mask: AttentionMask) -> BlockMask:
        """See `Kernel`."""
        on_gpu = mask.device.type == "cuda"
        make = _compiled(create_block_mask) if on_gpu else create_block_mask
        samples = None if mask.documents is None else mask.samples
        found: BlockMask = make(_sees(mask), samples, None, mask.queries, mask.keys, device=mask.device)
        return found

    def __call__(
        self,
        q_BCHE: Tensor,
        k_BTKE: Tensor,
        v_BTKV: Tensor,
        prepared: BlockMask,
        terms: Terms,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """See `Kernel`."""
        # Within a compiled layer the compiler follows as it is.
        compiles = q_BCHE.device.type == "cuda" and not torch.compiler.is_compiling()
        attend = _compiled(flex_attention) if compiles else flex_attention
        how: dict[str, Any] = {}
        if terms.soft_cap is not None:
            # The compiler makes code for the function itself, and does not follow what keeps it.
            make = _capped if torch.compiler.is_compiling() else _kept_cap
            how["score_mod"] = make(terms.soft_cap)
        if sinks_H is not None:
            how["return_aux"] = AuxRequest(lse=True)
        found: Any = attend(
            q_BCHE.transpose(1, 2),
            k_BTKE.transpose(1, 2),
            v_BTKV.transpose(1, 2),
            block_mask=prepared,
            scale=terms.scale,
            enable_gqa=q_BCHE.shape[2] != k_BTKE.shape[2],
            **how,
        )
        if sinks_H is None:
            return cast(Tensor, found).transpose(1, 2)
        # These sums have a gradient, so that to scale the output is all.
        out_BHCV, sums_BHC = cast(Tensor, found[0]), cast(Tensor, found[1].lse)
        share_BHC = torch.sigmoid(sums_BHC - sinks_H.to(sums_BHC.dtype)[:, None])
        return (out_BHCV * share_BHC[..., None]).to(q_BCHE.dtype).transpose(1, 2)


def _sees(mask: AttentionMask) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The mask as a function of sample, head, query and key."""
    if mask.documents is None:
        past, back, ahead = mask.start, mask.reach.back, mask.reach.ahead

        def by_distance(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            seen = k >= 0
            if ahead is not None:
                seen = k <= q + past + ahead
            if back is not None:
                seen = seen & (k >= q + past - back)
            return seen

        return by_distance
    # One row, where all have the same, becomes one for each sample.
    low_BC, high_BC = (x.expand(mask.samples, -1).contiguous() for x in mask.interval())

    def within(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k >= low_BC[b, q]) & (k < high_BC[b, q])

    return within


def _capped(cap: float) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The change of a score."""

    def change(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return change


_kept_cap = cache(_capped)
"""One function for equal caps."""


@cache
def _compiled(function: Any) -> Any:
    """FlexAttention, compiled. Uncompiled it has all scores in memory, also where torch gives up at its limits.

    Lengths are few: those of phases, and those of validation, which are 64 times a power of two.
    """
    lift_recompile_limits()
    keep_compiled_code_private()
    return torch.compile(function, dynamic=False)


OPERATION: Any = torch.ops.higher_order.flex_attention
"""Whose results selective recomputation keeps, within compiled layers."""
