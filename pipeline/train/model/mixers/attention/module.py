"""Grouped-query attention.

Shapes: B batch, S positions, T keys (S, or more with a cache), D width, H query heads, K key and value heads, E head
size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline.train.model.context import LayerContext
from pipeline.train.model.kernels.attention_mask import Terms
from pipeline.train.model.mixers.attend import attend_to_states, attention_of_pieces
from pipeline.train.model.mixers.attention.spec import AttentionSpec
from pipeline.train.model.norm import build_norm
from pipeline.train.model.positions.rope import apply_rope
from pipeline.train.model.states import KVCache, MixerState
from pipeline.train.torch_compat.core import own_part


class Attention(nn.Module):
    """Scaled dot-product attention over `kv_heads` shared keys and values (Ainslie et al. 2023).

    With `qk_norm` queries and keys are normalized before the rotary embedding, each head by itself (Qwen3) or all
    together (OLMo 2). With tensor parallelism a rank has some of the heads, and H and K are those it has.
    """

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.spec = spec
        self.terms = Terms(spec.scale, spec.soft_cap)
        self.wq = nn.Linear(spec.dim, spec.heads * spec.head_dim, bias=spec.qkv_bias)
        self.wk = nn.Linear(spec.dim, spec.kv_heads * spec.head_dim, bias=spec.qkv_bias)
        self.wv = nn.Linear(spec.dim, spec.kv_heads * spec.head_dim, bias=spec.qkv_bias)
        self.wo = nn.Linear(spec.heads * spec.head_dim, spec.dim, bias=spec.output_bias)
        for norm in spec.head_norms:
            self.add_module(norm.name, build_norm(norm.spec, norm.head_dim * (norm.heads or 1)))
        if spec.gate:
            self.wg = nn.Linear(spec.dim, spec.heads * spec.head_dim, bias=False)
        if spec.sinks:
            self.sinks = nn.Parameter(torch.zeros(spec.heads))

    def new_state(self, max_length: int | None) -> KVCache:
        """An empty cache for generation; see `Decoder.new_states`."""
        return KVCache(max_length)

    def forward(self, x_BSD: Tensor, context: LayerContext, state: MixerState | None = None) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        out_BSHE = self._attend(*self._queries_keys_values(x_BSD, context), context, state)
        out_BSC = out_BSHE.flatten(2)
        if self.spec.gate:
            out_BSC = out_BSC * torch.sigmoid(self.wg(x_BSD))
        out_BSD: Tensor = self.wo(out_BSC)
        return out_BSD

    def _queries_keys_values(self, x_BSD: Tensor, context: LayerContext) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, S, H, E], keys and values [B, S, K, E], normalized and turned."""
        spec = self.spec
        q_BSC, k_BSC = self.wq(x_BSD), self.wk(x_BSD)
        if spec.wide_qk_norm:
            q_BSC, k_BSC = self._normalized(q_BSC, k_BSC)
        q_BSHE, k_BSKE, v_BSKE = (x.unflatten(-1, (-1, spec.head_dim)) for x in (q_BSC, k_BSC, self.wv(x_BSD)))
        if spec.qk_norm is not None and not spec.wide_qk_norm:
            q_BSHE, k_BSKE = self._normalized(q_BSHE, k_BSKE)
        if context.rope is not None:
            q_BSHE, k_BSKE = apply_rope(q_BSHE, *context.rope), apply_rope(k_BSKE, *context.rope)
        return q_BSHE, k_BSKE, v_BSKE

    def _normalized(self, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        return self.get_submodule("q_norm")(queries), self.get_submodule("k_norm")(keys)

    def _attend(
        self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, context: LayerContext, state: MixerState | None
    ) -> Tensor:
        """Outputs of the heads, [B, S, H, E]."""
        sinks_H = own_part(self.sinks) if self.spec.sinks else None
        if state is not None:
            assert isinstance(state, KVCache) and context.places is not None
            k_BTKE, v_BTKE = state.append(k_BSKE, v_BSKE, context.places)
            return attend_to_states(q_BSHE, k_BTKE, v_BTKE, context, self.terms, sinks_H)
        attend = attention_of_pieces(self, context, self.terms, sinks_H)
        if context.cut is None:
            return attend(q_BSHE, k_BSKE, v_BSKE, 0)
        return context.cut.attend(q_BSHE, k_BSKE, v_BSKE, attend, [mask.keys for mask in context.sights])
