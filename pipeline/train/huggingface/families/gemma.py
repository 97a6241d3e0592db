"""Gemma 2 and 3 (text): norms around mixer and mlp that count from 1, and layers with a window between the others."""

from __future__ import annotations

import math
from dataclasses import replace

import orjson

from pipeline.config.layers.mixers import MAX_LAYERS
from pipeline.config.model import ModelConfig
from pipeline.train.huggingface.config_kinds import read_kinds
from pipeline.train.huggingface.config_rope import read_rope, read_rope_by_type, write_rope
from pipeline.train.huggingface.config_source import ConfigSource, Json
from pipeline.train.huggingface.config_windows import (
    DEFAULT_WINDOW,
    FULL,
    SLIDING,
    has_window,
    read_periodic,
    types_of,
    windows_of,
)
from pipeline.train.huggingface.family import Family, Need, anything, only, where
from pipeline.train.huggingface.llama_like import LLAMA_NAMES, LLAMA_NEEDS, write_shape

_THETAS = {FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)}
"""Of Gemma 3, by type of layer; `rope_scaling` is that of the first."""
_GELU = "gelu_pytorch_tanh"


def _read(source: ConfigSource, *, heads: int, kv_heads: int) -> Json:
    """Keys of `model:` that are read alike in all of them: all but windows and rotary frequencies."""
    source.must_be("hidden_activation", (_GELU,), _GELU)
    source.must_be("attention_bias", (False,), False)
    source.must_be("use_bidirectional_attention", (False,), False)
    for key in ("hidden_act", "cache_implementation"):
        source.get(key)  # transformers reads another key, and the kind of a cache
    head_dim, dim = source.size("head_dim", 256), source.need_size("hidden_size")
    squared = source.number("query_pre_attn_scalar", 256)
    return {
        "layers": source.need_count("num_hidden_layers", MAX_LAYERS),
        "dim": dim,
        "heads": source.size("num_attention_heads", heads),
        "kv_heads": source.size("num_key_value_heads", kv_heads),
        "head_dim": head_dim,
        "ffn_dim": source.need_size("intermediate_size"),
        "norm": "rmsnorm",
        "norm_eps": source.number("rms_norm_eps", 1e-6),
        "norm_offset": 1.0,
        "norm_place": "both",
        "mlp": "geglu",
        "attention_scale": None if squared == head_dim else squared**-0.5,
        "embedding_scale": dim**0.5,
        "tie_embeddings": source.flag("tie_word_embeddings", True),
        "vocab_size": source.need_size("vocab_size"),
    }


def _read_gemma3(source: ConfigSource) -> Json:
    found = _read(source, heads=8, kv_heads=4)
    # Files of transformers 4.5x have the period under two names, and only the first is read.
    period = source.size("sliding_window_pattern", 6)
    source.get("_sliding_window_pattern")
    types, window = read_periodic(source, found["layers"], period)
    ropes = read_rope_by_type(source, _THETAS)
    if scaling := ropes[SLIDING]["rope_scaling"]:
        source.refuse("rope_parameters", scaling, f"frequencies of {SLIDING} are not scaled in Gemma 3")
    if source.number("attn_logit_softcapping") is not None:
        source.refuse("attn_logit_softcapping", source.get("attn_logit_softcapping"), "Gemma 3 has none")
    kinds = {SLIDING: {"sliding_window": window, **ropes[SLIDING]}, FULL: ropes[FULL]}
    cap = source.number("final_logit_softcapping")
    return {**found, "qk_norm": True, "logit_soft_cap": cap, **read_kinds(types, kinds)}


def _read_gemma2(source: ConfigSource) -> Json:
    found = _read(source, heads=8, kv_heads=4)
    types, window = read_periodic(source, found["layers"], period=2)
    kinds = {SLIDING: {"sliding_window": window}, FULL: {}}
    return {
        **found,
        **read_rope(source),
        "attention_soft_cap": source.number_or_null("attn_logit_softcapping", 50.0),
        "logit_soft_cap": source.number_or_null("final_logit_softcapping", 30.0),
        **read_kinds(types, kinds),
    }


