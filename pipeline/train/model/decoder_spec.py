"""A decoder as data: the list of layers that the model, FLOPs, initial weights and plans iterate.

`decoder_spec` turns the run file's `model:` section into a spec per layer; layers of one kind have the same object.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from pipeline.common.errors import UserError
from pipeline.config.layers.layer import LayerConfig
from pipeline.config.model import ModelConfig, RelativeConfig
from pipeline.config.plugins import is_plugin
from pipeline.train.model.mixers.attention.cross import CrossAttentionSpec
from pipeline.train.model.mixers.attention.spec import AttentionSpec
from pipeline.train.model.mixers.delta.spec import DeltaSpec, KdaSpec
from pipeline.train.model.mixers.mamba2.spec import Mamba2Spec
from pipeline.train.model.mixers.mla.spec import MlaSpec
from pipeline.train.model.mlps.dense.spec import DenseKind, MlpSpec
from pipeline.train.model.mlps.experts.spec import ExpertsSpec
from pipeline.train.model.parameter_spec import NormSpec
from pipeline.train.model.part_spec import (
    LayerPartSpec,
    LayerSpec,
    MixerSpec,
    MtpSpec,
    RelativeSpec,
    Side,
)
from pipeline.train.model.plugins.parts import plugin_spec


@dataclass(frozen=True)
class DecoderSpec:
    """Embedding, layers, norm, head.

    Attributes:
        norm: Kind of the norms of the layers, after the last one, and of those below if they are there.
        vocab_size: Tokens that exist.
        vocab_padded: Rows of embedding and head; logits from `vocab_size` on are -inf.
        learned_positions: Rows of the learned position embedding; set exactly if positions are learned.
        tie_embeddings: The head's weight is the embedding's.
        embedding_scale: Factor on the embedding of tokens.
        logit_scale: Factor on the input of the head.
        logit_soft_cap: Logits become cap * tanh(logits / cap).
        mtp: By depth, what predicts tokens after the next one.
        token_types: Rows of the embedding of types, of which the first is added to all tokens; None: there is none.
        embedding_norm: The sum of the embeddings has a norm.
        final_norm: There is a norm after the last layer.
        head_transform: Activation between a matrix and a norm before the head; None: they are not there.
        head_transform_bias: The matrix has a bias.
        head_bias: The logits have a bias.
    """

    dim: int
    vocab_size: int
    vocab_padded: int
    norm: NormSpec
    learned_positions: int | None
    tie_embeddings: bool
    embedding_scale: float
    logit_scale: float
    logit_soft_cap: float | None
    layers: tuple[LayerSpec, ...]
    mtp: tuple[MtpSpec, ...] = ()
    token_types: int | None = None
    embedding_norm: bool = False
    final_norm: bool = True
    head_transform: Literal["gelu", "gelu_exact"] | None = None
    head_transform_bias: bool = False
    head_bias: bool = False

    @property
    def first_sizes(self) -> list[int]:
        """Sizes of the parameters before the first layer besides the embedding of tokens; whole on a rank of tp."""
        rows = [count * self.dim for count in (self.learned_positions, self.token_types) if count is not None]
        return rows + self._norm_sizes * self.embedding_norm

    @property
    def last_norm_sizes(self) -> list[int]:
        """Sizes of the parameters of the norm after the last layer."""
        return self._norm_sizes * self.final_norm

    @property
    def transform_sizes(self) -> list[int]:
        """Sizes of the parameters between that norm and the head, which ranks of tp have whole."""
        if self.head_transform is None:
            return []
        return [self.dim**2, *[self.dim] * self.head_transform_bias, *self._norm_sizes]

    @property
    def _norm_sizes(self) -> list[int]:
        return self.norm.parameters(self.dim)

    @property
    def encoder_layers(self) -> int:
        """Layers that are the encoder's, the first ones."""
        return sum(layer.side == "encoder" for layer in self.layers)

    @property
    def sided(self) -> bool:
        """True of an encoder-decoder, or of some of its layers."""
        return any(layer.side is not None for layer in self.layers)

    @property
    def relatives(self) -> dict[str, RelativeSpec]:
        """Relative positions of layers, by side."""
        found = [layer.mixer.relative for layer in self.layers if layer.mixer is not None]
        return {each.side: each for each in found if each is not None}

    @property
    def last_embeds(self) -> bool:
        """True if the end of the model uses the embedding: as the head, or for tokens that are predicted ahead.

        Of several stages the last one has a copy of it then.
        """
        return self.tie_embeddings or bool(self.mtp)

    @property
    def different_layers(self) -> list[LayerSpec]:
        """Each layer once, in order."""
        return list(dict.fromkeys({id(layer): layer for layer in self.layers}.values()))

    @property
    def blocks(self) -> list[LayerSpec]:
        """Layers, and after them the blocks of multi-token prediction."""
        return [*self.layers, *(each.layer for each in self.mtp)]

    @property
    def expert_layers(self) -> dict[int, ExpertsSpec]:
        """Index -> mixture of experts, of the layers that have one; multi-token prediction comes after the model's."""
        return {index: layer.mlp for index, layer in enumerate(self.blocks) if isinstance(layer.mlp, ExpertsSpec)}

    @property
    def expert_counts(self) -> list[int]:
        """Numbers of experts of its layers, each once: those that ep has to divide."""
        return list(dict.fromkeys(part.router.count for part in self.expert_layers.values()))

    @property
    def period(self) -> int:
        """Layers after which the kinds repeat, but for the norm of the first; all layers where they do not."""
        return period_of([replace(self.layers[0], input_norm=True), *self.layers[1:]])


