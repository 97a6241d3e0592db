"""Kimi Linear: Kimi delta attention in most layers, latent attention without rope in the others, and experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipeline.config.layers.mixers import DeltaConfig
from pipeline.config.model import ModelConfig
from pipeline.train.huggingface.config_delta import (
    LINEAR,
    delta_of,
    needs_delta,
    read_types,
    write_types,
)
from pipeline.train.huggingface.config_experts import (
    OF_SOME_LAYERS,
    dense_ffn_dim,
    experts_of,
    has_experts,
    read_count,
    read_experts,
)
from pipeline.train.huggingface.config_hybrid import (
    attention_of,
    both,
    has_recurrence,
    hybrid,
    mixer_of,
    of_attention,
    split,
)
from pipeline.train.huggingface.config_source import ConfigSource, Json
from pipeline.train.huggingface.config_windows import FULL
from pipeline.train.huggingface.families.experts.deepseek import (
    LATENT_EPS,
    fits_latent,
    read_latent,
    refuse_other_code,
    write_latent,
)
from pipeline.train.huggingface.families.experts.glm4_moe import dense_ones_first, needs_biased_experts
from pipeline.train.huggingface.families.experts.mixtral import BLOCK_EXPERTS
from pipeline.train.huggingface.family import Family, only, where
from pipeline.train.huggingface.llama_like import LLAMA_NAMES, read_llama_like, write_shape
from pipeline.train.model.mixers.delta.spec import KdaSpec
from pipeline.train.model.mixers.mla.spec import MlaSpec
from pipeline.train.model.mlps.dense.spec import MlpSpec
from pipeline.train.model.mlps.experts.spec import ExpertsSpec, shared_names
from pipeline.train.model.tensor_names import TensorNames

_OWN_CODE = ("configuration_kimi", "modeling_kimi")
"""Modules of the code that Moonshot published, of which files speak; it computes what is computed here."""
_SIZES = "linear_attn_config"
_DENSE, _SPARSE = "dense", "sparse"


def _read(source: ConfigSource) -> Json:
    found = read_llama_like(source, eps=1e-5, kv_heads=32, rope={"positions": "none"})
    layers, heads = found["layers"], found["heads"]
    if (of_keys := found.pop("kv_heads")) != heads:
        source.refuse("num_key_value_heads", of_keys, f"latent attention has as many as num_attention_heads ({heads})")
    del found["head_dim"]  # transformers computes it, and qk_head_dim, from the sizes of latent attention
    for key in ("qk_head_dim", "rope_theta", "rope_scaling", "model_max_length"):
        source.get(key)  # there is no rope
    source.must_be("mla_use_nope", (True,), True)
    source.must_be("attention_bias", (False,), False)
    source.must_be("moe_layer_freq", (1,), 1)
    source.must_be("moe_router_activation_func", ("sigmoid",), "sigmoid")
    source.must_be("use_grouped_topk", (True,), True)
    source.must_be("num_nextn_predict_layers", (0,), 0)
    refuse_other_code(source, _OWN_CODE)
    delta, types = _read_delta(source, layers)
    shared, attention = split(found)
    latent = {"mixer": "mla", "mla": read_latent(source, found["norm_eps"], q_rank=None)}
    kinds = {LINEAR: {"mixer": "kda", "delta": delta}, FULL: {**attention, **latent}}
    return read_experts(source, shared, _read_sparse(source, layers), _read_experts(source), types, kinds)


def _read_delta(source: ConfigSource, layers: int) -> tuple[Json, list[str]]:
    """`delta` of `model:`, and the type of each layer."""
    sizes = source.get(_SIZES, {})
    if not isinstance(sizes, dict):
        source.refuse(_SIZES, sizes, "it must be an object")
    inner = ConfigSource(sizes, _SIZES)
    heads = inner.count("num_heads", source.count("linear_num_heads", 32, least=1), least=1)
    size = inner.count("head_dim", source.count("linear_head_dim", 128, least=1), least=1)
    taps = inner.count("short_conv_kernel_size", source.count("linear_conv_kernel_dim", 4, least=1), least=1)
    by_type = {LINEAR: inner.get("kda_layers"), FULL: inner.get("full_attn_layers")}
    inner.finish(())
    default = [FULL if index and index % 4 == 0 else LINEAR for index in range(layers)]
    if source.get("layer_types") is None and None not in by_type.values():
        numbered = [(number, kind) for kind, numbers in by_type.items() for number in _listed(numbers)]
        if sorted(number for number, _ in numbered) != list(range(1, layers + 1)):
            source.refuse(_SIZES, sizes, f"kda_layers and full_attn_layers must have 1 to {layers} once")
        default = [kind for _, kind in sorted(numbered)]
    delta = {"key_heads": heads, "key_dim": size, "value_dim": size, "conv_size": taps}
    return delta, read_types(source, layers, lambda index: default[index])


def _listed(numbers: Any) -> list[int]:
    """Numbers of layers; none where it is not a list of them."""
    return numbers if isinstance(numbers, list) and all(isinstance(each, int) for each in numbers) else []


def _read_sparse(source: ConfigSource, layers: int) -> list[bool]:
    """Flags of the layers that have experts."""
    first = source.count("first_k_dense_replace", 1)
    types = source.get("mlp_layer_types") or [_DENSE if index < first else _SPARSE for index in range(layers)]
    if not isinstance(types, list) or len(types) != layers or any(each not in (_DENSE, _SPARSE) for each in types):
        source.refuse("mlp_layer_types", types, f"it must be a list of {layers} times {_DENSE} or {_SPARSE}")
    return [each == _SPARSE for each in types]


def _read_experts(source: ConfigSource) -> Json:
    size = source.count("moe_intermediate_size", 1024, least=1)
    groups = read_count(source, "num_expert_group", "n_group", default=1)
    top_groups = source.count("topk_group", 1, least=1)
    if groups == 1 and top_groups != 1:
        source.refuse("topk_group", top_groups, "num_expert_group is 1")
    return {
        "count": read_count(source, "num_experts", "num_local_experts", default=256),
        "top_k": read_count(source, "num_experts_per_token", "num_experts_per_tok", default=8),
        "ffn_dim": size,
        "shared_ffn_dim": size * read_count(source, "num_shared_experts", "n_shared_experts", default=1),
        "score": "sigmoid",
        "score_bias": True,
        "normalize": source.flag("moe_renormalize", source.flag("norm_topk_prob", True)),
        "scale": source.number("routed_scaling_factor", 2.446),
        **({} if groups == 1 else {"groups": groups, "top_groups": top_groups}),
    }


def _write(model: ModelConfig, positions: int) -> Json:
    attention, delta, experts, types = attention_of(model), delta_of(model), experts_of(model), write_types(model)
    assert attention.mla is not None and experts.shared_ffn_dim is not None, "the family needs them"
    found = write_shape(attention, positions)
    del found["max_position_embeddings"]
    return {
        **found,
        "intermediate_size": dense_ffn_dim(model),
        **write_latent(attention.mla),
        "model_max_length": positions,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "attention_dropout": 0.0,
        "mla_use_nope": True,
        _SIZES: {
            "num_heads": delta.key_heads,
            "head_dim": delta.key_dim,
            "short_conv_kernel_size": delta.conv_size,
            "kda_layers": [index + 1 for index, kind in enumerate(types) if kind == LINEAR],
            "full_attn_layers": [index + 1 for index, kind in enumerate(types) if kind == FULL],
        },
        "first_k_dense_replace": has_experts(model).index(True),
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "use_grouped_topk": True,
        "num_experts": experts.count,
        "num_experts_per_token": experts.top_k,
        "moe_intermediate_size": experts.ffn_dim,
        "num_shared_experts": experts.shared_ffn_dim // experts.ffn_dim,
        "moe_renormalize": experts.normalize,
        "routed_scaling_factor": experts.scale,
        "num_expert_group": experts.groups or 1,
        "topk_group": experts.top_groups or 1,
    }


def _fits(delta: DeltaConfig, layer: ModelConfig) -> bool:
    same = delta.key_dim == delta.value_dim == (delta.rank or delta.value_dim)
    return same and delta.beta_max == 1 and delta.norm_eps in (None, layer.norm_eps)


_EXPERTS = needs_biased_experts()
KIMI_LINEAR = Family(
    model_type="kimi_linear",
    architecture="KimiLinearForCausalLM",
    title="Kimi Linear",
    what="`mixer: kda` with heads of one size in some layers, and `mixer: mla` with `positions: none` in the others; "
    "`mlp: experts` in all layers but the first ones, as DeepSeek-V3",
    read=_read,
    write=_write,
    needs={
        **{key: _EXPERTS[key] for key in ("norm", "mlp", "ffn_dim", "experts")},
        "mixer": only("kda", "mla"),
        "positions": of_attention(only("none")),
        "mla": where(
            lambda layer: has_recurrence(layer) or fits_latent(layer),
            f"{LATENT_EPS} in the norms of latents (norm_eps, or mla.norm_eps beside another)",
        ),
        "delta": needs_delta(_fits, "heads and a rank of one size, beta_max 1 and no other norm_eps in kda"),
    },
    special=both,
    order=dense_ones_first,
    names=replace(
        LLAMA_NAMES,
        tables={
            ExpertsSpec: (
                TensorNames("block_sparse_moe.gate.weight", ("router.weight",)),
                TensorNames("block_sparse_moe.gate.e_score_correction_bias", ("router.score_bias",)),
                *BLOCK_EXPERTS,
                *shared_names("block_sparse_moe.shared_experts"),
            )
        },
        layers=({"mixer": KdaSpec, "mlp": ExpertsSpec}, {"mixer": MlaSpec, "mlp": MlpSpec}),
    ),
    renamed={".mlp.": ".block_sparse_moe."},
    positions=("model_max_length", 1048576),
    pads=True,
    **hybrid("delta", "mlp", mla=mixer_of, **OF_SOME_LAYERS["alike"]),
)
