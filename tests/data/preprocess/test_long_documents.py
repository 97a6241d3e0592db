"""Documents longer than `max_document_bytes`: cut into sequences of one document, or rejected."""

import contextlib
import itertools
import json
import os
import time
from pathlib import Path

import numpy as np
import orjson
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.indexed import SPLIT
from pipeline.data.datasets.verify import verify
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.preprocess.tokenize_unit import cut_text
from tests.data.datasets import megatron
from tests.data.runs import make_config
from tests.data.stage import start, workers, write_run_file
from tests.data.tokenization.test_tokenizer import byte_vocabulary, write

LIMIT = 1024
LINES = "".join(f"line {n} of a long document, with words\n" for n in range(200))
SPACES = " ".join(f"word{n}" for n in range(900))
TEXTS = {
    "short": "short",
    "exact": "x" * LIMIT,
    "one more": "y" * (LIMIT + 1),
    "lines": LINES,
    "spaces": SPACES,
    "one word": "漢" * 2000,
    "mixed": LINES[:3000] + "z" * 5000 + SPACES[:2500] + "🙂" * 700,
    "only spaces": " " * 5000,
    "special": "<|endoftext|>" * 300,
}


@pytest.fixture
def tokenizer(tmp_path):
    return {"path": str(write(tmp_path / "t.json", byte_vocabulary(), special=["<|endoftext|>"]))}


def config_of(root, tokenizer, texts=TEXTS, **settings):
    path = root / "a.jsonl"
    path.write_bytes(b"".join(orjson.dumps({"id": id, "text": text}) + b"\n" for id, text in texts.items()))
    return make_config(
        root,
        [{"name": "s", "type": "jsonl", "paths": [str(path)]}],
        tokenizer=tokenizer,
        heldout=0,
        preprocess={"max_document_bytes": LIMIT, "unit_bytes": 2**20, **settings},
    )


class TestCuts:
    @given(st.text(st.sampled_from("a b\nß漢🙂\r") | st.characters(codec="utf-8"), max_size=200), st.integers(4, 40))
    def test_any_text(self, text, limit):
        raw = text.encode()
        pieces = list(cut_text(raw, limit))
        assert "".join(pieces) == text
        assert all(len(piece.encode()) <= limit for piece in pieces)
        assert all(pieces) or text == ""
        for piece, following in itertools.pairwise(pieces):
            room = (piece + following).encode()[:limit]
            if piece.endswith("\n"):
                assert b"\n" not in room[len(piece.encode()) :]  # as late as possible
            elif following.startswith(" "):
                assert b"\n" not in room
                assert b" " not in room[len(piece.encode()) + 1 :]
            else:
                assert b"\n" not in room
                assert b" " not in room[1:]
                assert len(piece.encode()) + len(following[0].encode()) > limit

    def test_short_text_is_one_piece(self):
        assert list(cut_text(b"a b\nc", 5)) == ["a b\nc"]
        assert list(cut_text(b"", 5)) == [""]

    @pytest.mark.parametrize(
        ("text", "pieces"),
        [
            ("ab\ncd\nefgh", ["ab\ncd\n", "efgh"]),
            ("ab cd efgh", ["ab cd", " efgh"]),
            ("abcdefghij", ["abcdefg", "hij"]),
            ("漢漢漢", ["漢漢", "漢"]),
            ("  ab cdefg", ["  ab", " cdefg"]),
        ],
    )
    def test_where(self, text, pieces):
        assert list(cut_text(text.encode(), 7)) == pieces


def test_one_document_of_several_sequences(tmp_path, tokenizer):
    config = config_of(tmp_path, tokenizer)
    report = preprocess(config)
    assert report.documents == len(TEXTS)
    assert report.text_bytes == sum(len(text.encode()) for text in TEXTS.values())
    assert verify(config.data_dir).problems == []
    (prefix,) = (path.with_suffix("") for path in config.data_dir.glob("s/train/parts/*/*.bin"))
    plain = tokenizers.Tokenizer.from_file(str(tmp_path / "t.json"))
    plain.encode_special_tokens = True
    end = plain.token_to_id("<|endoftext|>")

    theirs = megatron.indexed_dataset().IndexedDataset(str(prefix))
    dataset = Dataset.open(config.data_dir / "s" / "train")
    by_text = {}
    bounds = theirs.document_indices.tolist()
    for document, (first, last) in enumerate(itertools.pairwise(bounds)):
        sequences = [theirs[number] for number in range(first, last)]
        start, stop = dataset.document_start(document), dataset.document_start(document + 1)
        assert np.array_equal(np.concatenate(sequences), dataset.read(start, stop - start))
        assert sequences[-1][-1] == end
        assert sum(int((sequence == end).sum()) for sequence in sequences) == 1
        sequences[-1] = sequences[-1][:-1]
        texts = [plain.decode(sequence.tolist(), skip_special_tokens=False) for sequence in sequences]
        for text, sequence in zip(texts, sequences, strict=True):
            assert plain.encode(text, add_special_tokens=False).ids == sequence.tolist()
        flags = dataset.provenance(document)[2]
        by_text["".join(texts)] = (len(sequences), flags)
    assert by_text.keys() == set(TEXTS.values())
    for name, text in TEXTS.items():
        count, flags = by_text[text]
        long = len(text.encode()) > LIMIT
        assert flags == (SPLIT if long else 0), name
        assert count == len(list(cut_text(text.encode(), LIMIT))), name
        assert (count > 1) == long


