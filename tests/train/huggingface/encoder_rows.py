"""Encoders as transformers has them, for `test_parity.py`."""

from __future__ import annotations

from typing import Any

from transformers import BertConfig, ModernBertConfig, RobertaConfig

from tests.train.huggingface import parity
from tests.train.huggingface.parity import Row

_SIZES = {"hidden_size": 24, "num_attention_heads": 6, "intermediate_size": 44}
_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert(**values: Any) -> Row:
    shape = {**_SIZES, **_DROPOUT, "num_hidden_layers": 3, "max_position_embeddings": parity.POSITIONS}
    return Row(BertConfig, {**shape, **values}, masked=True)


def roberta(exported_as: str | None = None, **values: Any) -> Row:
    shape = {**_SIZES, **_DROPOUT, "num_hidden_layers": 3, "max_position_embeddings": parity.POSITIONS + 2}
    shape |= {"pad_token_id": parity.PADDING, "type_vocab_size": 1}
    return Row(RobertaConfig, {**shape, **values}, {"pad_token_id"}, exported_as, masked=True)


def modernbert(**values: Any) -> Row:
    """A window shorter than the texts, and layers behind the period."""
    shape = {**_SIZES, "num_hidden_layers": 5, "max_position_embeddings": parity.POSITIONS, "local_attention": 10}
    tokens = {"cls_token_id": None, "sep_token_id": None}
    return Row(ModernBertConfig, {**shape, **tokens, **values}, masked=True)


ROWS = {
    "bert": bert(),
    "bert-tanh-three-types": bert(type_vocab_size=3, hidden_act="gelu_new", layer_norm_eps=1e-5),
    "roberta": roberta(),
    "roberta-two-types": roberta("bert", type_vocab_size=2),
    "modernbert": modernbert(),
    "modernbert-biases": modernbert(
        attention_bias=True,
        mlp_bias=True,
        classifier_bias=True,
        norm_bias=True,
        decoder_bias=False,
        tie_word_embeddings=False,
        classifier_activation="gelu_pytorch_tanh",
        layer_types=["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
    ),
}
