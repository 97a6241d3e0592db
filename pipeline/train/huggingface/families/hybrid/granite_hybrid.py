"""Granite 4: Mamba-2 in most layers, attention without rope in the others; an mlp, perhaps beside experts, in each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pipeline.config.layers.experts import ExpertsConfig
from pipeline.config.model import ModelConfig
from pipeline.train.huggingface.config_experts import SIZES, needs_experts, read_experts, restricted
from pipeline.train.huggingface.config_hybrid import attention_of, hybrid, of_attention, some_recurrent
from pipeline.train.huggingface.config_kinds import by_layer, layer_types
from pipeline.train.huggingface.config_mamba2 import (
    ATTENTION,
    HYBRID_NEEDS,
    MAMBA,
    TYPES,
    read_bamba_sizes,
    read_hybrid,
    write_bamba_sizes,
)
from pipeline.train.huggingface.config_source import ConfigSource, Json
from pipeline.train.huggingface.families.granite import FACTORS, has_factors, read_factors, write_factors
from pipeline.train.huggingface.family import Family, anything, only
from pipeline.train.huggingface.llama_like import LLAMA_NAMES, LLAMA_NEEDS, read_llama_like, write_llama_like
from pipeline.train.model.mixers.attention.spec import AttentionSpec
from pipeline.train.model.mixers.mamba2.spec import Mamba2Spec
from pipeline.train.model.mlps.dense.spec import MlpSpec
from pipeline.train.model.mlps.experts.spec import ExpertsSpec
from pipeline.train.model.tensor_names import TensorNames

_STACKED: Any = {"experts": "stacked"}
_OF_EXPERTS = (
    ("block_sparse_moe.router.layer", ("router",)),
    TensorNames("block_sparse_moe.input_linear.weight", ("experts.w1", "experts.w3"), **_STACKED),
    TensorNames("block_sparse_moe.output_linear.weight", ("experts.w2",), **_STACKED),
    ("shared_mlp.input_linear.weight", ("shared.w1.weight", "shared.w3.weight")),
    ("shared_mlp.output_linear.weight", ("shared.w2.weight",)),
)
_NO_ROPE = "nope"
"""What files have where there is none; transformers has null, too, and takes it where nothing is said."""


def _read(source: ConfigSource) -> Json:
    found = {**read_llama_like(source), **read_factors(source)}
    source.must_be("mlp_bias", (False,), False)
    source.must_be("position_embedding_type", ("rope", _NO_ROPE), _NO_ROPE)
    if source.get("position_embedding_type") != "rope":
        del found["rope_theta"], found["rope_scaling"]
        found["positions"] = "none"
    types = layer_types(source, found["layers"], tuple(TYPES), lambda index: MAMBA)
    names = [TYPES[each] for each in types]
    shared = source.count("shared_intermediate_size", 1024, least=1)
    count, top_k = source.count("num_local_experts", 8), source.count("num_experts_per_tok", 2)
    if count:
        sizes = {"count": count, "top_k": top_k, "ffn_dim": found.pop("ffn_dim"), "shared_ffn_dim": shared}
        found = read_experts(source, found, [True] * found["layers"], sizes)
    else:
        source.number("router_aux_loss_coef"), source.get("output_router_logits")
        found["ffn_dim"] = shared
    biased = source.flag("attention_bias", False) and ATTENTION in names
    found["bias"] = "attention" if biased else "none"
    return read_hybrid(found, names, {}, read_bamba_sizes(source))


def _write(model: ModelConfig, positions: int) -> Json:
    attention, experts = attention_of(model), model.experts if model.mlp == "experts" else None
    found = write_llama_like(attention, positions, **write_factors(attention), **write_bamba_sizes(model))
    if attention.heads_fill_dim:
        del found["head_dim"]
    if experts is not None:
        found["intermediate_size"] = experts.ffn_dim
    return {
        **found,
        "layer_types": by_layer(model, lambda layer: MAMBA if layer.mixer == "mamba2" else ATTENTION),
        "position_embedding_type": "rope" if attention.positions == "rope" else _NO_ROPE,
        "attention_bias": model.bias == "attention",
        "num_local_experts": 0 if experts is None else experts.count,
        "num_experts_per_tok": 0 if experts is None else experts.top_k,
        "shared_intermediate_size": found["intermediate_size"] if experts is None else experts.shared_ffn_dim,
    }


def _is_special(layers: Sequence[ModelConfig]) -> bool:
    return some_recurrent(layers) or has_factors(layers)


def _has_shared(experts: ExpertsConfig) -> bool:
    return experts.shared_ffn_dim is not None


_EXPERTS_NEEDS = needs_experts({*SIZES, "shared_ffn_dim"})
GRANITE_HYBRID = Family(
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    title="Granite 4",
    what="layers with `mixer: mamba2` and with attention, `positions: none` or `rope`; the factors of Granite; "
    "`bias: none` or `attention`; perhaps `mlp: experts` in all layers, with `shared_ffn_dim`",
    read=_read,
    write=_write,
    needs={
        **_EXPERTS_NEEDS,
        **HYBRID_NEEDS,
        "experts": restricted(_EXPERTS_NEEDS["experts"], _has_shared, "a shared mlp"),
        "positions": of_attention(only("rope", "none")),
        "rope_scaling": of_attention(LLAMA_NEEDS["rope_scaling"]),
        "bias": only("none", "attention", has="no biases of mlps"),
        **dict.fromkeys(FACTORS, anything()),
    },
    special=_is_special,
    names=replace(
        LLAMA_NAMES,
        tables={
            MlpSpec: (
                ("shared_mlp.input_linear.weight", ("w1.weight", "w3.weight")),
                ("shared_mlp.output_linear.weight", ("w2.weight",)),
            ),
            ExpertsSpec: _OF_EXPERTS,
        },
        layers=({"mixer": Mamba2Spec, "mlp": MlpSpec}, {"mixer": AttentionSpec, "mlp": ExpertsSpec}),
    ),
    **hybrid("mamba2"),
)
