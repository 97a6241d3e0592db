"""Qwen3-Next and Qwen3.5: three layers with the gated delta rule to one with gated attention, mostly with experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeline.config.model import ModelConfig
from pipeline.train.huggingface.config_delta import (
    LINEAR,
    OF_HYBRID,
    attention_layer,
    is_hybrid,
    kinds_of,
    of_attention,
    of_recurrence,
    read_delta,
    read_types,
    write_delta,
)
from pipeline.train.huggingface.config_experts import (
    SIZES,
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
from pipeline.train.huggingface.config_kinds import read_kinds
from pipeline.train.huggingface.config_rope import ROPE_SHARE
from pipeline.train.huggingface.config_source import ConfigSource, Json
from pipeline.train.huggingface.config_windows import FULL
from pipeline.train.huggingface.families.qwen_moe import SHARED_NAMES
from pipeline.train.huggingface.family import Family, Need, anything, only, where
from pipeline.train.huggingface.llama_like import LLAMA_NAMES, read_llama_like, write_llama_like
from pipeline.train.model.mixers.attention.spec import AttentionSpec
from pipeline.train.model.mixers.delta.spec import DeltaSpec
from pipeline.train.model.mlps.dense.spec import MlpSpec
from pipeline.train.model.mlps.experts.spec import ExpertsSpec
from pipeline.train.model.part_spec import LayerPartSpec
from pipeline.train.model.tensor_names import PartTable, RowNumbers, RowOrder, TensorNames, by_group


def _read_next(source: ConfigSource) -> Json:
    found, types, kinds = _read(source, kv_heads=2)
    has = read_sparse_layers(source, found["layers"])
    if not any(has):
        _read_mixture(source, count=512, top_k=10)  # which no layer has then
        source.get("norm_topk_prob"), source.get("router_aux_loss_coef"), source.get("output_router_logits")
        names, of_names = kinds_of(types, has, kinds)
        return {**found, **read_kinds(names, of_names)}
    experts = _read_mixture(source, count=512, top_k=10) | {"normalize": source.get("norm_topk_prob", True)}
    return _with_experts(source, found, types, has, kinds, experts)


def _read_moe(source: ConfigSource) -> Json:
    found, types, kinds = _read(source, kv_heads=2, ffn_dim=False)
    experts = _read_mixture(source, count=256, top_k=8)
    return _with_experts(source, found, types, [True] * len(types), kinds, experts)


def _read_dense(source: ConfigSource) -> Json:
    found, types, kinds = _read(source, kv_heads=4)
    return {**found, **read_kinds(types, kinds)}


def _read(source: ConfigSource, *, kv_heads: int, ffn_dim: bool = True) -> tuple[Json, list[str], dict[str, Json]]:
    """Keys of `model:`, the type of each layer, and the keys of the layers of a type.

    Args:
        source: the file.
        kv_heads: what transformers takes where the key is not there.
        ffn_dim: False: no layer has an mlp without experts.
    """
    found = read_llama_like(source, kv_heads=kv_heads, head_dim=256, share=0.25, ffn_dim=ffn_dim)
    source.must_be("attention_bias", (False,), False)
    found |= {"norm_offset": 1.0, "qk_norm": True, "output_gate": True, "delta": read_delta(source)}
    return found, read_types(source, found["layers"]), {LINEAR: {"mixer": "gated_delta"}, FULL: {}}


def _read_mixture(source: ConfigSource, *, count: int, top_k: int) -> Json:
    """Keys of `experts`, with what transformers takes where there are none."""
    return {
        "count": read_count(source, "num_experts", "num_local_experts", default=count),
        "top_k": source.get("num_experts_per_tok", top_k),
        "ffn_dim": source.get("moe_intermediate_size", 512),
        "shared_ffn_dim": source.get("shared_expert_intermediate_size", 512),
        "shared_gate": True,
    }


def _with_experts(
    source: ConfigSource, found: Json, types: list[str], has: list[bool], kinds: dict[str, Json], experts: Json
) -> Json:
    names, of_names = kinds_of(types, has, kinds)
    return {**read_experts(source, found, has, experts), **read_kinds(names, of_names)}


def _write_next(model: ModelConfig, positions: int) -> Json:
    experts = experts_of(model)
    dense = dense_layer(model)
    return _write(model, positions) | {
        **_write_mixture(model),
        "intermediate_size": write_llama_like(dense, positions)["intermediate_size"],
        "norm_topk_prob": experts.normalize,
        **write_sparse_layers(model),
    }


def _write_moe(model: ModelConfig, positions: int) -> Json:
    found = _write(model, positions) | _write_mixture(model)
    del found["intermediate_size"]
    return found


def _write_mixture(model: ModelConfig) -> Json:
    experts = experts_of(model)
    return {
        "num_experts": experts.count,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.ffn_dim,
        "shared_expert_intermediate_size": experts.shared_ffn_dim,
    }


def _write(model: ModelConfig, positions: int) -> Json:
    attention = attention_layer(model)
    return write_llama_like(attention, positions) | {
        **write_delta(model),
        "attention_bias": False,
        ROPE_SHARE: attention.rope_share,
    }


def _plain_delta(layer: ModelConfig) -> bool:
    delta = layer.delta
    return delta is None or (delta.beta_max == 1 and (delta.norm_eps or layer.norm_eps) == layer.norm_eps)


def _shared(layer: ModelConfig) -> bool:
    return layer.experts is not None and layer.experts.shared_ffn_dim is not None


_NEEDS: dict[str, Need] = {
    "mixer": only("attention", "gated_delta"),
    "delta": of_recurrence(where(_plain_delta, "delta with beta_max 1 and the norm_eps of the model")),
    "norm_offset": only(1.0),
    "qk_norm": of_attention(only(True)),
    "output_gate": of_attention(only(True)),
    "rope_share": anything(),
    "positions": of_attention(only("rope")),
    "bias": only("none", has="no biases"),
}


def _needs(*, mixed: bool, normalize: bool | None = None) -> dict[str, Need]:
    """Needs with experts."""
    free = {*SIZES, "shared_ffn_dim", *(("normalize",) if normalize is None else ())}
    values = {"shared_gate": True, **({} if normalize is None else {"normalize": normalize})}
    needs = needs_experts(free, **values)
    shared = restricted(needs["experts"], lambda experts: experts.shared_ffn_dim is not None, "a shared mlp")
    return {**needs, **_NEEDS, "experts": shared, **({} if mixed else {"mlp": only("experts")})}


def _by_key_head(part: DeltaSpec) -> RowNumbers:
    values = part.values_dim // part.key_heads
    return by_group(part.key_heads, part.key_dim, part.key_dim, values, values)


def _rates_by_key_head(part: DeltaSpec) -> RowNumbers:
    return by_group(part.key_heads, *[part.value_heads // part.key_heads] * 2)


def _gated_queries(part: AttentionSpec) -> RowNumbers:
    return by_group(part.heads, part.head_dim, part.head_dim)


_IN_NEXT: PartTable = (
    TensorNames("linear_attn.in_proj_qkvz", ("wq", "wk", "wv", "wz"), RowOrder("key head by key head", _by_key_head)),
    TensorNames("linear_attn.in_proj_ba", ("wb", "wa"), RowOrder("key head by key head", _rates_by_key_head)),
)
_IN_3_5: PartTable = (
    ("linear_attn.in_proj_qkv", ("wq", "wk", "wv")),
    ("linear_attn.in_proj_z", ("wz",)),
    ("linear_attn.in_proj_b", ("wb",)),
    ("linear_attn.in_proj_a", ("wa",)),
)
_OF_DELTA: PartTable = (
    TensorNames("linear_attn.conv1d.weight", ("conv_q.weight", "conv_k.weight", "conv_v.weight"), unit_dim=True),
    ("linear_attn.A_log", ("decay.a_log",)),
    ("linear_attn.dt_bias", ("decay.dt_bias",)),
    ("linear_attn.norm.weight", ("norm.weight",)),
    ("linear_attn.out_proj", ("wo",)),
)
_ATTENTION: PartTable = (
    TensorNames("self_attn.q_proj", ("wq", "wg"), RowOrder("queries and gate head by head", _gated_queries)),
    *AttentionSpec.huggingface["llama"][1:],
)
_MIXERS: tuple[type[LayerPartSpec], ...] = (DeltaSpec, AttentionSpec)
_TABLES: dict[type[LayerPartSpec], PartTable] = {AttentionSpec: _ATTENTION, ExpertsSpec: SHARED_NAMES}
_NAMES = replace(
    LLAMA_NAMES,
    tables={**_TABLES, DeltaSpec: (*_IN_3_5, *_OF_DELTA)},
    layers=tuple({"mixer": mixer, "mlp": MlpSpec} for mixer in _MIXERS),
)
_AHEAD = (r"mtp\..*",)
"""Layers of multi-token prediction, which transformers leaves out."""
_WHAT = "`mixer: gated_delta` in some layers, and in the others attention with `qk_norm` and `output_gate`"


def _dense(layers: Sequence[ModelConfig]) -> bool:
    return is_hybrid(layers) and not some_have_experts(layers)


def _routed(layers: Sequence[ModelConfig]) -> bool:
    return is_hybrid(layers) and some_have_experts(layers)


QWEN3_5 = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    title="Qwen3.5",
    what=f"{_WHAT}; `norm_offset: 1`, `rope_share`",
    read=_read_dense,
    write=_write,
    mark="mixer",
    needs={**_NEEDS, "norm": only("rmsnorm"), "mlp": only("swiglu"), "rope_theta": anything()}
    | {key: needs_experts(())[key] for key in ("kv_heads", "head_dim", "rope_scaling")},
    special=_dense,
    names=_NAMES,
    ignored=_AHEAD,
    positions=("max_position_embeddings", 32768),
    **OF_HYBRID,
)
QWEN3_NEXT = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    title="Qwen3-Next",
    what="as Qwen3.5, with `mlp: experts` in all or some layers, `shared_ffn_dim`, `shared_gate`, any `normalize`",
    read=_read_next,
    write=_write_next,
    mark="mixer",
    needs=_needs(mixed=True),
    special=_routed,
    names=replace(
        _NAMES,
        tables={**_TABLES, DeltaSpec: (*_IN_NEXT, *_OF_DELTA)},
        layers=tuple({"mixer": mixer, "mlp": mlp} for mlp in (ExpertsSpec, MlpSpec) for mixer in _MIXERS),
    ),
    ignored=_AHEAD,
    positions=("max_position_embeddings", 32768),
    **OF_HYBRID,
)
QWEN3_5_MOE = Family(
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    title="Qwen3.5-MoE",
    what="as Qwen3-Next, with experts in all layers and `normalize`; written as one",
    read=_read_moe,
    write=_write_moe,
    mark="mixer",
    needs=_needs(mixed=False, normalize=True),
    special=_routed,
    names=replace(_NAMES, layers=tuple({"mixer": mixer, "mlp": ExpertsSpec} for mixer in _MIXERS)),
    ignored=_AHEAD,
    positions=("max_position_embeddings", 32768),
    **OF_HYBRID,
)
