"""torch's own attention (`scaled_dot_product_attention`), on any device.

`torch.nn.attention.bias` is imported only where there is such a mask, on a GPU: it imports the compiler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.train.model.kernels.attention_mask import AttentionMask
from pipeline.train.model.kernels.tiles import Tiles, tile, tiled_attention

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias

Mask = Tensor | None

_FLASH_HEAD = 256
"""Head size that torch's flash kernels take at most."""


class Sdpa:
    """Without documents and windows the kernel that torch takes; with them tiles on a CPU, and a mask on a GPU.

    Args:
        on_gpu: Whether a GPU's kernels are to be fed; None: where the tensors are on one. For estimates of memory.
    """

    def __init__(self, on_gpu: bool | None = None) -> None:
        self._on_gpu = on_gpu
        self._flash = False
        """See `has_flash`."""

    def prepare(self, sight: AttentionMask) -> Mask | Tiles:
        """See `Kernel`. None: a query sees all keys up to itself, and there is one, or one for each key."""
        self._flash = has_flash(sight.device)
        if sight.causal and sight.queries in (1, sight.end):
            return None
        on_gpu = sight.device.type == "cuda" if self._on_gpu is None else self._on_gpu
        if not on_gpu:
            return tile(sight)
        if sight.causal:
            # Causality of the last queries: what flash kernels of GPUs do without a mask in memory.
            return lower_right(sight.queries, sight.end)
        return sight.mask()

    def __call__(self, q_BCHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, prepared: Mask | Tiles, scale: float) -> Tensor:
        """See `Kernel`."""
        if isinstance(prepared, Tiles):
            return tiled_attention(q_BCHE, k_BTKE, v_BTKE, prepared, scale)
        return masked_attention(q_BCHE, k_BTKE, v_BTKE, prepared, scale, self._on_gpu, self._flash)


def has_flash(device: torch.device) -> bool:
    """True for a GPU that torch has flash kernels for."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def lower_right(queries: int, keys: int) -> CausalBias:
    """A `causal_lower_right` without its memory: that makes an fp32 tensor [2, C, T], which nobody reads."""
    from torch.nn.attention.bias import CausalBias, CausalVariant

    bias = torch.empty(0).as_subclass(CausalBias)
    bias.variant, bias.seq_len_q, bias.seq_len_kv = CausalVariant.LOWER_RIGHT, queries, keys
    return bias


def is_causality(mask: Tensor) -> bool:
    """True for what `lower_right` gives, false for a mask in memory."""
    from torch.nn.attention.bias import CausalBias

    return isinstance(mask, CausalBias)


def masked_attention(
    q_BCHE: Tensor,
    k_BTKE: Tensor,
    v_BTKE: Tensor,
    mask: Mask,
    scale: float,
    on_gpu: bool | None = None,
    flash: bool | None = None,
) -> Tensor:
    """Attention with a mask in memory, see `attention_mask`, [B, C, H, E].

    Args:
        on_gpu: See `Sdpa`.
        flash: See `has_flash`; None: ask it, which compiled code should not.
    """
    on_gpu = q_BCHE.device.type == "cuda" if on_gpu is None else on_gpu
    flash = has_flash(q_BCHE.device) if flash is None else flash
    copies = q_BCHE.shape[2] // k_BTKE.shape[2]
    # Of torch's kernels for GPUs flash ones take shared heads, but no mask, and no fp32; and cuDNN's, which some have,
    # takes both. Without a kernel that does, all scores would be in memory.
    fits = flash and q_BCHE.dtype != torch.float32 and q_BCHE.shape[-1] <= _FLASH_HEAD
    takes = fits and (mask is None or is_causality(mask))
    if copies > 1 and on_gpu and not takes:
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
