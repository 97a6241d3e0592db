"""Files that cannot be read to their end: whatever happens to a file, no document is lost or made up without a word."""

import bz2
import gzip
import io
import lzma
import os
import random
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from pipeline.common.console import Console
from pipeline.common.errors import UserError
from pipeline.data.datasets.open import open_datasets
from pipeline.data.preprocess import source_work
from pipeline.data.preprocess.source_settings import check_settings
from pipeline.data.preprocess.source_work import SourceWork
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.preprocess.status import print_status
from pipeline.data.preprocess.tokenize_unit import UnitJob
from pipeline.data.provenance.source_location import Origins
from pipeline.data.sources.formats import SOURCE_FORMATS
from pipeline.data.sources.globs import find_files
from pipeline.data.sources.jsonl import JsonlReader
from pipeline.data.sources.reader import UnitReader
from tests import tiers
from tests.data.reading import LINES, damage, files, read, units
from tests.data.runs import datasets, make_config, text
from tests.data.tokenization.test_tokenizer import byte_vocabulary, write


def _records(count=120, seed=3):
    chance = random.Random(seed)
    return [f"{number} " + text(chance, chance.randint(1, 30)) for number in range(count)]


def _lines(records):
    return b"".join(orjson.dumps({"text": record}, option=orjson.OPT_APPEND_NEWLINE) for record in records)


def _parquet(records):
    out = io.BytesIO()
    options = {"row_group_size": 30, "write_page_checksum": True, "data_page_size": 700}
    pq.write_table(pa.table({"text": records}), out, **options)
    return out.getvalue()


def _in_members(compress):
    """Four members, so that what lies before the damaged one can be kept."""

    def make(records):
        return b"".join(compress(_lines(records[start : start + 30])) for start in range(0, len(records), 30))

    return make


MAKE = {
    "a.jsonl.gz": _in_members(gzip.compress),
    "a.jsonl.zst": _in_members(zstandard.ZstdCompressor(write_checksum=True).compress),
    "a.jsonl.bz2": _in_members(bz2.compress),
    "a.jsonl.xz": _in_members(lzma.compress),
    "one.jsonl.gz": lambda records: gzip.compress(_lines(records)),
    "a.parquet": _parquet,
}


def _type(name):
    return "parquet" if name.endswith(".parquet") else "jsonl"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in ("a.jsonl.bz2", "a.jsonl.xz") else name for name in MAKE],
)
def test_whatever_happens_to_a_file_is_seen(tmp_path, name):
    """Cut or flipped at 50 random bytes each: either all documents are there and equal, or the file is said to be
    damaged and what is given of it are documents of it."""
    records = _records()
    sound = MAKE[name](records)
    chance = random.Random(name)
    reader = SOURCE_FORMATS[_type(name)]("text", "id")
    ends = [at for at in range(len(sound)) if name.startswith("a.jsonl") and _is_end(sound, at, records, MAKE[name])]
    for trial in range(100):
        at = chance.randrange(len(sound))
        if trial % 2:
            content = sound[:at]
        else:
            content = sound[:at] + bytes([sound[at] ^ (1 << chance.randrange(8))]) + sound[at + 1 :]
        path = tmp_path / name
        path.write_bytes(content)
        (unit,) = units(files(path, type=reader.type), reader)
        found = UnitReader(unit, reader)
        try:
            documents = [document.text for document in found if document.reason is None]
        except UserError:
            continue  # a column is gone, say
        assert set(documents) <= set(records), (trial, at)
        if not found.damage and at not in ends:
            assert documents == records, (trial, at)
        assert documents == [record for record in records if record in set(documents)], (trial, at)
    assert UnitReader(unit, reader).damage == []


def _is_end(sound, at, records, make):
    """Whether a file that is cut here is a whole file with fewer members, which nobody can tell."""
    return any(make(records[:count]) == sound[:at] for count in (30, 60, 90))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    return {"path": str(write(folder / "t.json", byte_vocabulary(), special=["<|endoftext|>"]))}


def _config(root, tokenizer, *names, type="jsonl", **settings):
    sources = [{"name": "s", "type": type, "paths": [str(root / name) for name in names]}]
    splits = settings.pop("splits", {"heldout": 0.2})
    return make_config(root, sources, tokenizer=tokenizer, splits=splits, preprocess={"unit_bytes": 2000, **settings})


