"""Exports that sentence-transformers loads: their files, and the vector of a text by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from pipeline.common.errors import UserError
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.train.huggingface.convert import from_hf, to_hf
from tests.train.huggingface import parity
from tests.train.huggingface.encoder_rows import ROWS
from tests.train.huggingface.parity import QUIET, Row
from tests.train.huggingface.test_parity import llama


def exported(row: Row, root: Path, tokenizer: Tokenizer) -> Path:
    pair = parity.pair_of(row, root, tokenizer)
    from_hf(pair.folder, root / "ours", console=QUIET)
    to_hf(root / "ours", root / "pooled", pooled=True, console=QUIET)
    return root / "pooled"


def test_files(tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = exported(ROWS["modernbert"], tmp_path, tokenizer)
    modules = json.loads((folder / "modules.json").read_text())
    assert [(each["idx"], each["path"], each["type"].rpartition(".")[2]) for each in modules] == [
        (0, "", "Transformer"),
        (1, "1_Pooling", "Pooling"),
    ]
    pooling = json.loads((folder / "1_Pooling" / "config.json").read_text())
    assert pooling["word_embedding_dimension"] == 24
    assert [key for key, value in pooling.items() if key.startswith("pooling_mode") and value] == [
        "pooling_mode_mean_tokens"
    ]
    assert json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"] == parity.POSITIONS
    assert AutoTokenizer.from_pretrained(folder).pad_token == tokenizer.end_of_document_token


def test_the_vector_of_a_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Where the package is installed; it is none of the extras."""
    package = pytest.importorskip("sentence_transformers")
    folder = exported(ROWS["modernbert"], tmp_path, tokenizer)
    texts = ["the cat sat", "on the mat and on"]
    found = package.SentenceTransformer(str(folder), device="cpu").encode(texts, convert_to_tensor=True)
    model = AutoModel.from_pretrained(folder).eval()
    for text, vector in zip(texts, found, strict=True):
        with torch.no_grad():
            hidden = model(AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids)
        torch.testing.assert_close(vector, hidden.last_hidden_state[0].mean(0), atol=1e-6, rtol=1e-5)


def test_a_decoder_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="--pooled is for encoders"):
        exported(llama(), tmp_path, tokenizer)
