"""CSV and TSV against Python's csv, pandas and pyarrow: files that they have written, and strings that none would."""

import bz2
import csv
import gzip
import io
import json
import random

import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pytest
import zstandard

from pipeline.common.errors import UserError
from pipeline.config.data import SourceConfig
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.provenance.source_location import Origins
from pipeline.data.sources.delimited import CUT_FILE, CsvReader, TsvReader
from pipeline.data.sources.reader import UnitReader
from pipeline.data.sources.records import NOT_UTF8, line_of
from tests.data.reading import check_chain, check_resume, damage, files, read, units
from tests.data.runs import make_config, tree

CSV = CsvReader("text", "id", ("url",))
TSV = TsvReader("text", "id", ("url",))
LINES = TsvReader("text", "id", ("url",), quoting=False)
HARD = ["a", '"', '""', ",", "\t", "\n", "\r\n", "\n\n", " ", "é", "漢", "\0", ";", '",', '"\n', "x" * 40]


def _records(seed=0, count=60, pieces=HARD):
    chance = random.Random(seed)

    def some():
        return "".join(chance.choices(pieces, k=chance.randint(1, 8)))

    return [{"id": f"r{n}", "url": some(), "text": f"{n}" + some()} for n in range(count)]


def _python(records, delimiter=",", **options):
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, list(records[0]), delimiter=delimiter, **options)
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue().encode()


def _pandas(records, delimiter=",", **options):
    return pd.DataFrame(records).to_csv(None, sep=delimiter, index=False, **options).encode()


def _arrow(records, delimiter=","):
    out = io.BytesIO()
    pyarrow.csv.write_csv(pa.Table.from_pylist(records), out, pyarrow.csv.WriteOptions(delimiter=delimiter))
    return out.getvalue()


def _given(documents):
    return [{"id": d.id, "url": json.loads(d.metadata)["url"], "text": d.text} for d in documents]


def _write(tmp_path, content, name="a.csv"):
    path = tmp_path / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(("reader", "delimiter"), [(CSV, ","), (TSV, "\t")])
def test_what_others_write_is_read_as_they_meant_it(tmp_path, reader, delimiter):
    records = _records()
    made = {
        "python": _python(records, delimiter),
        "quoted": _python(records, delimiter, quoting=csv.QUOTE_ALL, lineterminator="\n"),
        "pandas": _pandas(records, delimiter),
        "marked": b"\xef\xbb\xbf" + _pandas(records, delimiter, quoting=csv.QUOTE_ALL),
        "arrow": _arrow(records, delimiter),
    }
    for name, content in made.items():
        path = _write(tmp_path, content, name)
        documents = read(path, reader)
        assert _given(documents) == records, name
        for document in documents:  # the place is where the record begins
            assert document.line == line_of(str(path), document.byte) - 1
        lines = content.decode("utf-8-sig").split("\n")
        assert all(lines[d.line].lstrip('"').startswith(d.id) for d in documents)


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, zstandard.compress])
def test_compressed_like_json_lines(tmp_path, pack):
    records = _records(1)
    content, suffix = _python(records), {gzip.compress: "gz", bz2.compress: "bz2"}.get(pack, "zst")
    path = _write(tmp_path, pack(content[:500]) + pack(content[500:]), f"a.csv.{suffix}")
    assert _given(read(path, CSV)) == records
    (unit,) = units(files(path, type="csv"), CSV)
    assert len(check_resume(unit, CSV)) == 60
    check_chain(unit, CSV, 7)


def test_a_reader_resumes_behind_every_record(tmp_path):
    records = _records(2)
    path = _write(tmp_path, b"\n\r\n" + _pandas(records).replace(b"\nr7,", b"\n\nr7,"))
    (unit,) = units(files(path, type="csv"), CSV, 100)
    assert _given(check_resume(unit, CSV)) == records
    check_chain(unit, CSV, 7)


