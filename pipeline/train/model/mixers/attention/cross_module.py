"""Attention of a decoder's layer to the encoder's positions.

Shapes: B batch, S positions of the decoder, T of the encoder, D width, H query heads, K key and value heads, E head
size.
"""

from __future__ import annotations

from torch import Tensor

from pipeline.train.model.context import LayerContext
from pipeline.train.model.mixers.attend import attend_to_states, attention_of_pieces
from pipeline.train.model.mixers.attention.module import Attention
from pipeline.train.model.states import EncoderCache
from pipeline.train.torch_compat.core import own_part


class CrossAttention(Attention):
    """Attention with queries of the decoder, and keys and values of the encoder's last layer."""

    def forward(  # type: ignore[override]
        self, x_BSD: Tensor, encoder_BTD: Tensor | None, context: LayerContext, state: EncoderCache | None = None
    ) -> Tensor:
        """[B, S, D] and the encoder's [B, T, D] -> [B, S, D]; without that the state has keys and values."""
        spec = self.spec
        q_BSC = self.wq(x_BSD)
        if state is None:
            assert encoder_BTD is not None
            k_BTKE, v_BTKE = self.keys_values(encoder_BTD)
        else:
            assert context.mask is not None
            k_BTKE, v_BTKE = state.held(len(x_BSD), context.mask.shape[-1])
        if spec.wide_qk_norm:
            q_BSC = self.get_submodule("q_norm")(q_BSC)
        q_BSHE = q_BSC.unflatten(-1, (-1, spec.head_dim))
        if spec.qk_norm is not None and not spec.wide_qk_norm:
            q_BSHE = self.get_submodule("q_norm")(q_BSHE)
        sinks_H = own_part(self.sinks) if spec.sinks else None
        if state is None:
            out_BSHE = attention_of_pieces(self, context, self.terms, sinks_H)(q_BSHE, k_BTKE, v_BTKE, 0)
        else:
            out_BSHE = attend_to_states(q_BSHE, k_BTKE, v_BTKE, context, self.terms, sinks_H)
        out_BSC = out_BSHE.flatten(2)
        if spec.gate:
            out_BSC = out_BSC * self.wg(x_BSD).sigmoid()
        out_BSD: Tensor = self.wo(out_BSC)
        return out_BSD

    def keys_values(self, encoder_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the encoder's positions, [B, T, K, E] each."""
        spec = self.spec
        k_BTC, v_BTC = self.wk(encoder_BTD), self.wv(encoder_BTD)
        if spec.wide_qk_norm:
            k_BTC = self.get_submodule("k_norm")(k_BTC)
        k_BTKE, v_BTKE = (x.unflatten(-1, (-1, spec.head_dim)) for x in (k_BTC, v_BTC))
        if spec.qk_norm is not None and not spec.wide_qk_norm:
            k_BTKE = self.get_submodule("k_norm")(k_BTKE)
        return k_BTKE, v_BTKE
