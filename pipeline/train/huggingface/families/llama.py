"""Llama 1 to 3, and models with the same layers under its name."""

from __future__ import annotations

from pipeline.config.model import ModelConfig
from pipeline.train.huggingface.config_source import ConfigSource, Json
from pipeline.train.huggingface.config_windows import read_same_window
from pipeline.train.huggingface.family import Family, only
from pipeline.train.huggingface.llama_like import LLAMA_NAMES, LLAMA_NEEDS, read_llama_like, write_llama_like


def _read(source: ConfigSource) -> Json:
    found = read_llama_like(source)
    attention, mlp = source.get("attention_bias", False), source.get("mlp_bias", False)
    if attention != mlp:
        source.refuse("attention_bias", attention, f"mlp_bias is {mlp!r}; only both or none are supported")
    window = read_same_window(source, found["layers"], windowed=False)
    return {**found, "bias": "all" if attention else "none", "sliding_window": window}


def _write(model: ModelConfig, positions: int) -> Json:
    biases = model.bias == "all"
    return write_llama_like(model, positions, attention_bias=biases, mlp_bias=biases)


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    title="Llama",
    what="`bias: none` or `all`",
    read=_read,
    write=_write,
    mark="positions",
    needs={**LLAMA_NEEDS, "bias": only("none", "all")},
    names=LLAMA_NAMES,
    ignored=(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
)
