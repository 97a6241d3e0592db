"""`data export`: what other libraries read in the files is what the source files have."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import tokenizers
from rich.console import Console

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.data.datasets.adopt import adopt
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.merge import merge
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.provenance.export_dataset import export_dataset
from tests.data.runs import make_config, write_jsonl
from tests.tiny import command
from tests.waiting import until

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Documents with ids that are stored nowhere else, some of them long, in files with and without blank lines."""
    root = tmp_path_factory.mktemp("corpus")
    write_jsonl(root / "corpus" / "a.jsonl", 40, words=400)
    blank = write_jsonl(root / "corpus" / "b.jsonl", 40, seed=3)
    blank.write_text(blank.read_text().replace("\n", "\n\n", 5))
    source = {"name": "web", "type": "jsonl", "paths": [str(root / "corpus" / "*.jsonl")]}
    config = make_config(root, [source], preprocess={"unit_bytes": 6000, "max_document_bytes": 1024})
    preprocess(config)
    return config


def rows(folder: Path) -> list[dict[str, Any]]:
    """All rows, read by others, in the order of the files."""
    found: list[dict[str, Any]] = []
    for path in sorted(folder.glob("documents-*")):
        if path.suffix == ".jsonl":
            found += map(json.loads, path.read_text().splitlines())
        else:
            found += [
                {**row, "metadata": json.loads(row["metadata"])} for row in pyarrow.parquet.read_table(path).to_pylist()
            ]
    return found


def check(config: Config, found: list[dict[str, Any]], ids: bool) -> None:
    folder = config.data_dir / "web" / "train"
    dataset, engine = Dataset.open(folder), tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert [row["document"] for row in found] == list(range(dataset.documents))
    assert len({(row["file"], row["line"]) for row in found}) == len(found)
    for row in found:
        record = json.loads(Path(row["file"]).read_text().splitlines()[row["line"] - 1])
        assert row["text"] == record["text"]
        assert row["id"] == (record["id"] if ids else None)
        assert (row["source"], row["row"], row["exact"]) == ("web", None, True)
        start = dataset.document_start(row["document"])
        own = dataset.read(start, dataset.document_start(row["document"] + 1) - start).tolist()
        assert row["tokens"] == own
        assert engine.decode(own[:-1], skip_special_tokens=False) == record["text"]


@pytest.mark.parametrize("form", ["jsonl", pytest.param("parquet", marks=pytest.mark.guard)])
def test_the_text_of_the_files_and_its_places(config: Config, tmp_path: Path, form: Any) -> None:
    source = config.data_dir / "web"
    options: dict[str, Any] = {"tokens": True, "shard_bytes": 4000, "workers": 1}
    counts = export_dataset(source, tmp_path / "to", form, QUIET, **options)
    assert len(counts) > 3 and not any(each.without_id for each in counts)
    assert sum(each.inexact for each in counts) == 0
    found = rows(tmp_path / "to")
    check(config, found, ids=True)
    assert any(len(row["text"].encode()) > 1024 for row in found)
    # Shards are about as large as they are to be: the longest document more at most.
    largest = max(len(row["text"].encode()) for row in found)
    for path in (tmp_path / "to").glob("documents-*.jsonl"):
        assert sum(len(json.loads(line)["text"]) for line in path.read_text().splitlines()) < 2 * 4000 + largest


def test_some_documents_without_ids(config: Config, tmp_path: Path) -> None:
    folder = config.data_dir / "web" / "train"
    export_dataset(folder, tmp_path / "to", "jsonl", QUIET, documents="5-9", workers=1, ids=False)
    found = rows(tmp_path / "to")
    assert [row["document"] for row in found] == [5, 6, 7, 8, 9]
    assert all(row["id"] is None and "tokens" not in row for row in found)
    for documents, match in (("9-5", "ends"), ("1-9999", "numbered from 0"), ("x", "whole number")):
        with pytest.raises(UserError, match=match):
            export_dataset(folder, tmp_path / "other", "jsonl", QUIET, documents=documents)
    with pytest.raises(UserError, match="another folder"):
        export_dataset(folder, tmp_path / "to", "jsonl", QUIET, documents="5-8", ids=False)
    with pytest.raises(UserError, match="it has heldout, train"):
        export_dataset(config.data_dir / "web", tmp_path / "other", "jsonl", QUIET, split="test")


