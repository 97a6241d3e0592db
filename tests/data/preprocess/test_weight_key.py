"""Loss weights of documents, from the records of a source to what a loader reads of the dataset."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from rich.console import Console

from pipeline.common.errors import UserError
from pipeline.common.hashing import put_sealed
from pipeline.config.load import load
from pipeline.data.curate.results.export import export
from pipeline.data.curate.stage import curate
from pipeline.data.datasets.adopt import adopt
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.manifest import PART, read_parts
from pipeline.data.datasets.merge import merge
from pipeline.data.datasets.open import open_datasets
from pipeline.data.datasets.validate import check_datasets
from pipeline.data.datasets.verify import verify
from pipeline.data.global_shuffle.external_sort import Shuffle
from pipeline.data.loading.loader import open_loader
from pipeline.data.loading.local_copy import copy_locally
from pipeline.data.order.phases import plan_journal
from pipeline.data.plan.build import make_data_plan
from pipeline.data.preprocess.run_file_check import check_run_file
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.provenance.export_dataset import export_dataset
from pipeline.data.provenance.run import open_view
from pipeline.data.provenance.step_to_documents import where
from pipeline.data.tokenization.tokenizer import Tokenizer
from tests import tiny

BAD = [None, -1, 0, 1e-9, 1e9, "2", True, [1]]


def test_the_tokenizer_has_no_text_without_weights(tmp_path: Path) -> None:
    """The message says why the records were rejected."""
    (tmp_path / "a.jsonl").write_text('{"text": "some words"}\n' * 3)
    source = {"name": "a", "type": "jsonl", "paths": [str(tmp_path / "a.jsonl")], "weight_key": "quality"}
    with pytest.raises(UserError, match=r"rejected: bad loss weight: 3\)"):
        preprocess(load(tiny.write_run(tmp_path, {"data.sources": [source]})))


def weight_of(text: str) -> float:
    """A weight that follows from the text."""
    return 0.25 + len(text) % 7


def write(root: Path, kind: str = "jsonl", **changes: Any) -> Path:
    """A run file of a source with weights, and of one without."""
    tiny.write_run(root)
    texts = [path.read_text() for path in sorted((root / "sea").glob("*.txt"))]
    records = [{"text": text, "id": f"n{at}", "quality": weight_of(text)} for at, text in enumerate(texts)]
    if kind == "jsonl":
        records += [{"text": "bad", "quality": value} for value in BAD] + [{"text": "no key"}]
        records.append({"text": "a longer text", "quality": "", "id": "last"} | {"quality": weight_of("a longer text")})
        (root / "sea.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    elif kind == "csv":
        with (root / "sea.csv").open("w", newline="") as file:
            written = csv.DictWriter(file, ["text", "id", "quality"])
            written.writeheader()
            written.writerows([*records[:-1], {**records[-1], "quality": "high"}])
    else:
        column = pa.array([record["quality"] for record in records[:-1]] + [None], pa.float64())
        names = {name: [record[name] for record in records] for name in ("text", "id")}
        parquet.write_table(pa.table({**names, "quality": column}), root / "sea.parquet")
    sources = [
        {"name": "sea", "type": kind, "paths": [str(root / f"sea.{kind}")], "weight_key": "quality"},
        {"name": "land", "paths": [str(root / "land" / "*.txt")]},
    ]
    return tiny.write_run(root, {"data.sources": sources, "data.preprocess.max_error_rate": 0.5, **changes})


def check_weights(folder: Path) -> int:
    """Every document has the weight of its text; their number."""
    dataset, tokenizer = Dataset.open(folder), Tokenizer.open(folder)
    assert dataset.manifest.has_weights
    texts = []
    for document in range(dataset.documents):
        start, end = dataset.document_start(document), dataset.document_start(document + 1)
        texts.append(tokenizer.decode(dataset.read(start, end - start - 1)))
        assert dataset.weight(document) == np.float32(weight_of(texts[-1]))
    pieces = dataset.pieces(np.array([0]), np.array([dataset.tokens]))
    out = np.empty(dataset.tokens, np.float32)
    for column, part, start, length in zip(*(each.tolist() for each in pieces[1:]), strict=True):
        dataset.fill_weights(part, start, out[column : column + length])
        if length > 9:  # from inside of a document to the inside of another one
            again = np.empty(length - 9, np.float32)
            dataset.fill_weights(part, start + 4, again)
            assert np.array_equal(again, out[column + 4 : column + length - 5])
    sizes = [dataset.document_start(d + 1) - dataset.document_start(d) for d in range(dataset.documents)]
    assert np.array_equal(out, np.repeat([np.float32(weight_of(text)) for text in texts], sizes))
    return dataset.documents


@pytest.mark.guard
@pytest.mark.parametrize("shuffle", ["unit", "global"])
def test_documents_keep_their_weights(tmp_path: Path, shuffle: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shuffle.__init__, "__defaults__", (9000,))  # several buckets
    file = write(tmp_path, **{"data.preprocess.shuffle": shuffle, "data.preprocess.unit_bytes": 3000})
    preprocess(load(file))
    sea = tmp_path / "data" / "sea"
    assert check_weights(sea / "train") + check_weights(sea / "heldout") == 61
    assert Dataset.open(sea / "train").manifest.parts > 2
    export_dataset(sea, tmp_path / "texts", "parquet", Console(quiet=True), workers=1)
    (table,) = (tmp_path / "texts").glob("*.parquet")
    exported = parquet.read_table(table).select(["text", "weight"]).to_pylist()
    assert len(exported) == Dataset.open(sea / "train").documents
    assert all(row["weight"] == weight_of(row["text"]) for row in exported)
    rejected = [json.loads(line) for line in (sea / "rejected.jsonl").read_text().splitlines()]
    assert [row["reason"] for row in rejected] == ["bad loss weight"] * (len(BAD) + 1)
    assert "'quality' is missing" in rejected[-1]["detail"]
    path = sea / "train" / "manifest.json"
    listed = json.loads(path.read_text()) | {"format_version": 4, "features": ["weights"]}
    listed.pop("seal")
    weights = [Dataset.open(sea / "train").weight(number) for number in range(3)]
    put_sealed(path, listed)
    assert [Dataset.open(sea / "train").weight(number) for number in range(3)] == weights
    land = tmp_path / "data" / "land" / "train"
    manifest = json.loads((land / "manifest.json").read_text())
    assert manifest["format_version"] == 2 and "weight_key" not in manifest["settings"]
    assert len((land / "parts.bin").read_bytes()) == manifest["parts"] * PART.itemsize
    assert not list(land.rglob("*.weight")) and not verify(tmp_path / "data").problems


@pytest.mark.guard
@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_a_column_of_a_table(tmp_path: Path, kind: str) -> None:
    preprocess(load(write(tmp_path, kind)))
    sea = tmp_path / "data" / "sea"
    assert check_weights(sea / "train") + check_weights(sea / "heldout") == 59  # of 60 one is bad
    missing = load(tmp_path / "run.yaml", ["data.sources.0.weight_key=other", f"data.dir={tmp_path / 'else'}"])
    with pytest.raises(UserError, match="no column 'other'.*set weight_key"):
        preprocess(missing)


@pytest.mark.guard
def test_damage_of_weights_is_seen(tmp_path: Path) -> None:
    preprocess(load(write(tmp_path)))
    folder = tmp_path / "data" / "sea" / "train"
    (path,) = folder.rglob("*.weight")
    good = path.read_bytes()
    for bad, words in ((b"\0" * len(good), "is not a loss weight"), (good[:-4], "; expected:"), (None, "No such file")):
        path.write_bytes(bad) if bad is not None else path.unlink()
        problems = verify(folder).problems
        assert any(words in problem and ".weight" in problem for problem in problems), problems
        if bad is None or len(bad) < len(good):
            with pytest.raises(UserError, match=r"\.weight (is missing|has)"):
                check_datasets({"sea": Dataset.open(folder)})
    preprocess(load(tmp_path / "run.yaml"))  # which makes what is missing
    assert path.read_bytes() == good


@pytest.mark.guard
def test_merged_adopted_and_copied(tmp_path: Path) -> None:
    preprocess(load(write(tmp_path, **{"data.preprocess.unit_bytes": 3000})))
    origin = tmp_path / "data" / "sea" / "train"
    merge(origin, tmp_path / "merged")
    adopt([tmp_path / "merged"], tmp_path / "adopted", tokenizer=origin / "tokenizer.json")
    adopted = tmp_path / "adopted" / "train"
    assert check_weights(adopted) == Dataset.open(origin).documents
    assert not verify(adopted).problems and read_parts(adopted, Dataset.open(adopted).manifest)["weight"].all()
    shutil.copytree(tmp_path / "data" / "sea" / "heldout", tmp_path / "adopted" / "heldout")

    changes = ["data.sources.0={name: sea, dataset: %s, weight_key: weight}" % (tmp_path / "adopted")]
    config = load(tmp_path / "run.yaml", [*changes, "stage.data=local", f"stage.dir={tmp_path / 'node'}"])
    datasets = open_datasets(config, "train")
    check_run_file(config, datasets)
    journal = plan_journal(config, datasets)
    assert journal.segments[0].sources["sea"].document_weights
    copies = copy_locally(config, datasets, journal)
    assert copies["sea"].folder.is_relative_to(tmp_path / "node")
    one, two = (open_loader(config, each).batches(0) for each in (datasets, copies))
    assert one.total_weight == two.total_weight
    assert one.total_weight != one.valid_targets and list((tmp_path / "node").rglob("*.weight"))

    other = load(tmp_path / "run.yaml", [changes[0].replace("weight_key: weight", "weight_key: quality")])
    with pytest.raises(UserError, match="weight_key 'quality', but .* has those of 'weight'"):
        check_run_file(other, datasets)
    without = load(tmp_path / "run.yaml", [changes[0].replace(", weight_key: weight", "")])
    check_run_file(without, datasets)
    assert any("weight_key: weight" in line for line in make_data_plan(without).warnings)
    (tmp_path / "merged.weight").write_bytes(b"\0" * 4)
    with pytest.raises(UserError, match="merged.weight: 4 bytes for"):
        adopt([tmp_path / "merged"], tmp_path / "again", tokenizer=origin / "tokenizer.json")


@pytest.mark.guard
def test_weights_are_shown(tmp_path: Path) -> None:
    config = load(write(tmp_path, **{"blend.phases": [{"until": "2 steps"}, {"loss_weights": {"sea": 2}}]}))
    preprocess(config)
    rows = {row.source: row for row in make_data_plan(config).sources}
    assert list(rows["sea"].loss_weights.values()) == [1, 2] and rows["sea"].document_weights
    assert list(rows["land"].loss_weights.values()) == [1, 1] and not rows["land"].document_weights
    run, datasets = open_view(tmp_path / "run.yaml"), open_datasets(config, "train")
    shown = 0
    for step, factor in ((2, 1), (3, 2)):
        for sample in where(run, step, say=lambda line: None).json["samples"]:
            for document in sample["documents"]:
                weight = factor * datasets["sea"].weight(document["document"]) if sample["source"] == "sea" else 1
                assert document["loss_weight"] == weight
                shown += weight != 1
    assert shown


@pytest.mark.guard
def test_curated_documents_keep_theirs(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        **{
            "data.curate": {
                "mode": "apply",
                "rules": {"gopher_quality": {"min_words": 60, "min_stop_words": None}},
                "clean": {"pii": {"email": "mask"}},
            }
        },
    )
    texts = [path.read_text() for path in sorted((tmp_path / "sea").glob("*.txt"))]
    records = [
        {"text": f"{text} to a{at % 3}@example.org", "n": at, "quality": 0.5 + at} for at, text in enumerate(texts)
    ]
    (tmp_path / "sea.jsonl").write_text("".join(json.dumps(each) + "\n" for each in [*records, {"text": "none"}]))
    config = load(file, ["data.sources.0.metadata=[n]", "data.preprocess.unit_bytes=3000"])
    curate(config)
    preprocess(config)
    found = [Dataset.open(tmp_path / "data" / "sea" / split) for split in ("train", "heldout")]
    kept = [(each.metadata(d)["n"], each.weight(d)) for each in found for d in range(each.documents)]
    assert 10 < len(kept) < 60 and all(weight == 0.5 + number for number, weight in kept)
    export(config, tmp_path / "exported", "jsonl", Console(file=io.StringIO()))
    lines = [line for path in (tmp_path / "exported").rglob("*.jsonl") for line in path.read_text().splitlines()]
    exported = [(each["n"], each["quality"]) for each in map(json.loads, lines) if "quality" in each]
    assert sorted(exported) == sorted(kept)


def test_a_text_file_has_no_key(tmp_path: Path) -> None:
    sources = [{"name": "sea", "paths": [str(tmp_path / "sea" / "*.txt")], "weight_key": "quality"}]
    with pytest.raises(UserError, match="weight_key needs records with keys"):
        load(tiny.write_run(tmp_path, {"data.sources": sources}))
