"""Qwen2-MoE (Qwen1.5-MoE) and Qwen3-MoE: some or all layers have experts, in the first beside a shared mlp."""

from __future__ import annotations

from dataclasses import replace

from pipeline.config.model import ModelConfig
from pipeline.train.huggingface.config_experts import (
    OF_SOME_LAYERS,
    SIZES,
    WITH_SOME_EXPERTS,
    dense_layer,
    experts_of,
    needs_experts,
    read_count,
    read_experts,
    read_sparse_layers,
    restricted,
    some_have_experts,
    write_sparse_layers,
)
from pipeline.train.huggingface.config_kinds import layer_types
from pipeline.train.huggingface.config_source import ConfigSource, Json
from pipeline.train.huggingface.config_windows import DEFAULT_WINDOW, FULL
from pipeline.train.huggingface.family import Family, Need, anything, only, where
from pipeline.train.huggingface.llama_like import LLAMA_NAMES, read_llama_like, write_llama_like
from pipeline.train.model.mlps.experts.spec import EXPERTS_NAMES, ExpertsSpec, shared_names


def _read_qwen2_moe(source: ConfigSource) -> Json:
    found = read_llama_like(source, kv_heads=16)
    source.must_be("use_sliding_window", (False,), False)
    source.get("sliding_window"), source.get("max_window_layers")  # which are not used then
    layer_types(source, found["layers"], (FULL,), lambda index: FULL)
    experts = {
        **read_qwen_experts(source, count=60, top_k=4, ffn_dim=1408),
        "shared_ffn_dim": source.size("shared_expert_intermediate_size", 5632),
        "shared_gate": True,
    }
    found["bias"] = "qkv" if source.flag("qkv_bias", True) else "none"
    return read_experts(source, found, read_sparse_layers(source, found["layers"]), experts)


def _read_qwen3_moe(source: ConfigSource) -> Json:
    found = read_llama_like(source, kv_heads=4)
    source.must_be("attention_bias", (False,), False)
    source.get("max_window_layers")  # which transformers does not read here
    window = source.size_or_null("sliding_window", DEFAULT_WINDOW, least=0)
    window = window if source.flag("use_sliding_window", False) else None
    found |= {"qk_norm": True, "sliding_window": window}
    experts = read_qwen_experts(source, count=128, top_k=8, ffn_dim=768)
    return read_experts(source, found, read_sparse_layers(source, found["layers"]), experts)


def read_qwen_experts(source: ConfigSource, *, count: int, top_k: int, ffn_dim: int) -> Json:
    """Keys of `experts`, with what transformers takes where there are none."""
    return {
        "count": read_count(source, "num_experts", "num_local_experts", default=count),
        "top_k": source.size("num_experts_per_tok", top_k),
        "ffn_dim": source.size("moe_intermediate_size", ffn_dim),
        "normalize": source.flag("norm_topk_prob", False),
    }


def _write_qwen2_moe(model: ModelConfig, positions: int) -> Json:
    experts = experts_of(model)
    found = _write(model, positions) | {
        "shared_expert_intermediate_size": experts.shared_ffn_dim,
        "qkv_bias": model.bias == "qkv",
        "layer_types": [FULL] * model.layers,
        "use_sliding_window": False,
    }
    del found["head_dim"]
    return found


def _write_qwen3_moe(model: ModelConfig, positions: int) -> Json:
    windowed = {"use_sliding_window": model.sliding_window is not None, "sliding_window": model.sliding_window}
    return _write(model, positions) | {"attention_bias": False, **windowed}


def _write(model: ModelConfig, positions: int) -> Json:
    return write_llama_like(dense_layer(model), positions) | write_qwen_experts(model) | write_sparse_layers(model)


def write_qwen_experts(model: ModelConfig) -> Json:
    """Write the keys of experts of this family."""
    experts = experts_of(model)
    return {
        "num_experts": experts.count,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.ffn_dim,
        "norm_topk_prob": experts.normalize,
    }


def needs_shared(needs: dict[str, Need]) -> dict[str, Need]:
    """Needs of a family with a shared mlp in layers with experts."""
    shared = restricted(needs["experts"], lambda experts: experts.shared_ffn_dim is not None, "a shared mlp")
    return {**needs, "experts": shared}


QWEN2_MOE = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    title="Qwen2-MoE",
    what="`bias: qkv` or `none`, `mlp: experts` in all or some layers, with `shared_ffn_dim` and `shared_gate`",
    read=_read_qwen2_moe,
    write=_write_qwen2_moe,
    mark="mlp",
    needs=needs_shared(
        {
            **needs_experts({*SIZES, "normalize", "shared_ffn_dim"}, shared_gate=True),
            "bias": only("qkv", "none", has="no biases but of queries, keys and values"),
            "head_dim": where(lambda model: model.heads_fill_dim, "dim / heads"),
        }
    ),
    special=some_have_experts,
    names=replace(
        LLAMA_NAMES,
        tables={
            ExpertsSpec: (
                *EXPERTS_NAMES,
                *shared_names("mlp.shared_expert"),
                ("mlp.shared_expert_gate", ("shared_gate",)),
            )
        },
        layers=WITH_SOME_EXPERTS,
    ),
    positions=("max_position_embeddings", 32768),
    **OF_SOME_LAYERS,
)
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    title="Qwen3-MoE",
    what="`qk_norm`, `mlp: experts` in all or some layers, with any `normalize`, `sliding_window` or none",
    read=_read_qwen3_moe,
    write=_write_qwen3_moe,
    mark="mlp",
    needs={
        **needs_experts({*SIZES, "normalize"}),
        "bias": only("none", has="no biases"),
        "qk_norm": only(True),
        "sliding_window": anything(),
    },
    special=some_have_experts,
    names=replace(LLAMA_NAMES, layers=WITH_SOME_EXPERTS),
    positions=("max_position_embeddings", 32768),
    **OF_SOME_LAYERS,
)
