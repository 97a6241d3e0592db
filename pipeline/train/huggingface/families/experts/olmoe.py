"""OLMoE: mixtures of experts, and norms of queries and keys over all heads together."""

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
from pipeline.train.huggingface.family import Family, only, where
from pipeline.train.huggingface.llama_like import LLAMA_NAMES, read_llama_like, write_llama_like


def _read(source: ConfigSource) -> Json:
    found = read_llama_like(source, eps=1e-5)
    source.must_be("clip_qkv", (None,), None)
    if found["head_dim"] not in (None, found["dim"] // found["heads"]):
        source.refuse("head_dim", found["head_dim"], "norms of queries in OLMoE are as wide as the model")
    experts = {
        "count": read_count(source, "num_experts", "num_local_experts", default=64),
        "top_k": source.size("num_experts_per_tok", 8),
        "ffn_dim": found.pop("ffn_dim"),
        "normalize": source.flag("norm_topk_prob", False),
    }
    found |= {"qk_norm": "full", "bias": "attention" if source.flag("attention_bias", False) else "none"}
    return read_experts(source, found, [True] * found["layers"], experts)


def _write(model: ModelConfig, positions: int) -> Json:
    experts = experts_of(model)
    found = write_llama_like(model, positions) | {
        "intermediate_size": experts.ffn_dim,
        "num_experts": experts.count,
        "num_experts_per_tok": experts.top_k,
        "norm_topk_prob": experts.normalize,
        "attention_bias": model.bias == "attention",
        "clip_qkv": None,
    }
    del found["head_dim"]
    return found


OLMOE = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    title="OLMoE",
    what="`mlp: experts` with any `normalize`, `qk_norm: full`, `bias: none` or `attention`",
    read=_read,
    write=_write,
    mark="mlp",
    needs={
        **needs_experts({*SIZES, "normalize"}),
        "mlp": only("experts"),
        "qk_norm": only("full"),
        "bias": only("none", "attention", has="no biases of mlps"),
        "head_dim": where(lambda model: model.heads_fill_dim, "dim / heads"),
    },
    special=some_have_experts,
    names=replace(LLAMA_NAMES, layers=WITH_EXPERTS),
    positions=("max_position_embeddings", 4096),
    pads=True,
)
