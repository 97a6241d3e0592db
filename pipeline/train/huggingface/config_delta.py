"""Layers with a gated delta rule in a `config.json` of Hugging Face's models."""

from __future__ import annotations

from collections.abc import Callable

from pipeline.config.layers.mixers import DeltaConfig
from pipeline.config.model import ModelConfig
from pipeline.train.huggingface.config_hybrid import has_recurrence
from pipeline.train.huggingface.config_kinds import by_layer, layer_types
from pipeline.train.huggingface.config_source import ConfigSource, Json
from pipeline.train.huggingface.config_windows import FULL
from pipeline.train.huggingface.family import Need

LINEAR = "linear_attention"
"""Type of layers, and our name of this kind; those with attention are `FULL`."""
_KEYS = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "conv_size": "linear_conv_kernel_dim",
}
"""Key of the files by key of `delta`."""


def read_delta(source: ConfigSource, **defaults: int) -> Json:
    """Sizes of `delta` of `model:`, with what transformers takes where there are none."""
    return {key: source.count(theirs, defaults[key], least=1) for key, theirs in _KEYS.items()}


def write_delta(model: ModelConfig) -> Json:
    """Write the keys that `read_delta` reads."""
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
    """Write the key that `read_types` reads."""
    return by_layer(model, lambda layer: LINEAR if has_recurrence(layer) else FULL)


def delta_of(model: ModelConfig) -> DeltaConfig:
    """Sizes of the layers with a rule."""
    found = next(layer.delta for layer in map(model.layer, model.layer_kinds) if has_recurrence(layer))
    assert found is not None, "the section sees to it"
    return found


def needs_delta(fits: Callable[[DeltaConfig, ModelConfig], bool], has: str) -> Need:
    """The need of `delta`.

    Args:
        fits: a condition on the layers with a rule, given all of their section besides.
        has: words for it.
    """
    return Need(lambda value, layer: value is None or not has_recurrence(layer) or fits(value, layer), has)
