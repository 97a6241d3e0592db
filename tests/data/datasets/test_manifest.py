"""Datasets and their check: every kind of damage is found and named."""

import os
import re
import shutil
import struct
from pathlib import Path

import numpy as np
import orjson
import pytest
import xxhash

from pipeline.common.errors import UserError
from pipeline.common.hashing import keyed_order, put_sealed
from pipeline.data.datasets import dataset as dataset_module
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.indexed import IndexedWriter, numbered, part_files, part_prefix
from pipeline.data.datasets.manifest import PART, datasets_below, read_manifest, write_dataset
from pipeline.data.datasets.verify import verify
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.provenance.inspect import document_lengths, inspect
from pipeline.data.tokenization.tokenizer import Tokenizer
from tests.data.runs import make_config, write_jsonl


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    write_jsonl(root / "a.jsonl", 120)
    config = make_config(root, [{"name": "s", "type": "jsonl", "paths": [str(root / "a.jsonl")]}])
    preprocess(config)
    return config.data_dir / "s"


@pytest.fixture
def source(made, tmp_path):
    return shutil.copytree(made, tmp_path / "s")


def change(path, offset, data):
    raw = bytearray(path.read_bytes())
    offset %= len(raw)
    raw[offset : offset + len(data)] = data
    path.write_bytes(raw)


def recommit(folder, index):
    """Make hashes fit to what is there, so that only the content can tell."""
    table = np.fromfile(folder / "parts.bin", PART)
    for name, path in zip(("bin", "idx", "prov"), part_files(part_prefix(folder, index)), strict=True):
        table[index][name] = xxhash.xxh3_64_intdigest(path.read_bytes())
    (folder / "parts.bin").write_bytes(table.tobytes())
    manifest = orjson.loads((folder / "manifest.json").read_bytes())
    manifest["parts_hash"] = xxhash.xxh3_128_hexdigest(table.tobytes())
    put_sealed(folder / "manifest.json", manifest)


class TestVerify:
    def test_sound(self, source):
        assert verify(source).problems == verify(source / "train").problems == []
        units = len(list((source / "receipts").rglob("*.json")))
        assert str(verify(source / "train")) == f"1 dataset, {units} parts"
        assert str(verify(source)) == f"2 datasets, {2 * units} parts, 1 plan, {units} receipts"

    def test_plans_and_receipts(self, source):
        receipts = source / "receipts" / "00000"
        (receipts / "00000000.json").unlink()
        (receipts / "00000001.json").write_text("{")
        missing, garbled = verify(source).problems
        assert str(receipts / "00000000.json") in missing
        assert str(receipts / "00000001.json") in garbled
        (source / "plan.json").write_text("{}")
        (problem,) = verify(source).problems
        assert str(source / "plan.json") in problem
        assert verify(source / "train").problems == []

    @pytest.mark.parametrize("suffix", ["bin", "idx", "prov"])
    @pytest.mark.parametrize("how", ["bit", "cut", "missing"])
    def test_a_part(self, source, suffix, how):
        path = source / "train" / "parts" / "00000" / f"00000002.{suffix}"
        if how == "bit":
            change(path, -1, bytes([path.read_bytes()[-1] ^ 4]))
        elif how == "cut":
            os.truncate(path, path.stat().st_size - 1)
        else:
            path.unlink()
        problems = verify(source).problems
        assert problems
        assert all(str(path.with_suffix("")) in problem for problem in problems)
        assert str(path) in problems[0]

    @pytest.mark.parametrize(
        ("name", "said"),
        [("manifest.json", "manifest.json"), ("parts.bin", "parts.bin"), ("tokenizer.json", "tokenizer.json")],
    )
    @pytest.mark.parametrize("how", ["garbled", "missing"])
    def test_the_files_above(self, source, name, said, how):
        path = source / "train" / name
        if how == "garbled":
            path.write_bytes(b"\x00" + path.read_bytes()[1:])
        else:
            path.unlink()
        problems = verify(source).problems
        assert problems and all(str(source / "train") in problem and said in problem for problem in problems)

    def test_totals(self, source):
        path = source / "train" / "manifest.json"
        manifest = orjson.loads(path.read_bytes())
        manifest["tokens"] += 1
        put_sealed(path, manifest)
        (problem,) = verify(source / "train").problems
        assert f"{path}: {manifest['tokens']} tokens" in problem
        with pytest.raises(UserError, match="totals"):
            Dataset.open(source / "train")

    @pytest.mark.parametrize(
        ("suffix", "offset", "data", "said"),
        [
            ("bin", 0, b"\xff\xff", "outside of the vocabulary"),
            ("bin", 0, b"\x00\x00", "end-of-document"),
            ("bin", -2, b"\x05\x00", "end-of-document"),
            ("idx", 34, struct.pack("<i", 1), "do not agree"),
        ],
    )
    def test_content_that_was_wrong_when_it_was_hashed(self, source, suffix, offset, data, said):
        folder = source / "train"
        change(part_prefix(folder, 1).with_suffix(f".{suffix}"), offset, data)
        recommit(folder, 1)
        (problem,) = verify(folder).problems
        assert said in problem
        assert f"00000001.{suffix}" in problem

    def test_provenance_of_another_length(self, source):
        path = part_files(part_prefix(source / "train", 1))[2]
        path.write_bytes(path.read_bytes() + bytes(24))
        recommit(source / "train", 1)
        (problem,) = verify(source).problems
        assert f"{path}: " in problem

    def test_in_small_chunks(self, source, monkeypatch):
        import pipeline.data.datasets.verify as module

        monkeypatch.setattr(module, "CHUNK_BYTES", 8 * 5)
        assert verify(source).problems == []
        change(part_prefix(source / "train", 1).with_suffix(".bin"), -2, b"\x05\x00")
        recommit(source / "train", 1)
        (problem,) = verify(source).problems
        assert "end-of-document" in problem

    def test_before_the_stage_is_done(self, source):
        for split in ("heldout", "train"):
            (source / split / "manifest.json").unlink()
        assert [p.partition(" is not finished")[0] for p in verify(source).problems] == [
            f"{source}/train",
            f"{source}/heldout",
        ]
        assert verify(source.parent).problems == verify(source).problems

    def test_nothing_there(self, tmp_path):
        with pytest.raises(UserError, match=r"has no dataset"):
            verify(tmp_path)
        with pytest.raises(UserError, match=r"has no dataset"):
            verify(tmp_path / "none")


