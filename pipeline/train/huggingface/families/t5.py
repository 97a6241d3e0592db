"""T5, its version 1.1 and UL2: an encoder and a decoder with relative positions."""

from __future__ import annotations

import math
from typing import Any

from pipeline.config.layers.mixers import MAX_LAYERS, MAX_WIDTH
from pipeline.config.model import ModelConfig, RelativeConfig
from pipeline.train.huggingface.config_source import ConfigSource, Json
from pipeline.train.huggingface.family import Family, Need, anything, only, where
from pipeline.train.huggingface.names import HEAD_RULE, Names, TensorRule
from pipeline.train.model.mixers.attention.cross import CrossAttentionSpec
from pipeline.train.model.mixers.attention.spec import AttentionSpec
from pipeline.train.model.mlps.dense.spec import MlpSpec, default_ffn_dim
from pipeline.train.model.tensor_names import TensorNames

_MLPS = {
    "relu": "relu",
    "gelu": "gelu_exact",
    "gelu_new": "gelu",
    "gated-gelu": "geglu",
    "gated-silu": "swiglu",
}
"""Our `mlp` by `feed_forward_proj`."""
_ACTIVATIONS = {"relu": "relu", "gelu_exact": "gelu", "gelu": "gelu_new", "geglu": "gelu_new", "swiglu": "silu"}
"""Name of the activation, `dense_act_fn`, by our `mlp`."""


def _mlp_names(layer: int) -> tuple[TensorNames, ...]:
    before = f"layer.{layer}.DenseReluDense."
    return (
        TensorNames(f"{before}wi", ("w1",), where=lambda part: not part.gated),
        TensorNames(f"{before}wi_0", ("w1",), where=lambda part: bool(part.gated)),
        TensorNames(f"{before}wi_1", ("w3",), where=lambda part: bool(part.gated)),
        TensorNames(f"{before}wo", ("w2",)),
    )


