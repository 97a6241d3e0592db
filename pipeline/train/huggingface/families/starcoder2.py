"""StarCoder2: LayerNorm, tanh GELU without a gate, and rope."""

from __future__ import annotations

from dataclasses import replace

from pipeline.config.layers.mixers import MAX_LAYERS
from pipeline.config.model import ModelConfig
from pipeline.train.huggingface.config_rope import read_rope, write_rope
from pipeline.train.huggingface.config_source import ConfigSource, Json
from pipeline.train.huggingface.family import Family, anything, only, where
from pipeline.train.huggingface.llama_like import LLAMA_NAMES, LLAMA_NEEDS
from pipeline.train.huggingface.names import HEAD_RULE, TensorRule
from pipeline.train.model.mlps.dense.spec import MlpSpec, default_ffn_dim

_TANH_GELU = ("gelu_pytorch_tanh", "gelu_new")


def _read(source: ConfigSource) -> Json:
    source.must_be("hidden_act", _TANH_GELU, "gelu_pytorch_tanh")
    # Published files have these two, which transformers does not read.
    source.must_be("norm_type", ("layer_norm",), "layer_norm")
    source.must_be("mlp_type", ("default",), "default")
    return {
        "layers": source.need_count("num_hidden_layers", MAX_LAYERS),
        "dim": source.need_size("hidden_size"),
        "heads": source.need_size("num_attention_heads"),
        "kv_heads": source.size("num_key_value_heads", 2),
        "head_dim": source.size("head_dim"),
        "ffn_dim": source.need_size("intermediate_size"),
        "norm": "layernorm",
        "norm_eps": source.number("norm_epsilon", 1e-5),
        "mlp": "gelu",
        "bias": "all" if source.flag("use_bias", True) else "none",
        **read_rope(source),
        "sliding_window": source.size("sliding_window", least=0),
        "tie_embeddings": source.flag("tie_word_embeddings", True),
        "vocab_size": source.need_size("vocab_size"),
    }


def _write(model: ModelConfig, positions: int) -> Json:
    return {
        "num_hidden_layers": model.layers,
        "hidden_size": model.dim,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads or model.heads,
        "intermediate_size": model.ffn_dim or default_ffn_dim(model.mlp, model.dim),
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": model.norm_eps,
        "use_bias": model.bias == "all",
        "max_position_embeddings": positions,
        "sliding_window": model.sliding_window,
        "attention_dropout": 0.0,
        "residual_dropout": 0.0,
        "embedding_dropout": 0.0,
        **write_rope(model),
    }


STARCODER2 = Family(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    title="StarCoder2",
    what="`norm: layernorm`, `mlp: gelu`, `bias: none` or `all`, `sliding_window` or none",
    read=_read,
    write=_write,
    mark="norm",
    needs={
        **LLAMA_NEEDS,
        "norm": only("layernorm"),
        "mlp": only("gelu"),
        "bias": only("none", "all"),
        "head_dim": where(lambda model: model.heads_fill_dim, "dim / heads"),
        "sliding_window": anything(),
    },
    names=replace(
        LLAMA_NAMES,
        norm_bias=True,
        after=(
            TensorRule("model.norm.weight", ("norm.weight",)),
            TensorRule("model.norm.bias", ("norm.bias",)),
            HEAD_RULE,
        ),
        tables={MlpSpec: MlpSpec.huggingface["gpt2"]},
    ),
    positions=("max_position_embeddings", 4096),
)
