"""All files that the data stages make of twelve corpora, against hashes that were written once.

A change that alters bytes on disk is either a mistake or a new format; for the latter, `python -m
tests.data.test_made_bytes` writes the hashes anew.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import xxhash

from pipeline.common.storage import json_bytes
from pipeline.config import Config
from pipeline.data.curate.stage import curate
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.provenance.excerpts import ExcerptReader
from tests.data import mixed
from tests.data.curate.runs import curate_config, everything
from tests.data.curate.runs import write_corpus as write_curated
from tests.data.runs import both, make_config, write_both, write_jsonl

HASHES = Path(__file__).with_name("made_bytes.json")
PACKED = {"loader": {"packing": "best_fit"}}
_VOLATILE = ("stat", "seconds", "engine", "time")
"""Keys of JSON files whose values are of a machine or a moment."""
_MTIME = 1_700_000_000


def _tokenizer(root: Path) -> dict[str, Any]:
    """A byte-level tokenizer with a few merges, the same with every version of `tokenizers`."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "t"), ("o", "k"), ("ok", "e"), ("oke", "n"), ("t", "h"), ("th", "r"), ("Ġ", "w")]
    vocab = {piece: number for number, piece in enumerate([*alphabet, *(a + b for a, b in merges), "<|endoftext|>"])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>"])
    made.save(str(root / "tokenizer.json"))
    return {"path": str(root / "tokenizer.json")}


def _mixed(root: Path, **data: Any) -> Config:
    return make_config(root, mixed.sources(mixed.write(root / "corpus")), **data)


def _preprocessed(config: Config) -> None:
    _age(config)
    preprocess(config)


def _age(config: Config) -> None:
    """Give all input files one time, which receipts know."""
    for path in config.run.dir.parent.rglob("*"):
        if path.is_file() and not path.is_relative_to(config.data_dir):
            os.utime(path, (_MTIME, _MTIME))


def formats(root: Path, **data: Any) -> Config:
    config = _mixed(root, preprocess={"max_error_rate": 0.5}, **data)
    _preprocessed(config)
    return config


def shuffled(root: Path, **data: Any) -> Config:
    config = _mixed(root, preprocess={"max_error_rate": 0.5, "shuffle": "global"}, **data)
    _preprocessed(config)
    return config


def packed(root: Path, **data: Any) -> Config:
    config = make_config(root, both(write_both(root / "corpus")), **PACKED, **data)
    _preprocessed(config)
    return config


def shuffled_and_packed(root: Path, **data: Any) -> Config:
    config = make_config(root, both(write_both(root / "corpus")), preprocess={"shuffle": "global"}, **PACKED, **data)
    _preprocessed(config)
    return config


def counted_splits(root: Path, **data: Any) -> Config:
    splits = {"heldout": {"documents": 20}, "other": 0.1}
    config = make_config(root, both(write_both(root / "corpus")), splits=splits, split_by="id", **data)
    _preprocessed(config)
    return config


def long_documents(root: Path, **data: Any) -> Config:
    settings = {"max_document_bytes": 1024, "on_long_document": "split"}
    write_jsonl(root / "corpus" / "long.jsonl", 20, 5, words=900)
    source = {"name": "l", "type": "jsonl", "paths": [f"{root}/corpus/*.jsonl"]}
    config = make_config(root, [source], preprocess=settings, **data)
    _preprocessed(config)
    return config


def _weighted(root: Path, shuffle: str, data: dict[str, Any]) -> Config:
    write_jsonl(root / "corpus" / "w.jsonl", 120, 3)
    lines = (root / "corpus" / "w.jsonl").read_text().splitlines()
    weighted = [json.dumps(json.loads(line) | {"w": (number % 4 + 1) / 2}) for number, line in enumerate(lines)]
    (root / "corpus" / "w.jsonl").write_text("\n".join(weighted) + "\n")
    source = {"name": "w", "type": "jsonl", "paths": [f"{root}/corpus/w.jsonl"], "weight_key": "w", "metadata": ["id"]}
    config = make_config(root, [source], preprocess={"shuffle": shuffle}, **data)
    _preprocessed(config)
    return config


def weighted(root: Path, **data: Any) -> Config:
    return _weighted(root, "unit", data)


def weighted_and_shuffled(root: Path, **data: Any) -> Config:
    return _weighted(root, "global", data)


def dropped(root: Path, **data: Any) -> Config:
    for number in range(3):
        whole = gzip.compress(write_jsonl(root / "corpus" / "plain", 60, number).read_bytes(), mtime=0)
        (root / "corpus" / f"{number}.jsonl.gz").write_bytes(whole[: len(whole) // 2] if number == 1 else whole)
    source = {"name": "d", "type": "jsonl", "paths": [f"{root}/corpus/*.jsonl.gz"]}
    config = make_config(root, [source], preprocess={"on_damaged_file": "drop", "max_error_rate": 0.5}, **data)
    _preprocessed(config)
    return config


def grown(root: Path, **data: Any) -> Config:
    write_jsonl(root / "corpus" / "b.jsonl", 60, 1)
    config = make_config(root, [{"name": "g", "type": "jsonl", "paths": [f"{root}/corpus/*.jsonl"]}], **data)
    _preprocessed(config)
    write_jsonl(root / "corpus" / "a.jsonl", 50, 7)
    _age(config)
    preprocess(config, grow=True)
    return config


def curated(root: Path, **data: Any) -> Config:
    corpus = write_curated(root / "corpus", 80)
    config = curate_config(root, corpus, everything(corpus), **data)
    _age(config)
    curate(config, read_texts=ExcerptReader(config.data.curate))
    preprocess(config)
    return config


def curated_and_shuffled(root: Path, **data: Any) -> Config:
    corpus = write_curated(root / "corpus", 80)
    settings: dict[str, Any] = {"mode": "apply", "duplicates": {"exact": "text", "lines": {"min_count": 3}}}
    config = curate_config(root, corpus, settings, preprocess={"shuffle": "global"}, **PACKED, **data)
    _age(config)
    curate(config)
    preprocess(config)
    return config


FIXTURES: list[Callable[..., Config]] = [
    formats,
    shuffled,
    packed,
    shuffled_and_packed,
    counted_splits,
    long_documents,
    weighted,
    weighted_and_shuffled,
    dropped,
    grown,
    curated,
    curated_and_shuffled,
]


def made(fixture: Callable[..., Config], root: Path) -> dict[str, str]:
    """Hash of each folder below a data folder: names and content of its files, without paths and times."""
    config = fixture(root, tokenizer=_tokenizer(root))
    found: dict[str, Any] = {}
    for path in sorted(config.data_dir.rglob("*")):
        name = path.relative_to(config.data_dir)
        # Receipts of excerpts, and of decisions beside them, have hashes of the paths of files.
        if (
            not path.is_file()
            or path.suffix == ".html"
            or ("receipts" in name.parts and {"excerpts", "decisions"} & set(name.parts))
        ):
            continue
        data = path.read_bytes()
        if path.suffix == ".json":
            data = json_bytes(_lasting(json.loads(data), str(root)))
        folder = found.setdefault(str(name.parent), xxhash.xxh3_64())
        folder.update(f"{name.name} {xxhash.xxh3_64_hexdigest(data.replace(str(root).encode(), b'ROOT'))}\n".encode())
    return {folder: each.hexdigest() for folder, each in found.items()}


def _lasting(value: Any, root: str) -> Any:
    if isinstance(value, dict):
        return {key: _lasting(each, root) for key, each in value.items() if key not in _VOLATILE and key != "seal"}
    if isinstance(value, list):
        return [_lasting(each, root) for each in value]
    return value.replace(root, "ROOT") if isinstance(value, str) else value


@pytest.mark.parametrize(
    "fixture",
    [pytest.param(each, marks=[] if each is shuffled_and_packed else pytest.mark.guard) for each in FIXTURES],
    ids=lambda each: str(each.__name__),
)
def test_the_same_files_as_ever(fixture: Callable[..., Config], tmp_path: Path) -> None:
    assert made(fixture, tmp_path) == json.loads(HASHES.read_text())[fixture.__name__]


if __name__ == "__main__":
    hashes = {}
    for each in FIXTURES:
        with tempfile.TemporaryDirectory() as folder:
            hashes[each.__name__] = made(each, Path(folder))
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else HASHES
    out.write_text(json.dumps(hashes, indent=1, sort_keys=True) + "\n")
