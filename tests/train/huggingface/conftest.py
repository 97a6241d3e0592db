from __future__ import annotations

import json

import pytest
import tokenizers
import transformers

from pipeline.config.tokenizer import TokenizerConfig, TokenizerTrainConfig
from pipeline.data.tokenization.tokenizer import Tokenizer
from tests.train.models import VOCAB


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be asked of the hub."""
    monkeypatch.setattr(transformers.utils.logging, "_default_log_level", transformers.utils.logging.ERROR)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Of fewer ids than the models have rows."""
    config = TokenizerConfig(train=TokenizerTrainConfig(vocab_size=257))
    trained = Tokenizer.train(iter(["the cat sat on the mat"]), config)
    state = json.loads(trained.definition)
    keep = {token: number for token, number in state["model"]["vocab"].items() if number < VOCAB - 5}
    state["model"]["vocab"], state["model"]["merges"] = keep, []
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(state)), "<|endoftext|>", [])