def period_of(items: Sequence[object]) -> int:
    """Number of items after which a sequence repeats itself; its length where it does not."""
    return next(step for step in range(1, len(items) + 1) if items[step:] == items[: len(items) - step])


MIXERS: dict[str, Callable[[ModelConfig, LayerConfig], MixerSpec]] = {
    "attention": AttentionSpec.of,
    "mla": MlaSpec.of,
    "mamba2": Mamba2Spec.of,
    "gated_delta": DeltaSpec.of,
    "kda": KdaSpec.of,
}
"""Constructors of mixer specs, by value of `model.mixer`."""
MLPS: dict[str, Callable[[ModelConfig, LayerConfig], LayerPartSpec]] = {
    **dict.fromkeys(get_args(DenseKind), MlpSpec.of),
    "experts": ExpertsSpec.of,
}
"""Constructors of mlp specs, by value of `model.mlp`."""


def layer_specs(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """All layers that `model:` describes: the one place where its keys become kinds of mixers and mlps."""
    if config.encoder is None:
        kinds = _kinds(config, config.layer_kinds)
        layers = [kinds[name] for name in config.layer_kinds]
        if not config.first_norm:
            layers[0] = replace(layers[0], input_norm=False)
        return tuple(layers)
    both = config.model_copy(update={"direction": "both"})
    sides = _kinds(both, config.encoder_kinds), _kinds(config, config.layer_kinds)
    of_encoder = {name: _of_side(layer, "encoder", config) for name, layer in sides[0].items()}
    of_decoder = {name: _of_side(layer, "decoder", config) for name, layer in sides[1].items()}
    *encoder, last = [of_encoder[name] for name in config.encoder_kinds]
    return *encoder, replace(last, ends_encoder=True), *(of_decoder[name] for name in config.layer_kinds)


def _kinds(config: ModelConfig, names: Sequence[str | None]) -> dict[str | None, LayerSpec]:
    """By name of a kind, layers of it."""
    norm = _norm_spec(config)
    kinds: dict[str | None, LayerSpec] = {}
    for name in dict.fromkeys(names):
        layer = config.layer(name)
        kinds[name] = LayerSpec(
            _part(MIXERS, "mixers", layer.mixer, config, layer),
            _part(MLPS, "mlps", layer.mlp, config, layer),
            norm,
            layer.norm_place,
            layer.residual,
            config.residual_scale,
        )
    return kinds


def _part(
    kinds: Mapping[str, Callable[[ModelConfig, LayerConfig], Any]],
    plugins: Literal["mixers", "mlps"],
    name: str,
    config: ModelConfig,
    layer: LayerConfig,
) -> Any:
    """The spec of a part of a layer by the name of its kind, of ours or of a plug-in; None for `none`."""
    if name == "none":
        return None
    return plugin_spec(plugins, config, layer) if is_plugin(name) else kinds[name](config, layer)


def _of_side(layer: LayerSpec, side: Side, config: ModelConfig) -> LayerSpec:
    """A layer with attention as one of an encoder-decoder's."""
    mixer = layer.mixer
    assert isinstance(mixer, AttentionSpec)
    if config.positions == "relative":
        of = config.relative or RelativeConfig()
        mixer = replace(mixer, relative=RelativeSpec(side, of.buckets, of.max_distance, mixer.heads))
    cross = None if side == "encoder" else CrossAttentionSpec.beside(mixer)
    return replace(layer, mixer=mixer, side=side, cross=cross)


def _norm_spec(config: ModelConfig) -> NormSpec:
    return NormSpec(config.norm, config.norm_eps, config.norm_bias, config.norm_offset)


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
    base_dim = config.init.mup_base_dim
    layers, norm = layer_specs(config), _norm_spec(config)
    return DecoderSpec(
        dim=config.dim,
        vocab_size=vocab_size,
        vocab_padded=math.ceil(vocab_size / config.vocab_multiple) * config.vocab_multiple,
        norm=norm,
        learned_positions=max_positions if config.positions == "learned" else None,
        tie_embeddings=config.tie_embeddings,
        embedding_scale=config.embedding_scale,
        logit_scale=config.logit_scale * (1.0 if base_dim is None else base_dim / config.dim),
        logit_soft_cap=config.logit_soft_cap,
        layers=layers,
        mtp=() if config.mtp is None else (MtpSpec(layers[-1], norm),) * config.mtp.depth,
        token_types=config.token_types,
        embedding_norm=config.embedding_norm,
        final_norm=config.final_norm,
        head_transform=config.head_transform,
        head_transform_bias=config.head_transform is not None and config.bias == "all",
        head_bias=config.head_bias,
    )