def _corpus(root, **bad):
    """Three compressed files and a table; those named are cut in the middle."""
    root.mkdir(parents=True, exist_ok=True)
    made = {}
    for number, name in enumerate(("a.jsonl.gz", "b.jsonl.zst", "c.jsonl.xz")):
        made[name] = MAKE["a" + name[1:]](_records(120, number))
    for name, content in made.items():
        (root / name).write_bytes(content[: bad.get(name[0], len(content))])
    return made


def _report(config):
    return orjson.loads((config.data_dir / "s" / "report.json").read_bytes())


def test_a_damaged_file_fails_the_stage_unless_it_is_said_what_to_do(tmp_path, tokenizer, capsys):
    made = _corpus(tmp_path)
    half = len(made["b.jsonl.zst"]) // 2 - 7  # not where a member ends
    _corpus(tmp_path, b=half)
    config = _config(tmp_path, tokenizer, "*.jsonl.*")
    for _ in range(2):  # it is no other the second time
        with pytest.raises(UserError) as error:
            preprocess(config)
        shown = str(error.value)
        assert f"{tmp_path}/b.jsonl.zst: truncated zstd file" in shown
        assert "1 file cannot be read to its end" in shown and "on_damaged_file: keep" in shown
    assert not list(config.data_dir.rglob("manifest.json"))
    assert (
        f"b.jsonl.zst: truncated zstd file, {half - len(_members(2, 1))} B of 1.5 kB is lost" in capsys.readouterr().out
    )
    print_status(Console(quiet=False), config)
    assert "b.jsonl.zst: truncated zstd file" in " ".join(capsys.readouterr().out.split())
    keep = _config(tmp_path, tokenizer, "*.jsonl.*", on_damaged_file="keep")
    report = preprocess(keep)
    assert report.units_done == 0  # what was made is what is kept
    assert "unread" in capsys.readouterr().out
    assert (report.documents, report.rejected) == (120 + 30 + 120, {"s": {}})
    (line,) = map(orjson.loads, (config.data_dir / "s" / "damaged.jsonl").open("rb"))
    assert (line["file"], line["bytes"]) == (f"{tmp_path}/b.jsonl.zst", half)
    assert _report(keep)["damaged"] == {"files": 1, "bytes": line["lost"]}


def _members(count, seed):
    return MAKE["a.jsonl.zst"](_records(120, seed)[: 30 * (count - 1)])


@pytest.mark.slow
@pytest.mark.guard
@pytest.mark.parametrize("shuffle", [pytest.param("unit", marks=pytest.mark.slow), "global"])
def test_dropped_afterwards_or_from_the_start_is_the_same(tmp_path, tokenizer, shuffle):
    cut = len(_corpus(tmp_path)["b.jsonl.zst"]) - 5
    _corpus(tmp_path, b=cut)
    names = "a.jsonl.gz", "b.jsonl.zst", "c.jsonl.xz"

    def run(folder, how, *names):
        config = _config(tmp_path, tokenizer, *names, on_damaged_file=how, shuffle=shuffle)
        config = config.model_copy(update={"run": config.run.model_copy(update={"dir": tmp_path / folder})})
        return config, preprocess(config)

    kept, report = run("kept", "keep", *names)
    assert report.documents == 120 + 90 + 120
    before = datasets(kept)
    dropped, report = run("kept", "drop", *names)  # after a dataset was finished with it
    assert report.documents == 240
    fresh, report = run("fresh", "drop", *names)
    assert datasets(dropped) == datasets(fresh) != before
    assert _report(dropped) == _report(fresh)
    assert _report(fresh)["damaged"] == {"files": 1, "bytes": cut}
    without, _ = run("without", "fail", names[0], names[2])
    assert _tokens(without) == _tokens(fresh)
    back, _ = run("kept", "keep", *names)
    assert datasets(back) == before
    # Repaired, with the size it had: it is read again, and nothing else is.
    _corpus(tmp_path)
    (tmp_path / "b.jsonl.zst").write_bytes((tmp_path / "b.jsonl.zst").read_bytes()[:cut])
    assert run("kept", "keep", *names)[1].documents == 120 + 90 + 120


