"""Datasets of pairs of conversations: records, bytes, checks, and what shows them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.common.errors import UserError
from pipeline.config.load import load
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.indexed import document_lengths
from pipeline.data.datasets.merge import merge
from pipeline.data.datasets.target_mask import mask_file, mask_problem
from pipeline.data.datasets.verify import verify
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.provenance.inspect import inspect
from pipeline.data.sources.records import UnusableRecord
from pipeline.data.sources.templates.conversation import read_pair
from pipeline.data.tokenization.tokenizer import Tokenizer
from tests.data import pairs


def turn(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


ASK, FAR, NEAR = turn("user", "how far?"), turn("assistant", "far"), turn("assistant", "near")


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"chosen": [ASK, FAR]}, "no value for 'rejected'"),
        ({"chosen": [ASK, FAR], "rejected": "near"}, "value of 'rejected' is not a list of messages"),
        ({"chosen": [ASK, FAR], "rejected": [ASK]}, "does not end with an answer"),
        ({"chosen": [ASK, FAR], "rejected": [turn("user", "?"), NEAR]}, "differ before their last answers"),
        ({"chosen": [ASK, FAR, ASK, FAR], "rejected": [ASK, NEAR]}, "differ before their last answers"),
        ({"chosen": [ASK, FAR], "rejected": [ASK, FAR]}, "are the same"),
        ({"chosen": [], "rejected": []}, "no messages"),
    ],
)
def test_what_is_no_pair_is_rejected(record: dict[str, Any], says: str) -> None:
    with pytest.raises(UnusableRecord, match=says):
        read_pair(record, None, None)


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "how far?", "chosen": "far", "rejected": "near"},
        {"prompt": [ASK], "chosen": [FAR], "rejected": [NEAR]},
        {"prompt": [ASK], "chosen": "far", "rejected": [NEAR]},
    ],
)
def test_a_prompt_may_be_apart(record: dict[str, Any]) -> None:
    whole = read_pair({"chosen": [ASK, FAR], "rejected": [ASK, NEAR]}, None, None)
    assert read_pair(record, "prompt", None) == whole


def test_a_prompt_is_not_taken_twice() -> None:
    whole = {"prompt": [ASK], "chosen": [ASK, FAR], "rejected": [ASK, NEAR]}
    with pytest.raises(UnusableRecord, match="does not begin with the assistant"):
        read_pair(whole, "prompt", None)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pairs")
    pairs.make(pairs.write(root))
    return root


def train_split(root: Path) -> Dataset:
    return Dataset.open(root / "data" / "pairs" / "train")


def test_bytes_are_those_of_both_conversations(root: Path) -> None:
    dataset = train_split(root)
    tokenizer, trained, texts = Tokenizer.open(dataset.folder), 0, set()
    for document in range(dataset.documents):
        start, end = (dataset.document_start(document + more) for more in (0, 1))
        ids, mask = dataset.read(start, end - start), dataset.mask(document)
        (border,) = np.flatnonzero(mask == 2)
        sides = []
        for own, its in zip(np.split(ids, [border]), np.split(mask, [border]), strict=True):
            assert own[-1] == tokenizer.end_of_document and its[-1] == 0
            text = tokenizer.decode(own[:-1])
            assert tokenizer.encode_parsed(text)[0] == own[:-1].tolist()
            answer = tokenizer.decode(own[its == 1])
            assert answer.endswith("<|end|>") and text.endswith(f"<|start|>assistant{answer}\n")
            sides.append((text.removesuffix(f"{answer}\n"), answer))
        assert sides[0][0] == sides[1][0] and [answer[-8] for _, answer in sides] == ["0", "1"]
        trained += int((mask == 1).sum())
        texts.add(tuple(sides))
    assert dataset.manifest.has_pairs and dataset.manifest.trained_tokens == trained
    assert trained == dataset.trained_targets(np.arange(dataset.documents)).sum()


def test_a_pair_is_verified_and_never_merged(root: Path, tmp_path: Path) -> None:
    dataset = train_split(root)
    assert not verify(dataset.folder).problems
    with pytest.raises(UserError, match="pairs of conversations"):
        merge(dataset.folder, tmp_path / "merged")
    part = dataset.new_part(0)
    lengths, data = document_lengths(part), bytearray(mask_file(dataset.prefix(0)).read_bytes())
    assert mask_problem(mask_file(dataset.prefix(0)), lengths, pairs=True) is None
    assert "neither 0 nor 1" in str(mask_problem(mask_file(dataset.prefix(0)), lengths))
    place = data.index(2, 4 * len(lengths))
    for at, value in ((place, 0), (place + 1, 2), (place + 1, 3)):
        changed = bytearray(data)
        changed[at] = value
        path = tmp_path / "changed.mask"
        path.write_bytes(changed)
        assert mask_problem(path, lengths, pairs=True) is not None


def test_length_counts_both_conversations(root: Path, tmp_path: Path) -> None:
    longest = int(np.diff([train_split(root).document_start(n) for n in range(train_split(root).documents + 1)]).max())
    file = pairs.write(tmp_path)
    text = file.read_text().replace("max_tokens: 256", f"max_tokens: {longest - 1}")
    file.write_text(text.replace("workers: 1", "workers: 1\n    max_error_rate: 1.0"))
    preprocess(load(file))
    rejected = [json.loads(line) for line in (tmp_path / "data" / "pairs" / "rejected.jsonl").read_text().splitlines()]
    assert rejected and all(f"longer than chat.max_tokens ({longest - 1})" in each["reason"] for each in rejected)


def test_both_answers_are_shown(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inspect(root / "data" / "pairs" / "train")
    out = capsys.readouterr().out
    assert "0<|end|>]]" in out and "1<|end|>]]" in out


@pytest.mark.parametrize(
    ("chat", "says"),
    [
        ("train_on: assistant", "set train_on: last"),
        ("train_on: last, on_long: cut", "on_long: cut would cut the answers"),
    ],
)
def test_what_does_not_go_with_pairs(root: Path, tmp_path: Path, chat: str, says: str) -> None:
    keys = f"data.sources.0.chat={{format: preference, template: {root / 'chat.jinja'}, max_tokens: 64, {chat}}}"
    with pytest.raises(UserError, match=says):
        load(root / "pairs.yaml", [keys])
    with pytest.raises(UserError, match="prompt_key is for format: preference"):
        load(root / "pairs.yaml", [keys.replace("preference,", "openai, prompt_key: prompt,")])