class TestOpen:
    def test_not_finished(self, source):
        (source / "train" / "manifest.json").unlink()
        with pytest.raises(UserError, match=r"train is not a finished dataset.*run `pipeline preprocess`"):
            Dataset.open(source / "train")

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"format_version": 9}, "format_version 9"),
            ({"tokens": "x"}, "tokens: "),
            ({"dtype": None}, "dtype: "),
            ({"dtype": "../x"}, "dtype: "),
            ({"format_version": 4, "features": ["weights", "masks"]}, "the dataset has 'masks', which this version"),
            ({"format_version": 4, "features": "weights"}, "features: "),
        ],
    )
    def test_manifest_of_another_kind(self, source, changes, said):
        path = source / "train" / "manifest.json"
        path.write_bytes(orjson.dumps(orjson.loads(path.read_bytes()) | changes))
        with pytest.raises(UserError, match=said) as error:
            read_manifest(source / "train")
        assert str(path) in str(error.value)

    def test_later_keys_are_passed_over(self, source):
        path = source / "train" / "manifest.json"
        before = read_manifest(source / "train")
        path.write_bytes(orjson.dumps(orjson.loads(path.read_bytes()) | {"later": 1}))
        assert read_manifest(source / "train") == before

    def test_a_part_that_is_another(self, source):
        folder = source / "train"
        for suffix in (".bin", ".idx"):
            shutil.copy(part_prefix(folder, 0).with_suffix(suffix), part_prefix(folder, 1).with_suffix(suffix))
        dataset = Dataset.open(folder)
        with pytest.raises(UserError, match=r"00000001\.idx has .* but parts\.bin says"):
            dataset.read(0, dataset.tokens)

    def test_fingerprint_is_of_the_content(self, source):
        folder = source / "train"
        before = Dataset.open(folder).fingerprint
        path = folder / "manifest.json"
        path.write_bytes(orjson.dumps(orjson.loads(path.read_bytes()) | {"config_hash": "x", "code_version": "9"}))
        assert Dataset.open(folder).fingerprint == before
        change(part_prefix(folder, 1).with_suffix(".bin"), 0, b"\x07\x00")
        recommit(folder, 1)
        assert Dataset.open(folder).fingerprint != before


