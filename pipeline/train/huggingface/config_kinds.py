"""Layers of several kinds in a `config.json` of Hugging Face's models, which has a list with an entry per layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipeline.config.model import ModelConfig
from pipeline.train.huggingface.config_source import ConfigSource, Json
from pipeline.train.model.decoder_spec import period_of


def read_kinds(names: Sequence[str], kinds: Mapping[str, Json]) -> Json:
    """Keys of `model:` for layers of these kinds: `pattern` and `kinds`, or the keys themselves where all are equal.

    Args:
        names: the kind of each layer.
        kinds: by kind the keys of its layers.
    """
    used = dict.fromkeys(names)
    if len(used) == 1:
        return dict(kinds[names[0]])
    return {"pattern": list(names[: period_of(names)]), "kinds": {name: dict(kinds[name]) for name in used}}


def layer_types(source: ConfigSource, layers: int, known: Sequence[str], default: Callable[[int], str]) -> list[str]:
    """`layer_types` of the file.

    Args:
        source: the file.
        layers: their number.
        known: types that the family has.
        default: by the index of a layer, what transformers takes where the key is not there.
    """
    names = source.get("layer_types", [default(index) for index in range(layers)])
    if not isinstance(names, list) or len(names) != layers:
        source.refuse("layer_types", names, f"it must be a list of {layers} types")
    if unknown := [name for name in names if name not in known]:
        source.refuse("layer_types", unknown[0], f"only {' and '.join(known)} are supported")
    return names


def by_layer(model: ModelConfig, value: Callable[[ModelConfig], Any]) -> list[Any]:
    """A value of each layer, given the section with its keys."""
    kinds = {name: value(model.layer(name)) for name in dict.fromkeys(model.layer_kinds)}
    return [kinds[name] for name in model.layer_kinds]
