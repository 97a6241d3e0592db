"""Layers with a gated delta rule, and attention among them, in a `config.json` of Hugging Face's models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pipeline.config.mixers import DeltaConfig
from pipeline.config.model import ModelConfig
from pipeline.train.huggingface.config_kinds import by_layer, layer_types
from pipeline.train.huggingface.config_source import ConfigSource, Json
from pipeline.train.huggingface.config_windows import FULL
from pipeline.train.huggingface.family import Need

LINEAR = "linear_attention"
"""Type of layers, and our name of this kind; those with attention are `FULL`."""
OF_ATTENTION = (
    *("heads", "kv_heads", "head_dim", "positions", "rope_theta", "rope_scaling", "rope_share"),
    *("qk_norm", "output_gate"),
)
"""Keys that layers with attention alone have."""
_RULES = ("gated_delta", "kda")
_KEYS = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "conv_size": "linear_conv_kernel_dim",
}
"""By key of `delta` that of the files."""


def read_delta(source: ConfigSource, **defaults: int) -> Json:
    """Sizes of `delta` of `model:`, with what transformers takes where there are none."""
    return {key: source.count(theirs, defaults[key], least=1) for key, theirs in _KEYS.items()}


def write_delta(model: ModelConfig) -> Json:
    """The same keys."""
    delta = delta_of(model)
    found = {theirs: getattr(delta, key) for key, theirs in _KEYS.items()}
    return {**found, _KEYS["value_heads"]: delta.value_heads or delta.key_heads}


def read_types(source: ConfigSource, layers: int, default: Callable[[int], str]) -> list[str]:
    """The type of each layer; both must be there.

    Args:
        source: the file.
        layers: their number.
        default: see `layer_types`.
    """
    types = layer_types(source, layers, (FULL, LINEAR), default)
    if missing := [name for name in (FULL, LINEAR) if name not in types]:
        source.refuse("layer_types", types[0], f"no layer is {missing[0]}")
    return types


def write_types(model: ModelConfig) -> list[str]:
    """The same key."""
    return by_layer(model, lambda layer: LINEAR if has_rule(layer) else FULL)


def split(found: Json, delta: Json, **linear: Any) -> tuple[Json, dict[str, Json]]:
    """Keys of all layers, and by type those that its layers have besides.

    Args:
        found: keys of a model without a rule.
        delta: `delta` of `model:`.
        linear: other keys of the layers with a rule.
    """
    shared = {key: value for key, value in found.items() if key not in OF_ATTENTION}
    kinds = {
        LINEAR: {"mixer": "gated_delta", **linear, "delta": delta},
        FULL: {key: found[key] for key in OF_ATTENTION if key in found},
    }
    return shared, kinds


def has_rule(layer: ModelConfig) -> bool:
    """True if a layer has a gated delta rule; a type of layers for `Family.alike`, too."""
    return layer.mixer in _RULES


def both(layers: Sequence[ModelConfig]) -> bool:
    """True of the kinds of layers of a model with both types, see `Family.special`."""
    return len(set(map(has_rule, layers))) == 2


def delta_of(model: ModelConfig) -> DeltaConfig:
    """Sizes of the layers with a rule."""
    found = next(layer.delta for layer in map(model.layer, model.layer_kinds) if has_rule(layer))
    assert found is not None, "the section sees to it"
    return found


def attention_of(model: ModelConfig) -> ModelConfig:
    """The section with the keys of the layers with attention."""
    return next(layer for layer in map(model.layer, model.layer_kinds) if not has_rule(layer))


def of_attention(need: Need) -> Need:
    """A need of the layers with attention alone."""
    return Need(lambda value, layer: has_rule(layer) or need.fits(value, layer), need.has)


def needs_delta(fits: Callable[[DeltaConfig, ModelConfig], bool], has: str) -> Need:
    """The need of `delta`.

    Args:
        fits: a condition on the layers with a rule, given all of their section besides.
        has: words for it.
    """
    return Need(lambda value, layer: value is None or not has_rule(layer) or fits(value, layer), has)


def hybrid(*varies: str, **alike: Callable[[ModelConfig], Any]) -> Json:
    """Fields of `Family` for one in which layers have a rule or attention.

    Args:
        varies: other keys that differ between layers.
        alike: those that are equal in all layers of a type, and the type of a layer.
    """
    types = {**dict.fromkeys(("delta", *OF_ATTENTION), has_rule), **alike}
    return {"mark": "mixer", "special": both, "varies": frozenset({"mixer", *varies, *types}), "alike": types}
