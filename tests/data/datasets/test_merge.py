"""`pipeline data merge` against Megatron's own reader and the dataset itself."""

import os
import subprocess
import sys

import numpy as np
import pytest
from rich.console import Console

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.config.tokenizer import TokenizerConfig
from pipeline.data.datasets import merge as module
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.indexed import PROVENANCE, HashedFile, IndexedPart, IndexedWriter, part_files, part_prefix
from pipeline.data.datasets.manifest import PART, write_dataset
from pipeline.data.datasets.merge import merge
from pipeline.data.tokenization.tokenizer import Tokenizer
from tests.data.datasets import megatron


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(iter(["a b c"]), TokenizerConfig.model_validate({"train": {"vocab_size": 300}}))


@pytest.fixture(scope="module")
def theirs():
    return megatron.indexed_dataset()


def write(folder, parts, tokenizer, dtype="<u2"):
    """A dataset; `parts`: lists of documents, a document a list of sequences."""
    table = np.zeros(len(parts), PART)
    for number, documents in enumerate(parts):
        # Units and links in some order that is not that of their names.
        unit, link = (len(parts) - number) * 700, number % 3
        prefix = part_prefix(folder, unit, link)
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with IndexedWriter(prefix, dtype) as writer, HashedFile(part_files(prefix)[2]) as provenance:
            for sequences in documents:
                lengths = [len(ids) for ids in sequences]
                writer.add_document(np.concatenate(sequences).astype(dtype), lengths if len(lengths) > 1 else ())
            provenance.write(np.zeros(len(documents), PROVENANCE).tobytes())
            provenance.commit()
        tokens = sum(len(ids) for sequences in documents for ids in sequences)
        hashes = writer.bin.hash, writer.idx.hash, provenance.hash, 0
        table[number] = (tokens, len(documents), unit, link, *hashes)
    about = {"source": "s", "split": "train", "text_bytes": 1, "config_hash": "h", "code_version": "2"}
    folder.mkdir(parents=True, exist_ok=True)
    write_dataset(folder, table, tokenizer, about | {"dtype": np.dtype(dtype).name})
    return folder


def documents(count, seed=0, several=False, longest=20):
    chance = np.random.default_rng(seed)
    sequences = chance.choice([1, 1, 1, 4], count) if several else np.ones(count, int)
    return [[chance.integers(1, 290, chance.integers(1, longest)) for _ in range(n)] for n in sequences.tolist()]


@pytest.mark.parametrize("dtype", ["<u2", "<i4"])
@pytest.mark.parametrize("several", [False, True])
def test_equals_the_dataset_for_megatron(theirs, tokenizer, tmp_path, dtype, several):
    parts = [[], documents(50, 1, several), [], documents(1, 2, several), documents(300, 3, several), []]
    folder = write(tmp_path / "d", parts, tokenizer, dtype)
    report = merge(folder, tmp_path / "out" / "all")
    dataset = Dataset.open(folder)
    opened = theirs.IndexedDataset(str(tmp_path / "out" / "all"))
    sequences = [ids for part in parts for document in part for ids in document]
    assert opened.index.dtype == np.dtype(dtype)
    assert opened.sequence_lengths.tolist() == [len(ids) for ids in sequences]
    for got, ids in zip(opened[:], sequences, strict=True):
        assert np.array_equal(got, ids)
    counts = [len(document) for part in parts for document in part]
    assert opened.document_indices.tolist() == np.cumsum([0, *counts]).tolist()
    assert np.array_equal(np.concatenate(opened[:]), dataset.read(0, dataset.tokens))
    part = IndexedPart(tmp_path / "out" / "all")
    for document in range(dataset.documents + 1):
        assert part.document_start(document) == dataset.document_start(document)
    assert (report.documents, report.tokens, report.sequences) == (dataset.documents, dataset.tokens, len(sequences))
    assert report.bytes == sum(path.stat().st_size for path in (report.bin, report.idx))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["all.bin", "all.idx"]


def test_the_same_bytes_as_one_part(tokenizer, tmp_path, monkeypatch):
    """As the writer of parts would write all of it, with blocks that cut parts in the middle."""
    monkeypatch.setattr(module, "BLOCK_BYTES", 64)
    parts = [documents(n, n, several=True) for n in (40, 1, 33)]
    merge(write(tmp_path / "d", parts, tokenizer), tmp_path / "all.idx")
    with IndexedWriter(tmp_path / "one", "<u2") as writer:
        for sequences in sum(parts, []):  # noqa: RUF017
            lengths = [len(ids) for ids in sequences]
            writer.add_document(np.concatenate(sequences).astype("<u2"), lengths if len(lengths) > 1 else ())
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"all{suffix}").read_bytes() == (tmp_path / f"one{suffix}").read_bytes()


def test_nothing_in_it(theirs, tokenizer, tmp_path):
    for number, parts in enumerate(([], [[]])):
        report = merge(write(tmp_path / f"d{number}", parts, tokenizer), tmp_path / f"p{number}")
        assert (report.documents, report.sequences, report.tokens) == (0, 0, 0)
        assert IndexedPart(tmp_path / f"p{number}").documents == 0


