"""Causal grouped-query attention and its masks.

Shapes: B batch, S positions, T keys (S, or more with a cache), D width, H query heads, K key and value heads, E head
size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias

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


Core = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""Attention itself: q [B, C, H, E], k and v [B, T, K, E] and which piece of the queries this is -> [B, C, H, E]."""


class SequenceCut(Protocol):
    """How a sequence is cut over processes that have a share of it each and attend to all of it."""

    def share(self, x: Tensor, dim: int = 1) -> Tensor:
        """What this process has of x, whose dimension `dim` is positions."""

    def masks(
        self, bounds_BS: Tensor | None, window: int | None, length: int, device: torch.device
    ) -> tuple[Tensor | None, ...]:
        """`attention_mask` of each piece that `attend` cuts the queries into; bounds and length are the whole's."""

    def attend(self, q_BLHE: Tensor, k_BLKE: Tensor, v_BLKE: Tensor, core: Core) -> Tensor:
        """Attention of this process's queries to the whole sequence, [B, L, H, E]; every process calls this."""


@dataclass
class Context:
    """What the blocks of one forward pass are told besides their input.

    The caller gives the first nine; the decoder adds, once and not in every layer, what follows from them.

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
        cut: The input is a share of the sequence; bounds, positions and length are the whole's. Not with states.
        rope: cos and sin of the positions, if they are rotary.
        masks: By window, what `attention_mask` returns; with a cut for each piece, else for one.
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
    cut: SequenceCut | None = None
    rope: tuple[Tensor, Tensor] | None = None
    masks: dict[int | None, tuple[Tensor | None, ...]] = field(default_factory=dict)
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


class Masks:
    """`attention_mask`, of which those without document bounds are made once.

    They are the same for every micro-batch, so that all that are under way share one. The last few shapes are kept.
    """

    _KEPT = 4

    def __init__(self) -> None:
        self._made: dict[tuple[int | None, int, int, torch.device], Tensor | None] = {}

    def __call__(
        self, bounds_BS: Tensor | None, window: int | None, queries: int, keys: int, device: torch.device
    ) -> Tensor | None:
        """See `attention_mask`."""
        if bounds_BS is not None:
            return attention_mask(bounds_BS, window, queries, keys, device)
        key = window, queries, keys, device
        if key not in self._made:
            for oldest in list(self._made)[: len(self._made) - self._KEPT + 1]:
                del self._made[oldest]
            self._made[key] = attention_mask(None, window, queries, keys, device)
        return self._made[key]


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
        self.as_on_gpu: bool | None = None
        """Whether a GPU's kernels are to be fed; None: where the tensors are on one. For estimates of memory."""
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
        masks = context.masks[spec.window]
        if state is not None:
            assert isinstance(state, KVCache) and context.places is not None
            k_BTKE, v_BTKE = state.append(k_BTKE, v_BTKE, context.places)
            if q_BSHE.shape[1] == 1:
                return self._attend_once(q_BSHE, k_BTKE, v_BTKE, masks[0])

        def attend(q_BCHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, piece: int) -> Tensor:
            return self._attend(q_BCHE, k_BTKE, v_BTKE, masks[piece], context.watch)

        if context.cut is None:
            out_BSHE = attend(q_BSHE, k_BTKE, v_BTKE, 0)
        else:
            out_BSHE = context.cut.attend(q_BSHE, k_BTKE, v_BTKE, attend)
        out_BSD: Tensor = self.wo(out_BSHE.flatten(2))
        return out_BSD

    def _attend(
        self, q_BSHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, mask: Tensor | None, watch: Watch | None
    ) -> Tensor:
        """Every query's sum of the values that it sees, [B, S, H, E]."""
        if watch is not None:
            watch.attention(self, q_BSHE, k_BTKE, None if isinstance(mask, CausalBias) else mask)
        copies = q_BSHE.shape[2] // k_BTKE.shape[2]
        if copies > 1 and self._repeats_keys(mask, q_BSHE.device):
            k_BTKE, v_BTKE = (x.repeat_interleave(copies, dim=2) for x in (k_BTKE, v_BTKE))
            copies = 1
        out_BHSE = F.scaled_dot_product_attention(
            q_BSHE.transpose(1, 2),
            k_BTKE.transpose(1, 2),
            v_BTKE.transpose(1, 2),
            attn_mask=mask,
            # One query of several keys is the last, and sees them all; torch's causality would show it the first.
            is_causal=mask is None and q_BSHE.shape[1] == k_BTKE.shape[1],
            scale=self.spec.scale,
            enable_gqa=copies > 1,
        )
        return out_BHSE.transpose(1, 2)

    def _repeats_keys(self, mask: Tensor | None, device: torch.device) -> bool:
        """Whether each query head gets keys and values of its own.

        Of torch's kernels for GPUs only cuDNN's, which some have, takes a mask together with shared heads. Without one
        that does, all scores would be in memory.
        """
        on_gpu = device.type == "cuda" if self.as_on_gpu is None else self.as_on_gpu
        return on_gpu and mask is not None and not isinstance(mask, CausalBias)

    def _attend_once(self, q_B1HE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, mask: Tensor | None) -> Tensor:
        """One query a row, at its last position: no mask means that it sees every key. [B, 1, D]."""
        # The heads that share keys go in as queries of one head, so that no kernel has to repeat the keys.
        q_BKGE = q_B1HE.reshape(len(q_B1HE), k_BTKE.shape[2], -1, self.spec.head_dim)
        out_BKGE = F.scaled_dot_product_attention(
            q_BKGE, k_BTKE.transpose(1, 2), v_BTKE.transpose(1, 2), attn_mask=mask, scale=self.spec.scale
        )
        out_B1D: Tensor = self.wo(out_BKGE.flatten(1)[:, None])
        return out_B1D
