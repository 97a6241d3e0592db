"""A dataset of several parts, by mmap and by pread: the same answers, and what a failing file system leads to."""

import errno
import gc
import os
from pathlib import Path

import numpy as np
import pytest
import xxhash

from pipeline.common import storage
from pipeline.common.errors import MachineError, UserError
from pipeline.data.datasets import dataset as dataset_module
from pipeline.data.datasets import indexed
from pipeline.data.datasets.dataset import Dataset, Slice
from pipeline.data.datasets.files import PARTS_FILE
from pipeline.data.datasets.indexed import IndexedWriter, PreadPart, part_files, part_prefix
from pipeline.data.datasets.manifest import FORMAT_VERSION, MANIFEST_FILE, PART, Manifest, TokenizerInfo
from pipeline.data.loading.loader import Loader
from pipeline.data.loading.objectives.causal import Causal
from pipeline.data.order.packs import instances_of
from pipeline.data.order.phases import plan_journal
from tests.clock import set_time
from tests.data.loading.test_loader import run_file

BY = ["mmap", "pread"]


def write(folder, parts, dtype="<u2"):
    """A dataset of parts, each a list of documents."""
    table = np.zeros(len(parts), PART)
    for number, documents in enumerate(parts):
        prefix = part_prefix(folder, number)
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with IndexedWriter(prefix, dtype) as writer:
            for ids in documents:
                writer.add_document(ids)
        table[number]["unit"] = number
        table[number]["documents"], table[number]["tokens"] = len(documents), sum(map(len, documents))
    (folder / PARTS_FILE).write_bytes(table.tobytes())
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        source="s",
        split="train",
        documents=int(table["documents"].sum()),
        tokens=int(table["tokens"].sum()),
        text_bytes=0,
        dtype=np.dtype(dtype).name,
        tokenizer=TokenizerInfo(
            fingerprint="f", vocab_size=1000, end_of_document=0, end_of_document_token="e", special_tokens={}
        ),
        config_hash="",
        code_version="",
        parts=len(parts),
        parts_hash=xxhash.xxh3_128_hexdigest(table.tobytes()),
    )
    storage.put_json(folder / MANIFEST_FILE, manifest.model_dump())


@pytest.fixture(scope="module")
def parts():
    """Some parts are empty, also the first and the last one; some documents are longer than a window."""
    chance = np.random.default_rng(4)
    return [
        [chance.integers(0, 999, chance.integers(1, 60)).astype(np.uint16) for _ in range(count)]
        for count in (0, 7, 1, 0, 0, 30, 2, 90, 0)
    ]


