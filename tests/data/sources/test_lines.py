"""Lines and text, plain and compressed, against a plain reading of the whole content."""

import bz2
import gzip
import json
import lzma
import random
import subprocess
import sys

import orjson
import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.sources import delimited, jsonl
from pipeline.data.sources.delimited import CsvReader
from pipeline.data.sources.jsonl import FEW_BLANKS, JsonlReader
from pipeline.data.sources.reader import UnitReader
from pipeline.data.sources.records import EMPTY, MAX_RECORD_BYTES, line_of
from pipeline.data.sources.text import TextReader
from tests import tiers
from tests.data.reading import LINES, check_chain, check_resume, damage, files, middle, read, together, units

TEXT = TextReader("text", "id")
COMPRESS = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    ".bz2": bz2.compress,
    ".xz": lambda data: lzma.compress(data, preset=0),
}
COMPRESSED = pytest.mark.parametrize("suffix", [".gz", ".zst", ".bz2", ".xz"])
ALL = pytest.mark.parametrize("suffix", COMPRESS)


def mixed_lines(count, seed=0):
    """Records, empty ones, bad ones and blank lines, with every line end."""
    chance = random.Random(seed)
    kinds = [
        *(lambda i: orjson.dumps({"id": f"r{i}", "text": "é" * chance.choice([1, 5, 300]), "url": f"u{i}"}),) * 4,
        lambda i: orjson.dumps({"text": f"no id {i}"}),
        lambda i: b'{"text": ""}',
        lambda i: b"nonsense",
        lambda i: b'{"text": null}',
        lambda i: b"",
        lambda i: b"  \t ",
    ]
    return [chance.choice(kinds)(i) + chance.choice([b"\n", b"\r\n"]) for i in range(count)]


def write(tmp_path, suffix, data, name="a.jsonl"):
    path = tmp_path / f"{name}{suffix}"
    path.write_bytes(COMPRESS[suffix](data))
    return path


@ALL
@pytest.mark.parametrize("seed", range(3))
def test_resume_behind_every_record(tmp_path, suffix, seed):
    """In units of one file and of several, with a byte order mark, and a last line without an end."""
    paths = [
        write(tmp_path, suffix, b"\xef\xbb\xbf" + b"".join(mixed_lines(15, seed)), "a"),
        write(tmp_path, suffix, b"", "b"),
        write(tmp_path, suffix, b"".join(mixed_lines(12, seed + 50)).rstrip(), "c"),
    ]
    found = files(*paths)
    for unit in units(found, LINES, 400):
        check_resume(unit, LINES)
    whole = together(*units(found, LINES, 300))
    documents = check_resume(whole, LINES)
    assert len(documents) > 15
    check_chain(whole, LINES, 4)


@pytest.mark.parametrize("seed", range(5))
def test_resume_in_the_middle_of_a_file(tmp_path, seed):
    raw = b"".join(mixed_lines(25, seed))
    unit = units(files(write(tmp_path, "", raw)), LINES)[0]
    chance = random.Random(seed)
    for _ in range(6):
        start, end = sorted(chance.sample(range(len(raw)), 2))
        check_resume(middle(unit, start, end), LINES)


@COMPRESSED
def test_compressed_is_as_plain(tmp_path, suffix):
    """Same rows, lines, bytes, reasons and hash; only the names differ."""
    raw = b"".join(mixed_lines(300))
    results = []
    for kind in ("", suffix):
        (unit,) = units(files(write(tmp_path, kind, raw)), LINES)
        reader = UnitReader(unit, LINES)
        documents = [(d.id.replace(suffix, ""), d.text, d.row, d.line, d.byte, d.reason) for d in reader]
        results.append((documents, reader.input_hash, reader.input_bytes, reader.pieces))
        assert reader.bytes_read == unit.bytes
        assert unit.chunked == (kind != "")
    assert results[0] == results[1]
    assert results[0][1:3] == (xxhash.xxh3_128_hexdigest(raw), len(raw))


def test_the_hash_of_a_link_is_that_of_its_bytes(tmp_path):
    raw = b"".join(mixed_lines(60, 3))
    (unit,) = units(files(write(tmp_path, ".gz", raw)), LINES)
    reader = UnitReader(unit, LINES)
    for document in reader:
        if document.row == 20:
            break
    end = reader.position[1]
    rest = UnitReader(unit, LINES, reader.position)
    list(rest)
    assert reader.input_hash == xxhash.xxh3_128_hexdigest(raw[:end])
    assert rest.input_hash == xxhash.xxh3_128_hexdigest(raw[end:])