def _tokens(config):
    return sorted(path.stat().st_size for path in config.data_dir.glob("s/*/parts/**/*.bin") if path.stat().st_size)


@pytest.mark.guard
def test_a_repaired_file_of_the_same_size_is_read_again(tmp_path, tokenizer):
    made = _corpus(tmp_path)
    content = bytearray(made["a.jsonl.gz"])
    content[-7] ^= 8
    (tmp_path / "a.jsonl.gz").write_bytes(content)
    config = _config(tmp_path, tokenizer, "*.jsonl.*")
    with pytest.raises(UserError, match="damaged gzip file"):
        preprocess(config)
    (tmp_path / "a.jsonl.gz").write_bytes(made["a.jsonl.gz"])
    os.utime(tmp_path / "a.jsonl.gz", (1, 1))
    report = preprocess(config)
    assert report.documents == 360
    assert report.units_done > 0
    (tmp_path / "other").mkdir()
    _corpus(tmp_path / "other")
    fresh = _config(tmp_path / "other", tokenizer, "*.jsonl.*")
    preprocess(fresh)
    assert datasets(config) == datasets(fresh)


@pytest.mark.guard
def test_splits_of_a_number_of_documents_are_counted_without_dropped_files(tmp_path, tokenizer):
    made = _corpus(tmp_path)
    _corpus(tmp_path, b=len(made["b.jsonl.zst"]) // 2 - 7)
    config = _config(tmp_path, tokenizer, "*.jsonl.*", on_damaged_file="drop", splits={"heldout": "40 documents"})
    report = preprocess(config)
    assert {name: split.documents for name, split in report.sources[0].splits.items()} == {"train": 200, "heldout": 40}


def test_plain_damage_is_seen_before_anything_is_made(tmp_path, tokenizer, capsys):
    _corpus(tmp_path)
    (tmp_path / "empty.jsonl.gz").touch()
    (tmp_path / "plain.jsonl.zst").write_bytes(_lines(_records()))
    (tmp_path / "no.parquet").write_bytes(_parquet(_records())[:-100])
    config = _config(tmp_path, tokenizer, "*.jsonl.*")
    for dry_run in (True, False):
        with pytest.raises(UserError) as error:
            preprocess(config, dry_run=dry_run)
        assert "empty.jsonl.gz: truncated gzip file" in str(error.value)
        assert "plain.jsonl.zst: damaged zstd file" in str(error.value)
    with pytest.raises(UserError, match=r"no.parquet: damaged Parquet file, all of it is lost: it does not end"):
        preprocess(_config(tmp_path, tokenizer, "*.parquet", type="parquet"))
    assert not config.data_dir.exists()
    assert preprocess(_config(tmp_path, tokenizer, "*.jsonl.*", on_damaged_file="drop")).documents == 360


def test_a_table_with_a_damaged_row_group(tmp_path, tokenizer):
    content = bytearray(_parquet(_records()))
    chunk = pq.read_metadata(io.BytesIO(bytes(content))).row_group(2).column(0)
    begin = chunk.dictionary_page_offset or chunk.data_page_offset
    content[begin + chunk.total_compressed_size - 4] ^= 1
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(UserError, match="damaged Parquet file, .*row group 2, from row 60"):
        preprocess(_config(tmp_path, tokenizer, "a.parquet", type="parquet"))
    kept = preprocess(_config(tmp_path, tokenizer, "a.parquet", type="parquet", on_damaged_file="keep"))
    assert 90 <= kept.documents < 120
    config = _config(tmp_path, tokenizer, "a.parquet", type="parquet", on_damaged_file="drop")
    with pytest.raises(UserError, match="no document to train on"):
        preprocess(config)


@pytest.mark.guard
def test_a_file_that_ends_inside_of_a_record(tmp_path, tokenizer):
    whole = _lines(_records())
    for cut in (1, 5, 10):
        (tmp_path / "a.jsonl").write_bytes(whole[:-cut])
        config = _config(tmp_path, tokenizer, "a.jsonl")
        if cut == 1:  # the last line end alone
            assert preprocess(config).documents == 120
            continue
        config = config.model_copy(update={"run": config.run.model_copy(update={"dir": tmp_path / str(cut)})})
        with pytest.raises(UserError, match="truncated JSON lines file"):
            preprocess(config)


def test_where_documents_of_a_damaged_file_came_from(tmp_path, tokenizer):
    made = _corpus(tmp_path)
    _corpus(tmp_path, b=len(made["b.jsonl.zst"]) * 3 // 4 - 5)
    config = _config(tmp_path, tokenizer, "*.jsonl.*", on_damaged_file="keep")
    preprocess(config)
    origins = Origins(config.data_dir / "s")
    key = origins.find("b.jsonl.zst", 60)
    assert str(origins.places([key])[key]).endswith("b.jsonl.zst:60")


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".bz2", ".xz"])
def test_nothing_of_a_member_whose_checksum_does_not_hold(tmp_path, suffix):
    """Of 4 MB of text in one member, whose end is damaged, a reader could have had most."""
    records = _records(20_000)
    whole = _WHOLE[suffix](_lines(records))
    path = tmp_path / f"a.jsonl{suffix}"
    reader = JsonlReader("text", "id")
    path.write_bytes(whole)
    (unit,) = units(files(path, type="jsonl"), reader)
    assert sum(1 for _ in UnitReader(unit, reader)) == len(records)
    content = bytearray(whole)
    content[len(content) * 9 // 10] ^= 16
    path.write_bytes(content)
    found = UnitReader(unit, reader)
    assert list(found) == []
    assert [each.lost for each in found.damage] == [len(content)]


_WHOLE = {
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
    ".bz2": bz2.compress,
    ".xz": lambda data: lzma.compress(data, preset=0),
}


class TestLinksAndPipes:
    def test_what_a_glob_matches_is_no_file(self, tmp_path):
        (tmp_path / "sub").mkdir()
        (tmp_path / "sub/a.txt").write_text("a")
        (tmp_path / "gone.txt").symlink_to("nothing")
        (tmp_path / "loop.txt").symlink_to("loop.txt")
        os.mkfifo(tmp_path / "sub/pipe.txt")
        (tmp_path / "good.txt").symlink_to("sub/a.txt")
        with pytest.raises(UserError) as error:
            find_files([f"{tmp_path}/**/*.txt"], [], "data.sources.0")
        for said in (
            f"{tmp_path}/gone.txt is a link to nothing, which does not exist",
            f"{tmp_path}/loop.txt is a link that points to itself",
            f"{tmp_path}/sub/pipe.txt is not a file but a pipe",
            "data.sources.0.exclude",
        ):
            assert said in str(error.value)
        with pytest.raises(UserError, match="gone.txt is a link"):
            find_files([f"{tmp_path}/gone.txt"], [], "data.sources.0")
        left = ["gone.txt", "loop.txt", "pipe.txt"]
        found = find_files([f"{tmp_path}/**/*.txt"], left, "data.sources.0")
        assert [Path(file.path).name for file in found] == ["good.txt", "a.txt"]
        assert len(find_files([f"{tmp_path}/*/a.txt", f"{tmp_path}/good*"], [], "k")) == 2


@pytest.mark.parametrize(
    "last",
    [b'{"text": "caf\xe9"}', b'{"text": "a",}', b"{'text': 'a'}", b'{"text": "a"}{"text": "b"}', b'{"text": "a\tb"}'],
)
def test_a_bad_last_line_that_is_whole_is_a_bad_record(tmp_path, last):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + last)
    assert [document.reason is None for document in read(path, LINES)] == [True, False]
    assert damage(path, LINES) == []