@pytest.mark.parametrize("shuffle", ["unit", "global"])
def test_ids_by_default(tmp_path: Path, shuffle: str) -> None:
    corpus = write_jsonl(tmp_path / "corpus" / "a.jsonl", 12)
    source = {"name": "web", "type": "jsonl", "paths": [str(corpus)]}
    config = make_config(tmp_path, [source], preprocess={"shuffle": shuffle}, heldout=0)
    preprocess(config)
    folder = config.data_dir / "web"
    (counts,) = export_dataset(folder, tmp_path / "to", "jsonl", QUIET, workers=1)
    ids = {f"r{number}" for number in range(12)}
    assert {row["id"] for row in rows(tmp_path / "to")} == (ids if shuffle == "unit" else {None})
    assert counts.without_id == (0 if shuffle == "unit" else 12)
    export_dataset(folder, tmp_path / "asked", "jsonl", QUIET, workers=1, ids=True)
    assert {row["id"] for row in rows(tmp_path / "asked")} == ids
    corpus.unlink()
    (counts,) = export_dataset(folder, tmp_path / "gone", "jsonl", QUIET, workers=1, ids=True)
    assert counts.without_id == 12 and {row["id"] for row in rows(tmp_path / "gone")} == {None}


@pytest.mark.guard
def test_an_adopted_dataset(config: Config, tmp_path: Path) -> None:
    """Its documents have several sequences, ids that follow from their places, and no line."""
    train = config.data_dir / "web" / "train"
    merge(train, tmp_path / "pair")
    adopt([tmp_path / "pair"], tmp_path / "adopted", tokenizer=train / "tokenizer.json")
    export_dataset(tmp_path / "adopted", tmp_path / "to", "parquet", QUIET, workers=1)
    export_dataset(train, tmp_path / "other", "jsonl", QUIET, workers=1)
    found = rows(tmp_path / "to")
    assert [row["text"] for row in found] == [row["text"] for row in rows(tmp_path / "other")]
    for number, row in enumerate(found):
        assert (row["row"], row["id"], row["line"]) == (number, f"pair#{number}", None)
        assert row["file"] == str((tmp_path / "pair").resolve())


@pytest.mark.guard
def test_texts_that_give_other_ids_are_flagged(tmp_path: Path) -> None:
    """The text of unknown words is not theirs."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    lines = ["plain words", "double  space", "plain again", " leading"]
    (corpus / "a.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    words = {"[UNK]": 0, "<|endoftext|>": 1, "plain": 2, "words": 3}
    engine = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "[UNK]"))
    engine.add_special_tokens(["<|endoftext|>"])
    engine.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    engine.save(str(tmp_path / "tokenizer.json"))
    source = {"name": "web", "type": "jsonl", "paths": [str(corpus / "*.jsonl")]}
    config = make_config(
        tmp_path,
        [source],
        tokenizer={"path": str(tmp_path / "tokenizer.json")},
        heldout=0.0001,
        preprocess={"max_unknown": 1},
    )
    preprocess(config)
    (count,) = export_dataset(config.data_dir / "web", tmp_path / "to", "parquet", QUIET, workers=1)
    found = {row["text"]: row["exact"] for row in rows(tmp_path / "to")}
    # "[UNK]" is cut into three when it is encoded again.
    assert found == {"plain words": True, "[UNK] [UNK]": False, "plain [UNK]": False, "[UNK]": False}
    assert count.inexact == 3


@pytest.mark.guard
def test_killed_and_resumed(config: Config, tmp_path: Path) -> None:
    source = config.data_dir / "web"
    options: dict[str, Any] = {"shard_bytes": 500, "workers": 1}
    whole = export_dataset(source, tmp_path / "whole", "jsonl", QUIET, **options)
    to = tmp_path / "killed"
    words = ["data", "export", source, "--to", to, "--max-shard", "500", "--workers", "1"]
    for _ in range(3):
        before = len(list(to.glob("documents-*")))
        process = subprocess.Popen(
            command(*words), start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        until(lambda: len(list(to.glob("documents-*"))) > before + 2, process, pause=0.001)  # noqa: B023
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    kept = {path.name: path.stat().st_mtime_ns for path in to.glob("documents-*")}
    assert len(kept) < len(whole)
    counts = export_dataset(source, to, "jsonl", QUIET, **options)
    assert counts == whole
    assert {path.name: path.read_bytes() for path in to.glob("documents-*")} == {
        path.name: path.read_bytes() for path in (tmp_path / "whole").glob("documents-*")
    }
    again = [name for name, time in kept.items() if (to / name).stat().st_mtime_ns != time]
    assert len(again) <= 3
