"""Generation against transformers' greedy search, closed forms of the sampling filters, and text in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.eval import GenerateConfig
from pipeline.config.model import ModelConfig
from pipeline.errors import UserError
from pipeline.eval.generate import _stream_text, generate, next_token_probabilities
from pipeline.train.model.config import decoder_spec
from pipeline.train.model.decoder import Context, Decoder
from tests.train.hf_mapping import randomize, twin
from tests.train.models import FAMILIES, VOCAB

PROMPT = "\u4e05\u4e11"  # ids 5 and 17 of `Letters`


class Letters:
    """A token is a letter: id i is chr(i + 0x4E00), and `end_of_document` is whatever the test wants."""

    def __init__(self, end_of_document: int = VOCAB - 1) -> None:
        self.end_of_document = end_of_document

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 0x4E00 for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(token + 0x4E00) for token in ids)


class Bytes:
    """A token is a byte of UTF-8. Like SentencePiece, it drops the space that a text begins with."""

    end_of_document = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < 256).decode(errors="replace").removeprefix(" ")


def _config(**keys: Any) -> GenerateConfig:
    return GenerateConfig.model_validate(keys)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers(family: str) -> None:
    theirs = FAMILIES[family].theirs()
    model = twin(theirs, FAMILIES[family].config, VOCAB)
    tokenizer = Letters()
    prompt_ids = [5, 17, 3, 88, 4, 4, 60, 12, 9, 31]
    expected = theirs.generate(
        torch.tensor([prompt_ids]),
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
        max_new_tokens=24,
        do_sample=False,
        eos_token_id=tokenizer.end_of_document,
        pad_token_id=0,
    )[0, len(prompt_ids) :].tolist()
    pieces = list(generate(model, tokenizer, tokenizer.decode(prompt_ids), _config(temperature=0, max_tokens=24)))
    if expected[-1] == tokenizer.end_of_document:
        expected = expected[:-1]
    assert tokenizer.encode("".join(pieces)) == expected
    assert len(set(expected)) > 1


def test_ends_with_the_document() -> None:
    model = Decoder(decoder_spec(FAMILIES["llama"].config, VOCAB, 64))
    randomize(model, seed=3)
    text = "".join(generate(model, Letters(end_of_document=-1), PROMPT, _config(temperature=0, max_tokens=20)))
    letter = text[-1]
    shorter = "".join(
        generate(model, Letters(end_of_document=ord(letter) - 0x4E00), PROMPT, _config(temperature=0, max_tokens=20))
    )
    assert shorter == text[: text.index(letter)]


def test_an_empty_prompt_begins_a_document() -> None:
    model = Decoder(decoder_spec(FAMILIES["llama"].config, VOCAB, 64))
    randomize(model, seed=3)
    config = _config(temperature=0, max_tokens=5)
    tokenizer = Letters(end_of_document=30)
    assert "".join(generate(model, tokenizer, "", config)) == "".join(
        generate(model, tokenizer, tokenizer.decode([30]), config)
    )


def test_draws_are_decided_by_the_seed_alone() -> None:
    model = Decoder(decoder_spec(FAMILIES["qwen3"].config, VOCAB, 64))
    randomize(model, seed=3)

    def text(**keys: Any) -> str:
        return "".join(
            generate(model, Letters(end_of_document=-1), PROMPT, _config(max_tokens=30, temperature=2, **keys))
        )

    torch.manual_seed(1)
    first = text(seed=5)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert text(seed=5) == first != text(seed=6)
    assert torch.equal(torch.get_rng_state(), state)
    assert text(seed=5, top_k=1) == text(seed=6, top_k=1) == text(seed=7, top_p=1e-9)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [0.3, 0.1, 0.4, 0.2, 0]),
        ({"top_k": 2}, [3 / 7, 0, 4 / 7, 0, 0]),
        ({"top_k": 99}, [0.3, 0.1, 0.4, 0.2, 0]),
        # 0.4 + 0.3 reaches 0.65; 0.4 alone reaches 0.35 and does not reach 0.45.
        ({"top_p": 0.65}, [3 / 7, 0, 4 / 7, 0, 0]),
        ({"top_p": 0.35}, [0, 0, 1, 0, 0]),
        ({"top_p": 0.45}, [3 / 7, 0, 4 / 7, 0, 0]),
        ({"top_p": 1}, [0.3, 0.1, 0.4, 0.2, 0]),
        # Of the three that top-k leaves, 4/9 + 3/9 reach 0.7.
        ({"top_k": 3, "top_p": 0.7}, [3 / 7, 0, 4 / 7, 0, 0]),
        ({"top_k": 3, "top_p": 0.8}, [3 / 9, 0, 4 / 9, 2 / 9, 0]),
        # Squares at half the temperature.
        ({"temperature": 0.5}, [9 / 30, 1 / 30, 16 / 30, 4 / 30, 0]),
        ({"temperature": 0.5, "top_k": 2}, [9 / 25, 0, 16 / 25, 0, 0]),
    ],
)
def test_filters_have_their_closed_form(keys: dict[str, Any], expected: list[float]) -> None:
    logits = torch.tensor([0.3, 0.1, 0.4, 0.2, 0.0]).log()
    probabilities = next_token_probabilities(logits, _config(**{"temperature": 1, **keys}))
    torch.testing.assert_close(probabilities, torch.tensor(expected, dtype=torch.float32))


def test_draws_follow_the_distribution() -> None:
    """The first token over many seeds, against the probabilities of the logits."""
    config = FAMILIES["llama"].config.model_copy(update={"layers": 1})
    model = Decoder(decoder_spec(config, VOCAB, 64))
    randomize(model, seed=9)
    draws = 400
    tokenizer = Letters(end_of_document=-1)
    counts = torch.zeros(VOCAB)
    for seed in range(draws):
        text = "".join(generate(model, tokenizer, PROMPT, _config(max_tokens=1, temperature=1, top_k=4, seed=seed)))
        counts[tokenizer.encode(text)[0]] += 1
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer.encode(PROMPT)]), Context())[0, -1, :VOCAB]
    expected = draws * next_token_probabilities(logits, _config(temperature=1, top_k=4))[:VOCAB]
    assert not counts[expected == 0].any()
    chi_squared = ((counts - expected) ** 2 / expected)[expected > 0].sum()
    assert chi_squared < 16.3  # 3 degrees of freedom: 0.001


def test_learned_positions_end_the_text() -> None:
    model = Decoder(decoder_spec(FAMILIES["gpt2"].config, VOCAB, 16))
    randomize(model, seed=3)
    tokenizer = Letters(end_of_document=-1)
    prompt = tokenizer.decode(range(10))
    assert len("".join(generate(model, tokenizer, prompt, _config(max_tokens=100)))) == 6
    with pytest.raises(UserError, match=r"16 tokens, but model\.max_positions is 16; give a prompt of at most 15"):
        generate(model, tokenizer, tokenizer.decode(range(16)), _config())


def test_a_character_comes_whole() -> None:
    tokenizer = Bytes()
    text = " naïve 世界 🎉 end"
    prompt_ids = tokenizer.encode("say")
    pieces = list(_stream_text(iter(tokenizer.encode(text)), tokenizer, prompt_ids))
    assert pieces == list(text)  # the leading space too, which decoding the new tokens alone would lose


@given(st.binary(max_size=40), st.sampled_from(["", "a", "é ", "🎉"]))
def test_pieces_join_to_the_text_of_the_tokens(data: bytes, prompt: str) -> None:
    """Any bytes, characters or not."""
    tokenizer = Bytes()
    prompt_ids = tokenizer.encode(prompt) or [tokenizer.end_of_document]
    pieces = list(_stream_text(iter(data), tokenizer, prompt_ids))
    assert "".join(pieces) == tokenizer.decode([*prompt_ids, *data])[len(tokenizer.decode(prompt_ids)) :]


def test_inference_mode_does_not_leak_between_pieces() -> None:
    config = ModelConfig(layers=1, dim=16, heads=2)
    model = Decoder(decoder_spec(config, VOCAB, 0))
    for _ in generate(model, Letters(end_of_document=-1), PROMPT, _config(max_tokens=2)):
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
