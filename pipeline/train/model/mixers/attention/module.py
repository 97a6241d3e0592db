"""Causal grouped-query attention.

Shapes: B batch, S positions, T keys (S, or more with a cache), D width, H query heads, K key and value heads, E head
size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline.train.model.context import LayerContext
from pipeline.train.model.kernels.attention_mask import Terms
from pipeline.train.model.kernels.sdpa import attend_once, masked_attention
from pipeline.train.model.mixers.attention.spec import AttentionSpec
from pipeline.train.model.norm import build_norm
from pipeline.train.model.rope import apply_rope
from pipeline.train.model.states import KVCache, MixerState


class Attention(nn.Module):
    """Scaled dot-product attention over `kv_heads` shared keys and values (Ainslie et al. 2023).

    With `qk_norm` queries and keys are normalized a head before the rotary embedding (Qwen3). With tensor parallelism
    a rank has some of the heads, and H and K are those it has.
    """

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.spec = spec
        self.reach = spec.kernel.reach
        self.terms = Terms(spec.scale, spec.kernel.soft_cap)
        self.wq = nn.Linear(spec.dim, spec.heads * spec.head_dim, bias=spec.qkv_bias)
        self.wk = nn.Linear(spec.dim, spec.kv_heads * spec.head_dim, bias=spec.qkv_bias)
        self.wv = nn.Linear(spec.dim, spec.kv_heads * spec.head_dim, bias=spec.qkv_bias)
        self.wo = nn.Linear(spec.heads * spec.head_dim, spec.dim, bias=spec.output_bias)
        self.sinks = nn.Parameter(torch.zeros(spec.heads)) if spec.kernel.sinks else None
        if spec.qk_norm is not None:
            self.q_norm = build_norm(spec.qk_norm, spec.head_dim)
            self.k_norm = build_norm(spec.qk_norm, spec.head_dim)

    def new_state(self, max_length: int | None) -> KVCache:
        """An empty cache for generation; see `Decoder.new_states`."""
        return KVCache(max_length)

    def forward(self, x_BSD: Tensor, context: LayerContext, state: MixerState | None = None) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        spec = self.spec
        q_BSHE = self.wq(x_BSD).unflatten(-1, (-1, spec.head_dim))
        k_BTKE = self.wk(x_BSD).unflatten(-1, (-1, spec.head_dim))
        v_BTKE = self.wv(x_BSD).unflatten(-1, (-1, spec.head_dim))
        if spec.qk_norm is not None:
            q_BSHE, k_BTKE = self.q_norm(q_BSHE), self.k_norm(k_BTKE)
        if context.rope is not None:
            q_BSHE, k_BTKE = apply_rope(q_BSHE, *context.rope), apply_rope(k_BTKE, *context.rope)
        if state is not None:
            assert isinstance(state, KVCache) and context.places is not None
            k_BTKE, v_BTKE = state.append(k_BTKE, v_BTKE, context.places)
            mask = context.masks[self.reach]
            if q_BSHE.shape[1] == 1:
                return self._project(attend_once(q_BSHE, k_BTKE, v_BTKE, mask, self.terms, self.sinks))
            return self._project(masked_attention(q_BSHE, k_BTKE, v_BTKE, mask, self.terms, self.sinks))

        sinks_H: Tensor | None = self.sinks
        if sinks_H is not None and context.cut is not None:
            sinks_H = context.cut.own_heads(sinks_H)

        def attend(q_BCHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, piece: int) -> Tensor:
            mask = context.sights[self.reach][piece]
            assert k_BTKE.shape[1] == mask.keys, "a piece has the keys that it needs"
            if context.observer is not None:
                context.observer.attention(self, q_BCHE, k_BTKE, mask, spec.scale)
            prepared = context.prepared[self.reach][piece]
            return context.kernel(q_BCHE, k_BTKE, v_BTKE, prepared, self.terms, sinks_H)

        if context.cut is None:
            return self._project(attend(q_BSHE, k_BTKE, v_BTKE, 0))
        keys = [mask.keys for mask in context.sights[self.reach]]
        return self._project(context.cut.attend(q_BSHE, k_BTKE, v_BTKE, attend, keys))

    def _project(self, out_BSHE: Tensor) -> Tensor:
        """Outputs of the heads, projected to [B, S, D]."""
        out_BSD: Tensor = self.wo(out_BSHE.flatten(2))
        return out_BSD
