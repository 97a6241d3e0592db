"""OLMo Hybrid: layers with a gated delta rule and norms ahead of their parts, and OLMo 2's attention in the others."""

from __future__ import annotations

from dataclasses import replace

from pipeline.config.model import ModelConfig
from pipeline.train.huggingface.config_delta import (
    LINEAR,
    OF_HYBRID,
    attention_layer,
    delta_of,
    is_attention,
    is_hybrid,
    of_attention,
    of_recurrence,
    read_delta,
    read_types,
    write_delta,
)
from pipeline.train.huggingface.config_kinds import read_kinds
from pipeline.train.huggingface.config_rope import read_rope
from pipeline.train.huggingface.config_source import ConfigSource, Json
from pipeline.train.huggingface.config_windows import FULL
from pipeline.train.huggingface.family import Family, only, where
from pipeline.train.huggingface.llama_like import LLAMA_NAMES, LLAMA_NEEDS, read_llama_like, write_llama_like
from pipeline.train.model.mixers.attention.spec import AttentionSpec
from pipeline.train.model.mixers.delta.spec import DeltaSpec
from pipeline.train.model.mlps.dense.spec import MlpSpec
from pipeline.train.model.tensor_names import TensorNames

_DELTA_EPS = 1e-5
"""Of the norms of results, whatever `rms_norm_eps` is."""
_BOUNDS = ("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor")
"""Keys of initial weights."""


def _read(source: ConfigSource) -> Json:
    turned = source.get("rope_parameters", {"rope_theta": 10000.0}).get("rope_theta") is not None
    source.get("max_position_embeddings")
    rope = read_rope(source) if turned else {"positions": "none"}
    found = read_llama_like(source, rope=rope)
    types = read_types(source, found["layers"])
    for key in _BOUNDS:
        source.get(key)
    heads, keys = found["heads"], source.get("linear_num_key_heads")
    key_dim = source.get("linear_key_head_dim") or int(0.75 * found["dim"] / (keys or heads))
    delta = read_delta(source) | {
        "key_heads": keys or heads,
        "value_heads": source.get("linear_num_value_heads") or heads,
        "key_dim": key_dim,
        "value_dim": source.get("linear_value_head_dim") or 2 * key_dim,
        "beta_max": 2 if source.get("linear_allow_neg_eigval", True) else 1,
        **({} if found["norm_eps"] == _DELTA_EPS else {"norm_eps": _DELTA_EPS}),
    }
    found["bias"] = "attention" if source.get("attention_bias", False) else "none"
    kinds = {LINEAR: {"mixer": "gated_delta"}, FULL: {"norm_place": "output", "qk_norm": "full"}}
    return {**found, "delta": delta, **read_kinds(types, kinds)}


def _write(model: ModelConfig, positions: int) -> Json:
    attention = attention_layer(model)
    found = write_llama_like(attention, positions, attention_bias=attention.bias == "attention")
    if attention.positions == "none":
        del found["rope_theta"], found["rope_scaling"]
        found["rope_parameters"] = {"rope_type": "default", "rope_theta": None}
    return found | write_delta(model) | {"linear_allow_neg_eigval": delta_of(model).beta_max == 2}


def _norms_fit(layer: ModelConfig) -> bool:
    return layer.norm_place == ("output" if is_attention(layer) else "pre")


def _eps_fits(layer: ModelConfig) -> bool:
    return layer.delta is None or (layer.delta.norm_eps or layer.norm_eps) == _DELTA_EPS


def _heads_divide(layer: ModelConfig) -> bool:
    return layer.head_size * layer.heads == layer.dim


OLMO_HYBRID = Family(
    model_type="olmo_hybrid",
    architecture="OlmoHybridForCausalLM",
    title="OLMo Hybrid",
    what="`mixer: gated_delta` in some layers; in the others attention as in OLMo 2, with `positions: rope` or `none`",
    read=_read,
    write=_write,
    mark="mixer",
    needs={
        **LLAMA_NEEDS,
        "mixer": only("attention", "gated_delta"),
        "delta": of_recurrence(where(_eps_fits, "1e-5 in the norm of the rule's result (norm_eps, or delta.norm_eps)")),
        "positions": of_attention(only("rope", "none")),
        "qk_norm": of_attention(only("full")),
        "norm_place": where(_norms_fit, "norm_place output in layers with attention, and pre in the others"),
        "bias": only("none", "attention", has="no biases of mlps"),
        "head_dim": of_attention(where(_heads_divide, "dim / heads")),
    },
    special=is_hybrid,
    names=replace(
        LLAMA_NAMES,
        norms={
            "attention_layer_norm": "mixer_norm",
            "feedforward_layer_norm": "mlp_norm",
            "post_attention_layernorm": "mixer_out_norm",
            "post_feedforward_layernorm": "mlp_out_norm",
        },
        tables={
            DeltaSpec: (
                *((f"linear_attn.{name}_proj", (f"w{name}",)) for name in "qkvba"),
                ("linear_attn.g_proj", ("wz",)),
                *(
                    TensorNames(f"linear_attn.{name}_conv1d.weight", (f"conv_{name}.weight",), unit_dim=True)
                    for name in "qkv"
                ),
                ("linear_attn.A_log", ("decay.a_log",)),
                ("linear_attn.dt_bias", ("decay.dt_bias",)),
                ("linear_attn.o_norm.weight", ("norm.weight",)),
                ("linear_attn.o_proj", ("wo",)),
            )
        },
        layers=tuple({"mixer": mixer, "mlp": MlpSpec} for mixer in (DeltaSpec, AttentionSpec)),
    ),
    # transformers writes them so.
    also=((r"(layers\.\d+)\.feedforward_layer_norm\.", r"\1.post_attention_layernorm."),),
    ignored=(r"mtp\..*",),
    positions=("max_position_embeddings", 65536),
    pads=True,
    **OF_HYBRID,
)
