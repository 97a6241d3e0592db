"""Layers with a recurrence, and attention among them, in a `config.json` of Hugging Face's models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pipeline.config.model import RECURRENT, ModelConfig
from pipeline.train.huggingface.config_source import Json
from pipeline.train.huggingface.family import Need

OF_ATTENTION = (
    *("heads", "kv_heads", "head_dim", "positions", "rope_theta", "rope_scaling", "rope_share"),
    *("qk_norm", "output_gate", "attention_scale"),
)
"""Keys that layers with attention alone have."""


def split(found: Json) -> tuple[Json, Json]:
    """Keys of all layers, and those of the layers with attention, from the keys of a model that has it everywhere."""
    own = {key: value for key, value in found.items() if key in OF_ATTENTION}
    return {key: value for key, value in found.items() if key not in OF_ATTENTION}, own


def has_recurrence(layer: ModelConfig) -> bool:
    """True if a layer has a recurrence."""
    return layer.mixer in RECURRENT


def mixer_of(layer: ModelConfig) -> Any:
    """A type of layers for `Family.alike`: those with one mixer are equal."""
    return layer.mixer


def attends(layer: ModelConfig) -> bool:
    """True if a layer has attention."""
    return layer.mixer not in (*RECURRENT, "none")


def attention_of(model: ModelConfig) -> ModelConfig:
    """The section with the keys of the layers with attention; where there are none, of some that nobody has."""
    return next(filter(attends, map(model.layer, model.layer_kinds)), model.model_copy(update={"heads": 1}))


def of_attention(need: Need) -> Need:
    """A need of the layers with attention alone."""
    return Need(lambda value, layer: not attends(layer) or need.fits(value, layer), need.has)


def some_recurrent(layers: Sequence[ModelConfig]) -> bool:
    """True of the kinds of layers of a model that has some with a recurrence, see `Family.special`."""
    return any(map(has_recurrence, layers))


def both(layers: Sequence[ModelConfig]) -> bool:
    """True of the kinds of layers of a model with both types."""
    return some_recurrent(layers) and not all(map(has_recurrence, layers))


def hybrid(section: str, *varies: str, **alike: Callable[[ModelConfig], Any]) -> Json:
    """Fields of `Family` for one in which layers have a recurrence or attention.

    Args:
        section: of `model:` with the sizes of the recurrence.
        varies: other keys that differ between layers.
        alike: those that are equal in all layers of a type, and the type of a layer.
    """
    types = {**dict.fromkeys((section, *OF_ATTENTION), mixer_of), **alike}
    return {"mark": "mixer", "varies": frozenset({"mixer", *varies, *types}), "alike": types}