@COMPRESSED
def test_a_compressed_file_is_never_cut(tmp_path, suffix):
    path = write(tmp_path, suffix, b"".join(mixed_lines(500)))
    (unit,) = units(files(path), LINES, 10)
    assert [(p.start, p.end) for p in unit.pieces] == [(0, path.stat().st_size)]


@COMPRESSED
@pytest.mark.parametrize("part", [0.4, 0.9])
def test_a_truncated_file(tmp_path, suffix, part):
    """The records of the members before the cut, and what is lost; a restart behind it yields nothing."""
    raw = [orjson.dumps({"text": random.Random(i).randbytes(150).hex()}) + b"\n" for i in range(900)]
    first = [write(tmp_path, suffix, b"".join(raw[at : at + 50])).read_bytes() for at in range(0, 900, 50)]
    path = write(tmp_path, suffix, b"")
    whole = b"".join(first)
    path.write_bytes(whole[: int(len(whole) * part)])
    good = read(path, LINES)
    (bad,) = damage(path, LINES)
    name = {".gz": "gzip", ".zst": "zstd", ".bz2": "bzip2", ".xz": "xz"}[suffix]
    assert bad.reason == f"truncated {name} file"
    assert len(good) % 50 == 0
    assert len(raw) * part - 60 < len(good) <= len(raw) * part * 1.1
    assert bad.lost == path.stat().st_size - sum(map(len, first[: len(good) // 50]))
    assert [d.text for d in good] == [json.loads(line)["text"] for line in raw[: len(good)]]
    assert f"{len(good)} lines before that are good" in bad.detail
    assert line_of(str(path), sum(map(len, raw[: len(good)]))) == len(good) + 1
    (unit,) = units(files(path), LINES)
    reader = UnitReader(unit, LINES)
    list(reader)
    assert reader.position == (1, -1, 0, len(good))
    assert list(UnitReader(unit, LINES, reader.position)) == []


@COMPRESSED
def test_resume_before_and_behind_a_cut(tmp_path, suffix):
    """The next file of the unit is read as if nothing had been."""
    cut = write(tmp_path, suffix, b"".join(mixed_lines(30)), "a")
    cut.write_bytes(cut.read_bytes()[:-5])
    (unit,) = units(files(cut, write(tmp_path, suffix, b"".join(mixed_lines(10, 1)), "b")), LINES)
    documents = check_resume(unit, LINES)
    assert {document.piece for document in documents} == {1}
    (bad,) = damage(cut, LINES)
    assert bad.reason.startswith("truncated")


@pytest.mark.first(4)
@COMPRESSED
def test_text_that_is_compressed(tmp_path, suffix):
    paths = [
        write(tmp_path, suffix, b"\xef\xbb\xbfone\r\n\x00", "a.txt"),
        write(tmp_path, suffix, b"", "b.txt"),
        write(tmp_path, suffix, b"bad \xff", "c.txt"),
        write(tmp_path, suffix, b"x" * (MAX_RECORD_BYTES + 1), "d.txt"),
        write(tmp_path, suffix, b"x" * 1000, "e.txt"),
        write(tmp_path, suffix, b"last", "f.txt"),
    ]
    paths[4].write_bytes(paths[4].read_bytes()[:-3])
    (unit,) = units(files(*paths), TEXT)
    got = check_resume(unit, TEXT)
    assert [(d.id, d.text) for d in got if d.reason is None] == [
        (f"a.txt{suffix}", "one\r\n\x00"),
        (f"f.txt{suffix}", "last"),
    ]
    assert [d.reason for d in got if d.reason] == [EMPTY, "not UTF-8", TEXT.too_long]
    assert [bad.reason.split()[0] for bad in damage(paths, TEXT)] == ["truncated"]


def test_metadata(tmp_path):
    raw = b"""
{"text": "a", "url": "u", "when": {"b": [1, null, 2.5], "a": "\\u00e9"}, "other": 1}
{"text": "b", "when": null}
{"text": "c"}
{"url": "rejected"}
{"text": "d", "when": %s}
""" % (b"[" * 900 + b"]" * 900)
    path = write(tmp_path, "", raw)
    got = read(path, JsonlReader("text", "id", ("when", "url", "when")))
    # What is nested deeper than can be written is null.
    assert [d.metadata for d in got] == [
        '{"url":"u","when":{"a":"é","b":[1,null,2.5]}}'.encode(),
        b'{"when":null}',
        b"{}",
        None,
        b'{"when":null}',
    ]
    assert {d.metadata for d in read(path, JsonlReader("text", "id"))} == {None}


def test_deep_nesting_and_keys_that_are_there_twice(tmp_path):
    deep = b"[" * 100_000 + b"]" * 100_000
    path = write(tmp_path, "", b'{"text": "a", "x": %s}\n{"text": "one", "id": "p", "id": "q", "text": "two"}\n' % deep)
    bad, good = read(path, LINES)
    assert (bad.reason, good.text, good.id) == ("invalid JSON", "two", "q")
    assert bad.detail


@pytest.mark.parametrize("suffix", tiers.first(1, [".zst", ".gz"], rest="guard"))
def test_a_line_that_is_a_bomb_takes_no_memory(tmp_path, suffix):
    """A line of 400 MB in a file of some kB is rejected, and the next one is read."""
    bomb = COMPRESS[suffix](b'{"text": "') + COMPRESS[suffix](b"x" * 20_000_000) * 20
    path = tmp_path / f"bomb.jsonl{suffix}"
    path.write_bytes(bomb + COMPRESS[suffix](b'"}\n{"text": "next"}\n'))
    code = """
import sys
from pipeline.data.sources.globs import find_files
from pipeline.data.sources.delimited import CsvReader
from pipeline.data.sources.jsonl import FEW_BLANKS, JsonlReader
from pipeline.data.sources.reader import UnitReader
from pipeline.data.sources.records import Unit
reader = JsonlReader("text", "id")
(pieces,) = reader.cut(find_files([sys.argv[1]], [], "k"), 2**30)
print([(d.reason, d.text, d.line) for d in UnitReader(Unit(0, "s", pieces), reader)])
print(next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
    run = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    documents, peak = run.stdout.splitlines()
    assert documents == "[('longer than data.preprocess.max_record_bytes (33554432)', '', 0), (None, 'next', 1)]"
    assert int(peak) < 180_000  # kB; Python and what is imported are 50 MB of it


_NAMES = st.sampled_from(["text", "other", "id", "url", "x"])
_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(st.characters(exclude_categories=()), max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=6,
)
_TEXTS = st.text(st.characters(exclude_categories=()), min_size=1)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(records=st.lists(st.lists(st.tuples(_NAMES, _VALUES) | st.tuples(st.just("text"), _TEXTS)), min_size=1))
def test_records_as_the_standard_library_reads_them(records, tmp_path_factory):
    """With what it takes and orjson does not: NaN, infinities, lone surrogates; and keys that are there twice."""
    lines = ["{" + ", ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in record) + "}" for record in records]
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_text("\n".join(lines) + "\n")
    found = read(path, LINES)
    assert len(found) == len(lines)
    for line, document in zip(lines, found, strict=True):
        text = json.loads(line).get("text")
        if not isinstance(text, str):
            assert document.reason in ("no key 'text'", "text is not a string")
        elif any("\ud800" <= c <= "\udfff" for c in text):
            assert (document.reason, document.text) == ("lone surrogate", "")
        else:
            assert (document.reason, document.text) == (None if text else EMPTY, text)
            assert set(json.loads(document.metadata)) == {"url"} & set(json.loads(line))
            document.id.encode()


@pytest.mark.parametrize(
    ("raw", "url"),
    [
        ('{"text": "a", "url": NaN}', None),
        ('{"text": "a", "url": [1, -Infinity]}', [1, None]),
        ('{"text": "a", "url": "u\\ud800"}', "u\\ud800"),
        ('{"text": "a", "url": "u", "x": 1e999}', "u"),
        ('{"text": "a", "url": "u", "x": %s}' % ("9" * 5000), "u"),
        ('{"text": "a", "url": 7, "x": [NaN, %s]}' % ("9" * 5000), 7),
    ],
)
def test_metadata_of_records_that_only_python_reads(tmp_path, raw, url):
    path = tmp_path / "a.jsonl"
    path.write_text(raw + "\n")
    (document,) = read(path, LINES)
    assert (document.reason, document.text, json.loads(document.metadata)) == (None, "a", {"url": url})


def test_ids_of_records_that_only_python_reads(tmp_path):
    """A number too large for 64 bits is no id, with a NaN beside it or without; of a string all is kept."""
    path = tmp_path / "a.jsonl"
    ids = ["12", "9" * 30, '"i\\udfff"']
    lines = [f'{{"text": "a", "id": {own}{nan}}}\n' for own in ids for nan in ("", ', "x": NaN')]
    path.write_text("".join(lines))
    starts = [sum(map(len, lines[:i])) for i in range(len(lines))]
    named = [f"a.jsonl@{starts[i]}" for i in (2, 3)]
    assert [d.id for d in read(path, LINES)] == ["12", "12", *named, "i\\udfff", "i\\udfff"]


@pytest.mark.parametrize(("depth", "reason"), [(400, None), (600, "invalid JSON"), (100_000, "invalid JSON")])
def test_nesting_of_records_that_only_python_reads(tmp_path, depth, reason):
    """The same for every version of Python. Brackets in strings do not count."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "' + "[" * 2000 + '\\"[", "x": ' + "[" * depth + "NaN" + "]" * depth + "}\n")
    (document,) = read(path, LINES)
    assert document.reason == reason
    assert "nested deeper than" in document.detail or reason is None


BLANKS = {"newlines": b"\n", "line ends": b"\r\n", "spaces": b" \t\v\n"}


@pytest.mark.parametrize("blank", BLANKS.values(), ids=BLANKS)
@pytest.mark.parametrize("suffix", ["", ".zst"])
@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_many_blank_lines_are_passed_over_together(tmp_path, monkeypatch, kind, suffix, blank):
    """16 kB of zstd can be 0.4 GiB of them. What is counted and hashed is what one line at a time would give."""
    if kind == "csv" and blank == BLANKS["spaces"]:
        return  # a field of spaces
    reader = LINES if kind == "jsonl" else CsvReader("text", "id", ("url",))
    record = b'{"text": "t", "id": "1", "url": "u"}' if kind == "jsonl" else b"t,1,u"
    head = b"" if kind == "jsonl" else blank * 9000 + b"text,id,url" + blank
    raw = head + blank * 200_000 + b"\n".join([record, b"", record, blank * 100_000 + record, blank * 3])
    (unit,) = units(files(write(tmp_path, suffix, raw, f"a.{kind}"), type=kind), reader)
    through, parts = UnitReader(unit, reader), []
    update = through.digest.update

    class Digest:
        def update(self, data):
            parts.append(len(data))
            update(data)

    monkeypatch.setattr(through, "digest", Digest())
    documents = list(through)
    assert [d.text for d in documents] == ["t"] * 3
    assert [d.line for d in documents] == [raw[: d.byte].count(b"\n") for d in documents]
    assert [raw[d.byte : d.byte + len(record)] for d in documents] == [record] * 3
    assert through.input_bytes == sum(parts) == len(raw)
    assert through.pieces == {0: (raw.count(b"\n"), 3)}
    assert len(parts) < 50 + 5 * FEW_BLANKS
    again = UnitReader(unit, reader)
    assert [d.byte for d in again] == [d.byte for d in documents]
    assert again.input_hash == xxhash.xxh3_128_hexdigest(raw)


def test_blank_lines_at_the_ends_of_pieces_and_ones_that_are_too_long(tmp_path):
    chance = random.Random(0)
    longest = 50
    reader = JsonlReader("text", "id", max_record_bytes=longest)
    for _ in range(20):
        lines = [b" " * chance.choice([0, 0, 0, 3, 48, 49, 50, 120]) + b"\n" for _ in range(60)]
        lines[chance.randrange(60)] = b'{"text": "t"}\n'
        raw = b"".join(lines)
        (unit,) = units(files(write(tmp_path, "", raw)), reader)
        documents = check_resume(unit, reader)
        assert [d.line for d in documents] == [
            number for number, line in enumerate(lines) if len(line) > longest or line.strip()
        ]
        starts = sorted(chance.sample(range(1, len(raw)), 5))
        parts = [middle(unit, *ends) for ends in zip([0, *starts], [*starts, len(raw)], strict=True)]
        found = [UnitReader(part, reader) for part in parts]
        assert [d.byte for each in found for d in each] == [d.byte for d in documents]
        assert sum(each.input_bytes for each in found) == len(raw)
        assert sum(each.pieces[0][0] for each in found) == len(lines)


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_damage_behind_many_blank_lines_is_where_it_is(tmp_path, monkeypatch, kind):
    reader = LINES if kind == "jsonl" else CsvReader("text", "id", ())
    record = b'{"text": "t", "id": "1"}\n' if kind == "jsonl" else b"t,1\n"
    head = b"" if kind == "jsonl" else b"text,id\n"
    whole, cut = gzip.compress(head + 3 * record + b"\n" * 100_000), gzip.compress(record * 1000)
    (tmp_path / f"a.{kind}.gz").write_bytes(whole + cut[: len(cut) // 2])
    found = []
    for few in (FEW_BLANKS, 10**9):
        for module in (jsonl, delimited):
            monkeypatch.setattr(module, "FEW_BLANKS", few)
        (unit,) = units(files(tmp_path / f"a.{kind}.gz", type=kind), reader)
        through = UnitReader(unit, reader)
        documents = [(document.byte, document.line, document.text) for document in through]
        found.append((documents, through.offset, through.line, [str(each) for each in through.damage]))
    assert found[0] == found[1]
