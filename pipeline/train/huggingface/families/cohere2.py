"""Cohere 2: mixer and mlp side by side after one norm; layers with a window have rope, full ones none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pipeline.config.model import ModelConfig
from pipeline.train.huggingface.config_kinds import read_kinds
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
from pipeline.train.huggingface.family import Family, anything, only, where
from pipeline.train.huggingface.llama_like import LLAMA_NAMES, LLAMA_NEEDS, read_llama_like, write_llama_like
from pipeline.train.model.mixers.attention.spec import AttentionSpec
from pipeline.train.model.tensor_names import RowNumbers, RowOrder, TensorNames, rope_pairs

_PAIRS = "with rotary pairs together where there is rope"


def _rows(part: AttentionSpec, heads: int) -> RowNumbers:
    return rope_pairs(heads, part.head_dim) if part.rope is not None else np.arange(heads * part.head_dim)


_QUERIES = RowOrder(_PAIRS, lambda part: _rows(part, part.heads))
_KEYS = RowOrder(_PAIRS, lambda part: _rows(part, part.kv_heads))


def _read(source: ConfigSource) -> Json:
    for key, value in (("use_parallel_block", True), ("use_gated_activation", True), ("rotary_pct", 1.0)):
        source.must_be(key, (value,), value)
    source.must_be("position_embedding_type", ("rope_gptj",), "rope_gptj")
    source.must_be("order_of_interleaved_layers", ("local_attn_first",), "local_attn_first")
    # How the embedding is kept, how states are, and what `sliding_window_pattern` says, too.
    for key in ("use_parallel_embedding", "use_embedding_sharing", "cache_implementation", "layer_switch"):
        source.get(key)
    found = read_llama_like(source, tied=True)
    period = source.size("sliding_window_pattern", 4)
    types, window = read_periodic(source, found["layers"], period)
    kinds = {
        FULL: {"positions": "none"},
        SLIDING: {"sliding_window": window, "rope_scaling": found.pop("rope_scaling")},
    }
    return {
        **found,
        "norm": "layernorm",
        "norm_bias": False,
        "norm_eps": source.number("layer_norm_eps", 1e-5),
        "residual": "parallel_shared",
        "bias": "attention" if source.flag("attention_bias", False) else "none",
        "logit_scale": float(source.number("logit_scale", 0.0625)),
        **read_kinds(types, kinds),
    }


def _write(model: ModelConfig, positions: int) -> Json:
    with_window = next((each for each in map(model.layer, model.layer_kinds) if has_window(each)), model)
    found = write_llama_like(
        with_window,
        positions,
        attention_bias=model.bias == "attention",
        layer_norm_eps=model.norm_eps,
        logit_scale=model.logit_scale,
        sliding_window=next(filter(None, windows_of(model)), DEFAULT_WINDOW),
        layer_types=types_of(model),
    )
    del found["rms_norm_eps"]
    return found


COHERE2 = Family(
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    title="Cohere 2",
    what="`norm: layernorm`, `norm_bias: false`, `residual: parallel_shared`, `logit_scale`, layers with rope and "
    "`sliding_window` or neither, `bias: none` or `attention`",
    read=_read,
    write=_write,
    mark="residual",
    needs={
        **LLAMA_NEEDS,
        "residual": only("parallel_shared"),
        "norm": only("layernorm"),
        "norm_bias": only(False),
        "bias": only("none", "attention", has="no biases of mlps"),
        "positions": where(
            lambda model: model.positions == ("rope" if has_window(model) else "none"),
            "rope in layers with a window and none in others",
        ),
        "sliding_window": anything(),
        "logit_scale": anything(),
    },
    varies=frozenset({"positions", "sliding_window", "rope_theta", "rope_scaling"}),
    alike=dict.fromkeys(("sliding_window", "rope_theta", "rope_scaling"), has_window),
    names=replace(
        LLAMA_NAMES,
        norms={"input_layernorm": "mixer_norm"},
        tables={
            AttentionSpec: (
                TensorNames("self_attn.q_proj", ("wq",), _QUERIES),
                TensorNames("self_attn.k_proj", ("wk",), _KEYS),
                ("self_attn.v_proj", ("wv",)),
                ("self_attn.o_proj", ("wo",)),
            ),
        },
    ),
    positions=("max_position_embeddings", 8192),
    pads=True,
)
