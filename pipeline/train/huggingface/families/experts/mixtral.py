"""Mixtral: a Mistral whose mlps are mixtures of experts."""

from __future__ import annotations

from dataclasses import replace

from pipeline.config.model import ModelConfig
from pipeline.train.huggingface.config_experts import (
    SIZES,
    WITH_EXPERTS,
    experts_of,
    needs_experts,
    read_count,
    read_experts,
    some_have_experts,
)
from pipeline.train.huggingface.config_source import ConfigSource, Json
from pipeline.train.huggingface.family import Family, anything, only
from pipeline.train.huggingface.llama_like import LLAMA_NAMES, read_llama_like, write_llama_like
from pipeline.train.model.mlps.experts.spec import ExpertsSpec
from pipeline.train.model.tensor_names import TensorNames


def _read(source: ConfigSource) -> Json:
    found = read_llama_like(source, kv_heads=8, theta=1e6, eps=1e-5)
    source.must_be("router_jitter_noise", (0, 0.0), 0)
    window = source.size("sliding_window", least=0)
    experts = {
        "count": read_count(source, "num_local_experts", "num_experts", default=8),
        "top_k": source.size("num_experts_per_tok", 2),
        "ffn_dim": found.pop("ffn_dim"),
    }
    found["sliding_window"] = None if window is None else int(window)
    return read_experts(source, found, [True] * found["layers"], experts)


def _write(model: ModelConfig, positions: int) -> Json:
    experts = experts_of(model)
    return write_llama_like(model, positions) | {
        "intermediate_size": experts.ffn_dim,
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.top_k,
        "sliding_window": model.sliding_window,
    }


BLOCK_EXPERTS = tuple(
    TensorNames(f"block_sparse_moe.experts.{{e}}.{name}.weight", (f"experts.{name}",), experts="numbered")
    for name in ("w1", "w3", "w2")
)
"""Names of experts that are called as ours are."""

MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    title="Mixtral",
    what="`mlp: experts`, `sliding_window` or none",
    read=_read,
    write=_write,
    mark="mlp",
    needs={
        **needs_experts(SIZES),
        "mlp": only("experts"),
        "bias": only("none", has="no biases"),
        "sliding_window": anything(),
    },
    special=some_have_experts,
    names=replace(
        LLAMA_NAMES,
        tables={
            ExpertsSpec: (
                ("block_sparse_moe.gate", ("router",)),
                *BLOCK_EXPERTS,
            )
        },
        layers=WITH_EXPERTS,
    ),
    positions=("max_position_embeddings", 131072),
)
