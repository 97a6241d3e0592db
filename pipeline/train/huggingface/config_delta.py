"""Gated delta rules beside attention in a `config.json` of Hugging Face's models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeline.config.mixers import DeltaConfig
from pipeline.config.model import ModelConfig
from pipeline.train.huggingface.config_kinds import by_layer, layer_types
from pipeline.train.huggingface.config_source import ConfigSource, Json
from pipeline.train.huggingface.config_windows import FULL
from pipeline.train.huggingface.family import Need

LINEAR = "linear_attention"
"""Their type of layers with a recurrence, and our name of the kind."""
_OF_ATTENTION = (
    *("kv_heads", "head_dim", "qk_norm", "output_gate", "positions"),
    *("rope_theta", "rope_scaling", "rope_share", "bias", "norm_place"),
)
OF_HYBRID: Json = {
    "varies": frozenset({"mixer", "delta", "mla", *_OF_ATTENTION, "heads", "mlp", "experts", "ffn_dim"}),
    "alike": {
        **dict.fromkeys(("delta", "mla", "heads", *_OF_ATTENTION), lambda layer: layer.mixer),
        **dict.fromkeys(("experts", "ffn_dim"), lambda layer: layer.mlp),
    },
}
"""Fields of `Family` for one in which most layers have a gated delta rule, and some may have experts."""


def read_types(source: ConfigSource, layers: int) -> list[str]:
    """The type of each layer; there must be both."""
    interval = source.count("full_attention_interval", 4, least=1)
    types = layer_types(source, layers, (LINEAR, FULL), lambda index: LINEAR if (index + 1) % interval else FULL)
    if len(set(types)) == 1:
        source.refuse("layer_types", types[0], f"models with both {LINEAR} and {FULL} are supported")
    return types


def read_delta(source: ConfigSource) -> Json:
    """`delta` of `model:`, with Qwen's defaults."""
    keys = {
        "key_heads": ("linear_num_key_heads", 16),
        "value_heads": ("linear_num_value_heads", 32),
        "key_dim": ("linear_key_head_dim", 128),
        "value_dim": ("linear_value_head_dim", 128),
        "conv_size": ("linear_conv_kernel_dim", 4),
    }
    return {ours: source.count(theirs, default, least=1) for ours, (theirs, default) in keys.items()}


def write_delta(model: ModelConfig) -> Json:
    """The same keys, and the type of each layer."""
    delta = delta_of(model)
    return {
        "linear_num_key_heads": delta.key_heads,
        "linear_num_value_heads": delta.value_heads or delta.key_heads,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_conv_kernel_dim": delta.conv_size,
        "layer_types": types_of(model),
    }


def types_of(model: ModelConfig) -> list[str]:
    """The type of each layer."""
    return by_layer(model, lambda layer: FULL if is_attention(layer) else LINEAR)


def is_attention(layer: ModelConfig) -> bool:
    """True of a layer without a recurrence."""
    return layer.mixer in ("attention", "mla")


def attention_layer(model: ModelConfig) -> ModelConfig:
    """The section with the keys of the layers with attention."""
    return next(layer for layer in map(model.layer, model.layer_kinds) if is_attention(layer))


def delta_of(model: ModelConfig) -> DeltaConfig:
    """Sizes of the gated delta rule."""
    found = next(layer.delta for layer in map(model.layer, model.layer_kinds) if not is_attention(layer))
    assert found is not None, "the section sees to it"
    return found


def kinds_of(types: Sequence[str], has_experts: Sequence[bool], keys: dict[str, Json]) -> tuple[list[str], Json]:
    """Kinds of layers by type of mixer and of mlp: the name of each layer's, and their keys.

    Args:
        types: the type of each layer.
        has_experts: for each layer whether it has experts.
        keys: by type the keys of its layers.
    """
    mixed = len(set(has_experts)) == 2
    kinds: dict[str, Json] = {}
    names = []
    for kind, routed in zip(types, has_experts, strict=True):
        names.append(f"{kind}_{'experts' if routed else 'dense'}" if mixed else kind)
        kinds[names[-1]] = {**keys[kind], **({"mlp": "experts" if routed else "swiglu"} if mixed else {})}
    return names, kinds


def of_attention(need: Need) -> Need:
    """A need that layers with a recurrence do not have."""
    return replace(need, fits=lambda value, model: not is_attention(model) or need.fits(value, model))


def of_recurrence(need: Need) -> Need:
    """A need that layers with attention do not have."""
    return replace(need, fits=lambda value, model: is_attention(model) or need.fits(value, model))


def is_hybrid(layers: Sequence[ModelConfig]) -> bool:
    """True of the kinds of layers of a model with both, see `Family.special`."""
    return len({is_attention(layer) for layer in layers}) == 2