def _write(model: ModelConfig, positions: int) -> Json:
    """Keys of config.json that are written alike for all of them."""
    layer = model.layer(model.layer_kinds[0])
    return {
        **write_shape(layer, positions),
        "hidden_activation": _GELU,
        "rms_norm_eps": model.norm_eps,
        "query_pre_attn_scalar": _squared(layer),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "final_logit_softcapping": model.logit_soft_cap,
        # transformers wants a number even where no layer has a window.
        "sliding_window": next(filter(None, windows_of(model)), DEFAULT_WINDOW),
        "layer_types": types_of(model),
    }


def _write_gemma3(model: ModelConfig, positions: int) -> Json:
    layers = {has_window(layer): layer for layer in map(model.layer, dict.fromkeys(model.layer_kinds))}
    found = _write(model, positions)
    if False in layers:
        found |= write_rope(layers[False])
    if True in layers:
        found["rope_local_base_freq"] = layers[True].rope_theta
    return found


def _write_gemma2(model: ModelConfig, positions: int) -> Json:
    cap = model.layer(model.layer_kinds[0]).attention_soft_cap
    return {**_write(model, positions), **write_rope(model), "attn_logit_softcapping": cap}


def _squared(layer: ModelConfig) -> int:
    """`query_pre_attn_scalar`: 1 / the square of the factor on products of queries and keys."""
    return layer.head_size if layer.attention_scale is None else round(layer.attention_scale**-2)


def _scale_fits(layer: ModelConfig) -> bool:
    squared = _squared(layer)
    return layer.attention_scale is None or (squared > 0 and math.isclose(layer.attention_scale, squared**-0.5))


def _splits_as_gemma(definition: str) -> bool:
    state = orjson.loads(definition)
    normalizer, pre = state.get("normalizer") or {}, state.get("pre_tokenizer") or {}
    return (
        (normalizer.get("type"), normalizer.get("content")) == ("Replace", "\u2581")
        and (pre.get("type"), pre.get("pattern")) == ("Split", {"String": " "})
        and state["model"].get("byte_fallback") is True
    )


_NAMES = replace(
    LLAMA_NAMES,
    norms={
        "input_layernorm": "mixer_norm",
        "post_attention_layernorm": "mixer_out_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "mlp_out_norm",
    },
)
_NEEDS: dict[str, Need] = {
    **LLAMA_NEEDS,
    "mlp": only("geglu"),
    "bias": only("none", has="no biases"),
    "heads": where(lambda model: model.dim % model.query_heads == 0, "heads that divide dim"),
    "norm_place": only("both"),
    "norm_offset": only(1.0, has="norm_offset 1"),
    "embedding_scale": where(
        lambda model: math.isclose(model.embedding_scale, model.dim**0.5), "embedding_scale sqrt(dim)"
    ),
    "attention_scale": where(_scale_fits, "1 / sqrt of a whole number"),
    "logit_soft_cap": anything(),
    "sliding_window": Need(lambda value, model: True, "one window, or none, for each layer"),
}

GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    title="Gemma 2",
    pads=True,
    what="`norm_place: both`, `norm_offset: 1`, `embedding_scale` sqrt(dim), `mlp: geglu`, `attention_soft_cap` and "
    "`logit_soft_cap` or none; layers with a `sliding_window`",
    read=_read_gemma2,
    write=_write_gemma2,
    mark="norm_offset",
    needs={**_NEEDS, "attention_soft_cap": anything()},
    names=_NAMES,
    varies=frozenset({"sliding_window"}),
    alike={"sliding_window": has_window},
    positions=("max_position_embeddings", 8192),
    splits_alike=_splits_as_gemma,
)
GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    title="Gemma 3",
    pads=True,
    what="`norm_place: both`, `norm_offset: 1`, `embedding_scale` sqrt(dim), `mlp: geglu`, `qk_norm`; layers with a "
    "`sliding_window` and a `rope_theta` of their own",
    read=_read_gemma3,
    write=_write_gemma3,
    mark="norm_offset",
    needs={
        **_NEEDS,
        "qk_norm": only(True),
        "rope_scaling": Need(
            lambda scaling, model: (
                LLAMA_NEEDS["rope_scaling"].fits(scaling, model) and (scaling is None or model.sliding_window is None)
            ),
            "rope_scaling in layers without a window",
        ),
    },
    names=_NAMES,
    varies=frozenset({"sliding_window", "rope_theta", "rope_scaling"}),
    alike=dict.fromkeys(("sliding_window", "rope_theta", "rope_scaling"), has_window),
    positions=("max_position_embeddings", 131_072),
    splits_alike=_splits_as_gemma,
)