def test_memory_does_not_depend_on_the_number_of_documents(tokenizer, tmp_path):
    peaks = []
    for count in (1_000, 700_000):
        with IndexedWriter(part := part_prefix(_made(tmp_path / str(count)), 0), "<u2") as writer:
            writer.add_documents(b"\1\0" * 20 * count, np.full(count, 20))
        files = part_files(part)
        files[2].write_bytes(bytes(24 * count))
        table = np.zeros(1, PART)
        table[0] = (20 * count, count, 0, 0, writer.bin.hash, writer.idx.hash, 0, 0)
        about = {"source": "s", "split": "train", "text_bytes": 1, "config_hash": "h", "code_version": "2"}
        write_dataset(tmp_path / str(count), table, tokenizer, about)
        code = (
            "import sys; from pathlib import Path; from pipeline.data.datasets.merge import merge\n"
            "r = merge(Path(sys.argv[1]), Path(sys.argv[2])); print(r.documents)\n"
            "print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])"
        )
        command = [sys.executable, "-c", code, str(tmp_path / str(count)), str(tmp_path / f"out{count}")]
        done, peak = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        assert int(done) == count
        peaks.append(int(peak))
    # The larger one has 28 MB of tokens and 14 MB of index.
    assert peaks[1] - peaks[0] < 16_000
    opened = IndexedPart(tmp_path / "out700000")
    assert opened.document_start(654_321) == 20 * 654_321


def _made(folder):
    (folder / "parts" / "00000").mkdir(parents=True)
    return folder


class TestRefused:
    @pytest.fixture
    def folder(self, tokenizer, tmp_path):
        return write(tmp_path / "d", [documents(9, 1), documents(9, 2)], tokenizer)

    def refused(self, tmp_path, said, folder, **options):
        before = sorted(os.listdir(tmp_path))
        with pytest.raises(UserError, match=said):
            merge(folder, tmp_path / "p", **options)
        assert sorted(os.listdir(tmp_path)) == before

    @pytest.mark.parametrize("suffix", ["bin", "idx"])
    @pytest.mark.parametrize(("how", "said"), [("bit", "other xxh3"), ("cut", "do not"), ("gone", "is missing")])
    def test_damage(self, folder, tmp_path, suffix, how, said):
        path = part_prefix(folder, 700, 1).with_suffix(f".{suffix}")
        data = bytearray(path.read_bytes())
        data[-3] ^= 4
        path.write_bytes(data if how == "bit" else data[:-1])
        if how == "gone":
            path.unlink()
        self.refused(tmp_path, f"{path.name}.*{said}|{said}.*{path.name}", folder)

    def test_header(self, folder, tmp_path):
        path = part_prefix(folder, 700, 1).with_suffix(".idx")
        data = bytearray(path.read_bytes())
        data[17] = 4
        path.write_bytes(data)
        self.refused(tmp_path, "header", folder)

    @pytest.mark.parametrize("suffix", ["bin", "idx"])
    def test_nothing_is_replaced_without_force(self, folder, tmp_path, suffix):
        (tmp_path / f"p.{suffix}").write_bytes(b"old")
        self.refused(tmp_path, rf"p\.{suffix} exist already.*--force", folder)
        assert (tmp_path / f"p.{suffix}").read_bytes() == b"old"
        merge(folder, tmp_path / "p", force=True)
        assert IndexedPart(tmp_path / "p").documents == 18

    def test_paths(self, folder, tmp_path, tokenizer):
        (tmp_path / "p").mkdir()
        self.refused(tmp_path, "is a folder", folder)
        (tmp_path / "p").rmdir()
        self.refused(tmp_path, "has no dataset", tmp_path / "nowhere")
        write(tmp_path / "s" / "train", [], tokenizer)
        write(tmp_path / "s" / "heldout", [], tokenizer)
        self.refused(tmp_path, "2 datasets; name one of them: .*train, .*heldout", tmp_path / "s")

    def test_a_disk_that_is_too_full(self, folder, tmp_path, monkeypatch):
        usage = module.shutil.disk_usage(tmp_path)._replace(free=100)
        monkeypatch.setattr(module.shutil, "disk_usage", lambda _: usage)
        self.refused(tmp_path, "100 are free", folder)

    def test_a_disk_that_gets_full(self, folder, tmp_path):
        """A file cannot grow over the limit: what was written goes away again."""
        code = (
            "import resource, signal, sys; from pathlib import Path; from pipeline.data.datasets.merge import merge\n"
            "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
            "merge(Path(sys.argv[1]), Path(sys.argv[2]))"
        )
        (tmp_path / "out").mkdir()
        run = subprocess.run(
            [sys.executable, "-c", code, str(folder), str(tmp_path / "out" / "p")], capture_output=True, text=True
        )
        assert "OSError: [Errno 27]" in run.stderr
        assert any(str(tmp_path / "out" / name) in run.stderr for name in ("p.bin", "p.idx"))
        assert os.listdir(tmp_path / "out") == []


def test_what_a_killed_merge_left_is_removed(tokenizer, tmp_path, monkeypatch):
    folder = write(tmp_path / "d", [documents(9)], tokenizer)
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    monkeypatch.setattr(storage.os, "getpid", lambda: process.pid)
    (tmp_path / "out").mkdir()
    storage.temporary(tmp_path / "out" / "p.bin").write_bytes(b"x")
    monkeypatch.undo()
    other = tmp_path / "out" / ".q.bin.tmp"
    other.write_bytes(b"")
    merge(folder, tmp_path / "out" / "p.bin", console=Console(quiet=True))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".q.bin.tmp", "p.bin", "p.idx"]
