"""GPT-NeoX and Pythia: layernorms, biases, gelu, rope in a part of each head, mixer and mlp in parallel or not."""

from __future__ import annotations

from pipeline.config.layers.mixers import MAX_LAYERS
from pipeline.config.model import ModelConfig
from pipeline.train.huggingface.config_rope import read_rope, read_rope_share, write_rope
from pipeline.train.huggingface.config_source import ConfigSource, Json
from pipeline.train.huggingface.family import Family, anything, only, where
from pipeline.train.huggingface.llama_like import LLAMA_NEEDS
from pipeline.train.huggingface.names import Names, TensorRule
from pipeline.train.model.mixers.attention.spec import AttentionSpec
from pipeline.train.model.mlps.dense.spec import MlpSpec, default_ffn_dim
from pipeline.train.model.tensor_names import RowOrder, TensorNames, by_group

_ACTIVATIONS = {"gelu": "gelu_exact", "gelu_fast": "gelu", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu"}
_HEADS = RowOrder("head by head", lambda part: by_group(part.heads, *[part.head_dim] * 3))


def _read(source: ConfigSource) -> Json:
    source.must_be("hidden_act", _ACTIVATIONS, "gelu")
    source.must_be("is_decoder", (True, False), False)  # of encoders beside it, which there are none
    for dropout in ("hidden_dropout", "classifier_dropout"):
        source.get(dropout)
    heads = source.need_size("num_attention_heads")
    return {
        "layers": source.need_count("num_hidden_layers", MAX_LAYERS),
        "dim": source.need_size("hidden_size"),
        "heads": heads,
        "ffn_dim": source.size("intermediate_size", 24576),
        "norm": "layernorm",
        "norm_eps": source.number("layer_norm_eps", 1e-5),
        "mlp": _ACTIVATIONS[source.get("hidden_act", "gelu")],
        "bias": "all" if source.flag("attention_bias", True) else "mlp",
        "residual": "parallel" if source.flag("use_parallel_residual", True) else "sequential",
        **read_rope(source, shared=True, theta_key="rotary_emb_base"),
        "rope_share": read_rope_share(source, "rotary_pct", 0.25),
        "tie_embeddings": source.flag("tie_word_embeddings", False),
        "vocab_size": source.need_size("vocab_size"),
    }


def _write(model: ModelConfig, positions: int) -> Json:
    rope = write_rope(model)
    return {
        "num_hidden_layers": model.layers,
        "hidden_size": model.dim,
        "num_attention_heads": model.heads,
        "intermediate_size": model.ffn_dim or default_ffn_dim(model.mlp, model.dim),
        "layer_norm_eps": model.norm_eps,
        "hidden_act": next(name for name, ours in _ACTIVATIONS.items() if ours == model.mlp),
        "attention_bias": model.bias == "all",
        "use_parallel_residual": model.residual == "parallel",
        "max_position_embeddings": positions,
        "rotary_emb_base": rope["rope_theta"],
        "rotary_pct": model.rope_share,
        "rope_scaling": rope["rope_scaling"],
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }


GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    title="GPT-NeoX",
    what="`norm: layernorm`, `mlp: gelu_exact` or `gelu`, `bias: all` or `mlp`, `residual: parallel` or `sequential`, "
    "`rope_share`",
    read=_read,
    write=_write,
    mark="norm",
    needs={
        **LLAMA_NEEDS,
        "norm": only("layernorm"),
        "mlp": only("gelu_exact", "gelu"),
        "bias": only("all", "mlp"),
        "kv_heads": where(lambda model: model.kv_heads in (None, model.heads), "as many kv_heads as heads"),
        "head_dim": where(lambda model: model.heads_fill_dim, "dim / heads"),
        "residual": only("parallel", "sequential"),
        "rope_share": anything(),
    },
    names=Names(
        style="gpt_neox",
        layer="gpt_neox.layers.{i}.",
        before=(TensorRule("gpt_neox.embed_in.weight", ("embedding.weight",)),),
        norms={"input_layernorm": "mixer_norm", "post_attention_layernorm": "mlp_norm"},
        after=(
            TensorRule("gpt_neox.final_layer_norm.weight", ("norm.weight",)),
            TensorRule("gpt_neox.final_layer_norm.bias", ("norm.bias",)),
            TensorRule("embed_out.weight", ("head.weight",)),
        ),
        norm_bias=True,
        tables={
            AttentionSpec: (
                TensorNames("attention.query_key_value", ("wq", "wk", "wv"), _HEADS),
                ("attention.dense", ("wo",)),
            ),
            MlpSpec: (("mlp.dense_h_to_4h", ("w1",)), ("mlp.dense_4h_to_h", ("w2",))),
        },
    ),
    prefix="gpt_neox.",
    ignored=(r"layers\.\d+\.attention\.((masked_)?bias|rotary_emb\.inv_freq)",),
)
