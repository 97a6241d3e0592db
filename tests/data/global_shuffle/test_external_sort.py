"""The global shuffle against a sort of everything in memory."""

import os
import pickle
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import orjson
import pytest
import xxhash

from pipeline.common.errors import UserError
from pipeline.common.hashing import mix
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.document_records import MetadataWriter, read_metadata
from pipeline.data.datasets.indexed import (
    PROVENANCE,
    HashedFile,
    IndexedPart,
    IndexedWriter,
    part_files,
    part_prefix,
)
from pipeline.data.datasets.manifest import PART, write_dataset
from pipeline.data.global_shuffle.bucket import _first_at_least
from pipeline.data.global_shuffle.external_sort import Shuffle, SortedRun
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.data.work.job import make_worker
from pipeline.data.work.worker_pool import Done, Workers
from tests.data.reference import mix_one
from tests.data.runs import tree

KEYS = [2**63 + 11, 5, 77, 10**18]


def write_run(dataset, unit, link, key, rows, dtype="<u2", metadata=False, seed=0, longest=40):
    """A run as the first pass writes it; also its documents as (z, unit, row, sequences, id hash, object)."""
    chance = np.random.default_rng([unit, link, seed])
    documents = []
    for row in rows:
        lengths = chance.integers(1, longest + 1, chance.choice([1, 1, 1, 3]))
        sequences = [chance.integers(0, 60_000, n).astype(dtype).tolist() for n in lengths]
        object_ = orjson.dumps({"r": row, "pad": "x" * int(chance.integers(0, 30))}) if metadata else b""
        documents.append((mix_one(row, key), unit, row, sequences, int(chance.integers(0, 2**63)), object_))
    documents.sort()
    prefix = part_prefix(dataset / "unshuffled", unit, link)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    records = np.array([(d[1], int(len(d[3]) > 1), d[2], d[4]) for d in documents], PROVENANCE)
    with IndexedWriter(prefix, dtype) as writer, HashedFile(part_files(prefix)[2]) as provenance:
        for document in documents:
            lengths = [len(ids) for ids in document[3]]
            writer.add_document(np.concatenate(document[3]).astype(dtype), lengths if len(lengths) > 1 else ())
        provenance.write(records.tobytes())
        provenance.commit()
    files = {"bin": writer.bin, "idx": writer.idx, "prov": provenance}
    if metadata:
        sizes = np.array([len(d[5]) for d in documents], np.int64)
        meta = MetadataWriter(prefix, sizes)
        with meta.file:
            meta.write(b"".join(d[5] for d in documents))
            meta.file.commit()
        files["meta"] = meta.file
    tokens = sum(len(ids) for d in documents for ids in d[3])
    receipt = {
        "unit": unit,
        "link": link,
        "splits": {
            "train": {
                "documents": len(documents),
                "tokens": tokens,
                "files": {name: {"size": f.size, "xxh3": f"{f.hash:016x}"} for name, f in files.items()},
            }
        },
    }
    return SortedRun.of(receipt, "train", key), documents


def make(folder, metadata=False, dtype="<u2", keys=KEYS, size=120, bucket_bytes=20_000):
    """Units with several links, one of them empty and one document alone."""
    shapes = [(0, 0, range(size)), (0, 1, range(size, 2 * size)), (1, 0, range(0)), (2, 0, range(3, size, 2))]
    shapes += [(3, 0, range(1)), (3, 2, range(50, 50 + size)), (1203, 0, range(size))]
    runs, documents = [], []
    for unit, link, rows in shapes:
        run, more = write_run(folder / "train", unit, link, keys[unit % 4], rows, dtype, metadata)
        runs.append(run)
        documents += more
    shuffle = Shuffle(folder, "train", runs[::-1], dtype, "hash", bucket_bytes)
    return shuffle, sorted(documents, key=lambda d: d[:3])


def silent(amount):
    assert amount >= 0


def fill(shuffle):
    for job in shuffle.jobs():
        pickle.loads(pickle.dumps(job)).make(None, silent)


def read_back(shuffle, metadata=False):
    """(unit, row, sequences, id hash, object) of every document of the parts in their order."""
    found = []
    for bucket in range(shuffle.buckets):
        prefix = part_prefix(shuffle.dataset, bucket)
        part = IndexedPart(prefix)
        ids, records = part.read(0, part.tokens).tolist(), np.fromfile(part_files(prefix)[2], PROVENANCE)
        assert len(records) == part.documents
        at = 0
        for document in range(part.documents):
            sequences = []
            for sequence in range(int(part.bounds[document]), int(part.bounds[document + 1])):
                assert part.pointers[sequence] == at * part.dtype.itemsize
                sequences.append(ids[at : at + int(part.lengths[sequence])])
                at += int(part.lengths[sequence])
            object_ = orjson.dumps(read_metadata(prefix, document, part.documents)) if metadata else b""
            record = records[document]
            assert record["flags"] == (len(sequences) > 1)
            found.append((int(record["unit"]), int(record["row"]), sequences, int(record["id_hash"]), object_))
    return found


