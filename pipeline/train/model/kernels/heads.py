"""Heads of keys and values of unequal sizes.

Shapes: B batch, C queries, T keys, H query heads, K key and value heads, E head size, V size of a value head.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def equal_heads(q_BCHE: Tensor, k_BTKE: Tensor, v_BTKV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values with heads of one size, the smaller ones filled up with zeros.

    That changes no score, and appends zeros to what is summed of the values: the output has V elements that count.
    """
    more = q_BCHE.shape[-1] - v_BTKV.shape[-1]
    if more > 0:
        v_BTKV = F.pad(v_BTKV, (0, more))
    elif more < 0:
        q_BCHE, k_BTKE = F.pad(q_BCHE, (0, -more)), F.pad(k_BTKE, (0, -more))
    return q_BCHE, k_BTKE, v_BTKV
