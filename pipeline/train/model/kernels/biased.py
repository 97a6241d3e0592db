"""Attention with a bias of the scores that has a gradient, as relative positions do, with all scores in memory.

No fused kernel makes the gradient of a bias. For parity with published models, and short sequences.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.train.model.kernels.attention_mask import AttentionMask, Terms


class Biased:
    """A kernel, see `Kernel`, that takes a bias [1 or B, H, C, T] in place of sinks."""

    def prepare(self, mask: AttentionMask) -> Tensor:
        """The keys that are seen, bool [B or 1, 1, C, T]."""
        return mask.seen()

    def __call__(
        self,
        q_BCHE: Tensor,
        k_BTKE: Tensor,
        v_BTKV: Tensor,
        prepared: Any,
        terms: Terms,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """See `Kernel`; the bias comes in the place of sinks."""
        assert sinks_H is not None
        return biased_attention(q_BCHE, k_BTKE, v_BTKV, prepared, terms, sinks_H)


def biased_attention(
    q_BCHE: Tensor, k_BTKE: Tensor, v_BTKV: Tensor, mask: Tensor | None, terms: Terms, bias: Tensor
) -> Tensor:
    """Softmax of scale * q k + bias over the keys that a mask, bool [B or 1, 1, C, T], shows; [B, C, H, V]."""
    assert terms.soft_cap is None
    scores = bias.to(q_BCHE.dtype)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    out_BHCV = F.scaled_dot_product_attention(
        q_BCHE.transpose(1, 2),
        k_BTKE.transpose(1, 2),
        v_BTKV.transpose(1, 2),
        attn_mask=scores,
        scale=terms.scale,
        enable_gqa=q_BCHE.shape[2] != k_BTKE.shape[2],
    )
    return out_BHCV.transpose(1, 2)
