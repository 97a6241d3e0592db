"""torch's own attention (`scaled_dot_product_attention`), on any device."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import CausalBias, causal_lower_right

from pipeline.train.model.kernels.sight import Sight
from pipeline.train.model.kernels.tiles import Tiles, tile, tiled_attention

Mask = Tensor | None


class Sdpa:
    """Without documents and windows the kernel that torch takes; with them tiles on a CPU, and a mask on a GPU.

    Args:
        on_gpu: Whether a GPU's kernels are to be fed; None: where the tensors are on one. For estimates of memory.
    """

    def __init__(self, on_gpu: bool | None = None) -> None:
        self._on_gpu = on_gpu

    def prepare(self, sight: Sight) -> Mask | Tiles:
        """See `Kernel`. None: a query sees all keys up to itself, and there is one, or one for each key."""
        if sight.causal and sight.queries in (1, sight.end):
            return None
        on_gpu = sight.device.type == "cuda" if self._on_gpu is None else self._on_gpu
        if not on_gpu:
            return tile(sight)
        if sight.causal:
            # Causality of the last queries: what flash kernels of GPUs do without a mask in memory.
            return causal_lower_right(sight.queries, sight.end)
        return sight.mask()

    def __call__(self, q_BCHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, prepared: Mask | Tiles, scale: float) -> Tensor:
        """See `Kernel`."""
        if isinstance(prepared, Tiles):
            return tiled_attention(q_BCHE, k_BTKE, v_BTKE, prepared, scale)
        return masked_attention(q_BCHE, k_BTKE, v_BTKE, prepared, scale, self._on_gpu)


def masked_attention(
    q_BCHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, mask: Mask, scale: float, on_gpu: bool | None = None
) -> Tensor:
    """Attention with a mask in memory, see `attention_mask`, [B, C, H, E].

    Args:
        on_gpu: See `Sdpa`.
    """
    on_gpu = q_BCHE.device.type == "cuda" if on_gpu is None else on_gpu
    copies = q_BCHE.shape[2] // k_BTKE.shape[2]
    if copies > 1 and on_gpu and mask is not None and not isinstance(mask, CausalBias):
        # Of torch's kernels for GPUs only cuDNN's, which some have, takes a mask together with shared heads. Without
        # one that does, all scores would be in memory.
        k_BTKE, v_BTKE = (x.repeat_interleave(copies, dim=2) for x in (k_BTKE, v_BTKE))
        copies = 1
    out_BHCE = F.scaled_dot_product_attention(
        q_BCHE.transpose(1, 2),
        k_BTKE.transpose(1, 2),
        v_BTKE.transpose(1, 2),
        attn_mask=mask,
        # One query of several keys is the last, and sees them all; torch's causality would show it the first.
        is_causal=mask is None and q_BCHE.shape[1] == k_BTKE.shape[1],
        scale=scale,
        enable_gqa=copies > 1,
    )
    return out_BHCE.transpose(1, 2)
