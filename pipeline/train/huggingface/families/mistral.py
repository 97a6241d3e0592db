"""Mistral: all layers attend within a window."""

from __future__ import annotations

from pipeline.config.model import ModelConfig
from pipeline.train.huggingface.config_source import ConfigSource, Json
from pipeline.train.huggingface.config_windows import DEFAULT_WINDOW
from pipeline.train.huggingface.family import Family, only, where
from pipeline.train.huggingface.llama_like import LLAMA_NAMES, LLAMA_NEEDS, read_llama_like, write_llama_like


def _read(source: ConfigSource) -> Json:
    found = read_llama_like(source, kv_heads=8)
    source.must_be("attention_bias", (False,), False)
    source.get("layer_types")  # which transformers does not read here
    window = source.size_or_null("sliding_window", DEFAULT_WINDOW, least=0)
    return {**found, "sliding_window": None if window is None else int(window)}


def _write(model: ModelConfig, positions: int) -> Json:
    return write_llama_like(model, positions, sliding_window=model.sliding_window)


MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    title="Mistral",
    what="`sliding_window`",
    read=_read,
    write=_write,
    mark="sliding_window",
    needs={
        **LLAMA_NEEDS,
        "bias": only("none", has="no biases"),
        # Without a window it is a Llama.
        "sliding_window": where(lambda model: model.sliding_window is not None, "a window"),
    },
    names=LLAMA_NAMES,
    positions=("max_position_embeddings", 131072),
)
