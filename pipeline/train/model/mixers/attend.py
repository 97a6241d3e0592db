"""Attention within a mixer, once queries, keys and values are there: to the keys in states, or of pieces of a sequence.

Shapes: B batch, S positions, C queries of a piece, T keys, H query heads, K key and value heads, E head size, V size of
a value head.
"""

from __future__ import annotations

from torch import Tensor, nn

from pipeline.train.model.context import LayerContext
from pipeline.train.model.kernels.attention_mask import Terms
from pipeline.train.model.kernels.biased import biased_attention
from pipeline.train.model.kernels.sdpa import attend_once, masked_attention
from pipeline.train.model.mixers.sequence import AttentionFn


def attend_to_states(
    q_BSHE: Tensor, k_BTKE: Tensor, v_BTKV: Tensor, context: LayerContext, terms: Terms, sinks_H: Tensor | None
) -> Tensor:
    """Attention of new positions to all that states hold, [B, S, H, V]."""
    if context.bias is not None:
        return biased_attention(q_BSHE, k_BTKE, v_BTKV, context.mask, terms, context.bias)
    attend = attend_once if q_BSHE.shape[1] == 1 else masked_attention
    return attend(q_BSHE, k_BTKE, v_BTKV, context.mask, terms, sinks_H)


def attention_of_pieces(mixer: nn.Module, context: LayerContext, terms: Terms, sinks_H: Tensor | None) -> AttentionFn:
    """Attention by the context's kernel, shown to its observer; without a cut all queries are piece 0.

    Args:
        mixer: That attends, for the observer.
        context: Of the layer, without states.
        terms: Of the scores.
        sinks_H: Of all heads that this process has.
    """
    if context.cut is not None and sinks_H is not None:
        sinks_H = context.cut.own_heads(sinks_H)

    def attend(q_BCHE: Tensor, k_BTKE: Tensor, v_BTKV: Tensor, piece: int) -> Tensor:
        mask = context.sights[piece]
        assert k_BTKE.shape[1] == mask.keys, "a piece has the keys that it needs"
        if context.bias is not None:  # what an observer would compute from queries and keys lacks it
            return context.kernel(q_BCHE, k_BTKE, v_BTKV, context.prepared[piece], terms, context.bias)
        if context.bias is not None:  # what an observer would compute from queries and keys lacks it
            return context.kernel(q_BCHE, k_BTKE, v_BTKV, context.prepared[piece], terms, context.bias)
        if context.observer is not None:
            context.observer.attention(mixer, q_BCHE, k_BTKE, mask, terms.scale)
        return context.kernel(q_BCHE, k_BTKE, v_BTKV, context.prepared[piece], terms, sinks_H)

    return attend
