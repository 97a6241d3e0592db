"""Granite 3: a Llama with factors on the embedding, on attention, on what is added to the stream, and on the logits."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.config.model import ModelConfig
from pipeline.train.huggingface.config_source import ConfigSource, Json
from pipeline.train.huggingface.family import Family, anything, is_default, only
from pipeline.train.huggingface.llama_like import (
    BIASES,
    LLAMA_NAMES,
    LLAMA_NEEDS,
    read_bias,
    read_llama_like,
    write_bias,
    write_llama_like,
)

FACTORS = ("embedding_scale", "residual_scale", "attention_scale", "logit_scale")


def _read(source: ConfigSource) -> Json:
    return {**read_llama_like(source), "bias": read_bias(source), **read_factors(source)}


def read_factors(source: ConfigSource) -> Json:
    """`FACTORS` of `model:`."""
    return {
        "embedding_scale": float(source.number("embedding_multiplier", 1.0)),
        "residual_scale": float(source.number("residual_multiplier", 1.0)),
        "attention_scale": float(source.number("attention_multiplier", 1.0)),
        "logit_scale": 1 / source.number("logits_scaling", 1.0),
    }


def _write(model: ModelConfig, positions: int) -> Json:
    return write_llama_like(model, positions, **write_bias(model), **write_factors(model))


def write_factors(model: ModelConfig) -> Json:
    """Write the factors of this family."""
    return {
        "embedding_multiplier": model.embedding_scale,
        "residual_multiplier": model.residual_scale,
        "attention_multiplier": model.head_size**-0.5 if model.attention_scale is None else model.attention_scale,
        "logits_scaling": _divisor(model.logit_scale),
    }


def _divisor(scale: float) -> float:
    """The number with which 1 / number is the scale; whole where that is possible, as in published files."""
    whole = float(round(1 / scale))
    return whole if whole and 1 / whole == scale else 1 / scale


def has_factors(layers: Sequence[ModelConfig]) -> bool:
    """True of layers of a model with some of them, see `Family.special`."""
    return not all(is_default(layer, key) for layer in layers for key in FACTORS)


GRANITE = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    title="Granite",
    what="`embedding_scale`, `residual_scale`, `attention_scale`, `logit_scale`; `bias` as Llama",
    read=_read,
    write=_write,
    mark="residual_scale",
    needs={**LLAMA_NEEDS, "bias": only(*BIASES), **dict.fromkeys(FACTORS, anything())},
    special=has_factors,  # else it is a Llama
    names=LLAMA_NAMES,
)
