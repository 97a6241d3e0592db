"""Every family against transformers: files, logits, gradients, generation, training. A new family is a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Starcoder2Config

from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.train.huggingface.registry import FAMILIES
from tests import tiers
from tests.train.huggingface import parity
from tests.train.huggingface.parity import Pair, Row

SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 44,
    "max_position_embeddings": parity.POSITIONS,
}
SHAPE = {**SIZES, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}


def llama(**values: Any) -> Row:
    return Row(LlamaConfig, {**SHAPE, **values})


def scaled(kind: str, factor: float, **more: Any) -> Row:
    return llama(rope_parameters={"rope_theta": 10000.0, "rope_type": kind, "factor": factor, **more})


# Of transformers' models whose windows are off, these are not read.
NO_WINDOW = {"max_window_layers"}
ROWS = {
    "gpt2": Row(
        GPT2Config,
        {"n_embd": 20, "n_layer": 3, "n_head": 5, "n_positions": parity.POSITIONS, "n_inner": 44}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "llama": llama(),
    "llama-tied-full-heads": llama(tie_word_embeddings=True, num_key_value_heads=6, rope_theta=500.0),
    "llama-biases-wide-heads": llama(attention_bias=True, mlp_bias=True, head_dim=10),
    "llama-linear": scaled("linear", 4.0),
    # Contexts short enough that every branch of the scaling is taken by some of the frequencies.
    "llama3": scaled("llama3", 8.0, original_max_position_embeddings=32, low_freq_factor=1.0, high_freq_factor=4.0),
    "llama-yarn": scaled("yarn", 4.0, original_max_position_embeddings=512, beta_fast=24.0, beta_slow=2.0),
    "mistral": Row(
        MistralConfig, {**SHAPE, "sliding_window": 7, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    ),
    "qwen2": Row(Qwen2Config, {**SHAPE, "tie_word_embeddings": True}, NO_WINDOW),
    "qwen2-window": Row(
        Qwen2Config, {**SHAPE, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}
    ),
    "qwen3": Row(
        Qwen3Config, {**SHAPE, "num_key_value_heads": 1, "head_dim": 10, "tie_word_embeddings": True}, NO_WINDOW
    ),
    "starcoder2": Row(
        Starcoder2Config, {**SIZES, "norm_epsilon": 1e-4, "sliding_window": 7, "tie_word_embeddings": False}
    ),
    "starcoder2-tied-no-biases": Row(Starcoder2Config, {**SIZES, "use_bias": False}),
}


@pytest.fixture(scope="module", params=tiers.first(2, ROWS, rest="guard"))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Pair:
    return parity.pair_of(ROWS[request.param], tmp_path_factory.mktemp(request.param), tokenizer)


def test_every_family_has_a_row() -> None:
    assert {row.config.model_type for row in ROWS.values()} == FAMILIES.keys()


@pytest.mark.parametrize("name", ROWS)
def test_keys(name: str) -> None:
    parity.check_keys(ROWS[name])


def test_conversion(pair: Pair, tmp_path: Path) -> None:
    parity.check_conversion(pair, tmp_path)


def test_config_json(pair: Pair, tmp_path: Path) -> None:
    parity.check_config(pair, tmp_path)


def test_logits_and_gradients(pair: Pair) -> None:
    parity.check_logits_and_gradients(pair)


def test_greedy_tokens(pair: Pair) -> None:
    parity.check_greedy(pair)


def test_packed_documents(pair: Pair) -> None:
    parity.check_packed(pair)


@pytest.mark.guard
@pytest.mark.parametrize("name", ROWS)
def test_twenty_steps(root: Path, name: str) -> None:
    parity.check_training(ROWS[name], root, name)
