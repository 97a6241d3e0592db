"""torch's FlexAttention (Dong et al. 2024): a kernel that a compiler makes for a mask given as a function.

What a block of queries does not see of the keys at all is skipped. On a CPU there is no backward pass; what
ran on a GPU: docs/gpu-results.md.

Shapes: see `sight`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from pipeline.train.model.kernels.attention_mask import AttentionMask
from pipeline.train.parallel.torch_compat.compiler import keep_compiled_code_private, lift_recompile_limits


class Flex:
    """FlexAttention with a mask by blocks, which is made once in a forward pass."""

    def prepare(self, sight: AttentionMask) -> BlockMask:
        """See `Kernel`."""
        bounds_BC, past, window = sight.bounds_BC, sight.start, sight.window

        def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            seen = k <= q + past
            if window is not None:
                seen = seen & (k > q + past - window)
            if bounds_BC is not None:
                seen = seen & (k >= bounds_BC[b, q])
            return seen

        samples = None if bounds_BC is None else sight.samples
        make = _compiled(create_block_mask) if sight.device.type == "cuda" else create_block_mask
        mask: BlockMask = make(sees, samples, None, sight.queries, sight.end, device=sight.device)
        return mask

    def __call__(self, q_BCHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, prepared: BlockMask, scale: float) -> Tensor:
        """See `Kernel`."""
        # Within a compiled layer the compiler follows as it is.
        compiles = q_BCHE.device.type == "cuda" and not torch.compiler.is_compiling()
        attend = _compiled(flex_attention) if compiles else flex_attention
        out_BHCE: Tensor = attend(
            q_BCHE.transpose(1, 2),
            k_BTKE.transpose(1, 2),
            v_BTKE.transpose(1, 2),
            block_mask=prepared,
            scale=scale,
            enable_gqa=q_BCHE.shape[2] != k_BTKE.shape[2],
        )
        return out_BHCE.transpose(1, 2)


@cache
def _compiled(function: Any) -> Any:
    """Without it, all scores would be in memory; and so they would past the limits, where it runs uncompiled.

    Lengths are few: those of phases, and those of validation, which are 64 times a power of two.
    """
    lift_recompile_limits()
    keep_compiled_code_private()
    return torch.compile(function, dynamic=False)


OPERATION: Any = torch.ops.higher_order.flex_attention
"""Whose results selective recomputation keeps, within compiled layers."""