class TestOrder:
    @pytest.mark.first(3)
    @pytest.mark.parametrize("metadata", [False, True])
    @pytest.mark.parametrize("dtype", ["<u2", "<i4"])
    @pytest.mark.parametrize("bucket_bytes", [10_000, 10**9])
    def test_equals_a_sort_of_everything(self, tmp_path, metadata, dtype, bucket_bytes):
        shuffle, documents = make(tmp_path, metadata, dtype, bucket_bytes=bucket_bytes)
        assert (shuffle.buckets > 5) == (bucket_bytes == 10_000)
        fill(shuffle)
        assert read_back(shuffle, metadata) == [document[1:] for document in documents]

    def test_ties_are_in_the_order_of_units(self, tmp_path):
        shuffle, documents = make(tmp_path, keys=[9, 9, 9, 9])
        assert len({d[0] for d in documents}) < len(documents)
        fill(shuffle)
        assert read_back(shuffle) == [document[1:] for document in documents]

    def test_the_cut_into_parts_does_not_matter(self, tmp_path):
        small, documents = make(tmp_path / "small", bucket_bytes=3000)
        large, _ = make(tmp_path / "large", bucket_bytes=50_000)
        assert small.buckets > large.buckets > 1
        fill(small)
        fill(large)
        assert read_back(small) == read_back(large)
        sizes = small.table()["documents"]
        assert sizes.sum() == len(documents)
        assert sizes.max() < 4 * sizes.mean()

    def test_nothing_at_all(self, tmp_path):
        (tmp_path / "train").mkdir()
        for runs in ([], [write_run(tmp_path / "train", 0, 0, 1, range(0))[0]]):
            shuffle = Shuffle(tmp_path, "train", runs, "<u2", f"hash{len(runs)}")
            fill(shuffle)
            assert shuffle.table().tolist() == shuffle.table()[:1].tolist()
            assert IndexedPart(part_prefix(shuffle.dataset, 0)).documents == 0

    @pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 100_000])
    def test_the_search_equals_a_scan(self, count):
        numbers = np.sort(mix(np.arange(count, dtype=np.uint64), 3))
        if count > 300:
            numbers[40_000:70_000] = numbers[40_000]
        chance = np.random.default_rng(0)
        reads = []

        def read(start, stop):
            assert 0 <= start <= stop <= count
            assert stop - start <= 256
            reads.append(start)
            return numbers[start:stop]

        bounds = chance.integers(0, 2**64, 200, dtype=np.uint64).tolist() + numbers[::500].tolist() + [0, 2**64 - 1]
        for bound in bounds:
            low = int(np.searchsorted(numbers, np.uint64(bound // 2)))
            for start, below in ((0, 0), (low, bound // 2)):
                assert _first_at_least(read, bound, start, count, below) == np.searchsorted(numbers, np.uint64(bound))
        assert len(reads) < 2 * len(bounds) * 8


class TestDataset:
    def test_is_one(self, tmp_path):
        """What comes out opens as a dataset."""
        shuffle, documents = make(tmp_path, metadata=True)
        fill(shuffle)
        tokenizer = Tokenizer.train(iter(["a b c"]), _tokenizer_config())
        about = {"source": "s", "split": "train", "text_bytes": 1, "config_hash": "h", "code_version": "2"}
        write_dataset(shuffle.dataset, shuffle.table(), tokenizer, about)
        dataset = Dataset.open(shuffle.dataset)
        assert dataset.read(0, dataset.tokens).tolist() == [t for d in documents for ids in d[3] for t in ids]
        for number in (0, 17, len(documents) - 1):
            unit, row, _, id_hash = dataset.provenance(number)
            assert (unit, row, id_hash) == (*documents[number][1:3], documents[number][4])
            assert orjson.dumps(dataset.metadata(number)) == documents[number][5]

    def test_table(self, tmp_path):
        shuffle, _ = make(tmp_path)
        with pytest.raises(UserError, match="not complete"):
            shuffle.table()
        fill(shuffle)
        table = shuffle.table()
        assert table.dtype == PART
        assert table["unit"].tolist() == list(range(shuffle.buckets))
        assert not table["link"].any()
        assert not table["meta"].any()
        for record in table:
            for name, path in zip(
                ("bin", "idx", "prov"), part_files(part_prefix(shuffle.dataset, record["unit"])), strict=True
            ):
                assert int(record[name]) == xxhash.xxh3_64_intdigest(path.read_bytes())


def _tokenizer_config():
    from pipeline.config.tokenizer import TokenizerConfig

    return TokenizerConfig.model_validate({"train": {"vocab_size": 300}})


class TestAgain:
    def test_only_what_is_missing_is_made_and_gives_the_same_bytes(self, tmp_path):
        shuffle, _ = make(tmp_path)
        fill(shuffle)
        assert shuffle.finished()
        assert shuffle.jobs() == []
        before = tree(tmp_path)
        prefix = part_prefix(shuffle.dataset, 2)
        part_files(prefix)[0].unlink()
        part_files(part_prefix(shuffle.dataset, 4))[2].write_bytes(b"cut")
        (tmp_path / "receipts/shuffle/train/00000/00000001.json").write_text("{")
        assert [job.bucket for job in shuffle.jobs()] == [1, 2, 4]
        assert not shuffle.finished()
        fill(shuffle)
        assert tree(tmp_path) == before

    def test_other_runs_are_another_shuffle(self, tmp_path):
        shuffle, _ = make(tmp_path)
        fill(shuffle)
        changed, _ = write_run(shuffle.dataset, 2, 0, KEYS[2], range(3, 120, 2), seed=1)
        others = [changed if run.unit == 2 else run for run in shuffle.runs]
        for other in (
            Shuffle(tmp_path, "train", others, "<u2", "hash", 20_000),
            Shuffle(tmp_path, "train", shuffle.runs, "<u2", "other", 20_000),
        ):
            assert not other.finished()
            assert len(Shuffle(tmp_path, "train", others, "<u2", "hash", 20_000).jobs()) == other.buckets

    def test_the_runs_go_when_nobody_needs_them(self, tmp_path):
        shuffle, documents = make(tmp_path)
        with pytest.raises(UserError, match="not finished"):
            shuffle.remove_unshuffled()
        fill(shuffle)
        shuffle.remove_unshuffled()
        shuffle.remove_unshuffled()
        assert not (shuffle.dataset / "unshuffled").exists()
        assert shuffle.finished()
        assert shuffle.jobs() == []
        assert read_back(shuffle) == [document[1:] for document in documents]
        part_files(part_prefix(shuffle.dataset, 0))[0].unlink()
        with pytest.raises(UserError, match="missing or truncated"):
            shuffle.jobs()

    @pytest.mark.guard
    def test_killed_anywhere(self, tmp_path):
        shuffle, _ = make(tmp_path / "whole", size=600, bucket_bytes=6000)
        shutil.copytree(tmp_path / "whole", tmp_path / "killed")
        fill(shuffle)
        killed = Shuffle(tmp_path / "killed", "train", shuffle.runs, "<u2", "hash", 6000)
        code = (
            "import sys, pickle\n"
            "for job in pickle.load(sys.stdin.buffer):\n"
            "    job.make(None, lambda _: None)\n    print(job.bucket, flush=True)"
        )
        chance = np.random.default_rng(int.from_bytes(os.urandom(4)))
        for _ in range(3):
            if not (jobs := killed.jobs()):
                break  # a fast machine makes all of them before it is killed
            process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            process.stdin.write(pickle.dumps(jobs))
            process.stdin.close()
            process.stdout.readline()
            time.sleep(chance.uniform(0, 0.1))
            process.send_signal(signal.SIGKILL)
            process.wait()
            process.stdout.close()
            assert len(killed.jobs()) < len(jobs)
        fill(killed)
        assert tree(tmp_path / "killed") == tree(tmp_path / "whole")

    def test_workers(self, tmp_path):
        shuffle, documents = make(tmp_path, metadata=True)
        with Workers(make_worker, (None, True), 2) as workers:
            done = [event.job.bucket for event in workers.run(shuffle.jobs()) if isinstance(event, Done)]
        assert sorted(done) == list(range(shuffle.buckets))
        assert read_back(shuffle, metadata=True) == [document[1:] for document in documents]


class TestDamage:
    @pytest.mark.parametrize("name", ["bin", "idx", "prov", "meta"])
    def test_cut_before(self, tmp_path, name):
        shuffle, _ = make(tmp_path, metadata=True)
        path = part_prefix(shuffle.dataset / "unshuffled", 2).with_suffix(f".{name}")
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(UserError, match=f"{path.name} is missing or truncated"):
            shuffle.jobs()

    @pytest.mark.parametrize(("name", "said"), [("prov", "damaged"), ("idx", "damaged"), ("bin", "describes")])
    def test_changed_meanwhile(self, tmp_path, name, said):
        shuffle, _ = make(tmp_path)
        jobs = shuffle.jobs()
        path = part_prefix(shuffle.dataset / "unshuffled", 2).with_suffix(f".{name}")
        data = bytearray(path.read_bytes())
        if name == "prov":
            data[24 * 5 + 8] ^= 1  # a row
        elif name == "idx":
            data[34] += 1  # a length
        else:
            data = data[:-2]
        path.write_bytes(data)
        with pytest.raises(UserError, match=said):
            for job in jobs:
                job.make(None, silent)
        assert not list(tmp_path.rglob("*.tmp"))
