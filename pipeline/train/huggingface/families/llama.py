"""Llama 1 to 3, and models with the same layers under its name."""

from __future__ import annotations

from pipeline.config.model import ModelConfig
from pipeline.train.huggingface.config_source import ConfigSource, Json
from pipeline.train.huggingface.config_windows import read_windows
from pipeline.train.huggingface.family import Family, only
from pipeline.train.huggingface.llama_like import (
    BIASES,
    LLAMA_NAMES,
    LLAMA_NEEDS,
    read_bias,
    read_llama_like,
    write_bias,
    write_llama_like,
)


def _read(source: ConfigSource) -> Json:
    found = read_llama_like(source)
    return {**found, "bias": read_bias(source), **read_windows(source, found["layers"], windowed=False)}


def _write(model: ModelConfig, positions: int) -> Json:
    return write_llama_like(model, positions, **write_bias(model))


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    title="Llama",
    what="`bias: none`, `attention`, `mlp` or `all`",
    read=_read,
    write=_write,
    mark="positions",
    needs={**LLAMA_NEEDS, "bias": only(*BIASES)},
    names=LLAMA_NAMES,
    ignored=(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
)