def test_a_long_document_of_characters_that_are_dropped(tmp_path):
    """Pieces without ids are no sequences."""
    state = json.loads(write(tmp_path / "t.json", byte_vocabulary(), special=["<|endoftext|>"]).read_text())
    state["normalizer"] = {"type": "Replace", "pattern": {"String": "x"}, "content": ""}
    (tmp_path / "t.json").write_text(json.dumps(state))
    texts = {"a": "x" * 5000, "b": "a" * 1500 + "x" * 5000, "c": "c", "d": "x"}
    config = config_of(tmp_path, {"path": str(tmp_path / "t.json")}, texts)
    preprocess(config)
    assert verify(config.data_dir).problems == []
    dataset = Dataset.open(config.data_dir / "s" / "train")
    lengths = np.diff([dataset.document_start(document) for document in range(5)])
    assert sorted(lengths.tolist()) == [1, 1, 2, 1501]
    assert dataset.tokens == 1505
    (prefix,) = (path.with_suffix("") for path in config.data_dir.glob("s/train/parts/*/*.bin"))
    assert (megatron.indexed_dataset().IndexedDataset(str(prefix)).sequence_lengths > 0).all()


def test_rejected(tmp_path, tokenizer):
    config = config_of(tmp_path, tokenizer, on_long_document="reject", max_error_rate=1)
    report = preprocess(config)
    reason = f"longer than data.preprocess.max_document_bytes ({LIMIT})"
    assert report.documents == 2
    assert report.rejected == {"s": {reason: 7}}
    kept = [orjson.loads(line) for line in (config.data_dir / "s" / "rejected.jsonl").open("rb")]
    long = [n for n, text in enumerate(TEXTS.values(), 1) if len(text.encode()) > LIMIT]
    assert [(record["reason"], record["line"]) for record in kept] == [(reason, n) for n in long]


def peak(file):
    """Peak memory in MB of the command or its worker, whichever took most. It only grows, so that looking is enough."""
    process = start(file)
    most = 0
    while process.poll() is None:
        for pid in (process.pid, *workers(process.pid)):
            with contextlib.suppress(OSError, IndexError):
                most = max(most, int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0]))
        time.sleep(0.002)
    said, _ = process.communicate()
    assert process.returncode == 0, said
    return most / 1024


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["tokenizers", "gigatoken"])
def test_memory_of_a_document_of_21_mb(tmp_path, engine):
    if engine == "gigatoken":
        pytest.importorskip("gigatoken")
    code = "".join(path.read_text("ascii", errors="ignore") for path in sorted(Path(os.__file__).parent.rglob("*.py")))
    texts = [code[: 21 * 10**6], *(code[n : n + 3000] for n in range(0, 6 * 10**6, 3000))]
    assert len(texts[0]) == 21 * 10**6
    (tmp_path / "a.jsonl").write_bytes(b"".join(orjson.dumps({"text": text}) + b"\n" for text in texts))
    config = make_config(
        tmp_path,
        [{"name": "s", "type": "jsonl", "paths": [str(tmp_path / "a.jsonl")]}],
        tokenizer={"train": {"vocab_size": 4000, "max_bytes": 2 * 10**6}},
        preprocess={"unit_bytes": 2**30, "engine": engine},
        dir=str(tmp_path / "run"),
    )
    file = write_run_file(config, tmp_path / "run.yaml")
    preprocess(config.model_copy(update={"data": config.data.model_copy(update={"dir": tmp_path / "elsewhere"})}))
    kept = {"path": tmp_path / "elsewhere" / "tokenizer"}
    config = config.model_copy(update={"tokenizer": config.tokenizer.model_copy(update={**kept, "train": None})})
    write_run_file(config, file)
    assert peak(file) < (600 if engine == "tokenizers" else 400)
