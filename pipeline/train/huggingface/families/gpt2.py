"""GPT-2: learned positions, biases everywhere, matrices stored as [in, out]."""

from __future__ import annotations

from pipeline.config.model import ModelConfig
from pipeline.train.huggingface.config_source import ConfigSource, Json
from pipeline.train.huggingface.family import Family, anything, only, where
from pipeline.train.huggingface.names import HEAD_RULE, Names, TensorRule
from pipeline.train.model.mlps.dense.spec import default_ffn_dim

_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")
_HAS = "layernorm, gelu, biases everywhere and plain attention"


def _read(source: ConfigSource) -> Json:
    source.must_be("activation_function", _TANH_GELU, "gelu_new")
    source.must_be("scale_attn_weights", (True,), True)
    source.must_be("scale_attn_by_inverse_layer_idx", (False,), False)
    source.must_be("add_cross_attention", (False,), False)
    return {
        "layers": source.need_size("n_layer"),
        "dim": source.need_size("n_embd"),
        "heads": source.need_size("n_head"),
        "ffn_dim": source.size("n_inner", 4 * source.need_size("n_embd")),
        "norm": "layernorm",
        "norm_eps": source.number("layer_norm_epsilon", 1e-5),
        "mlp": "gelu",
        "bias": "all",
        "positions": "learned",
        "max_positions": source.size("n_positions", 1024),
        "tie_embeddings": source.flag("tie_word_embeddings", True),
        "vocab_size": source.need_size("vocab_size"),
    }


def _write(model: ModelConfig, positions: int) -> Json:
    return {
        "n_layer": model.layers,
        "n_embd": model.dim,
        "n_head": model.heads,
        "n_inner": model.ffn_dim or default_ffn_dim(model.mlp, model.dim),
        "n_positions": model.max_positions or positions,
        "n_ctx": model.max_positions or positions,  # of published files: llama.cpp's converter needs it
        "layer_norm_epsilon": model.norm_eps,
        "activation_function": "gelu_new",
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    title="GPT-2",
    what="`positions: learned`, `norm: layernorm`, `mlp: gelu`, `bias: all`",
    read=_read,
    write=_write,
    mark="positions",
    needs={
        "positions": only("learned"),
        "norm": only("layernorm", has=_HAS),
        "mlp": only("gelu", has=_HAS),
        "bias": only("all", has=_HAS),
        "kv_heads": where(lambda model: model.kv_heads in (None, model.heads), _HAS),
        "head_dim": where(lambda model: model.heads_fill_dim, _HAS),
        "qk_norm": only(False, has=_HAS),
        "sliding_window": only(None, has=_HAS),
        "rope_theta": anything(),  # there is no rope
    },
    names=Names(
        style="gpt2",
        layer="transformer.h.{i}.",
        before=(
            TensorRule("transformer.wte.weight", ("embedding.weight",)),
            TensorRule("transformer.wpe.weight", ("position_embedding.weight",)),
        ),
        norms={"ln_1": "mixer_norm", "ln_2": "mlp_norm"},
        after=(
            TensorRule("transformer.ln_f.weight", ("norm.weight",)),
            TensorRule("transformer.ln_f.bias", ("norm.bias",)),
            HEAD_RULE,
        ),
        norm_bias=True,
        transposed=True,
    ),
    prefix="transformer.",
    ignored=(r"h\.\d+\.attn\.(masked_)?bias",),
    positions=("n_positions", 1024),
)
