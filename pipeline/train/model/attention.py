"""Causal grouped-query attention and its masks.

Shapes: B batch, S positions, T keys (S, or more with a cache), D width, H query heads, K key and value heads, E head
size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.train.loss import Criterion
from pipeline.train.model.config import AttentionSpec
from pipeline.train.model.norm import build_norm
from pipeline.train.model.rope import apply_rope
from pipeline.train.model.states import KVCache, MixerState, Places, States


class Watch(Protocol):
    """Is shown what a forward pass computes in its layers, and changes nothing of it."""

    def attention(self, mixer: Attention, q_BSHE: Tensor, k_BTKE: Tensor, mask: Tensor | None) -> None:
        """Queries and keys as they are multiplied, and which keys a query sees, see `attention_mask`."""

    def output(self, block: nn.Module, x_BSD: Tensor) -> None:
        """The residual stream behind a block."""


@dataclass
class Context:
    """What the blocks of one forward pass are told besides their input.

    The caller gives the first eight; the decoder adds, once and not in every layer, what follows from them.

    Attributes:
        bounds_BS: For every position the first one that it may attend to: where its document begins. None: the
            sequence is one document.
        positions_BS: Position of every token, for the position embedding. None: they restart at every bound, or go on
            from what the states hold.
        states: What the mixers keep of the rows so far, for generation. Not together with bounds.
        counts: With states: how many tokens of each row count; the rest is padding on the right. None: all.
        last_only: With states: only the last token of each row that counts gets logits, [B, 1, V].
        length: Positions of the sequence, where the input of the model does not show them: a part of a model may get
            only its share of the residual stream.
        criterion: What the head is to give the loss of; None: it gives logits.
        watch: Is shown what the layers compute.
        rope: cos and sin of the positions, if they are rotary.
        masks: By window, what `attention_mask` returns.
        places: Where the new positions go in the states.
    """

    bounds_BS: Tensor | None = None
    positions_BS: Tensor | None = None
    states: States | None = None
    counts: Sequence[int] | None = None
    last_only: bool = False
    length: int | None = None
    criterion: Criterion | None = None
    watch: Watch | None = None
    rope: tuple[Tensor, Tensor] | None = None
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)
    places: Places | None = None


def attention_mask(
    bounds_BS: Tensor | None, window: int | None, queries: int, keys: int, device: torch.device
) -> Tensor | None:
    """Which keys a query sees, bool [B or 1, 1, S, T]: bounds[q] <= k <= q and k > q - window.

    The queries are the last of the keys. None where causality alone says the same: the kernel needs no mask then.
    """
    if bounds_BS is None and (window is None or window >= keys) and queries in (1, keys):
        return None
    q_S1 = torch.arange(keys - queries, keys, device=device)[:, None]
    k_T = torch.arange(keys, device=device)
    mask = (k_T <= q_S1)[None]
    if bounds_BS is not None:
        mask = mask & (k_T >= bounds_BS[:, :, None])
    if window is not None:
        mask = mask & (k_T > q_S1 - window)
    return mask[:, None]


def mask_by_row(positions_BS: Tensor, window: int | None, keys: int) -> Tensor:
    """`attention_mask` of rows with unequal pasts, whose queries are at `positions_BS`: bool [B, 1, S, T]."""
    k_T = torch.arange(keys, device=positions_BS.device)
    q_BS1 = positions_BS[..., None]
    mask = k_T <= q_BS1
    if window is not None:
        mask = mask & (k_T > q_BS1 - window)
    return mask[:, None]


class Attention(nn.Module):
    """Scaled dot-product attention over `kv_heads` shared keys and values (Ainslie et al. 2023).

    With `qk_norm` queries and keys are normalized a head before the rotary embedding (Qwen3). With tensor parallelism
    a rank has some of the heads, and H and K are those it has.
    """

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.spec = spec
        self.wq = nn.Linear(spec.dim, spec.heads * spec.head_dim, bias=spec.qkv_bias)
        self.wk = nn.Linear(spec.dim, spec.kv_heads * spec.head_dim, bias=spec.qkv_bias)
        self.wv = nn.Linear(spec.dim, spec.kv_heads * spec.head_dim, bias=spec.qkv_bias)
        self.wo = nn.Linear(spec.heads * spec.head_dim, spec.dim, bias=spec.output_bias)
        if spec.qk_norm is not None:
            self.q_norm = build_norm(spec.qk_norm, spec.head_dim)
            self.k_norm = build_norm(spec.qk_norm, spec.head_dim)

    def new_state(self, max_length: int | None) -> KVCache:
        """An empty cache for generation; see `Decoder.new_states`."""
        return KVCache(max_length)

    def forward(self, x_BSD: Tensor, context: Context, state: MixerState | None = None) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        spec = self.spec
        q_BSHE = self.wq(x_BSD).unflatten(-1, (-1, spec.head_dim))
        k_BTKE = self.wk(x_BSD).unflatten(-1, (-1, spec.head_dim))
        v_BTKE = self.wv(x_BSD).unflatten(-1, (-1, spec.head_dim))
        if spec.qk_norm is not None:
            q_BSHE, k_BTKE = self.q_norm(q_BSHE), self.k_norm(k_BTKE)
        if context.rope is not None:
            q_BSHE, k_BTKE = apply_rope(q_BSHE, *context.rope), apply_rope(k_BTKE, *context.rope)
        mask = context.masks[spec.window]
        if state is not None:
            assert isinstance(state, KVCache) and context.places is not None
            k_BTKE, v_BTKE = state.append(k_BTKE, v_BTKE, context.places)
            if q_BSHE.shape[1] == 1:
                return self._attend_once(q_BSHE, k_BTKE, v_BTKE, mask)
        if context.watch is not None:
            context.watch.attention(self, q_BSHE, k_BTKE, mask)
        out_BHSE = F.scaled_dot_product_attention(
            q_BSHE.transpose(1, 2),
            k_BTKE.transpose(1, 2),
            v_BTKE.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            scale=spec.scale,
            enable_gqa=q_BSHE.shape[2] != k_BTKE.shape[2],
        )
        out_BSD: Tensor = self.wo(out_BHSE.transpose(1, 2).flatten(2))
        return out_BSD

    def _attend_once(self, q_B1HE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, mask: Tensor | None) -> Tensor:
        """One query a row, at its last position: no mask means that it sees every key. [B, 1, D]."""
        # The heads that share keys go in as queries of one head, so that no kernel has to repeat the keys.
        q_BKGE = q_B1HE.reshape(len(q_B1HE), k_BTKE.shape[2], -1, self.spec.head_dim)
        out_BKGE = F.scaled_dot_product_attention(
            q_BKGE, k_BTKE.transpose(1, 2), v_BTKE.transpose(1, 2), attn_mask=mask, scale=self.spec.scale
        )
        out_B1D: Tensor = self.wo(out_BKGE.flatten(1)[:, None])
        return out_B1D
