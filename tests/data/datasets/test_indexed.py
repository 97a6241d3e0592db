"""The .bin/.idx format: against Megatron-LM's own code, against plain lists, and against damaged files."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.common.errors import UserError
from pipeline.data.datasets.document_records import read_provenance
from pipeline.data.datasets.indexed import IndexedPart, IndexedWriter, part_files
from pipeline.data.tokenization.tokenizer import token_dtype
from tests.data.datasets import megatron

DTYPES = ["<u2", "<i4"]


def documents(count, dtype="<u2", seed=0, longest=50):
    chance = np.random.default_rng(seed)
    top = min(np.iinfo(dtype).max, 70_000)
    return [chance.integers(0, top + 1, chance.integers(1, longest + 1)).astype(dtype) for _ in range(count)]


def write(prefix, docs, dtype="<u2"):
    with IndexedWriter(prefix, dtype) as writer:
        for ids in docs:
            writer.add_document(ids)
    return IndexedPart(prefix)


@pytest.fixture(scope="module")
def theirs():
    return megatron.indexed_dataset()


class TestMegatron:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_ours_opens_there(self, theirs, tmp_path, dtype):
        docs = documents(200, dtype)
        write(tmp_path / "p", docs, dtype)
        opened = theirs.IndexedDataset(str(tmp_path / "p"))
        assert len(opened) == len(docs)
        assert opened.index.dtype == np.dtype(dtype)
        assert opened.document_indices.tolist() == list(range(201))
        assert opened.sequence_lengths.tolist() == [len(ids) for ids in docs]
        for got, ids in zip(opened[:], docs, strict=True):
            assert got.dtype == np.dtype(dtype)
            assert np.array_equal(got, ids)
        assert np.array_equal(opened.get(17, offset=0, length=len(docs[17])), docs[17])

    @pytest.mark.parametrize("dtype", [np.uint16, np.int32])
    def test_the_same_bytes_as_their_builder(self, theirs, tmp_path, dtype):
        docs = documents(100, np.dtype(dtype).str)
        write(tmp_path / "ours", docs, dtype)
        builder = theirs.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
        for ids in docs:
            builder.add_document(ids, [len(ids)])
        builder.finalize(str(tmp_path / "theirs.idx"))
        for suffix in (".bin", ".idx"):
            assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()

    @pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.uint8, np.int64])
    def test_theirs_opens_here_with_documents_of_several_sequences(self, theirs, tmp_path, dtype):
        chance = np.random.default_rng(3)
        builder = theirs.IndexedDatasetBuilder(str(tmp_path / "p.bin"), dtype=dtype)
        docs, sequences = [], 0
        for _ in range(60):
            lengths = chance.integers(1, 20, chance.integers(1, 5)).tolist()
            ids = chance.integers(0, 100, sum(lengths)).astype(dtype)
            builder.add_document(ids, lengths)
            docs.append(ids)
            sequences += len(lengths)
        builder.finalize(str(tmp_path / "p.idx"))
        part = IndexedPart(tmp_path / "p")
        assert (part.documents, part.sequences, part.dtype) == (60, sequences, np.dtype(dtype))
        check_against_list(part, docs)

    def test_theirs_with_documents_without_tokens(self, theirs, tmp_path):
        builder = theirs.IndexedDatasetBuilder(str(tmp_path / "p.bin"), dtype=np.int32)
        docs = [np.arange(n, dtype=np.int32) for n in (0, 3, 0, 0, 2, 0)]
        for ids in docs:
            builder.add_document(ids, [len(ids)] if len(ids) else [])
        builder.finalize(str(tmp_path / "p.idx"))
        part = IndexedPart(tmp_path / "p")
        assert [part.document_start(d) for d in range(7)] == [0, 0, 3, 3, 3, 5, 5]
        assert [part.document_at(t) for t in range(5)] == [1, 1, 1, 4, 4]
        assert part.document_starts(0, 5).tolist() == [0, 0, 3, 3, 3]
        rows, tokens = part.starts_within(np.arange(100) % 5, np.ones(100, np.int64))
        expected = [(row, token) for row in range(100) for token in {0: [0, 0], 3: [3, 3, 3]}.get(row % 5, [])]
        assert list(zip(rows.tolist(), tokens.tolist(), strict=True)) == expected

    def test_the_choice_of_dtype_is_theirs(self, theirs):
        for size in (1, 256, 50_257, 65_499, 65_500, 65_536, 128_256):
            assert token_dtype(size) == np.dtype(theirs.DType.optimal_dtype(size))


def check_against_list(part, docs):
    """Every question to a part, answered from plain lists."""
    flat = np.concatenate(docs)
    starts = np.cumsum([0, *map(len, docs)]).tolist()
    owner = [d for d, ids in enumerate(docs) for _ in ids]
    assert part.tokens == len(flat)
    assert np.array_equal(part.read(0, part.tokens), flat)
    assert [part.document_start(d) for d in range(len(docs) + 1)] == starts
    assert [part.document_at(t) for t in range(part.tokens)] == owner
    chance = np.random.default_rng(0)
    for _ in range(50):
        a, b = sorted(chance.integers(0, part.tokens + 1, 2).tolist())
        assert np.array_equal(part.read(a, b - a), flat[a:b])
        assert part.document_starts(a, b - a).tolist() == [s for s in starts[:-1] if a <= s < b]
    for count in (0, 3, 200):  # few are looked up one by one, many together
        begin = chance.integers(0, part.tokens + 1, count)
        end = chance.integers(begin, part.tokens + 1)
        rows, tokens = part.starts_within(begin, end - begin)
        assert list(zip(rows.tolist(), tokens.tolist(), strict=True)) == [
            (row, s)
            for row, (a, b) in enumerate(zip(begin.tolist(), end.tolist(), strict=True))
            for s in starts[:-1]
            if a <= s < b
        ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_reader_against_lists(tmp_path, dtype):
    docs = documents(80, dtype)
    check_against_list(write(tmp_path / "p", docs, dtype), docs)


@given(st.lists(st.lists(st.integers(1, 9), max_size=12), max_size=30), st.data())
@settings(max_examples=60)
def test_document_bounds_equal_a_scan_for_the_end_of_document_token(tmp_path_factory, docs, data):
    prefix = tmp_path_factory.mktemp("scan") / "p"
    part = write(prefix, [np.array([*ids, 0], dtype="<u2") for ids in docs])
    ids = part.read(0, part.tokens)
    after_end = [t for t in range(part.tokens) if t == 0 or ids[t - 1] == 0]
    assert part.document_starts(0, part.tokens).tolist() == after_end
    start = data.draw(st.integers(0, part.tokens))
    count = data.draw(st.integers(0, part.tokens - start))
    assert part.document_starts(start, count).tolist() == [t for t in after_end if start <= t < start + count]


def test_copies_leave_not_views(tmp_path):
    part = write(tmp_path / "p", documents(5))
    got = part.read(0, 3)
    assert got.base is None
    assert got.flags.writeable


def test_outside(tmp_path):
    part = write(tmp_path / "p", [np.array([1, 2, 0])])
    for start, count in ((-1, 1), (0, 4), (3, 1), (2, -1)):
        with pytest.raises(IndexError, match=r"p\.bin"):
            part.read(start, count)
    for token in (-1, 3):
        with pytest.raises(IndexError):
            part.document_at(token)
    for document in (-1, 2):
        with pytest.raises(IndexError):
            part.document_start(document)


def test_nothing_in_it(tmp_path):
    part = write(tmp_path / "p", [])
    assert (part.documents, part.tokens, part.document_start(0)) == (0, 0, 0)
    assert part.read(0, 0).tolist() == part.document_starts(0, 0).tolist() == []
    assert (tmp_path / "p.idx").stat().st_size == 34 + 8


class TestWriter:
    def test_ids_of_another_dtype_are_checked(self, tmp_path):
        part = write(tmp_path / "p", [np.array([0, 65535], dtype=np.int64), np.array([1], dtype=np.uint8)])
        assert part.read(0, 3).tolist() == [0, 65535, 1]
        for ids in ([65536], [-1]):
            with pytest.raises(ValueError, match="do not fit"):
                write(tmp_path / "q", [np.array(ids)])

    def test_an_exception_leaves_nothing(self, tmp_path):
        with pytest.raises(RuntimeError), IndexedWriter(tmp_path / "p", "<u2") as writer:
            writer.add_document(np.array([1]))
            raise RuntimeError
        assert list(tmp_path.iterdir()) == []

    def test_nothing_is_visible_before_the_end(self, tmp_path):
        with IndexedWriter(tmp_path / "p", "<u2") as writer:
            writer.add_document(np.array([1]))
            assert not (tmp_path / "p.bin").exists()
            assert not (tmp_path / "p.idx").exists()

    def test_offsets_are_summed_over_chunks(self, tmp_path, monkeypatch):
        import pipeline.data.datasets.indexed as module

        monkeypatch.setattr(module, "CHUNK_BYTES", 8 * 7)
        docs = documents(100)
        check_against_list(write(tmp_path / "p", docs), docs)


class TestDamage:
    """Whatever is wrong is said with the name of the file."""

    @pytest.fixture
    def prefix(self, tmp_path):
        write(tmp_path / "p", documents(20))
        return tmp_path / "p"

    def refused(self, prefix, name, said):
        with pytest.raises(UserError, match=said) as error:
            IndexedPart(prefix)
        assert str(prefix.with_name(name)) in str(error.value)

    @pytest.mark.parametrize("suffix", [".bin", ".idx"])
    def test_missing(self, prefix, suffix):
        prefix.with_name("p" + suffix).unlink()
        self.refused(prefix, "p" + suffix, "missing")

    @pytest.mark.parametrize(("suffix", "said"), [(".bin", "describes"), (".idx", "cut")])
    @pytest.mark.parametrize("change", [-1, 1, -50])
    def test_cut_or_longer(self, prefix, suffix, said, change):
        path = prefix.with_name("p" + suffix)
        data = path.read_bytes()
        path.write_bytes(data[:change] if change < 0 else data + b"x" * change)
        self.refused(prefix, "p" + suffix, said)

    @pytest.mark.parametrize(
        ("offset", "value", "said"),
        [
            (0, b"NOTANIDX\x00", "is not an .idx file"),
            (9, struct.pack("<Q", 2), "version 2"),
            (17, b"\x06", "dtype code 6"),
            (17, b"\x09", "dtype code 9"),
            (18, struct.pack("<Q", 2**62), "header needs"),
            (26, struct.pack("<Q", 0), "header needs"),
            (-8, struct.pack("<q", 3), "document bounds"),
        ],
    )
    def test_header_and_bounds(self, prefix, offset, value, said):
        path = prefix.with_name("p.idx")
        data = bytearray(path.read_bytes())
        offset %= len(data)
        data[offset : offset + len(value)] = value
        path.write_bytes(data)
        self.refused(prefix, "p.idx", said)

    def test_empty_index(self, prefix):
        prefix.with_name("p.idx").write_bytes(b"")
        self.refused(prefix, "p.idx", "too few")

    def test_provenance(self, prefix):
        path = part_files(prefix)[2]
        path.write_bytes(struct.pack("<IIQQ", 3, 0, 2**40, 2**63 + 1) + b"cut")
        assert read_provenance(prefix, 0) == (3, 2**40, 0, 2**63 + 1)
        with pytest.raises(UserError, match=r"p\.prov is truncated"):
            read_provenance(prefix, 1)
