"""Multi-head latent attention.

Shapes: B batch, S positions, T keys (S, or more with states), D width, H heads, E size of a head of queries and keys
(N of the latent and R that are rotary), V size of a value head, C numbers of a latent, G = C + R; with a cut L
positions of a share.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline.train.model.context import LayerContext
from pipeline.train.model.kernels.attention_mask import Terms
from pipeline.train.model.mixers.attend import attend_to_states, attention_of_pieces
from pipeline.train.model.mixers.mla.spec import MlaSpec
from pipeline.train.model.norm import build_norm
from pipeline.train.model.positions.rope import apply_rope
from pipeline.train.model.states import KVCache, MixerState
from pipeline.train.torch_compat.core import own_part


class LatentAttention(nn.Module):
    """Attention whose keys and values are made of one small latent of each token (DeepSeek-V2, 2024).

    A key of a head is `wkb` times the latent and, after it, a rotary key that all heads share; a value is `wvb` times
    the latent. What is kept for generation, and sent over cp, is latents and rotary keys alone. With tensor parallelism
    a rank has some of the heads, and H is those it has; latents are whole on each.
    """

    def __init__(self, spec: MlaSpec) -> None:
        super().__init__()
        self.spec = spec
        self.terms = Terms(spec.scale, spec.soft_cap)
        for matrix in spec.matrices:
            self.add_module(matrix.name, nn.Linear(matrix.columns, matrix.rows, bias=matrix.bias))
        for norm in spec.head_norms:
            self.add_module(norm.name, build_norm(norm.spec, norm.head_dim))
        if spec.sinks:
            self.sinks = nn.Parameter(torch.zeros(spec.heads))

    def new_state(self, max_length: int | None) -> KVCache:
        """An empty cache of latents and rotary keys; see `Decoder.new_states`."""
        return KVCache(max_length)

    def forward(self, x_BSD: Tensor, context: LayerContext, state: MixerState | None = None) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        q_BSHE = self._queries(x_BSD, context)
        c_BSC, r_BSR = self._latents(x_BSD, context)
        out_BSHV = self._attend(q_BSHE, c_BSC, r_BSR, context, state)
        out_BSD: Tensor = self.get_submodule("wo")(out_BSHV.flatten(2))
        return out_BSD

    def _queries(self, x_BSD: Tensor, context: LayerContext) -> Tensor:
        """[B, S, H, E], of which the last R dimensions are turned."""
        spec, module = self.spec, self.get_submodule
        direct = spec.q_rank is None
        q: Tensor = module("wq")(x_BSD) if direct else module("wqb")(module("q_norm")(module("wqa")(x_BSD)))
        q_BSHE = q.reshape(*q.shape[:2], -1, spec.head_dim)
        if context.rope is None:
            return q_BSHE
        q_BSHN, q_BSHR = torch.split(q_BSHE, [spec.nope_dim, spec.rope_dim], dim=-1)
        return torch.cat((q_BSHN, apply_rope(q_BSHR, *context.rope)), dim=-1)

    def _latents(self, x_BSD: Tensor, context: LayerContext) -> tuple[Tensor, Tensor]:
        """Latents [B, S, C], normalized, and rotary keys [B, S, R], turned."""
        module = self.get_submodule
        c_BSC, r_BSR = module("kv_norm")(module("wkva")(x_BSD)), module("wkr")(x_BSD)
        if context.rope is not None:
            r_BSR = apply_rope(r_BSR[:, :, None], *context.rope)[:, :, 0]
        return c_BSC, r_BSR

    def _keys_values(self, c_BTC: Tensor, r_BTR: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [B, T, H, E] and values [B, T, H, V]."""
        spec, module = self.spec, self.get_submodule
        k_BTHN = module("wkb")(c_BTC).unflatten(-1, (-1, spec.nope_dim))
        v_BTHV = module("wvb")(c_BTC).unflatten(-1, (-1, spec.value_dim))
        k_BTHR = r_BTR[:, :, None].expand(-1, -1, k_BTHN.shape[2], -1)
        return torch.cat((k_BTHN, k_BTHR), dim=-1), v_BTHV

    def _attend(
        self, q_BSHE: Tensor, c_BSC: Tensor, r_BSR: Tensor, context: LayerContext, state: MixerState | None
    ) -> Tensor:
        """Outputs of the heads, [B, S, H, V]."""
        sinks_H = own_part(self.sinks) if self.spec.sinks else None
        if state is not None:
            assert isinstance(state, KVCache) and context.places is not None
            k_BTHE, v_BTHV = self._keys_values(*state.append(c_BSC, r_BSR, context.places))
            return attend_to_states(q_BSHE, k_BTHE, v_BTHV, context, self.terms, sinks_H)
        attend = attention_of_pieces(self, context, self.terms, sinks_H)
        if context.cut is None:
            return attend(q_BSHE, *self._keys_values(c_BSC, r_BSR), 0)

        def expand(g_BTG: Tensor) -> tuple[Tensor, Tensor]:
            return self._keys_values(*torch.split(g_BTG, [self.spec.kv_rank, self.spec.rope_dim], dim=-1))

        g_BLG = torch.cat((c_BSC, r_BSR), dim=-1)
        return context.cut.attend_latent(q_BSHE, g_BLG, expand, attend, [mask.keys for mask in context.sights])
