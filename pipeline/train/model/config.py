"""A decoder as data: the list of layers that the model, FLOPs, initial weights and plans iterate.

The run file's `model:` section describes equal layers; `decoder_spec` turns it into one spec a layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.common.errors import UserError
from pipeline.config.model import ModelConfig
from pipeline.train.model.mixers.attention.spec import AttentionSpec
from pipeline.train.model.mlps.dense.spec import MlpSpec
from pipeline.train.model.part_spec import LayerPartSpec, LayerSpec, NormSpec, RopeSpec


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

    @property
    def different_layers(self) -> list[LayerSpec]:
        """Each layer once, in order."""
        return list(dict.fromkeys({id(layer): layer for layer in self.layers}.values()))


MLPS: dict[str, Callable[[ModelConfig], LayerPartSpec]] = {"swiglu": MlpSpec.of, "gelu": MlpSpec.of}
"""By value of `model.mlp`, what makes the spec of the mlp."""


def layer_specs(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """All layers that `model:` describes: the one place where its keys become kinds of mixers and mlps."""
    layer = LayerSpec(AttentionSpec.of(config), MLPS[config.mlp](config), NormSpec(config.norm, config.norm_eps))
    return (layer,) * config.layers


def decoder_spec(config: ModelConfig, vocab_size: int, max_positions: int) -> DecoderSpec:
    """The decoder that `model:` describes.

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
    base_dim, head_dim = config.init.mup_base_dim, config.head_size
    return DecoderSpec(
        dim=config.dim,
        vocab_size=vocab_size,
        vocab_padded=math.ceil(vocab_size / config.vocab_multiple) * config.vocab_multiple,
        norm=NormSpec(config.norm, config.norm_eps),
        rope=RopeSpec(head_dim, config.rope_theta, config.rope_scaling) if config.positions == "rope" else None,
        learned_positions=max_positions if config.positions == "learned" else None,
        tie_embeddings=config.tie_embeddings,
        logit_scale=1.0 if base_dim is None else base_dim / config.dim,
        logit_soft_cap=config.logit_soft_cap,
        layers=layer_specs(config),
    )
