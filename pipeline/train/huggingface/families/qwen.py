"""Qwen2, Qwen2.5 and Qwen3: biases of queries, keys and values, or norms of queries and keys."""

from __future__ import annotations

import orjson

from pipeline.config.model import ModelConfig
from pipeline.train.huggingface.config_source import ConfigSource, Json
from pipeline.train.huggingface.config_windows import has_window, read_windows, write_windows
from pipeline.train.huggingface.family import Family, anything, only, where
from pipeline.train.huggingface.llama_like import LLAMA_NAMES, LLAMA_NEEDS, read_llama_like, write_llama_like

_SPLIT = orjson.dumps(r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|").decode()[1:-1]
"""Single digits, which no other family here has; as JSON writes it."""


def _read_qwen2(source: ConfigSource) -> Json:
    found = read_llama_like(source, kv_heads=32)
    return {**found, "bias": "qkv", **read_windows(source, found["layers"], windowed=True)}


def _read_qwen3(source: ConfigSource) -> Json:
    found = read_llama_like(source, head_dim=128, kv_heads=32)
    source.must_be("attention_bias", (False,), False)
    return {**found, "qk_norm": True, **read_windows(source, found["layers"], windowed=True)}


def _write_qwen2(model: ModelConfig, positions: int) -> Json:
    return write_llama_like(model, positions, **write_windows(model))


def _write_qwen3(model: ModelConfig, positions: int) -> Json:
    return write_llama_like(model, positions, attention_bias=False, **write_windows(model))


def _splits_as_qwen(definition: str) -> bool:
    state = orjson.loads(definition)
    return (
        _SPLIT in orjson.dumps(state.get("pre_tokenizer")).decode()
        and (state.get("normalizer") or {}).get("type") == "NFC"
    )


QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    title="Qwen2",
    what="`bias: qkv`, `sliding_window` in all, some or no layers",
    read=_read_qwen2,
    write=_write_qwen2,
    mark="bias",
    needs={
        **LLAMA_NEEDS,
        "bias": only("qkv"),
        "head_dim": where(lambda model: model.heads_fill_dim, "dim / heads"),
        "sliding_window": anything(),
    },
    varies=frozenset({"sliding_window"}),
    alike={"sliding_window": has_window},
    names=LLAMA_NAMES,
    positions=("max_position_embeddings", 32768),
    splits_alike=_splits_as_qwen,
)
QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    title="Qwen3",
    what="`qk_norm`, `sliding_window` in all, some or no layers",
    read=_read_qwen3,
    write=_write_qwen3,
    mark="qk_norm",
    needs={
        **LLAMA_NEEDS,
        "bias": only("none", has="no biases"),
        "qk_norm": only(True),
        "sliding_window": anything(),
    },
    varies=frozenset({"sliding_window"}),
    alike={"sliding_window": has_window},
    names=LLAMA_NAMES,
    positions=("max_position_embeddings", 32768),
)