def test_lines_without_quoting_are_cut_anywhere(tmp_path):
    """Whatever the size of the units, each record is in one of them."""
    records = _records(3, pieces=["a", '"', ",", " ", "é", "yyyyy"])
    content = b"\n\n" + b"\n".join(
        "\t".join(r.values()).encode() for r in [{"i": "id", "u": "url", "t": "text"}, *records]
    )
    path = _write(tmp_path, content, "a.tsv")
    for size in range(1, 400, 7):
        cut = units(files(path, type="tsv"), LINES, size)
        documents = [d for unit in cut for d in UnitReader(unit, LINES)]
        assert _given(documents) == records, size
    for unit in units(files(path, type="tsv"), LINES, 300):
        check_resume(unit, LINES)
        check_chain(unit, LINES, 3)


def test_any_bytes_are_read_as_python_reads_them(tmp_path):
    """Where this is stricter a record is rejected, and the others stay the same."""
    chance = random.Random(5)
    accepted = 0
    for trial in range(250):
        body = "".join(chance.choices(["a", "b", '"', '"', ",", ",", "\n", "\r\n", "é"], k=chance.randint(1, 24)))
        path = _write(tmp_path, f"id,url,text\n{body}\n".encode())
        reader = CsvReader("text", "id", ("url",))
        (unit,) = units(files(path, type="csv"), reader)
        found = UnitReader(unit, reader)
        documents = list(found)
        theirs = list(csv.reader(io.StringIO(f"{body}\n", newline="")))
        theirs = [row for row in theirs if row]
        if any(d.reason and d.reason.startswith("text behind") for d in documents):
            continue  # Python takes the quotes away and reads on
        if found.damage:
            assert theirs[-1][-1].endswith("\n") or not theirs[-1], trial
            theirs = theirs[:-1]
        assert len(documents) == len(theirs), (trial, body)
        for document, row in zip(documents, theirs, strict=True):
            if document.reason == "wrong number of fields":
                assert len(row) != 3
            else:
                assert [json.loads(document.metadata)["url"], document.text] == row[1:], (trial, body)
                assert document.id == (row[0] or f"a.csv@{document.byte}")
                accepted += 1
    assert accepted > 20


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'r1,u,"a"b', "text behind a closing quote"),
        (b"r1,u", "wrong number of fields"),
        (b"r1,u,a,b", "wrong number of fields"),
        (b"r1,u,\xff", NOT_UTF8),
        (b"r1,\xff,a", NOT_UTF8),
        (b"r1,u,a\rb", "carriage return outside of quotes"),
        (b"r1,u," + b"x" * 2000, "longer than data.preprocess.max_record_bytes (1024)"),
        (b'r1,u,"' + b"x\n" * 1000 + b'"', "longer than data.preprocess.max_record_bytes (1024)"),
        (b'r1,u,"' + b'x""' * 1000 + b'"', "longer than data.preprocess.max_record_bytes (1024)"),
        (b"r1,u,", "empty document"),
        (b"," * 1000, "wrong number of fields"),
        (b'"",' * 300, "wrong number of fields"),
    ],
)
def test_a_bad_record_is_rejected_alone(tmp_path, line, reason):
    path = _write(tmp_path, b"id,url,text\nr0,u,a\n" + line + b"\nr2,u,b\n")
    reader = CsvReader("text", "id", ("url",), max_record_bytes=1024)
    documents = read(path, reader)
    assert [(d.reason, d.row) for d in documents] == [(None, 0), (reason, 1), (None, 2)]
    assert (documents[1].line, documents[1].byte) == (2, 19)
    (unit,) = units(files(path, type="csv"), reader)
    assert reader.locate(unit.pieces[0], 3, 19) == f"{path}:3"
    check_resume(unit, reader)


@pytest.mark.parametrize("end", [b'r1,u,"a', b"r1,u", b'r1,"u\nv', b'r1,u,"a""'])
def test_a_file_that_ends_inside_of_a_record_is_damaged(tmp_path, end):
    path = _write(tmp_path, b"id,url,text\nr0,u,a\n" + end)
    assert [d.id for d in read(path, CSV)] == ["r0"]
    (lost,) = damage(path, CSV)
    assert (lost.reason, lost.lost) == (CUT_FILE, len(end))


