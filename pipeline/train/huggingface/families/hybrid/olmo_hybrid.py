"""OLMo Hybrid: a gated delta rule with norms ahead of its parts, and OLMo 3's attention with norms after them."""

from __future__ import annotations

from dataclasses import replace

from pipeline.config.layers.mixers import MAX_WIDTH, DeltaConfig
from pipeline.config.model import ModelConfig
from pipeline.train.huggingface.config_delta import (
    LINEAR,
    delta_of,
    needs_delta,
    read_delta,
    read_types,
    write_delta,
    write_types,
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
from pipeline.train.huggingface.config_kinds import read_kinds
from pipeline.train.huggingface.config_rope import read_rope, write_rope_values
from pipeline.train.huggingface.config_source import ConfigSource, Json
from pipeline.train.huggingface.config_windows import FULL
from pipeline.train.huggingface.family import Family, Need, only, where
from pipeline.train.huggingface.llama_like import LLAMA_NAMES, LLAMA_NEEDS, read_llama_like, write_llama_like
from pipeline.train.model.mixers.attention.spec import AttentionSpec
from pipeline.train.model.mixers.delta.spec import DeltaSpec
from pipeline.train.model.mlps.dense.spec import MlpSpec
from pipeline.train.model.tensor_names import TensorNames

_EPS = 1e-5
"""Of the norm of a rule's result, whatever `rms_norm_eps` is."""
_ROPE = "rope_parameters"
_INITIAL = ("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor")


def _read(source: ConfigSource) -> Json:
    found = read_llama_like(source, rope=_read_rope(source))
    layers, dim = found["layers"], source.need_count("hidden_size", MAX_WIDTH)
    heads = source.need_count("num_attention_heads", MAX_WIDTH)
    if found["head_dim"] not in (None, dim // heads):
        source.refuse("head_dim", found["head_dim"], f"it must be {dim // heads}, hidden_size by heads")
    source.must_be("linear_use_gate", (True,), True)
    for key in _INITIAL:
        source.get(key)
    key_heads = source.count("linear_num_key_heads", heads, least=1)
    key_dim = source.count("linear_key_head_dim", int(0.75 * dim / key_heads), least=1)
    delta = {
        **read_delta(source, key_heads=heads, value_heads=heads, key_dim=key_dim, value_dim=2 * key_dim, conv_size=4),
        "beta_max": 2 if source.flag("linear_allow_neg_eigval", True) else 1,
        **({} if found["norm_eps"] == _EPS else {"norm_eps": _EPS}),
    }
    found |= {"bias": "attention" if source.flag("attention_bias", False) else "none", "qk_norm": "full"}
    shared, attention = split(found)
    kinds = {LINEAR: {"mixer": "gated_delta", "delta": delta}, FULL: {**attention, "norm_place": "output"}}

    def default(index: int) -> str:
        return FULL if index % 4 == 3 or (layers < 4 and index == layers - 1) else LINEAR

    return {**shared, **read_kinds(read_types(source, layers, default), kinds)}


def _read_rope(source: ConfigSource) -> Json:
    """Keys of rope; the published models have null for the theta, and no rope."""
    parameters = source.object(_ROPE)
    theta = parameters.get("rope_theta", source.number_or_null("rope_theta", 10000.0))
    if theta is not None:
        return read_rope(source)
    kind = (parameters or source.object("rope_scaling")).get("rope_type", "default")
    if kind != "default":
        source.refuse(_ROPE, parameters, "without a rope_theta there is no rope")
    source.size("max_position_embeddings")
    return {"positions": "none"}


def _write(model: ModelConfig, positions: int) -> Json:
    attention = attention_of(model)
    rope = (
        write_rope_values(attention) if attention.positions == "rope" else {"rope_theta": None, "rope_type": "default"}
    )
    found = write_llama_like(
        attention,
        positions,
        **write_delta(model),
        attention_bias=model.bias == "attention",
        linear_allow_neg_eigval=delta_of(model).beta_max == 2,
        layer_types=write_types(model),
        rope_parameters=rope,
    )
    for key in ("rope_theta", "rope_scaling", "head_dim"):
        del found[key]
    return found


def _fits(delta: DeltaConfig, layer: ModelConfig) -> bool:
    return (delta.norm_eps or layer.norm_eps) == _EPS


OLMO_HYBRID = Family(
    model_type="olmo_hybrid",
    architecture="OlmoHybridForCausalLM",
    title="OLMo Hybrid",
    what="`mixer: gated_delta` with any `beta_max` and a `delta.norm_eps` of 1e-5 in some layers, and attention as in "
    "OLMo 2, with rope or `positions: none`, in the others",
    read=_read,
    write=_write,
    needs={
        **LLAMA_NEEDS,
        "positions": of_attention(only("rope", "none")),
        "rope_scaling": of_attention(LLAMA_NEEDS["rope_scaling"]),
        "head_dim": of_attention(where(lambda layer: layer.heads_fill_dim, "dim / heads")),
        "norm_place": Need(
            lambda place, layer: place == ("pre" if has_recurrence(layer) else "output"),
            "norm_place output in layers with attention, and pre in the others",
        ),
        "qk_norm": of_attention(only("full")),
        "bias": only("none", "attention", has="no biases of mlps"),
        "mixer": only("gated_delta", "attention"),
        "delta": needs_delta(_fits, "1e-5 in the norm of a rule's result (delta.norm_eps)"),
    },
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
                ("linear_attn.q_proj", ("wq",)),
                ("linear_attn.k_proj", ("wk",)),
                ("linear_attn.v_proj", ("wv",)),
                ("linear_attn.a_proj", ("wa",)),
                ("linear_attn.b_proj", ("wb",)),
                ("linear_attn.g_proj", ("wz",)),
                *(
                    TensorNames(f"linear_attn.{kind}_conv1d.weight", (f"conv_{kind}.weight",), unit_dims=(1,))
                    for kind in "qkv"
                ),
                ("linear_attn.A_log", ("decay.a_log",)),
                ("linear_attn.dt_bias", ("decay.dt_bias",)),
                ("linear_attn.o_norm.weight", ("norm.weight",)),
                ("linear_attn.o_proj", ("wo",)),
            )
        },
        layers=({"mixer": DeltaSpec, "mlp": MlpSpec}, {"mixer": AttentionSpec, "mlp": MlpSpec}),
    ),
    special=both,
    renamed={
        "attention_layer_norm": "input_layernorm",
        "feedforward_layer_norm": "post_attention_layernorm",
        "post_attention_layernorm": "feedforward_layer_norm",
    },
    positions=("max_position_embeddings", 65536),
    pads=True,
    **hybrid("delta", norm_place=mixer_of, bias=mixer_of),
)
