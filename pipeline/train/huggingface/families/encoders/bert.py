"""BERT and RoBERTa: post-norm, learned positions and types of tokens, a matrix and a norm before the head.

RoBERTa's token 1 is padding: its positions begin after it, so that the first two rows of the table are not used.
"""

from __future__ import annotations

from typing import Any

from pipeline.config.layers.mixers import MAX_LAYERS
from pipeline.config.model import ModelConfig
from pipeline.train.huggingface.config_source import ConfigSource, Json
from pipeline.train.huggingface.family import Family, Need, anything, only, where
from pipeline.train.huggingface.names import Names, TensorRule
from pipeline.train.model.mixers.attention.spec import AttentionSpec
from pipeline.train.model.mlps.dense.spec import MlpSpec, default_ffn_dim

_GELUS = {"gelu": "gelu_exact", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu"}
_HAS = "post-norm layers with layernorm, gelu, biases everywhere and plain attention to both sides"
_PADDING = 1
"""RoBERTa's token for padding."""
_SKIPPED = _PADDING + 1
"""Rows of RoBERTa's table of positions that no token has."""


def _read(source: ConfigSource, *, types: int, skipped: int = 0, transform: str | None = None) -> Json:
    """Keys of `model:`.

    Args:
        source: the file.
        types: what transformers takes where `type_vocab_size` is not there.
        skipped: rows of the table of positions that are not used.
        transform: activation before the head; None: the one of the layers.
    """
    source.must_be("hidden_act", _GELUS, "gelu")
    source.must_be("position_embedding_type", ("absolute",), "absolute")
    source.must_be("is_decoder", (False,), False)
    source.must_be("add_cross_attention", (False,), False)
    source.must_be("tie_word_embeddings", (True,), True)  # of two biases of the head the other one counts without
    for key in ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"):
        source.get(key)
    gelu, dim = _GELUS[source.get("hidden_act", "gelu")], source.need_size("hidden_size")
    rows = source.count("max_position_embeddings", 512, least=skipped + 1)
    return {
        "direction": "both",
        "layers": source.need_count("num_hidden_layers", MAX_LAYERS),
        "dim": dim,
        "heads": source.need_size("num_attention_heads"),
        "ffn_dim": source.need_size("intermediate_size"),
        "norm": "layernorm",
        "norm_eps": source.number("layer_norm_eps", 1e-12),
        "norm_place": "post",
        "mlp": gelu,
        "bias": "all",
        "positions": "learned",
        "max_positions": rows - skipped,
        "token_types": source.size("type_vocab_size", types),
        "embedding_norm": True,
        "final_norm": False,
        "head_transform": transform or gelu,
        "head_bias": True,
        "tie_embeddings": True,
        "vocab_size": source.need_size("vocab_size"),
    }


def _write(model: ModelConfig, positions: int, skipped: int = 0) -> Json:
    return {
        "num_hidden_layers": model.layers,
        "hidden_size": model.dim,
        "num_attention_heads": model.heads,
        "intermediate_size": model.ffn_dim or default_ffn_dim(model.mlp, model.dim),
        "max_position_embeddings": (model.max_positions or positions) + skipped,
        "type_vocab_size": model.token_types,
        "layer_norm_eps": model.norm_eps,
        "hidden_act": "gelu" if model.mlp == "gelu_exact" else "gelu_new",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }


def _read_roberta(source: ConfigSource) -> Json:
    source.must_be("pad_token_id", (_PADDING,), _PADDING)
    return _read(source, types=2, skipped=_SKIPPED, transform="gelu_exact")


def _write_roberta(model: ModelConfig, positions: int) -> Json:
    return {**_write(model, positions, _SKIPPED), "pad_token_id": _PADDING}


_NEEDS: dict[str, Need] = {
    "direction": only("both"),
    "positions": only("learned"),
    "norm": only("layernorm", has=_HAS),
    "norm_place": only("post", has=_HAS),
    "final_norm": only(False, has=_HAS),
    "embedding_norm": only(True),
    "mlp": only("gelu", "gelu_exact"),
    "bias": only("all", has=_HAS),
    "head_bias": only(True),
    "kv_heads": where(lambda model: model.kv_heads in (None, model.heads), _HAS),
    "head_dim": where(lambda model: model.heads_fill_dim, _HAS),
    "tie_embeddings": only(True, has="a head that is tied to the embedding"),
    "rope_theta": anything(),  # there is no rope
}


def _names(prefix: str, head: dict[str, str], positions: int = 0) -> Names:
    """Names of tensors.

    Args:
        prefix: before those of the model without its head.
        head: theirs for dense, norm and bias of the head, and for its weight.
        positions: rows ahead of the positions.
    """
    embeddings = f"{prefix}embeddings."

    def both(theirs: str, ours: str) -> tuple[TensorRule, ...]:
        return tuple(TensorRule(f"{theirs}.{kind}", (f"{ours}.{kind}",)) for kind in ("weight", "bias"))

    return Names(
        style="bert",
        layer=f"{prefix}encoder.layer.{{i}}.",
        before=(
            TensorRule(f"{embeddings}word_embeddings.weight", ("embedding.weight",)),
            TensorRule(f"{embeddings}position_embeddings.weight", ("position_embedding.weight",), skipped=positions),
            TensorRule(f"{embeddings}token_type_embeddings.weight", ("type_embedding.weight",)),
            *both(f"{embeddings}LayerNorm", "embedding_norm"),
        ),
        norms={"attention.output.LayerNorm": "mixer_sum_norm", "output.LayerNorm": "mlp_sum_norm"},
        after=(
            *both(head["dense"], "head.dense"),
            *both(head["norm"], "head.norm"),
            TensorRule(head["bias"], ("head.bias",)),
            TensorRule(head["weight"], ("head.weight",)),
        ),
        norm_bias=True,
        tables={
            AttentionSpec: (
                ("attention.self.query", ("wq",)),
                ("attention.self.key", ("wk",)),
                ("attention.self.value", ("wv",)),
                ("attention.output.dense", ("wo",)),
            ),
            MlpSpec: (("intermediate.dense", ("w1",)), ("output.dense", ("w2",))),
        },
    )


_OLD_NORMS = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
"""Names of norms in TensorFlow, and in files of the first BERT."""
_UNUSED = (r"embeddings\.position_ids", r"pooler\.dense\.(weight|bias)")
"""A buffer, and what the output for whole texts was made of."""
_BERT_HEAD = "cls.predictions."

BERT = Family(
    model_type="bert",
    architecture="BertForMaskedLM",
    title="BERT",
    pads=True,
    what="`direction: both`, `norm_place: post` without `final_norm`, `positions: learned`, `token_types: 2`, "
    "`embedding_norm`, `mlp: gelu_exact`, `bias: all`, `head_transform`, `head_bias`",
    read=lambda source: _read(source, types=2),
    write=_write,
    mark="direction",
    needs={
        **_NEEDS,
        "token_types": Need(lambda value, model: value not in (None, 1), "token_types 2"),
        "head_transform": where(lambda model: model.head_transform == model.mlp, "a head_transform like its mlp"),
    },
    names=_names(
        "bert.",
        {
            "dense": f"{_BERT_HEAD}transform.dense",
            "norm": f"{_BERT_HEAD}transform.LayerNorm",
            "bias": f"{_BERT_HEAD}bias",
            "weight": f"{_BERT_HEAD}decoder.weight",
        },
    ),
    prefix="bert.",
    # Of the head the bias may be there twice, tied; and there may be one that tells whether two texts belong together.
    ignored=(*_UNUSED, r"cls\.predictions\.decoder\.bias", r"cls\.seq_relationship\.(weight|bias)"),
    copies={f"{_BERT_HEAD}decoder.bias": f"{_BERT_HEAD}bias"},
    renamed=_OLD_NORMS,
    positions=("max_position_embeddings", 512),
)
_ROBERTA_HEAD = "lm_head."
_ROBERTA: dict[str, Any] = {
    "dense": f"{_ROBERTA_HEAD}dense",
    "norm": f"{_ROBERTA_HEAD}layer_norm",
    "bias": f"{_ROBERTA_HEAD}bias",
    "weight": f"{_ROBERTA_HEAD}decoder.weight",
}
ROBERTA = Family(
    model_type="roberta",
    architecture="RobertaForMaskedLM",
    title="RoBERTa",
    padding=_PADDING,
    what="BERT's with `token_types: 1`",
    read=_read_roberta,
    write=_write_roberta,
    mark="direction",
    needs={**_NEEDS, "token_types": only(1), "head_transform": only("gelu_exact")},
    names=_names("roberta.", _ROBERTA, _SKIPPED),
    prefix="roberta.",
    ignored=(*_UNUSED, r"lm_head\.decoder\.bias"),
    copies={f"{_ROBERTA_HEAD}decoder.bias": f"{_ROBERTA_HEAD}bias"},
    renamed=_OLD_NORMS,
    positions=("max_position_embeddings", 512),
)
