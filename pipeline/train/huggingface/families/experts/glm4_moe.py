"""GLM-4.5: first layers without experts, a biased choice of them by sigmoid scores, a shared mlp, a partial rope."""

from __future__ import annotations

from dataclasses import replace

from pipeline.config.layers.experts import ExpertsConfig
from pipeline.config.model import ModelConfig
from pipeline.train.huggingface.config_experts import (
    OF_SOME_LAYERS,
    SIZES,
    WITH_SOME_EXPERTS,
    dense_layer,
    experts_of,
    has_experts,
    needs_experts,
    read_count,
    read_experts,
    restricted,
)
from pipeline.train.huggingface.config_rope import ROPE_SHARE
from pipeline.train.huggingface.config_source import ConfigSource, Json
from pipeline.train.huggingface.family import Family, Need, anything, only
from pipeline.train.huggingface.llama_like import LLAMA_NAMES, read_llama_like, write_llama_like


def _read(source: ConfigSource) -> Json:
    found = read_llama_like(source, kv_heads=8, eps=1e-5, share=0.5)
    found["bias"] = "qkv" if source.flag("attention_bias", False) else "none"
    found["qk_norm"] = source.flag("use_qk_norm", False)
    for key in ("num_nextn_predict_layers", "num_mtp_layers"):
        source.get(key)  # layers after the last one, which transformers leaves out
    first = source.count("first_k_dense_replace", 1)
    has = [index >= first for index in range(found["layers"])]
    sizes = read_expert_sizes(source, count=128, ffn_dim=1408, shared=1)
    return read_experts(source, found, has, read_biased_experts(source, sizes))


def read_biased_experts(
    source: ConfigSource, sizes: Json, *, scale: float = 1.0, groups: int = 1, top_groups: int = 1
) -> Json:
    """Keys of `experts` where the choice by sigmoid scores has a bias, perhaps within groups.

    Args:
        source: the file.
        sizes: from `read_expert_sizes`.
        scale: what transformers takes where the key is not there.
        groups: the same.
        top_groups: the same.
    """
    found_groups, found_top = source.size("n_group", groups), source.size("topk_group", top_groups)
    if found_groups == 1 and found_top != 1:
        source.refuse("topk_group", found_top, "n_group is 1")
    return {
        **sizes,
        "top_k": source.size("num_experts_per_tok", 8),
        "score": "sigmoid",
        "score_bias": True,
        "normalize": source.flag("norm_topk_prob", True),
        "scale": source.number("routed_scaling_factor", scale),
        **({} if found_groups == 1 else {"groups": found_groups, "top_groups": found_top}),
    }


def read_expert_sizes(source: ConfigSource, *, count: int, ffn_dim: int, shared: int) -> Json:
    """Keys of `experts` for numbers and sizes, with what transformers takes where there are none."""
    size = source.count("moe_intermediate_size", ffn_dim, least=1)
    return {
        "count": read_count(source, "n_routed_experts", "num_local_experts", "num_experts", default=count),
        "ffn_dim": size,
        "shared_ffn_dim": size * source.count("n_shared_experts", shared, least=1),
    }


def write_biased_experts(experts: ExpertsConfig) -> Json:
    """Write the keys that `read_expert_sizes` reads."""
    assert experts.shared_ffn_dim is not None, "the family needs it"
    return {
        "n_routed_experts": experts.count,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.ffn_dim,
        "n_shared_experts": experts.shared_ffn_dim // experts.ffn_dim,
        "norm_topk_prob": experts.normalize,
        "routed_scaling_factor": experts.scale,
        "n_group": experts.groups or 1,
        "topk_group": experts.top_groups or 1,
    }


def _write(model: ModelConfig, positions: int) -> Json:
    return write_llama_like(dense_layer(model), positions) | {
        **write_biased_experts(experts_of(model)),
        "first_k_dense_replace": has_experts(model).index(True),
        "num_nextn_predict_layers": 0,
        "attention_bias": model.bias == "qkv",
        "use_qk_norm": model.qk_norm,
        ROPE_SHARE: model.rope_share,
    }


def needs_biased_experts() -> dict[str, Need]:
    """Needs of a family with such experts."""
    free = {*SIZES, "normalize", "scale", "groups", "top_groups", "shared_ffn_dim"}
    needs = needs_experts(free, score="sigmoid", score_bias=True)
    return {**needs, "experts": with_shared_experts(needs["experts"])}


def with_shared_experts(others: Need) -> Need:
    """A need of experts, with shared ones of the size of the others beside them."""
    return restricted(others, _whole_shared_experts, "shared_ffn_dim is a multiple of ffn_dim")


def _whole_shared_experts(experts: ExpertsConfig) -> bool:
    return experts.shared_ffn_dim is not None and experts.shared_ffn_dim % experts.ffn_dim == 0


def dense_ones_first(layers: ModelConfig) -> bool:
    """True if all layers after the first one with experts have some."""
    has = has_experts(layers)
    return any(has) and all(has[has.index(True) :])


GLM4_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    title="GLM-4.5",
    what="`bias: qkv` or `none`, `qk_norm` or none, `rope_share`; `mlp: experts` in all layers but the first ones, "
    "with `score: sigmoid`, `score_bias`, `shared_ffn_dim`, any `groups`, `scale` and `normalize`",
    read=_read,
    write=_write,
    mark="mlp",
    needs={
        **needs_biased_experts(),
        "bias": only("qkv", "none", has="no biases but of queries, keys and values"),
        "qk_norm": only(True, False),
        "rope_share": anything(),
    },
    order=dense_ones_first,
    names=replace(LLAMA_NAMES, layers=WITH_SOME_EXPERTS),
    extra_layers=True,
    positions=("max_position_embeddings", 131072),
    **OF_SOME_LAYERS,
)