@pytest.mark.parametrize(
    "whole", ['{"text": "漢 f() {}; x[0]", "n": 12.5}', '{"a": true, "text": "\\u00e9 }", "b": [{}]}']
)
def test_a_line_that_is_cut_anywhere_is_no_bad_record(tmp_path, whole):
    path = tmp_path / "a.jsonl"
    raw = whole.encode()
    for end in range(1, len(raw)):
        path.write_bytes(b'{"text": "good"}\n' + raw[:end])
        found = len(damage(path, LINES)), sum(document.reason is not None for document in read(path, LINES))
        assert found == (1, 0), raw[:end]


def test_a_long_line_of_code_that_is_cut(tmp_path):
    """Looked through once: a look for each of its quotes would take a quarter of an hour."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "' + b'f(x[0]) = \\"ab\\"; ' * 60_000)
    assert read(path, LINES) == []
    assert [each.lost for each in damage(path, LINES)] == [path.stat().st_size]


def test_lost_bytes_are_those_on_disk(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "good"}\n' * 50 + b'{"text": "' + b"x" * 850))
    (found,) = damage(path, LINES)
    assert 0 < found.lost < path.stat().st_size * 0.7


@pytest.mark.parametrize(
    "changes",
    tiers.first(
        2,
        [
            {"damaged": [{"piece": 0}]},
            {"damaged": None},
            {"damaged": [{"piece": -1, "reason": "", "detail": "", "lost": 1}]},
            {"records": "many"},
            {"rejected": {"x": -1}},
            {"splits": {"train": {"tokens": 1.5}}},
            {"start": [0, "x", 0, 0]},
            {"pieces": {"0": 3}},
            {"input": []},
        ],
        rest="slow",
    ),
)
def test_a_receipt_that_makes_no_sense_is_made_again(tmp_path, tokenizer, changes):
    _corpus(tmp_path)
    config = _config(tmp_path, tokenizer, "a.jsonl.gz")
    preprocess(config)
    path = next((config.data_dir / "s" / "receipts").rglob("*.json"))
    sound = path.read_bytes()
    path.write_bytes(orjson.dumps(orjson.loads(sound) | changes))
    assert preprocess(config).units_done == 1
    assert path.read_bytes() == sound


@pytest.mark.guard
def test_a_command_that_looked_before_another_one_dropped_leaves_its_parts(tmp_path, tokenizer, monkeypatch):
    made = _corpus(tmp_path)
    _corpus(tmp_path, b=len(made["b.jsonl.zst"]) // 2 - 7)
    config = _config(tmp_path, tokenizer, "*.jsonl.*", on_damaged_file="drop")
    assert preprocess(config).documents == 240
    before = datasets(config)
    # As this command saw it, before there was a receipt.
    monkeypatch.setattr(source_work, "without_damaged", lambda job, *_: job)
    monkeypatch.setattr(SourceWork, "is_outdated", False)
    monkeypatch.setattr(UnitJob, "is_done", lambda *_: False)
    preprocess(config, units=True)
    assert datasets(config) == before
    keep = _config(tmp_path, tokenizer, "*.jsonl.*", on_damaged_file="keep")
    with pytest.raises(UserError, match="another command has finished"):
        preprocess(keep, units=True)
    assert datasets(config) == before


def test_units_alone_are_made_again_without_dropped_files(tmp_path, tokenizer):
    made = _corpus(tmp_path)
    _corpus(tmp_path, b=len(made["b.jsonl.zst"]) // 2 - 7)
    config = _config(tmp_path, tokenizer, "*.jsonl.*", on_damaged_file="drop")
    preprocess(config, units=True)
    report = preprocess(config)
    assert (report.units_done, report.documents) == (0, 240)


def test_datasets_of_the_version_before_can_be_trained_on(tmp_path, tokenizer):
    """Their settings have these keys; one more among them would be another setting, which training refuses."""
    _corpus(tmp_path)
    config = _config(tmp_path, tokenizer, "*.jsonl.*")
    preprocess(config)
    (train,) = open_datasets(config, "train").values()
    before = "seed unit_bytes max_document_bytes on_long_document shuffle".split()
    own = {"name", "type", "metadata", "id_key", "text_key", "code_version", "tokenizer", "ends of splits"}
    assert train.manifest.settings.keys() == own | {
        "data.splits",
        "data.split_by",
        *(f"data.preprocess.{key}" for key in before),
    }
    other = _config(tmp_path, tokenizer, "*.jsonl.*", max_record_bytes=2**20)
    with pytest.raises(UserError, match=r"max_record_bytes: None then, 1MiB now"):
        check_settings(other, {"s": train.manifest})
    # The commit of a hub dataset is none of the run file, and so no difference, whatever the type is now.
    hub = {**train.manifest.settings, "type": "hub", "hub.revision": "5f0c"}
    with pytest.raises(UserError, match="type: 'hub' then, 'jsonl' now") as refused:
        check_settings(config, {"s": train.manifest.model_copy(update={"settings": hub})})
    assert "revision" not in str(refused.value)