def test_many_parts_are_opened_when_touched(source, tmp_path, monkeypatch):
    """2,300 parts in three folders; opening reads no part."""
    folder = tmp_path / "many"
    tokenizer = Tokenizer.open(source / "train")
    table = np.zeros(2300, PART)
    for index in range(2300):
        prefix = part_prefix(folder, index)
        prefix.parent.mkdir(parents=True, exist_ok=True)
        documents = index % 3
        if index in (0, 7, 2299) or index % 100 == 0:
            with IndexedWriter(prefix, tokenizer.dtype) as writer:
                for _ in range(documents):
                    writer.add_document(np.array([index % 200 + 5, 0]))
        table[index]["documents"], table[index]["tokens"], table[index]["unit"] = documents, 2 * documents, index
    about = {"source": "s", "split": "train", "text_bytes": 1, "config_hash": "", "code_version": "1"}
    write_dataset(folder, table, tokenizer, about)
    assert sorted(p.name for p in (folder / "parts").iterdir()) == ["00000", "00001", "00002"]
    opened = []
    real = dataset_module.IndexedPart
    monkeypatch.setattr(dataset_module, "IndexedPart", lambda prefix: opened.append(prefix) or real(prefix))
    dataset = Dataset.open(folder)
    assert opened == []
    assert dataset.documents == sum(i % 3 for i in range(2300))
    first_of_7 = sum(i % 3 for i in range(7))
    assert dataset.read(2 * first_of_7, 2).tolist() == [12, 0]
    assert dataset.document_at(2 * first_of_7 + 1) == first_of_7
    assert opened == [part_prefix(folder, 7)]
    assert dataset.read(dataset.tokens - 2, 2).tolist() == [2299 % 200 + 5, 0]
    assert dataset.document_start(dataset.documents) == dataset.tokens
    # A system allows a process 65,530 mappings unless somebody changes that; a part is two.
    assert dataset_module._mapped_part.cache_info().maxsize <= 65_530 // 4
    assert dataset_module._read_part.cache_info().maxsize <= 512


def test_numbers_are_a_thousand_a_folder(tmp_path):
    assert [str(numbered(tmp_path, i).relative_to(tmp_path)) for i in (0, 999, 1000, 123_456)] == [
        "00000/00000000",
        "00000/00000999",
        "00001/00001000",
        "00123/00123456",
    ]


@pytest.mark.parametrize("count", [0, 1, 2, 1000])
def test_keyed_order(count):
    orders = [keyed_order(count, key) for key in (1, 2, 2**64 - 1)]
    for order in orders:
        assert sorted(order.tolist()) == list(range(count))
    if count > 2:
        assert len({tuple(order.tolist()) for order in orders}) == 3


def splitmix64(x):
    """Steele, Lea, Flood 2014, figure 13, with Python's integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def test_keyed_order_is_the_sort_it_says(key=2**63 + 12345):
    expected = sorted(range(500), key=lambda i: splitmix64((i + key) % 2**64))
    assert keyed_order(500, key).tolist() == expected


def test_the_page_on_the_format_reads_a_dataset(made, monkeypatch, tmp_path, capsys):
    """Both programs of the page, run as they are."""
    page = (Path(__file__).parents[3] / "docs" / "data-format.md").read_text()
    monkeypatch.chdir(tmp_path)
    Path("runs/quickstart/data").mkdir(parents=True)
    Path("runs/quickstart/data/stdlib").symlink_to(made)
    with_numpy, with_us = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {}
    exec(compile(with_numpy, "page", "exec"), names)
    dataset = Dataset.open(made / "train")
    assert names["first"].tolist() == dataset.read(0, dataset.document_start(1)).tolist()
    exec(compile(with_us, "page", "exec"), {})
    assert str(dataset.provenance(0)) in capsys.readouterr().out


class TestInspect:
    def test_everything_is_shown(self, source, capsys):
        inspect(source, documents=2)
        shown = capsys.readouterr().out
        for split in ("train", "heldout"):
            manifest = read_manifest(source / split)
            assert str(source / split) in shown
            for value in (f"{manifest.documents:,}", f"{manifest.tokens:,}", manifest.tokenizer.fingerprint, "uint16"):
                assert value in shown
        assert shown.count("document 0:") == shown.count("document 1:") == 2
        assert "document 2:" not in shown
        assert "█" in shown
        assert "<|endoftext|>" in shown  # the name of the token; the documents are shown without it
        assert shown.count("<|endoftext|>") == 2

    def test_histogram_counts_every_document(self, source):
        dataset = Dataset.open(source / "train")
        starts = [dataset.document_start(d) for d in range(dataset.documents + 1)]
        assert document_lengths(dataset, 10**6).tolist() == np.diff(starts).tolist()
        assert len(document_lengths(dataset, 10)) == 10

    def test_control_characters_do_not_reach_the_terminal(self, tmp_path, capsys):
        (tmp_path / "a.txt").write_text("red \x1b[31m bell \x07 [bold]markup[/bold] end")
        config = make_config(tmp_path, [{"name": "s", "paths": [f"{tmp_path}/a.txt"]}], heldout=0)
        preprocess(config)
        capsys.readouterr()
        inspect(config.data_dir)
        shown = capsys.readouterr().out
        assert r"red \x1b[31m bell \x07 [bold]markup[/bold] end" in shown
        assert "\x1b" not in shown
        assert len(datasets_below(config.data_dir)) == 2  # the empty one is shown as well
