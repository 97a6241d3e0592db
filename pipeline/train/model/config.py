"""What a decoder is made of, as data: the list of layers that the model, FLOPs, initial weights and plans iterate.

The run file's `model:` section describes equal layers; `decoder_spec` turns it into one spec a layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pipeline.common.errors import UserError
from pipeline.config.model import ModelConfig, RopeScalingConfig

# muP divides attention logits by head_dim instead of its root; the two agree for heads of this size.
MUP_HEAD_DIM = 64


@dataclass(frozen=True)
class NormSpec:
    """A normalization over the last dimension."""

    kind: Literal["rmsnorm", "layernorm"]
    eps: float


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding of queries and keys."""

    head_dim: int
    theta: float
    scaling: RopeScalingConfig | None


@dataclass(frozen=True)
class AttentionSpec:
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


@dataclass(frozen=True)
class MlpSpec:
    """`swiglu`: w2(silu(w1 x) * w3 x). `gelu`: w2(gelu(w1 x)) with the tanh approximation."""

    kind: Literal["swiglu", "gelu"]
    dim: int
    ffn_dim: int
    bias: bool


@dataclass(frozen=True)
class LayerSpec:
    """A block: mixer and mlp, a norm before each."""

    mixer: AttentionSpec
    mlp: MlpSpec
    norm: NormSpec


@dataclass(frozen=True)
class DecoderSpec:
    """Embedding, layers, norm, head.

    Attributes:
        vocab_size: Tokens that exist.
        vocab_padded: Rows of embedding and head; logits from `vocab_size` on are -inf.
        rope: Set exactly if positions are rotary.
        learned_positions: Rows of the learned position embedding; set exactly if positions are learned.
        tie_embeddings: The head's weight is the embedding's.
        logit_scale: Factor on the input of the head (1 except for muP).
        logit_soft_cap: Logits become cap * tanh(logits / cap).
    """

    dim: int
    vocab_size: int
    vocab_padded: int
    norm: NormSpec
    rope: RopeSpec | None
    learned_positions: int | None
    tie_embeddings: bool
    logit_scale: float
    logit_soft_cap: float | None
    layers: tuple[LayerSpec, ...]


def default_ffn_dim(kind: str, dim: int) -> int:
    """4 * dim for gelu; for swiglu 8/3 * dim (three matrices with the parameters of two), up to a multiple of 64."""
    return 4 * dim if kind == "gelu" else math.ceil(8 * dim / 3 / 64) * 64


def decoder_spec(config: ModelConfig, vocab_size: int, max_positions: int) -> DecoderSpec:
    """The layers that `model:` describes.

    Args:
        config: The `model:` section.
        vocab_size: Largest token id + 1.
        max_positions: Rows of a learned position embedding (ignored by rope).

    Raises:
        UserError: The section has a smaller vocabulary.
    """
    if config.vocab_size is not None:
        if config.vocab_size < vocab_size:
            raise UserError(
                f"model.vocab_size: {config.vocab_size} is less than the tokenizer's {vocab_size} ids; leave it out, "
                "or use the tokenizer that belongs to the model"
            )
        vocab_size = config.vocab_size
    norm = NormSpec(config.norm, config.norm_eps)
    head_dim = config.head_dim or config.dim // config.heads
    base_dim = config.init.mup_base_dim
    mixer = AttentionSpec(
        dim=config.dim,
        heads=config.heads,
        kv_heads=config.kv_heads or config.heads,
        head_dim=head_dim,
        qkv_bias=config.bias in ("qkv", "all"),
        output_bias=config.bias == "all",
        qk_norm=NormSpec("rmsnorm", config.norm_eps) if config.qk_norm else None,
        window=config.sliding_window,
        scale=head_dim**-0.5 if base_dim is None else MUP_HEAD_DIM**0.5 / head_dim,
    )
    mlp = MlpSpec(
        kind=config.mlp,
        dim=config.dim,
        ffn_dim=config.ffn_dim or default_ffn_dim(config.mlp, config.dim),
        bias=config.bias == "all",
    )
    return DecoderSpec(
        dim=config.dim,
        vocab_size=vocab_size,
        vocab_padded=math.ceil(vocab_size / config.vocab_multiple) * config.vocab_multiple,
        norm=norm,
        rope=RopeSpec(head_dim, config.rope_theta, config.rope_scaling) if config.positions == "rope" else None,
        learned_positions=max_positions if config.positions == "learned" else None,
        tie_embeddings=config.tie_embeddings,
        logit_scale=1.0 if base_dim is None else base_dim / config.dim,
        logit_soft_cap=config.logit_soft_cap,
        layers=(LayerSpec(mixer, mlp, norm),) * config.layers,
    )