def test_whatever_happens_to_a_compressed_file_is_seen(tmp_path):
    records = _records(7)
    content = _python(records)
    parts = [content[start : start + 700] for start in range(0, len(content), 700)]
    sound, ends = b"".join(map(gzip.compress, parts)), []
    for number in range(len(parts)):
        ends.append(len(b"".join(map(gzip.compress, parts[:number]))))
    chance = random.Random(1)
    for trial in range(60):
        at = chance.randrange(len(sound))
        flipped = sound[:at] + bytes([sound[at] ^ (1 << chance.randrange(8))]) + sound[at + 1 :]
        path = _write(tmp_path, sound[:at] if trial % 2 else flipped, "a.csv.gz")
        (unit,) = units(files(path, type="csv"), CSV)
        found = UnitReader(unit, CSV)
        given = _given(found)
        assert given == records[: len(given)], trial
        assert found.damage or given == records or at in ends, trial


class TestColumns:
    def test_from_the_run_file(self, tmp_path):
        path = _write(tmp_path, b"r0;u;a\nr1;u;b\n")
        reader = CsvReader("text", "id", ("url",), delimiter=";", columns=("id", "url", "text"))
        assert [d.text for d in read(path, reader)] == ["a", "b"]
        (unit,) = units(files(path, type="csv"), reader)
        check_resume(unit, reader)

    @pytest.mark.parametrize(
        ("header", "said"),
        [
            (b"id,url,body\n", "has no column 'text'; its columns are 'id', 'url', 'body': set text_key"),
            (b"id,text\n", "has no column 'url'"),
            (b"id,url,text,text\n", "several columns named 'text'"),
            (b"id;url;text\n", "its header has ';': set csv.delimiter"),
            ("id,url,text\n".encode("utf-16"), "UTF-16"),
            (b'"id,url\n', "its columns are none"),
            (b"id,url,text\r1,u,a\r\n", "the header of"),
            (b'id,url,text\r1,"u",a\r\n', "carriage return outside of quotes (lines end with LF or CR LF)"),
            (b'"id" ,url,text\n', "text behind a closing quote"),
        ],
    )
    def test_a_header_that_lacks_one(self, tmp_path, header, said):
        path = _write(tmp_path, header)
        for every in (False, True):
            with pytest.raises(UserError) as error:
                CSV.check_columns(files(path, type="csv"), every=every)
            assert said in str(error.value) and str(path) in str(error.value)

    def test_empty_files_hold_nothing(self, tmp_path):
        path, packed = _write(tmp_path, b""), _write(tmp_path, gzip.compress(b""), "b.csv.gz")
        CSV.check_columns(files(path, packed, type="csv"), every=True)
        assert read([path, packed], CSV) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"csv": {"delimiter": ";;"}}, "one ASCII character"),
        ({"csv": {"columns": ["a", "a"]}}, "different names"),
        ({"type": "jsonl", "csv": {"delimiter": ";"}}, "csv needs type: csv or tsv"),
    ],
)
def test_settings_that_make_no_sense(changes, said):
    with pytest.raises(ValueError, match=said):
        SourceConfig.model_validate({"name": "s", "type": "csv", "paths": ["a"], **changes})


@pytest.mark.guard
def test_through_the_stage_and_back_to_the_file(tmp_path):
    """Resumed in the middle of a file it makes the same, and every document leads to its line and back."""
    records = [r for r in _records(8, 150) if r["text"].strip()]
    path = _write(tmp_path, _python(records), "a.csv")
    config = make_config(tmp_path, [{"name": "s", "type": "csv", "paths": [str(path)], "metadata": ["url"]}], heldout=0)
    preprocess(config)
    folder = config.data_dir / "s"
    made = tree(folder)
    later = [name for name in made if "receipts/" in name and json.loads(made[name]).get("link", 0) > 0]
    assert later
    for name in later:
        (folder / name).unlink()
    preprocess(config)
    assert tree(folder) == made
    documents, origins = {d.row: d for d in read(path, CSV)}, Origins(folder)
    places = origins.places([(0, row) for row in documents], read=True)
    for row, document in documents.items():
        place = places[0, row]
        assert (place.file, place.number, place.id) == (str(path), document.line + 1, f"r{row}")
        assert origins.find(str(path), place.number) == (0, row)
