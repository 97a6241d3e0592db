"""Causal grouped-query attention.

Shapes: B batch, S positions, T keys (S, or more with a cache), D width, H query heads, K key and value heads, E head
size.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.config.model import ModelConfig
from pipeline.train.model.context import LayerContext
from pipeline.train.model.kernels.sdpa import masked_attention
from pipeline.train.model.norm import build_norm
from pipeline.train.model.part_spec import CpTransfer, Division, HeadNorm, KernelUse, Matrix, MixerSpec, NormSpec
from pipeline.train.model.rope import apply_rope
from pipeline.train.model.states import KVCache, MixerState

_MUP_HEAD_DIM = 64
"""muP divides attention logits by head_dim instead of its root; the two agree for heads of this size."""


@dataclass(frozen=True)
class AttentionSpec(MixerSpec):
    """Causal grouped-query attention. `window` counts the token itself; None is all tokens before it."""

    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool
    output_bias: bool
    qk_norm: NormSpec | None
    window: int | None
    scale: float

    label: ClassVar = "attention"
    huggingface: ClassVar = {
        "llama": (
            ("self_attn.q_proj", ("wq",)),
            ("self_attn.k_proj", ("wk",)),
            ("self_attn.v_proj", ("wv",)),
            ("self_attn.o_proj", ("wo",)),
            ("self_attn.q_norm.weight", ("q_norm.weight",)),
            ("self_attn.k_norm.weight", ("k_norm.weight",)),
        ),
        "gpt2": (("attn.c_attn", ("wq", "wk", "wv")), ("attn.c_proj", ("wo",))),
    }

    @classmethod
    def of(cls, config: ModelConfig) -> AttentionSpec:
        """That of the `model:` section."""
        head_dim = config.head_dim or config.dim // config.heads
        return cls(
            dim=config.dim,
            heads=config.heads,
            kv_heads=config.kv_heads or config.heads,
            head_dim=head_dim,
            qkv_bias=config.bias in ("qkv", "all"),
            output_bias=config.bias == "all",
            qk_norm=NormSpec("rmsnorm", config.norm_eps) if config.qk_norm else None,
            window=config.sliding_window,
            scale=head_dim**-0.5 if config.init.mup_base_dim is None else _MUP_HEAD_DIM**0.5 / head_dim,
        )

    def build(self) -> Attention:
        """See `LayerPartSpec`."""
        return Attention(self)

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """See `LayerPartSpec`."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return (
            Matrix("wq", queries, self.dim, "rows", self.qkv_bias),
            *(Matrix(name, keys, self.dim, "rows", self.qkv_bias, heads=self.kv_heads) for name in ("wk", "wv")),
            Matrix("wo", self.dim, queries, "columns", self.output_bias, to_residual=True),
        )

    @property
    def head_norms(self) -> tuple[HeadNorm, ...]:
        """See `LayerPartSpec`."""
        if self.qk_norm is None:
            return ()
        return tuple(HeadNorm(name, self.qk_norm, self.head_dim) for name in ("q_norm", "k_norm"))

    @property
    def divisions(self) -> tuple[Division, ...]:
        """See `LayerPartSpec`."""
        heads = Division("heads", self.heads)
        return (heads,) if self.kv_heads == self.heads else (heads, Division("kv_heads", self.kv_heads, self.heads))

    @property
    def kernel(self) -> KernelUse:
        """See `MixerSpec`."""
        return KernelUse(self.window, self.head_dim)

    def extra_flops(self, sequence_length: int, *, causal: bool) -> float:
        """Scores and their sum over values."""
        window = min(self.window or sequence_length, sequence_length)
        keys = window - window**2 / (2 * sequence_length) if causal else window
        return 4.0 * self.heads * self.head_dim * keys

    def elementwise_numbers(self, tp: int) -> float:
        """The rotation."""
        return 2 * (self.heads + self.kv_heads) * self.head_dim / tp

    def kept_numbers(self, tp: int) -> float:
        """Queries, keys, values and the result of attention."""
        return 2 * (self.heads * self.head_dim / tp) + 2 * self._kv_heads_on_rank(tp) * self.head_dim

    def kept_results(self, keep: Collection[str], tp: int) -> float:
        """The result of attention; queries."""
        return sum(self.heads * self.head_dim / tp for name in ("attention", "matmul") if name in keep)

    def most_numbers(self, sequence_length: int) -> int:
        """See `LayerPartSpec`."""
        return 40 * self.dim + 2 * self.heads * (self.head_dim + sequence_length)

    def cp_transfer(self, method: str, tp: int, cp: int) -> CpTransfer:
        """See `MixerSpec`."""
        keys = self._kv_heads_on_rank(tp)
        if method != "ulysses":  # collected is what all ranks have together
            return CpTransfer("keys and values", 1, 2 * keys * cp * self.head_dim)
        # Exchanged is what this rank has, with a copy of a key head for each rank that needs one.
        heads = 2 * (keys if keys % cp == 0 else cp) + 2 * self.heads // tp
        return CpTransfer("queries, keys, values, outputs", 2, heads * self.head_dim)

    def _kv_heads_on_rank(self, tp: int) -> int:
        return max(1, self.kv_heads // tp)


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
            mask = context.masks[spec.window]
            if q_BSHE.shape[1] == 1:
                return self._attend_once(q_BSHE, k_BTKE, v_BTKE, mask)
            return self._project(masked_attention(q_BSHE, k_BTKE, v_BTKE, mask, spec.scale))

        def attend(q_BCHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, piece: int) -> Tensor:
            if context.watch is not None:
                context.watch.attention(self, q_BCHE, k_BTKE, context.sights[spec.window][piece], spec.scale)
            return context.kernel(q_BCHE, k_BTKE, v_BTKE, context.prepared[spec.window][piece], spec.scale)

        if context.cut is None:
            return self._project(attend(q_BSHE, k_BTKE, v_BTKE, 0))
        return self._project(context.cut.attend(q_BSHE, k_BTKE, v_BTKE, attend))

    def _project(self, out_BSHE: Tensor) -> Tensor:
        """What the heads found, [B, S, D]."""
        out_BSD: Tensor = self.wo(out_BSHE.flatten(2))
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