def _attention_names(layer: int, name: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return tuple(
        (f"layer.{layer}.{name}.{theirs}", (ours,))
        for theirs, ours in zip("qkvo", ("wq", "wk", "wv", "wo"), strict=True)
    )


_SELF = _attention_names(0, "SelfAttention")
_ENCODER = Names(
    style="t5",
    layer="encoder.block.{i}.",
    before=(),
    norms={"layer.0.layer_norm": "mixer_norm", "layer.1.layer_norm": "mlp_norm"},
    after=(),
    tables={AttentionSpec: _SELF, MlpSpec: _mlp_names(1)},
)
_DECODER = Names(
    style="t5",
    layer="decoder.block.{i}.",
    before=(),
    norms={
        "layer.0.layer_norm": "mixer_norm",
        "layer.1.layer_norm": "cross_norm",
        "layer.2.layer_norm": "mlp_norm",
    },
    after=(),
    tables={
        AttentionSpec: _SELF,
        CrossAttentionSpec: _attention_names(1, "EncDecAttention"),
        MlpSpec: _mlp_names(2),
    },
    layers=({"mixer": AttentionSpec, "cross": CrossAttentionSpec, "mlp": MlpSpec},),
)
_TABLE = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"


def _read(source: ConfigSource) -> Json:
    layers = source.need_count("num_layers", MAX_LAYERS)
    form = source.get("feed_forward_proj", "relu")
    if form not in _MLPS:
        source.refuse("feed_forward_proj", form, f"only {', '.join(map(repr, _MLPS))} are supported")
    mlp = _MLPS[form]
    # Derived from it by transformers, unless a file says otherwise.
    source.must_be("dense_act_fn", (_ACTIVATIONS[mlp],), _ACTIVATIONS[mlp])
    source.must_be("is_gated_act", (form.startswith("gated-"),), form.startswith("gated-"))
    source.must_be("is_decoder", (False,), False)
    source.must_be("is_encoder_decoder", (True,), True)
    for key in ("dropout_rate", "classifier_dropout", "n_positions"):
        source.get(key)  # nothing that the weights compute
    source.size("decoder_start_token_id", least=0)  # which the folder has
    dim, tied = source.need_count("d_model", MAX_WIDTH), source.flag("tie_word_embeddings", True)
    # Version 5 of transformers says so by a key of its own, and earlier ones by tied embeddings.
    scaled = source.get_absent("scale_decoder_outputs", tied)
    if not isinstance(scaled, bool):
        source.refuse("scale_decoder_outputs", scaled, "it must be true or false")
    return {
        "layers": source.size("num_decoder_layers", layers),
        "encoder": {"layers": layers},
        "dim": dim,
        "heads": source.need_size("num_heads"),
        "head_dim": source.size("d_kv", 64),
        "ffn_dim": source.need_size("d_ff"),
        "mlp": mlp,
        "norm": "rmsnorm",
        "norm_eps": source.number("layer_norm_epsilon", 1e-6),
        "positions": "relative",
        "relative": {
            "buckets": source.size("relative_attention_num_buckets", 32),
            "max_distance": source.size("relative_attention_max_distance", 128),
        },
        "attention_scale": 1.0,
        # Version 5 writes tied embeddings of all; those without a factor are tied only if the files have no head.
        "tie_embeddings": tied and scaled,
        "logit_scale": dim**-0.5 if scaled else 1.0,
        "vocab_size": source.need_size("vocab_size"),
    }


def _write(model: ModelConfig, positions: int) -> Json:
    assert model.encoder is not None
    relative = model.relative or RelativeConfig()
    form = next(theirs for theirs, ours in _MLPS.items() if ours == model.mlp)
    return {
        "d_model": model.dim,
        "d_kv": model.head_size,
        "d_ff": model.ffn_dim or default_ffn_dim(model.mlp, model.dim),
        "num_layers": model.encoder.layers,
        "num_decoder_layers": model.layers,
        "num_heads": model.heads,
        "relative_attention_num_buckets": relative.buckets,
        "relative_attention_max_distance": relative.max_distance,
        "feed_forward_proj": form,
        "layer_norm_epsilon": model.norm_eps,
        "dropout_rate": model.dropout,
        "scale_decoder_outputs": model.logit_scale != 1.0,
        "is_encoder_decoder": True,
        "n_positions": positions,
    }


def _scale_fits(scale: Any, model: ModelConfig) -> bool:
    return scale == 1.0 or (model.tie_embeddings and math.isclose(scale, model.dim**-0.5, rel_tol=1e-9))


T5 = Family(
    model_type="t5",
    architecture="T5ForConditionalGeneration",
    title="T5",
    what=(
        "`encoder`, `positions: relative`, `attention_scale: 1.0`, `mlp: relu` with `tie_embeddings` and `logit_scale: "
        "dim ** -0.5` (1.0), `mlp: geglu` (1.1) or `swiglu` (UL2) without"
    ),
    read=_read,
    write=_write,
    mark="encoder",
    needs={
        "encoder": Need(lambda encoder, model: encoder is not None and encoder.pattern is None, "an encoder"),
        "positions": only("relative"),
        "relative": anything(),
        "attention_scale": only(1.0),
        "norm": only("rmsnorm"),
        "mlp": only(*_MLPS.values()),
        "kv_heads": where(lambda model: model.kv_heads in (None, model.heads), "as many kv_heads as heads"),
        "head_dim": anything(),
        "logit_scale": Need(_scale_fits, "logit_scale dim ** -0.5 with tie_embeddings, or none"),
        "rope_theta": anything(),  # there is no rope
    },
    names=Names(
        style="t5",
        layer="decoder.block.{i}.",
        before=(
            TensorRule("shared.weight", ("embedding.weight",)),
            TensorRule(f"encoder.{_TABLE}", ("relative.encoder",)),
            TensorRule(f"decoder.{_TABLE}", ("relative.decoder",)),
        ),
        norms={},
        layers=(),
        after=(TensorRule("decoder.final_layer_norm.weight", ("norm.weight",)), HEAD_RULE),
        sides={"encoder": _ENCODER, "decoder": _DECODER},
        encoder_norm="encoder.final_layer_norm.weight",
    ),
    prefix="",
    ignored=(r"(encoder|decoder)\.embed_tokens\.weight",),  # the shared one again
    copies={f"{side}.embed_tokens.weight": "shared.weight" for side in ("encoder", "decoder")},
    positions=("n_positions", 512),
)
