"""Qwen3-Next and Qwen3.5: a gated delta rule in most layers, and attention with an output gate in the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeline.config.layers.mixers import DeltaConfig
from pipeline.config.model import ModelConfig
from pipeline.train.huggingface.config_delta import (
    LINEAR,
    needs_delta,
    read_delta,
    read_types,
    write_delta,
    write_types,
)
from pipeline.train.huggingface.config_experts import (
    OF_SOME_LAYERS,
    SIZES,
    dense_ffn_dim,
    experts_of,
    needs_experts,
    read_experts,
    read_sparse_layers,
    some_have_experts,
    write_sparse_layers,
)
from pipeline.train.huggingface.config_hybrid import attention_of, both, hybrid, of_attention, split
from pipeline.train.huggingface.config_kinds import read_kinds
from pipeline.train.huggingface.config_rope import ROPE_SHARE
from pipeline.train.huggingface.config_source import ConfigSource, Json
from pipeline.train.huggingface.config_windows import FULL
from pipeline.train.huggingface.families.experts.qwen_moe import (
    QWEN2_MOE,
    needs_shared,
    read_qwen_experts,
    write_qwen_experts,
)
from pipeline.train.huggingface.family import Family, Need, anything, only
from pipeline.train.huggingface.llama_like import LLAMA_NAMES, LLAMA_NEEDS, read_llama_like, write_llama_like
from pipeline.train.model.mixers.attention.spec import AttentionSpec
from pipeline.train.model.mixers.delta.spec import DeltaSpec
from pipeline.train.model.mlps.dense.spec import MlpSpec
from pipeline.train.model.mlps.experts.spec import ExpertsSpec
from pipeline.train.model.tensor_names import RowOrder, TensorNames, by_group

_SHARE = 0.25
_INTERVAL = "full_attention_interval"
_OF_FILES = ("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
"""Keys of Qwen3.5 about kernels of inference, and layers that are left out."""


def _read(source: ConfigSource, *, kv_heads: int, dense: bool = True) -> tuple[Json, list[str], dict[str, Json]]:
    """Keys of all layers, the type of each, and by type those of its layers."""
    found = read_llama_like(source, head_dim=256, kv_heads=kv_heads, share=_SHARE, dense=dense)
    for key in ("attention_bias", "use_sliding_window"):
        source.must_be(key, (False,), False)
    source.must_be("attn_output_gate", (True,), True)
    for key in _OF_FILES:
        source.get(key)
    interval = source.count(_INTERVAL, 4, least=1)
    types = read_types(source, found["layers"], lambda index: LINEAR if (index + 1) % interval else FULL)
    delta = read_delta(source, key_heads=16, value_heads=32, key_dim=128, value_dim=128, conv_size=4)
    found |= {"norm_offset": 1.0, "qk_norm": True, "output_gate": True}
    shared, attention = split(found)
    return shared, types, {LINEAR: {"mixer": "gated_delta", "delta": delta}, FULL: attention}


def _read_next(source: ConfigSource) -> Json:
    found, types, kinds = _read(source, kv_heads=2)
    experts = _read_experts(source, count=512, top_k=10, normalize=source.flag("norm_topk_prob", True))
    return read_experts(source, found, read_sparse_layers(source, len(types)), experts, types, kinds)


def _read_dense(source: ConfigSource) -> Json:
    found, types, kinds = _read(source, kv_heads=4)
    return {**found, **read_kinds(types, kinds)}


def _read_moe(source: ConfigSource) -> Json:
    found, types, kinds = _read(source, kv_heads=2, dense=False)
    source.must_be("norm_topk_prob", (True,), True)
    source.must_be("mlp_only_layers", ([],), [])
    source.must_be("decoder_sparse_step", (1,), 1)
    experts = _read_experts(source, count=256, top_k=8, normalize=True)
    return read_experts(source, found, [True] * len(types), experts, types, kinds)


def _read_experts(source: ConfigSource, *, count: int, top_k: int, normalize: bool) -> Json:
    return {
        **read_qwen_experts(source, count=count, top_k=top_k, ffn_dim=512),
        "normalize": normalize,
        "shared_ffn_dim": source.size("shared_expert_intermediate_size", 512),
        "shared_gate": True,
    }


def _write(model: ModelConfig, positions: int) -> Json:
    attention = attention_of(model)
    return {
        **write_llama_like(attention, positions),
        **write_delta(model),
        ROPE_SHARE: attention.rope_share,
        "attention_bias": False,
        "layer_types": write_types(model),
    }


def _write_moe(model: ModelConfig, positions: int) -> Json:
    found = _write(model, positions) | write_qwen_experts(model)
    found["shared_expert_intermediate_size"] = experts_of(model).shared_ffn_dim
    return found


def _write_next(model: ModelConfig, positions: int) -> Json:
    return {**_write_moe(model, positions), "intermediate_size": dense_ffn_dim(model), **write_sparse_layers(model)}


def _write_qwen35_moe(model: ModelConfig, positions: int) -> Json:
    found = _write_moe(model, positions)
    del found["intermediate_size"], found["norm_topk_prob"]
    return found


def _fits(delta: DeltaConfig, layer: ModelConfig) -> bool:
    return delta.beta_max == 1 and delta.norm_eps in (None, layer.norm_eps)


def _with_experts(layers: Sequence[ModelConfig]) -> bool:
    return both(layers) and some_have_experts(layers)


_ATTENTION = RowOrder("head by head", lambda part: by_group(part.heads, part.head_dim, part.head_dim))
_NAMES = replace(
    LLAMA_NAMES,
    tables={
        ExpertsSpec: QWEN2_MOE.names.tables[ExpertsSpec],
        AttentionSpec: (
            TensorNames("self_attn.q_proj", ("wq", "wg"), _ATTENTION),
            *AttentionSpec.huggingface["llama"][1:],
        ),
    },
    layers=({"mixer": DeltaSpec, "mlp": ExpertsSpec}, {"mixer": AttentionSpec, "mlp": MlpSpec}),
)
_APART = replace(
    _NAMES,
    tables={
        **_NAMES.tables,
        DeltaSpec: (
            ("linear_attn.in_proj_qkv", ("wq", "wk", "wv")),
            ("linear_attn.in_proj_z", ("wz",)),
            ("linear_attn.in_proj_b", ("wb",)),
            ("linear_attn.in_proj_a", ("wa",)),
            *DeltaSpec.huggingface["llama"][2:],
        ),
    },
)
_NEEDS: dict[str, Need] = {
    **LLAMA_NEEDS,
    **{key: of_attention(need) for key, need in LLAMA_NEEDS.items() if key in ("positions", "rope_scaling")},
    "norm_offset": only(1.0, has="norm_offset 1"),
    "mixer": only("gated_delta", "attention"),
    "delta": needs_delta(_fits, "beta_max 1 and no other norm_eps in a gated delta rule"),
    "rope_share": anything(),
    "qk_norm": of_attention(only(True)),
    "output_gate": of_attention(only(True)),
}
_EXPERTS = needs_shared(needs_experts({*SIZES, "normalize", "shared_ffn_dim"}, shared_gate=True))
_OF_EXPERTS = {key: _EXPERTS[key] for key in ("mlp", "ffn_dim", "experts")}
_WHAT = (
    "`norm_offset: 1`; `mixer: gated_delta` in some layers, and attention with `qk_norm`, `output_gate` and any "
    "`rope_share` in the others"
)

QWEN3_NEXT = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    title="Qwen3-Next",
    what=f"{_WHAT}; `mlp: experts` in all or some layers, with any `normalize`, `shared_ffn_dim` and `shared_gate`",
    read=_read_next,
    write=_write_next,
    needs={**_NEEDS, **_OF_EXPERTS},
    names=_NAMES,
    extra="mtp.",
    positions=("max_position_embeddings", 32768),
    special=_with_experts,
    **hybrid("delta", "mlp", **OF_SOME_LAYERS["alike"]),
)
QWEN3_5 = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    title="Qwen3.5",
    what=_WHAT,
    read=_read_dense,
    write=_write,
    needs=_NEEDS,
    names=replace(_APART, layers=({"mixer": DeltaSpec, "mlp": MlpSpec}, {"mixer": AttentionSpec, "mlp": MlpSpec})),
    extra="mtp.",
    positions=("max_position_embeddings", 32768),
    special=both,
    **hybrid("delta"),
)
QWEN3_5_MOE = Family(
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    title="Qwen3.5-MoE",
    what=f"{_WHAT}; `mlp: experts` in all layers, with `shared_ffn_dim` and `shared_gate`. Exported as `qwen3_next`",
    read=_read_moe,
    write=_write_qwen35_moe,
    needs={**_NEEDS, **_OF_EXPERTS, "mlp": only("experts")},
    names=replace(
        _APART, layers=({"mixer": DeltaSpec, "mlp": ExpertsSpec}, {"mixer": AttentionSpec, "mlp": ExpertsSpec})
    ),
    extra="mtp.",
    positions=("max_position_embeddings", 32768),
    special=both,
    **hybrid("delta"),
)