@pytest.fixture(scope="module")
def folder(parts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pread") / "train"
    write(folder, parts)
    return folder


@pytest.fixture
def no_pauses(monkeypatch):
    pauses = []
    set_time(monkeypatch, sleep=pauses.append)
    return pauses


@pytest.mark.parametrize("read", BY)
def test_against_lists(folder, parts, read):
    dataset = Dataset.open(folder, read)
    documents = [ids for part in parts for ids in part]
    flat = np.concatenate(documents)
    starts = np.cumsum([0, *map(len, documents)]).tolist()
    assert (dataset.tokens, dataset.documents) == (len(flat), len(documents))
    assert [dataset.document_start(d) for d in range(len(documents) + 1)] == starts
    owner = [document for document, ids in enumerate(documents) for _ in ids]
    assert [dataset.document_at(t) for t in range(len(flat))] == owner
    chance = np.random.default_rng(0)
    begin = chance.integers(0, len(flat) + 1, 300)
    end = chance.integers(begin, len(flat) + 1)
    for a, b in zip(begin.tolist(), end.tolist(), strict=True):
        assert np.array_equal(dataset.read(a, b - a), flat[a:b])
        for dtype in (np.int64, np.uint16):
            out = np.zeros(b - a, dtype)
            dataset.fill(a, out)
            assert np.array_equal(out, flat[a:b])
        assert dataset.document_starts(a, b - a).tolist() == [s for s in starts[:-1] if a <= s < b]
    rows, tokens = dataset.starts_within(begin, end - begin)
    assert sorted(zip(rows.tolist(), tokens.tolist(), strict=True)) == [
        (row, s)
        for row, (a, b) in enumerate(zip(begin.tolist(), end.tolist(), strict=True))
        for s in starts[:-1]
        if a <= s < b
    ]
    part = Slice(dataset, 5, 50)
    assert part.tokens == starts[50] - starts[5]
    assert part.document_at(0) == 5 and part.document_at(part.tokens - 1) == 49
    assert [part.document_start(d) for d in (0, 5, 6, 50, 100)] == [
        0,
        0,
        starts[6] - starts[5],
        part.tokens,
        part.tokens,
    ]
    for call in (lambda: dataset.read(-1, 2), lambda: dataset.read(len(flat), 1), lambda: dataset.read(3, -1)):
        with pytest.raises(IndexError, match=str(folder)):
            call()
    with pytest.raises(IndexError):
        dataset.fill(len(flat) - 1, np.zeros(2, np.int64))


def test_a_loader_gives_the_same_batches(folder):
    def loader(read):
        datasets = {"s": Dataset.open(folder, read)}
        journal = plan_journal(run_file({"s": 1}, sequence_length=37, batch_size=5), datasets)
        return Loader(journal, instances_of(journal, datasets), Causal(), micro_batch_size=[5], vocab_size=1000)

    one, other = loader("mmap"), loader("pread")
    for mapped, read in zip(one.iterate(0, 50), other.iterate(0, 50), strict=True):
        assert (mapped.data_hash, mapped.order_hash) == (read.data_hash, read.order_hash)
        assert mapped.micro_batches[0].starts.tolist() == read.micro_batches[0].starts.tolist()
        assert mapped.micro_batches[0].tokens.equal(read.micro_batches[0].tokens)


@pytest.fixture
def prefix(tmp_path):
    with IndexedWriter(tmp_path / "p", "<u2") as writer:
        for n in range(100):
            writer.add_document(np.arange(1, 20 + n))
    return tmp_path / "p"


class Failing:
    """An `os.preadv` that fails so many times."""

    def __init__(self, number, times):
        self.number, self.times, self.descriptors = number, times, []

    def __call__(self, descriptor, buffers, offset, preadv=os.preadv):
        self.descriptors.append(descriptor)
        if len(self.descriptors) <= self.times:
            raise OSError(self.number, os.strerror(self.number))
        # Short reads happen as well.
        return preadv(descriptor, [buffers[0][:100]], offset)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_errors_that_pass_are_tried_again(prefix, no_pauses, monkeypatch, number):
    part = PreadPart(prefix)
    expected = part.read(100, 500)
    failing = Failing(number, 3)
    monkeypatch.setattr(indexed.os, "preadv", failing)
    assert np.array_equal(part.read(100, 500), expected)
    assert no_pauses == [0.1, 1.0, 5.0]


def test_errors_that_stay_are_named(prefix, no_pauses, monkeypatch):
    part = PreadPart(prefix)
    monkeypatch.setattr(indexed.os, "preadv", Failing(errno.EIO, 4))
    with pytest.raises(MachineError, match=r"p\.bin: reading 60 bytes at 200 failed 4 times, EIO: Input/output error"):
        part.read(100, 30)
    assert len(no_pauses) == 3
    monkeypatch.setattr(indexed.os, "preadv", Failing(errno.EINVAL, 1))
    with pytest.raises(OSError, match="Invalid argument"):
        part.read(100, 30)
    assert len(no_pauses) == 3


def test_a_stale_file_is_opened_anew(prefix, no_pauses, monkeypatch):
    """The server gave the file another handle: the old descriptor never works again."""
    part = PreadPart(prefix)
    stale = part._file.number
    original = os.preadv

    def preadv(descriptor, buffers, offset):
        if descriptor == stale:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return original(descriptor, buffers, offset)

    holder = part._file  # as another thread in the middle of a read; its number is not given to another file
    monkeypatch.setattr(indexed.os, "preadv", preadv)
    assert part.read(1, 3).tolist() == [2, 3, 4]
    assert part._file is not holder and no_pauses == [0.1]


def test_a_file_that_shrinks_is_named(prefix):
    part = PreadPart(prefix)
    path = part_files(prefix)[0]
    os.truncate(path, 100)
    with pytest.raises(UserError, match=r"p\.bin ends at byte 100"):
        part.read(40, 30)
    assert part.read(0, 3).tolist() == [1, 2, 3]


@pytest.mark.parametrize("read", BY)
def test_opening_is_tried_again(folder, no_pauses, monkeypatch, read):
    failed = []

    def stale(*_):
        failed.append(1)
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    dataset = Dataset.open(folder, read)
    monkeypatch.setattr(indexed.IndexedPart, "_read_header", stale)
    with pytest.raises(MachineError, match=r"00000001\.idx: opening it failed 4 times, ESTALE") as error:
        dataset.read(0, 1)
    assert "preprocess" not in str(error.value)  # the dataset is not to blame
    assert len(failed) == 4


def open_bins(folder, read):
    """The .bin files that this process has mapped, or open."""
    gc.collect()
    if read == "mmap":
        names = {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()}
    else:
        links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        names = {os.readlink(link) for link in links if os.path.lexists(link)}
    return [name for name in names if name.startswith(str(folder)) and name.endswith(".bin")]


@pytest.mark.parametrize("read", BY)
def test_only_so_many_parts_are_open(tmp_path, monkeypatch, read):
    write(tmp_path / "train", [[np.array([n, 0])] for n in range(1, 20)])
    cached = dataset_module.lru_cache(maxsize=8)(dataset_module.open_part)
    monkeypatch.setattr(dataset_module, "_mapped_part" if read == "mmap" else "_read_part", cached)
    dataset = Dataset.open(tmp_path / "train", read)
    for _ in range(2):
        assert [int(dataset.read(2 * n, 1)[0]) for n in range(19)] == list(range(1, 20))
        assert 1 <= len(open_bins(tmp_path, read)) <= 8
    # Windows that are looked up together hold no part open.
    journal = plan_journal(run_file({"s": 1}, sequence_length=1, batch_size=19), {"s": dataset})
    loader = Loader(journal, instances_of(journal, {"s": dataset}), Causal(), micro_batch_size=[19])
    for step in range(10):
        loader.batches(step)
    assert 1 <= len(open_bins(tmp_path, read)) <= 8
    cached.cache_clear()
    assert not open_bins(tmp_path, read)


@pytest.mark.parametrize("read", BY)
def test_one_by_one_and_together_are_the_same(folder, monkeypatch, read):
    dataset = Dataset.open(folder, read)
    chance = np.random.default_rng(1)
    begin = chance.integers(0, dataset.tokens, 100)
    counts = chance.integers(0, dataset.tokens - begin + 1)
    found = []
    for few in (0, 1, 16, 1000):
        monkeypatch.setattr(dataset_module, "_FEW", few)
        found.append([array.tolist() for array in dataset.starts_within(begin, counts)])
    assert found[0] == found[1] == found[2] == found[3]
    pieces = dataset.pieces(begin, counts)
    assert pieces.length.min() >= 1
    for row, (start, count) in enumerate(zip(begin.tolist(), counts.tolist(), strict=True)):
        ids = np.zeros(count, np.uint16)
        for piece in (pieces.row == row).nonzero()[0].tolist():
            column, end = int(pieces.column[piece]), int(pieces.column[piece] + pieces.length[piece])
            first = int(pieces.start[piece])
            ids[column:end] = dataset.part_view(int(pieces.part[piece]), first, first + end - column)
        assert pieces.length[pieces.row == row].sum() == count
        assert np.array_equal(ids, dataset.read(start, count))
