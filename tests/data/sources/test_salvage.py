"""Compressed files of one member that are cut: what is salvaged of them; and zstd windows above the limit."""

import gzip
import random
import subprocess

import orjson
import pytest
import zstandard
from rich.console import Console

from pipeline.common.errors import UserError
from pipeline.data.curate.stage import curate
from pipeline.data.datasets.manifest import read_manifest
from pipeline.data.datasets.verify import verify
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.provenance.why_removed import why
from pipeline.data.sources import compression
from pipeline.data.verify.command import verify_all
from tests.data.runs import datasets, make_config
from tests.data.tokenization.test_tokenizer import byte_vocabulary, write

RECORDS = [f"document {number} " + "some more words and numbers " * (number % 7) for number in range(600)]
LINES = [orjson.dumps({"text": record}, option=orjson.OPT_APPEND_NEWLINE) for record in RECORDS]


def zstd(data, window_log=20, checksum=True):
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=window_log, write_checksum=checksum)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    out = b""
    for start in range(0, len(data), 4000):  # blocks, as a stream of a program is
        out += compressor.compress(data[start : start + 4000])
        out += compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    return out + compressor.flush()


WHOLE = {".gz": gzip.compress(b"".join(LINES)), ".zst": zstd(b"".join(LINES))}


@pytest.fixture
def run(tmp_path):
    tokenizer = {"path": str(write(tmp_path / "t.json", byte_vocabulary()))}

    def configure(mode, **preprocess):
        source = {"name": "s", "type": "jsonl", "paths": [str(tmp_path / "a.jsonl*")]}
        preprocess = {"on_damaged_file": mode, "unit_bytes": 2**13, **preprocess}
        return make_config(tmp_path, [source], tokenizer=tokenizer, preprocess=preprocess, splits={"heldout": 0})

    return configure


def documents(config):
    """Number of documents in training, whose ids are those of the lines."""
    return read_manifest(config.data_dir / "s" / "train").documents


@pytest.mark.first(3)
@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("share", [0.3, 0.7, 0.99])
def test_text_before_the_break(tmp_path, run, suffix, share, capsys):
    path = tmp_path / f"a.jsonl{suffix}"
    cut = WHOLE[suffix][: int(len(WHOLE[suffix]) * share)]
    path.write_bytes(cut)
    if suffix == ".gz":  # what another program makes of it
        text = subprocess.run(["gzip", "-dc"], input=cut, capture_output=True, check=False).stdout
    else:
        text = zstandard.ZstdDecompressor().decompressobj().decompress(cut)
    expected = text.count(b"\n")
    assert 0 < expected < len(LINES)
    config = run("salvage")
    report = preprocess(config)
    assert documents(config) == expected
    (damaged,) = report.sources[0].damaged
    assert (damaged.salvaged, damaged.lost) == (len(text), 0)
    assert read_manifest(config.data_dir / "s" / "train").salvaged_bytes == len(text)
    listed = orjson.loads((config.data_dir / "s" / "damaged.jsonl").read_bytes())
    assert listed["salvaged"] == len(text) and "without a checksum" in listed["detail"]
    assert "without a checksum" in capsys.readouterr().out
    assert not verify(config.data_dir).problems


def test_larger_than_what_is_held(tmp_path, run, monkeypatch):
    (tmp_path / "a.jsonl.gz").write_bytes(WHOLE[".gz"][:-400])
    preprocess(run("salvage"))
    small = datasets(run("salvage"))
    monkeypatch.setattr(compression, "_HELD_BYTES", 1000)
    monkeypatch.setattr(compression, "_OUTPUT_BYTES", 700)
    config = run("salvage")
    for path in sorted(config.data_dir.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    preprocess(config)
    assert datasets(config) == small


def test_the_key_can_be_changed(tmp_path, run):
    (tmp_path / "a.jsonl.gz").write_bytes(WHOLE[".gz"][:-400])
    (tmp_path / "a.jsonl").write_bytes(b"".join(LINES[:50]))
    preprocess(run("keep"))
    assert documents(run("keep")) == 50
    kept = datasets(run("keep"))
    preprocess(run("salvage"))
    assert documents(run("keep")) > 50
    assert preprocess(run("salvage")).units_done == 0
    preprocess(run("keep"))
    assert datasets(run("keep")) == kept
    preprocess(run("salvage"))
    with pytest.raises(UserError, match="salvage to use"):
        preprocess(run("fail"))


def test_repair_salvages_again(tmp_path, run):
    (tmp_path / "a.jsonl.gz").write_bytes(WHOLE[".gz"][:-400])
    config = run("salvage")
    preprocess(config)
    part = next((config.data_dir / "s" / "train").rglob("0*.bin"))
    part.write_bytes(b"\1" + part.read_bytes()[1:])
    assert verify_all(config.data_dir, (), Console(), repairs=True)


@pytest.mark.parametrize("mode", ["keep", "drop"])
def test_nothing_is_left(tmp_path, run, mode):
    (tmp_path / "a.jsonl.gz").write_bytes(WHOLE[".gz"][:-400])
    with pytest.raises(UserError) as error:
        preprocess(run(mode))
    assert "hold no records" not in str(error.value)
    for word in ("cannot be read to its end", "on_damaged_file: salvage"):
        assert word in str(error.value)


def test_a_wrong_checksum_is_not_salvaged(tmp_path, run):
    data = bytearray(WHOLE[".gz"])
    data[-8] ^= 1
    (tmp_path / "a.jsonl.gz").write_bytes(data)
    with pytest.raises(UserError, match="no document to train on"):
        preprocess(run("salvage"))


def test_a_large_window(tmp_path, run):
    (tmp_path / "a.jsonl.zst").write_bytes(zstd(b"".join(LINES), window_log=28))
    with pytest.raises(UserError) as error:
        preprocess(run("fail"))
    for word in ("268.4 MB", "134.2 MB", "--long", "data.preprocess.max_zstd_window"):
        assert word in str(error.value)
    preprocess(run("fail", max_zstd_window=2**28))
    assert documents(run("fail")) == len(LINES)


@pytest.mark.guard
def test_curation_compares_what_was_salvaged(tmp_path):
    """It reads documents that may be similar a second time; the same documents from a whole file are decided alike."""
    chance = random.Random(3)
    words = [[str(chance.randrange(10**6)) for _ in range(60)] for _ in range(80)]
    texts = [" ".join([*each, more]) for each in words for more in ("first", "second")]
    lines = [orjson.dumps({"text": text}, option=orjson.OPT_APPEND_NEWLINE) for text in texts]
    cut = gzip.compress(b"".join(lines))[:-9000]
    kept = subprocess.run(["gzip", "-dc"], input=cut, capture_output=True, check=False).stdout.count(b"\n")
    assert 40 < kept < len(lines)

    def decided(name, file, content):
        path = tmp_path / name / file
        path.parent.mkdir()
        path.write_bytes(content)
        source = {"name": "s", "type": "jsonl", "paths": [str(path)]}
        curation = {"duplicates": {"exact": None, "near": {"min_similarity": 0.7}}, "rules": {}}
        config = make_config(
            path.parent, [source], preprocess={"on_damaged_file": "salvage"}, curate=curation, dir=path.parent / "run"
        )
        (found,) = curate(config).sources
        assert why(config, "s", f"{path}:{kept}", text=True, say=print).text == texts[kept - 1]
        return found.kept, found.removed

    assert decided("cut", "a.jsonl.gz", cut) == decided("whole", "a.jsonl", b"".join(lines[:kept]))
