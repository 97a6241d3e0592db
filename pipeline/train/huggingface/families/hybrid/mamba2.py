"""Mamba-2 alone: layers without an mlp."""

from __future__ import annotations

from pipeline.config.layers.mixers import MAX_LAYERS
from pipeline.config.model import ModelConfig
from pipeline.train.huggingface.config_hybrid import some_recurrent
from pipeline.train.huggingface.config_mamba2 import (
    check_expand,
    is_whole_factor,
    needs_sizes,
    read_limits,
    read_sizes,
    sizes_of,
    write_limits,
    write_sizes,
)
from pipeline.train.huggingface.config_source import ConfigSource, Json
from pipeline.train.huggingface.family import Family, only
from pipeline.train.huggingface.names import HEAD_RULE, Names, TensorRule
from pipeline.train.model.mixers.mamba2.spec import Mamba2Spec

MAMBA2_NAMES = Names(
    style="mamba2",
    layer="backbone.layers.{i}.",
    before=(TensorRule("backbone.embeddings.weight", ("embedding.weight",)),),
    norms={"norm": ("mixer_norm", "mlp_norm")},
    after=(TensorRule("backbone.norm_f.weight", ("norm.weight",)), HEAD_RULE),
    layers=({"mixer": Mamba2Spec},),
)
_KEYS = {
    **{"heads": "num_heads", "head_dim": "head_dim", "state_dim": "state_size", "groups": "n_groups"},
    **{"conv_size": "conv_kernel", "conv_bias": "use_conv_bias"},
}
_OF_TRAINING = ("rescale_prenorm_residual", "time_step_rank", "time_step_min", "time_step_max", "time_step_floor")
"""For initial weights, of which the rank is of Mamba-1."""


def _read(source: ConfigSource) -> Json:
    source.must_be("hidden_act", ("silu",), "silu")
    source.must_be("use_bias", (False,), False)
    for key in (*_OF_TRAINING, "chunk_size", "residual_in_fp32", "max_position_embeddings"):
        source.get(key)
    sizes = read_sizes(source, _KEYS)
    check_expand(source, "expand", sizes)
    return {
        "layers": source.need_count("num_hidden_layers", MAX_LAYERS),
        "dim": source.need_size("hidden_size"),
        "mixer": "mamba2",
        "mamba2": {**sizes, **read_limits(source)},
        "mlp": "none",
        "norm": "rmsnorm",
        "norm_eps": source.number("layer_norm_epsilon", 1e-5),
        "tie_embeddings": source.flag("tie_word_embeddings", False),
        "vocab_size": source.need_size("vocab_size"),
    }


def _write(model: ModelConfig, positions: int) -> Json:
    sizes = sizes_of(model)
    return {
        "num_hidden_layers": model.layers,
        "hidden_size": model.dim,
        "hidden_act": "silu",
        "layer_norm_epsilon": model.norm_eps,
        **write_sizes(sizes, _KEYS),
        "expand": sizes.heads * sizes.head_dim // model.dim,
        "use_bias": False,
        **write_limits(sizes),
        "max_position_embeddings": positions,  # which transformers does not read here, but others do
    }


MAMBA2 = Family(
    model_type="mamba2",
    architecture="Mamba2ForCausalLM",
    title="Mamba-2",
    what="`mixer: mamba2` and `mlp: none`",
    read=_read,
    write=_write,
    mark="mixer",
    needs={
        "mixer": only("mamba2"),
        "mamba2": needs_sizes(is_whole_factor, "heads that are a multiple of dim together"),
        "norm": only("rmsnorm"),
        "mlp": only("none"),
    },
    special=some_recurrent,
    names=MAMBA2_NAMES,
    prefix="backbone.",
    pads=True,
)
