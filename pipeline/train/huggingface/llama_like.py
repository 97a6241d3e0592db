"""Names of tensors and keys of config.json that decoders since Llama share.

A family takes from here what it has, and adds or replaces the rest in its own file.
"""

from __future__ import annotations

from typing import Any

from pipeline.config.layers.layer import RopeScalingConfig
from pipeline.config.layers.mixers import MAX_LAYERS
from pipeline.config.model import ModelConfig
from pipeline.train.huggingface.config_rope import ROPE_SHARE, read_rope, read_rope_share, write_rope
from pipeline.train.huggingface.config_source import ConfigSource, Json
from pipeline.train.huggingface.family import Need, anything, only
from pipeline.train.huggingface.names import HEAD_RULE, Names, TensorRule
from pipeline.train.model.mlps.dense.spec import default_ffn_dim

LLAMA_NAMES = Names(
    style="llama",
    layer="model.layers.{i}.",
    before=(TensorRule("model.embed_tokens.weight", ("embedding.weight",)),),
    norms={"input_layernorm": "mixer_norm", "post_attention_layernorm": "mlp_norm"},
    after=(TensorRule("model.norm.weight", ("norm.weight",)), HEAD_RULE),
)
"""`dataclasses.replace` makes those of a family with other norms or fused matrices."""

LLAMA_NEEDS: dict[str, Need] = {
    "positions": only("rope"),
    "norm": only("rmsnorm"),
    "mlp": only("swiglu"),
    "kv_heads": anything(),
    "head_dim": anything(),
    "rope_theta": anything(),
    "rope_scaling": Need(lambda scaling, model: not _has_mscale(scaling), "no mscale, which is DeepSeek's"),
}
"""See `Family.needs`; a family adds the keys that it has besides, or has otherwise."""


def _has_mscale(scaling: RopeScalingConfig | None) -> bool:
    fields = RopeScalingConfig.model_fields
    return scaling is not None and any(
        getattr(scaling, key) != fields[key].default for key in ("mscale", "mscale_all_dim")
    )


def read_llama_like(
    source: ConfigSource,
    *,
    head_dim: int | None = None,
    kv_heads: int | None = None,
    theta: float = 10000.0,
    tied: bool = False,
    eps: float = 1e-6,
    share: float | None = None,
    rope: Json | None = None,
    dense: bool = True,
) -> Json:
    """Keys of `model:` that all of them have.

    Args:
        source: the file.
        head_dim: what transformers takes where the key is not there; None: hidden size / heads.
        kv_heads: the same; None: as many as heads.
        theta: the same of the rotary frequencies.
        tied: the same of tied embeddings.
        eps: the same of what the norms add.
        share: the same of the part of a head that is turned; None: the family turns whole heads.
        rope: keys of rope in a family that has them otherwise.
        dense: False in a family whose layers all have experts; it has no size of other mlps.
    """
    source.must_be("hidden_act", ("silu",), "silu")
    dim, heads = source.need_size("hidden_size"), source.need_size("num_attention_heads")
    found_kv_heads = source.size_or_null("num_key_value_heads", kv_heads)  # null means as many as heads
    return {
        "layers": source.need_count("num_hidden_layers", MAX_LAYERS),
        "dim": dim,
        "heads": heads,
        "kv_heads": heads if found_kv_heads is None else found_kv_heads,
        "head_dim": source.size("head_dim", head_dim),
        **({"ffn_dim": source.need_size("intermediate_size")} if dense else {}),
        "norm": "rmsnorm",
        "norm_eps": source.number("rms_norm_eps", eps),
        "mlp": "swiglu",
        **(read_rope(source, theta, shared=share is not None) if rope is None else rope),
        **({} if share is None else {"rope_share": read_rope_share(source, ROPE_SHARE, share)}),
        "tie_embeddings": source.flag("tie_word_embeddings", tied),
        "vocab_size": source.need_size("vocab_size"),
    }


BIASES = ("none", "attention", "mlp", "all")
"""Values of `bias` in families with `attention_bias` and `mlp_bias`."""


def read_bias(source: ConfigSource) -> str:
    """`bias` of `model:` in such a family."""
    attention, mlp = source.flag("attention_bias", False), source.flag("mlp_bias", False)
    return ("all" if mlp else "attention") if attention else "mlp" if mlp else "none"


def write_bias(model: ModelConfig) -> Json:
    """The two keys."""
    return {"attention_bias": model.bias in ("attention", "all"), "mlp_bias": model.bias in ("mlp", "all")}


def write_shape(model: ModelConfig, positions: int) -> Json:
    """Keys of config.json for the numbers of things and their sizes."""
    return {
        "num_hidden_layers": model.layers,
        "hidden_size": model.dim,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads or model.heads,
        "head_dim": model.head_size,
        "intermediate_size": model.ffn_dim or default_ffn_dim(model.mlp, model.dim),
        "max_position_embeddings": positions,
    }


def write_llama_like(model: ModelConfig, positions: int, **more: Any) -> Json:
    """Keys of config.json that all of them have, and `more`."""
    return {
        **write_shape(model, positions),
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "attention_dropout": 0.0,
        **write_rope(model),
        **more,
    }
