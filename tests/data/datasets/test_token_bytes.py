"""Bytes of text by token, against the texts themselves."""

from __future__ import annotations

import numpy as np
import orjson
import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Engine

from pipeline.config.tokenizer import TokenizerConfig
from pipeline.data.datasets.token_bytes import token_bytes
from pipeline.data.tokenization.tokenizer import Tokenizer

TEXTS = ["the sea, the sea\n", "Žluťoučký kůň  \t", "灯台守は嵐の前", "👩‍🚀 rocket", "", "a <|endoftext|> in a text"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    config = TokenizerConfig.model_validate({"train": {"vocab_size": 320}, "special_tokens": ["<|x|>"]})
    return Tokenizer.train(iter(TEXTS), config)


def test_the_bytes_of_all_tokens_are_those_of_the_text(tokenizer: Tokenizer) -> None:
    sizes = token_bytes(tokenizer)
    assert sizes is not None and sizes.shape == (tokenizer.vocab_size,)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert sizes[ids].sum() == len(text.encode()), text
    assert sizes[tokenizer.end_of_document] == 0, "it is in no text"
    assert sizes[tokenizer.special_tokens["<|x|>"]] == len("<|x|>")


def test_characters_that_are_cut_have_their_bytes_in_each_piece(tokenizer: Tokenizer) -> None:
    sizes = token_bytes(tokenizer)
    assert sizes is not None
    ids = tokenizer.encode("灯")
    assert len(ids) > 1, "a character of several tokens"
    assert sizes[ids].tolist() == [1] * 3


def made(engine: Engine) -> Tokenizer:
    engine.add_special_tokens([AddedToken("<|endoftext|>", special=True, normalized=False)])
    return Tokenizer(engine, "<|endoftext|>", [])


def test_where_tokens_do_not_tell_nothing_is_told(tokenizer: Tokenizer) -> None:
    lower = Engine.from_str(tokenizer.definition)
    lower.normalizer = normalizers.Lowercase()
    assert token_bytes(made(lower)) is None, "the text was another one"
    words = Engine(models.WordLevel({"[UNK]": 0, "sea": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    assert token_bytes(made(words)) is None
    strips = Engine.from_str(tokenizer.definition)
    strips.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    assert token_bytes(made(strips)) is None
    assert np.array_equal(token_bytes(made(Engine.from_str(tokenizer.definition))) > 0, token_bytes(tokenizer) > 0)
    assert orjson.loads(tokenizer.definition)["decoder"]["type"] == "ByteLevel"
