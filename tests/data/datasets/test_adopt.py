"""`pipeline data adopt`: files of Megatron's own builder become datasets, and whatever is wrong with them is said."""

import itertools
import os
import random
import subprocess
import sys

import numpy as np
import orjson
import pytest
import xxhash
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.common.hashing import put_sealed
from pipeline.config.load import load
from pipeline.config.tokenizer import TokenizerConfig
from pipeline.data.datasets import foreign as foreign_module
from pipeline.data.datasets.adopt import adopt
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.foreign import bytes_of_tokens
from pipeline.data.datasets.indexed import IndexedPart, IndexedWriter, part_files, part_prefix
from pipeline.data.datasets.merge import merge
from pipeline.data.datasets.verify import verify
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.tokenization.tokenizer import Tokenizer
from tests.data.datasets import megatron
from tests.data.runs import text
from tests.tiny import pipeline, write_run

EOD = 0


@pytest.fixture(scope="module")
def theirs():
    return megatron.indexed_dataset()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer's folder."""
    chance = random.Random(0)
    config = TokenizerConfig.model_validate({"train": {"vocab_size": 400}, "special_tokens": ["<|x|>"]})
    folder = tmp_path_factory.mktemp("tokenizer")
    Tokenizer.train((text(chance, 60) for _ in range(30)), config).save(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.open(folder)


def texts(count, seed=0):
    chance = random.Random(seed)
    return [text(chance, chance.randint(1, 40)) for _ in range(count)]


def build(theirs, prefix, documents, dtype=np.uint16):
    """Write with Megatron's builder; a document is a list of sequences."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    builder = theirs.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for sequences in documents:
        ids = np.array([number for sequence in sequences for number in sequence], dtype)
        builder.add_document(ids, [len(sequence) for sequence in sequences])
    builder.finalize(f"{prefix}.idx")
    return prefix


def encoded(tokenizer, some, end=True):
    return [[[*tokenizer.encode(one), EOD] if end else tokenizer.encode(one)] for one in some]


def flat(documents):
    return [number for sequences in documents for sequence in sequences for number in sequence]


def contents(root):
    return sorted((str(path.relative_to(root)), path.stat().st_mtime_ns) for path in root.rglob("*"))


def is_sound(folder):
    """Checked, and opened: the dataset of the split `train`, or the one in the folder itself."""
    assert verify(folder).problems == []
    return Dataset.open(folder / "train" if (folder / "train").exists() else folder)


class TestAdopted:
    @pytest.mark.parametrize("dtype", [np.uint16, np.int32])
    @pytest.mark.parametrize("link", ["symlink", "hardlink", "copy"])
    def test_is_a_dataset(self, theirs, folder, tokenizer, tmp_path, dtype, link, monkeypatch):
        monkeypatch.setattr(foreign_module, "BLOCK", 97)
        first, second = texts(30, 1), texts(11, 2)
        build(theirs, tmp_path / "in" / "a", encoded(tokenizer, first), dtype)
        build(theirs, tmp_path / "in" / "b", encoded(tokenizer, second), dtype)
        prefixes = [tmp_path / "in" / "a", tmp_path / "in" / "b.bin"]
        report = adopt(prefixes, tmp_path / "s", tokenizer=folder, special_tokens=["<|x|>"], link=link)
        dataset = is_sound(tmp_path / "s")
        assert dataset.dtype == dtype
        assert dataset.documents == 41
        assert dataset.read(0, dataset.tokens).tolist() == flat(encoded(tokenizer, first + second))
        assert dataset.text_bytes == sum(len(one.encode()) for one in first + second)
        assert dataset.provenance(35) == (1, 5, 0, xxhash.xxh3_64_intdigest(b"b#5"))
        assert dataset.manifest.source == "s"
        assert dataset.manifest.settings["adopted"] == ["a", "b"]
        assert dataset.manifest.tokenizer.fingerprint == tokenizer.fingerprint
        assert (report.copied, report.dropped, report.appended) == (2 * (link == "copy"), 0, 0)
        bin_path, idx_path, _ = part_files(part_prefix(tmp_path / "s" / "train", 0))
        for path, original in ((bin_path, "a.bin"), (idx_path, "a.idx")):
            assert path.is_symlink() == (link == "symlink")
            if link == "symlink":
                assert os.readlink(path) == str(tmp_path / "in" / original)
            assert path.samefile(tmp_path / "in" / original) == (link != "copy")
        assert sorted(os.listdir(tmp_path / "s")) == ["train"]

    def test_several_sequences_and_documents_without_tokens(self, theirs, folder, tmp_path, monkeypatch):
        monkeypatch.setattr(foreign_module, "BLOCK", 5)
        documents = [[[5, 6], [7, EOD]], [], [[9, 9, EOD]], [[], [8, EOD], []], [[EOD]], [[3], [4], [5], [EOD]], []]
        build(theirs, tmp_path / "p", documents)
        report = adopt([tmp_path / "p"], tmp_path / "s", tokenizer=folder)
        dataset = is_sound(tmp_path / "s" / "train")
        assert dataset.read(0, dataset.tokens).tolist() == flat(documents)
        assert [dataset.document_start(d) for d in range(6)] == [0, 4, 7, 9, 10, 14]
        assert [dataset.provenance(d)[1] for d in range(5)] == [0, 2, 3, 4, 5]
        assert report.dropped == 2
        assert "2 documents without tokens" in str(report)
        part = IndexedPart(part_prefix(dataset.folder, 0))
        assert part.lengths.tolist() == [2, 2, 3, 2, 1, 1, 1, 1, 1]
        assert part.bin_path.is_symlink()
        assert not part.idx_path.is_symlink()

    def test_all_of_them_empty(self, theirs, folder, tmp_path):
        build(theirs, tmp_path / "p", [[], []])
        build(theirs, tmp_path / "q", [])
        adopt([tmp_path / "p", tmp_path / "q"], tmp_path / "s", tokenizer=folder)
        assert is_sound(tmp_path / "s" / "train").documents == 0

    def test_folders_globs_and_their_order(self, theirs, folder, tokenizer, tmp_path):
        for name in ("x/s_2", "x/s_10", "x/s_1", "y.d/t"):
            build(theirs, tmp_path / name, [[[10 + int(name[-1].replace("t", "9")), EOD]]])
        for number, (arguments, names) in enumerate(
            [
                (["x"], ["s_1", "s_2", "s_10"]),
                (["y.d/t", "x/s_*.bin"], ["y.d/t", "x/s_1", "x/s_2", "x/s_10"]),
                (["*/s_1*"], ["s_1", "s_10"]),
                (["y.d/t.idx"], ["t"]),
            ]
        ):
            adopt([tmp_path / one for one in arguments], tmp_path / "out" / str(number), tokenizer=folder)
            assert is_sound(tmp_path / "out" / str(number)).manifest.settings["adopted"] == names
        for argument, said in (("nowhere/*", "matches no"), ("nowhere", "is missing"), ("out", r"has no \.idx")):
            with pytest.raises(UserError, match=said):
                adopt([tmp_path / argument], tmp_path / "no", tokenizer=folder)
        with pytest.raises(UserError, match="given twice"):
            adopt([tmp_path / "x", tmp_path / "x" / "s_1"], tmp_path / "no", tokenizer=folder)
        assert not (tmp_path / "no").exists()

    @pytest.mark.slow
    def test_trains(self, theirs, tmp_path):
        """A run whose only source was adopted, from its tokens to an evaluated model."""
        preprocess(load(write_run(tmp_path)))
        for split in ("train", "heldout"):
            dataset = Dataset.open(tmp_path / "data" / "sea" / split)
            starts = [dataset.document_start(d) for d in range(dataset.documents + 1)]
            documents = [[dataset.read(a, b - a).tolist()] for a, b in itertools.pairwise(starts)]
            build(theirs, tmp_path / split, documents, np.int32)
            report = adopt([tmp_path / split], tmp_path / "foreign", tokenizer=dataset.folder, split=split)
            assert report.manifest.text_bytes == dataset.text_bytes
        assert "--split heldout" not in str(report)
        changes = {
            "data.sources": [{"name": "foreign", "dataset": str(tmp_path / "foreign")}],
            "tokenizer": {"path": str(tmp_path / "foreign" / "train" / "tokenizer.json")},
            "data.dir": str(tmp_path / "data2"),
            "train.duration": "2 steps",
        }
        run = write_run(tmp_path, changes, "foreign.yaml")
        done = pipeline("run", run)
        assert done.returncode == 0, done.stderr


def test_a_file_that_is_gone_later_is_named(theirs, folder, tmp_path):
    prefix = build(theirs, tmp_path / "p", [[[5, EOD]]])
    adopt([prefix], tmp_path / "s", tokenizer=folder)
    prefix.with_suffix(".bin").unlink()
    dataset = Dataset.open(tmp_path / "s" / "train")
    with pytest.raises(UserError, match=rf"^{prefix}\.bin, which .*links to, is missing.*adopted"):
        dataset.read(0, 1)
    with pytest.raises(UserError, match="is missing.*adopted"):
        merge(tmp_path / "s" / "train", tmp_path / "out")


class TestEnds:
    def test_without_any(self, theirs, folder, tokenizer, tmp_path, monkeypatch):
        some = texts(20)
        prefix = build(theirs, tmp_path / "p", [[], *encoded(tokenizer, some, end=False)])
        before = contents(tmp_path)
        with pytest.raises(UserError, match="none of 20 documents ends with.*--append-eod writes"):
            adopt([prefix], tmp_path / "s", tokenizer=folder)
        assert contents(tmp_path) == before
        monkeypatch.setattr(foreign_module, "BLOCK", 13)
        report = adopt([prefix], tmp_path / "s", tokenizer=folder, append_eod=True)
        dataset = is_sound(tmp_path / "s" / "train")
        assert dataset.read(0, dataset.tokens).tolist() == flat(encoded(tokenizer, some))
        assert dataset.documents == report.appended == 20
        assert dataset.text_bytes == sum(len(one.encode()) for one in some)
        assert report.copied == 1
        bounds = [dataset.document_start(d) for d in range(21)]
        assert bounds == np.cumsum([0, *(len(tokenizer.encode(one)) + 1 for one in some)]).tolist()

    def test_some(self, theirs, folder, tmp_path):
        documents = [[[5, EOD]], [[6]], [[7], [8, 9]], [[EOD]]]
        build(theirs, tmp_path / "p", documents)
        build(theirs, tmp_path / "q", [[[5, EOD]]])
        with pytest.raises(UserError, match=r"2 of 5 documents do not end.*p\.bin, document 1\."):
            adopt([tmp_path / "q", tmp_path / "p"], tmp_path / "s", tokenizer=folder)
        report = adopt([tmp_path / "q", tmp_path / "p"], tmp_path / "s", tokenizer=folder, append_eod=True)
        dataset = is_sound(tmp_path / "s" / "train")
        assert dataset.read(0, dataset.tokens).tolist() == [5, EOD, 5, EOD, 6, EOD, 7, 8, 9, EOD, EOD]
        assert IndexedPart(part_prefix(dataset.folder, 1)).lengths.tolist() == [2, 2, 1, 3, 1]
        assert (report.copied, report.appended) == (1, 2)
        assert part_files(part_prefix(dataset.folder, 0))[0].is_symlink()

    def test_another_token(self, theirs, folder, tmp_path):
        build(theirs, tmp_path / "p", [[[5, 6, 1]], [[7, 1]]])
        with pytest.raises(UserError, match=r"all 2 end with '<\|x\|>' \(id 1\).*--end-of-document"):
            adopt([tmp_path / "p"], tmp_path / "s", tokenizer=folder)
        adopt([tmp_path / "p"], tmp_path / "s", tokenizer=folder, end_of_document="<|x|>")
        assert is_sound(tmp_path / "s").manifest.tokenizer.end_of_document == 1

    def test_forged(self, theirs, folder, tmp_path, monkeypatch):
        monkeypatch.setattr(foreign_module, "BLOCK", 4)
        build(theirs, tmp_path / "p", [[[5, EOD]], [[6, EOD, 7, EOD, EOD]], [[8, EOD]]])
        report = adopt([tmp_path / "p"], tmp_path / "s", tokenizer=folder)
        assert report.manifest.inner_ends == 2
        assert report.first_inner == [f"{tmp_path / 'p.bin'}, document 1, token {token}" for token in (1, 3)]
        assert "'<|endoftext|>' occurs inside of documents, 2 times" in str(report)
        is_sound(tmp_path / "s")
        manifest = tmp_path / "s" / "train" / "manifest.json"
        put_sealed(manifest, orjson.loads(manifest.read_bytes()) | {"inner_ends": 3})
        (problem,) = verify(tmp_path / "s").problems
        assert "2 end-of-document tokens inside of documents, but 3 were adopted" in problem
        put_sealed(manifest, orjson.loads(manifest.read_bytes()) | {"inner_ends": 0})
        (problem,) = verify(tmp_path / "s").problems
        assert "not at the ends" in problem


class TestRefused:
    @pytest.fixture
    def prefix(self, theirs, tokenizer, tmp_path):
        return build(theirs, tmp_path / "p", encoded(tokenizer, texts(20)))

    def refused(self, said, arguments, target, **options):
        before = contents(target.parent)
        with pytest.raises(UserError, match=said):
            adopt(arguments, target, **options)
        assert contents(target.parent) == before

    def test_another_tokenizer(self, theirs, folder, tmp_path):
        build(theirs, tmp_path / "p", [[[5, EOD]], [[6, 400, EOD]]])
        self.refused(
            r"p\.bin: document 1 has the id 400, but the tokenizer's ids end with 318; .*--tokenizer",
            [tmp_path / "p"], tmp_path / "s", tokenizer=folder,
        )  # fmt: skip
        build(theirs, tmp_path / "q", [[[5, -1, EOD]]], np.int32)
        self.refused("document 0 has the id -1", [tmp_path / "q"], tmp_path / "s", tokenizer=folder)

    def test_tokenizer(self, prefix, folder, tmp_path):
        self.refused(r"^--tokenizer: .* does not exist", [prefix], tmp_path / "s", tokenizer=tmp_path / "none")
        for option, said in (
            ({"end_of_document": "<eos>"}, "^--end-of-document: .* no token '<eos>'"),
            ({"special_tokens": ["<y>"]}, "^--special-token: .* no token '<y>'"),
            ({"special_tokens": ["<|endoftext|>"]}, "must differ"),
            ({"split": "a/b"}, "--split"),
        ):
            self.refused(said, [prefix], tmp_path / "s", tokenizer=folder, **option)

    @pytest.mark.parametrize(("suffix", "cut"), [("bin", 1), ("idx", 1), ("idx", 8), ("bin", 10**9), ("idx", 10**9)])
    def test_cut(self, prefix, folder, tmp_path, suffix, cut):
        path = prefix.with_suffix(f".{suffix}")
        path.write_bytes(path.read_bytes()[:-cut])
        self.refused(path.name, [prefix], tmp_path / "s", tokenizer=folder)
        path.unlink()
        self.refused(f"{path.name} is missing", [prefix], tmp_path / "s", tokenizer=folder)

    @pytest.mark.parametrize(
        ("offset", "value", "said"),
        [
            (0, b"X", "is not an .idx file"),
            (9, b"\2", "version 2"),
            (17, b"\4", r"describes|do not agree"),
            (17, b"\7", "not an integer type"),
            (18, b"\1", "header needs"),
            (34, b"\xff", "do not agree"),
            (34 + 3, b"\xff", "do not agree"),
            (34 + 4 * 20 + 8, b"\xff", "do not agree"),
            (34 + 12 * 20 + 8, b"\x10", "do not agree"),
            (34 + 12 * 20 + 15, b"\xff", "do not agree"),
        ],
    )
    def test_flipped(self, prefix, folder, tmp_path, offset, value, said):
        path = prefix.with_suffix(".idx")
        data = bytearray(path.read_bytes())
        data[offset : offset + 1] = value
        path.write_bytes(data)
        self.refused(rf"p\.(idx|bin).*({said})", [prefix], tmp_path / "s", tokenizer=folder)

    def test_multimodal(self, theirs, folder, tmp_path):
        builder = theirs.IndexedDatasetBuilder(str(tmp_path / "p.bin"), dtype=np.uint16, multimodal=True)
        builder.add_document(np.array([5, 6, EOD]), [2, 1], [0, 1])
        builder.finalize(str(tmp_path / "p.idx"))
        self.refused(r"p\.idx was written for several modalities", [tmp_path / "p"], tmp_path / "s", tokenizer=folder)

    def test_types(self, theirs, folder, tmp_path):
        build(theirs, tmp_path / "p", [[[5, EOD]]])
        build(theirs, tmp_path / "q", [[[5, EOD]]], np.int32)
        self.refused("one type", [tmp_path / "p", tmp_path / "q"], tmp_path / "s", tokenizer=folder)
        build(theirs, tmp_path / "r", [[[5]]], np.uint8)
        wide = Library(models.WordLevel({f"w{n}": n for n in range(300)} | {"<e>": 300}, "w0"))
        wide.save(str(tmp_path / "t.json"))
        self.refused(
            "does not fit into the uint8", [tmp_path / "r"], tmp_path / "s",
            tokenizer=tmp_path / "t.json", end_of_document="<e>", append_eod=True,
        )  # fmt: skip

    def test_folder(self, prefix, folder, tmp_path):
        (tmp_path / "s" / "train").mkdir(parents=True)
        adopt([prefix], tmp_path / "s", tokenizer=folder)
        self.refused("exists already", [prefix], tmp_path / "s", tokenizer=folder)
        self.refused(
            "has another tokenizer", [prefix], tmp_path / "s",
            tokenizer=folder, end_of_document="<|x|>", split="heldout", append_eod=True,
        )  # fmt: skip
        adopt([prefix], tmp_path / "s", tokenizer=folder, split="heldout", source="name")
        assert is_sound(tmp_path / "s" / "heldout").manifest.source == "name"
        assert verify(tmp_path / "s").datasets == 2

    @pytest.mark.guard
    def test_a_full_disk_leaves_nothing(self, prefix, folder, tmp_path):
        code = (
            "import resource, signal, sys; from pathlib import Path; from pipeline.data.datasets.adopt import adopt\n"
            "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
            "adopt([Path(sys.argv[1])], Path(sys.argv[2]), tokenizer=Path(sys.argv[3]))"
        )
        command = [sys.executable, "-c", code, str(prefix), str(tmp_path / "s"), str(folder)]
        assert "OSError: [Errno 27]" in subprocess.run(command, capture_output=True, text=True).stderr
        assert list((tmp_path / "s").iterdir()) == []


def test_what_a_killed_adoption_left_is_removed(theirs, folder, tmp_path, monkeypatch):
    prefix = build(theirs, tmp_path / "p", [[[5, EOD]]])
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    (tmp_path / "s").mkdir()
    alive = storage.temporary(tmp_path / "s" / "train")
    monkeypatch.setattr(storage.os, "getpid", lambda: process.pid)
    for left in (storage.temporary(tmp_path / "s" / "train"), alive):
        (left / "parts").mkdir(parents=True)
        (left / "parts" / "x.bin").symlink_to(prefix.with_suffix(".bin"))
    monkeypatch.undo()
    adopt([prefix], tmp_path / "s", tokenizer=folder)
    assert {path.name for path in (tmp_path / "s").iterdir()} == {alive.name, "train"}
    assert prefix.with_suffix(".bin").exists()


class TestTextBytes:
    def test_byte_level_with_added_tokens(self, tmp_path):
        """Cut characters, spaces and added tokens; compared with decoding."""
        chance = random.Random(1)
        sample = [text(chance, 50) for _ in range(20)]
        library = Tokenizer.train(iter(sample), TokenizerConfig.model_validate({"train": {"vocab_size": 350}}))
        engine = Library.from_str(library.definition)
        engine.add_tokens(["  ", "é"])
        engine.add_special_tokens(["<s>"])
        engine.save(str(tmp_path / "tokenizer.json"))
        config = TokenizerConfig.model_validate({"path": str(tmp_path / "tokenizer.json")})
        tokenizer = Tokenizer.load(tmp_path / "tokenizer.json", config)
        table = bytes_of_tokens(tokenizer)
        for one in [*sample, "é  é", "日本語🙂", "\x00\x7f", "a\u0301", " "]:
            ids = tokenizer.encode(one)
            assert table[ids].sum() == len(one.encode())
        assert table[tokenizer.end_of_document] == table[engine.token_to_id("<s>")] == 0

    def test_other_tokenizers_are_decoded(self, theirs, tmp_path):
        """A SentencePiece-like one, with bytes for what it does not know."""
        vocabulary = {"<e>": 0, **{f"<0x{n:02X}>": n + 1 for n in range(256)}, "▁": 257, "a": 258, "b": 259, "▁a": 260}
        library = Library(models.BPE(vocabulary, [("▁", "a")], byte_fallback=True, unk_token=None))
        library.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never", split=False)
        library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        library.save(str(tmp_path / "t.json"))
        config = TokenizerConfig.model_validate({"path": str(tmp_path / "t.json"), "end_of_document": "<e>"})
        tokenizer = Tokenizer.load(tmp_path / "t.json", config)
        assert bytes_of_tokens(tokenizer) is None
        some = ["a a ab", "é漢🙂 b", "x y"]
        prefix = build(theirs, tmp_path / "p", encoded(tokenizer, some))
        report = adopt([prefix], tmp_path / "s", tokenizer=tmp_path / "t.json", end_of_document="<e>")
        assert report.manifest.text_bytes == sum(len(one.encode()) for one in some)

    def test_unknown_tokens_are_counted_and_reported(self, theirs, tmp_path):
        library = Library(models.WordLevel({"<e>": 0, "<unk>": 1, "a": 2, "b": 3}, unk_token="<unk>"))
        library.pre_tokenizer = pre_tokenizers.Whitespace()
        library.save(str(tmp_path / "t.json"))
        config = TokenizerConfig.model_validate({"path": str(tmp_path / "t.json"), "end_of_document": "<e>"})
        tokenizer = Tokenizer.load(tmp_path / "t.json", config)
        prefix = build(theirs, tmp_path / "p", encoded(tokenizer, ["a b sea", "wind b", "a"]))
        report = adopt([prefix], tmp_path / "s", tokenizer=tmp_path / "t.json", end_of_document="<e>")
        assert (report.manifest.unknown_tokens, report.manifest.tokens) == (2, 9)
        assert "of 9 tokens are unknown" in str(report)
        assert verify(tmp_path / "s").problems == []


@pytest.mark.guard
def test_memory_is_bounded(folder, tmp_path):
    """100,000 documents with 60 MB of tokens; the index is mapped, the tokens are read in blocks."""
    peaks = []
    for count in (100, 100_000):
        ids = np.full((count, 300), 7, np.uint16)
        ids[:, -1] = EOD
        with IndexedWriter(tmp_path / str(count), "<u2") as writer:
            writer.add_documents(ids.tobytes(), np.full(count, 300))
        code = (
            "import sys; from pathlib import Path; from pipeline.data.datasets.adopt import adopt\n"
            "adopt([Path(sys.argv[1])], Path(sys.argv[2]), tokenizer=Path(sys.argv[3]), append_eod=True, link='copy')\n"
            "print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])"
        )
        command = [sys.executable, "-c", code, str(tmp_path / str(count)), str(tmp_path / f"s{count}"), str(folder)]
        peaks.append(int(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    assert peaks[1] - peaks[0] < 50_000
    assert Dataset.open(tmp_path / "s100000" / "train").documents == 100_000
