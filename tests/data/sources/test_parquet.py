"""Parquet and Arrow files against the rows that pyarrow was given."""

import datetime
import decimal
import json
import random
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.common.errors import UserError
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.sources.formats import SOURCE_FORMATS
from pipeline.data.sources.globs import find_files
from pipeline.data.sources.reader import UnitReader
from pipeline.data.sources.records import EMPTY, MAX_RECORD_BYTES, NULL_TEXT
from tests.data.reading import check_chain, check_resume, damage, files, middle, read, together, units
from tests.data.runs import make_config

KINDS = ("parquet", "stream", "file")
ALL = pytest.mark.parametrize("kind", KINDS)


def reader(kind, *metadata, text="text", id="id"):
    return SOURCE_FORMATS["parquet" if kind == "parquet" else "arrow"](text, id, metadata)


def write(path, kind, table, rows=7, **options):
    """A table in groups of `rows` rows."""
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=rows, **options)
        return path
    opened = (pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file)(str(path), table.schema, **options)
    with opened as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def some_table(count, seed=0):
    """Rows of all kinds: null, empty, not UTF-8, without an id."""
    chance = random.Random(seed)
    texts = [chance.choice([f"text é {i} " * chance.choice([1, 3, 50]), "", None, "漢"]) for i in range(count)]
    raw = [None if t is None else b"bad \xff" if chance.random() < 0.1 else t.encode() for t in texts]
    ids = [chance.choice([f"r{i}", None, ""]) for i in range(count)]
    return pa.table({"n": list(range(count)), "text": pa.array(raw, pa.binary()), "id": ids, "url": ids})


def expected(table, name):
    """(id, text, reason, row) as a loop over the rows says it."""
    result = []
    for row, record in enumerate(table.to_pylist()):
        text, reason = "", None
        if record["text"] is None:
            reason = "text is null"
        else:
            try:
                text = record["text"].decode()
                reason = None if text else EMPTY
            except UnicodeDecodeError:
                reason = "not UTF-8"
        sound = reason in (None, EMPTY)
        result.append(((record["id"] or f"{name}#{row}") if sound else "", text, reason, row))
    return result


@ALL
@pytest.mark.parametrize("seed", range(3))
def test_all_rows_in_units_of_any_size(tmp_path, kind, seed):
    table = some_table(random.Random(seed).choice([0, 1, 40, 95]), seed)
    path = write(tmp_path / "a.x", kind, table)
    for size in (64, 700, 5000, 10**9):
        found = units(files(path), reader(kind), size)
        readers = [UnitReader(unit, reader(kind)) for unit in found]
        got = [d for r in readers for d in r]
        assert [(d.id, d.text, d.reason, d.byte) for d in got] == expected(table, "a.x")
        assert [d.line for d in got] == [None] * len(got)
        assert sum(r.bytes_read for r in readers) == path.stat().st_size
        assert all(unit.chunked for unit in found)
        assert len(found) > 1 or size > 700 or len(table) < 2


@pytest.mark.first(2)
@ALL
@pytest.mark.parametrize("seed", range(2))
def test_resume_behind_every_record(tmp_path, kind, seed):
    paths = [write(tmp_path / f"{i}.x", kind, some_table(n, seed + i), 5) for i, n in enumerate([17, 0, 12])]
    how = reader(kind, "url", "n")
    found = files(*paths)
    for unit in units(found, how, 900):
        check_resume(unit, how)
    whole = together(*units(found, how, 900))
    assert len(check_resume(whole, how)) == 29
    check_chain(whole, how, 4)
    (one,) = units(found[:1], how)
    size = found[0].size
    for start, end in ((0, size // 2), (size // 3, size // 2), (size // 2, size)):
        check_resume(middle(one, start, end), how)


@ALL
def test_the_hash_is_of_the_rows_and_not_of_the_file(tmp_path, kind):
    table = some_table(40)
    hashes = set()
    for rows in (3, 40):
        (unit,) = units(files(write(tmp_path / f"{rows}.x", kind, table, rows)), reader(kind, "n"))
        found = UnitReader(unit, reader(kind, "n"))
        list(found)
        hashes.add(found.input_hash)
    assert len(hashes) == 1
    other = table.set_column(0, "n", [[7, *range(1, 40)]])
    (unit,) = units(files(write(tmp_path / "other.x", kind, other)), reader(kind, "n"))
    found = UnitReader(unit, reader(kind, "n"))
    list(found)
    assert found.input_hash not in hashes


TYPES = {
    "string": pa.string(),
    "large_string": pa.large_string(),
    "string_view": pa.string_view(),
    "binary": pa.binary(),
    "large_binary": pa.large_binary(),
    "dictionary": pa.dictionary(pa.int32(), pa.string()),
    "json": pa.json_(),
}


@ALL
@pytest.mark.parametrize("type", TYPES)
def test_columns_that_hold_text(tmp_path, kind, type):
    values = ["one", None, "zwei é", "", "one"] * 4
    column = pa.array(values).dictionary_encode() if type == "dictionary" else None
    if type == "json":
        values = ['{"a": 1}', None, "[]", "", "1"] * 4
        column = pa.ExtensionArray.from_storage(pa.json_(), pa.array(values))
    if column is None:
        column = pa.array([v.encode() if v and "binary" in type else v for v in values], TYPES[type])
    table = pa.table({"text": column, "id": pa.array(range(20))})
    path = write(tmp_path / "a.x", kind, table, 6)
    how = reader(kind)
    found = units(files(path), how, 400)
    got = [d for unit in found for d in UnitReader(unit, how)]
    assert [d.text for d in got] == [v or "" for v in values]
    assert [d.id for d in got] == [str(i) if values[i] is not None else "" for i in range(20)]
    assert {d.reason for d in got} == {None, EMPTY, "text is null"}
    check_resume(together(*found), how)


@ALL
def test_a_column_of_nulls_and_a_file_of_no_rows(tmp_path, kind):
    path = write(tmp_path / "a.x", kind, pa.table({"text": pa.nulls(3)}))
    assert [d.reason for d in read(path, reader(kind))] == ["text is null"] * 3
    none = write(tmp_path / "b.x", kind, pa.table({"text": pa.array([], pa.string())}))
    assert read(none, reader(kind)) == []


@ALL
def test_ids(tmp_path, kind):
    for column, ids in (
        (pa.array([7, None]), ["7", "a.x#1"]),
        (pa.array(["x", ""]), ["x", "a.x#1"]),
        (pa.array([2**64 - 1, 0], pa.uint64()), [str(2**64 - 1), "0"]),
        (pa.array([1.5, 2.0]), ["a.x#0", "a.x#1"]),
        (pa.array([True, False]), ["a.x#0", "a.x#1"]),
    ):
        path = write(tmp_path / "a.x", kind, pa.table({"text": ["a", "b"], "key": column}))
        assert [d.id for d in read(path, reader(kind, id="key"))] == ids
        assert [d.id for d in read(path, reader(kind))] == ["a.x#0", "a.x#1"]


@ALL
def test_metadata(tmp_path, kind):
    columns = {
        "text": ["a", None],
        "score": [0.5, float("nan")],
        "when": [datetime.datetime(2024, 5, 6, 7, 8, 9), None],
        "nano": pa.array([1234567890123456789, None], pa.timestamp("ns")),
        "day": [datetime.date(2024, 5, 6), None],
        "price": [decimal.Decimal("1.50"), None],
        "raw": [b"ab\xff", None],
        "tags": [["x", "y"], []],
        "meta": [{"b": 1, "a": None}, None],
        "a.b": ["dot", None],
    }
    path = write(tmp_path / "a.x", kind, pa.table(columns))
    names = [name for name in columns if name != "text"]
    first, second = read(path, reader(kind, *names))
    kept = json.loads(first.metadata)
    assert kept.pop("nano").startswith("2009-02-13")
    assert kept == {
        "score": 0.5,
        "when": "2024-05-06T07:08:09",
        "day": "2024-05-06",
        "price": "1.50",
        "raw": "ab\\xff",
        "tags": ["x", "y"],
        "meta": {"a": None, "b": 1},
        "a.b": "dot",
    }
    assert (second.reason, second.metadata) == ("text is null", None)
    nan = pa.table({"text": ["a"], "score": [float("nan")]})
    (document,) = read(write(tmp_path / "b.x", kind, nan), reader(kind, "score", "score"))
    assert document.metadata == b'{"score":null}'


@ALL
def test_too_long_a_value(tmp_path, kind):
    table = pa.table({"text": ["before", "x" * (MAX_RECORD_BYTES + 1), "after"]})
    path = write(tmp_path / "a.x", kind, table)
    assert [(d.text, d.reason) for d in read(path, reader(kind))] == [
        ("before", None),
        ("", reader(kind).too_long),
        ("after", None),
    ]


@ALL
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"text": "body"}, "has no column 'body'; its columns are 'text', 'n', 'list', 'twice', 'twice': set text_key"),
        ({"text": "n"}, "column 'n' is of type int64, not text"),
        ({"text": "list"}, "column 'list' is of type list<.*>, not text"),
        ({"text": "twice"}, "several columns named 'twice'"),
        ({"metadata": ("n", "link")}, "no column 'link'.*set metadata"),
    ],
)
def test_wrong_columns(tmp_path, kind, how, said):
    table = pa.Table.from_arrays(
        [pa.array(["a"]), pa.array([1]), pa.array([["a"]]), pa.array([1]), pa.array([2])],
        names=["text", "n", "list", "twice", "twice"],
    )
    path = write(tmp_path / "a.x", kind, table)
    asked = reader(kind, *how.get("metadata", ()), text=how.get("text", "text"))
    for action in (lambda: asked.check_columns(files(path)), lambda: read(path, asked)):
        with pytest.raises(UserError, match=said) as error:
            action()
        assert str(path) in str(error.value)


@ALL
def test_columns_are_looked_for_in_the_first_sound_file(tmp_path, kind):
    (tmp_path / "a.x").write_bytes(b"nonsense")
    write(tmp_path / "b.x", kind, pa.table({"body": ["a"]}))
    with pytest.raises(UserError, match=r"b\.x has no column 'text'"):
        reader(kind).check_columns(files(tmp_path / "*"))
    reader(kind).check_columns(files(tmp_path / "a.x"))


@pytest.mark.parametrize("content", [b"", b"PAR1", b"nonsense" * 100, None, "cut"])
def test_a_parquet_file_without_a_footer(tmp_path, content):
    path = write(tmp_path / "a.parquet", "parquet", some_table(50))
    whole = path.read_bytes()
    path.write_bytes(whole[:-20] if content is None else whole[: len(whole) // 2] if content == "cut" else content)
    for size in (100, 10**9):  # once, however many pieces there are
        assert read(path, reader("parquet"), size) == []
        (bad,) = damage(path, reader("parquet"), size)
        assert (bad.reason, bad.lost) == ("damaged Parquet file", path.stat().st_size)
        assert bad.detail
    good = write(tmp_path / "b.parquet", "parquet", pa.table({"text": ["good"]}))
    (unit,) = units(files(path, good), reader("parquet"))
    assert [d.text for d in check_resume(unit, reader("parquet"))] == ["good"]


@pytest.mark.parametrize("options", [{"compression": "snappy"}, {"compression": "none", "write_page_checksum": True}])
def test_a_damaged_row_group(tmp_path, options):
    """The row groups around it are read, and so are the pages before the damage."""
    table = pa.table({"text": [random.Random(i).randbytes(400).hex() for i in range(60)]})
    path = write(tmp_path / "a.parquet", "parquet", table, 20, use_dictionary=False, **options)
    chunk = pq.read_metadata(path).row_group(1).column(0)
    content = bytearray(path.read_bytes())
    at = chunk.data_page_offset + chunk.total_compressed_size // 2
    content[at : at + 600] = b"\xff" * 600
    path.write_bytes(content)
    how = reader("parquet")
    (unit,) = units(files(path), how)
    got = check_resume(unit, how)
    (bad,) = damage(path, how)
    assert (bad.reason, bad.lost) == ("damaged Parquet file", chunk.total_compressed_size)
    assert bad.detail.startswith("row group 1, from row 20 of the file on: ")
    assert [d.text for d in got] == table["text"].to_pylist()[:20] + table["text"].to_pylist()[40:]
    assert [d.id for d in got] == [f"a.parquet#{i}" for i in (*range(20), *range(40, 60))]


@pytest.mark.parametrize("seed", range(60))
@ALL
def test_random_damage_never_ends_the_process(tmp_path, kind, seed):
    """Whatever is overwritten: an error for the user or records, good and rejected, and the same on every reading."""
    chance = random.Random(seed)
    table = some_table(60, seed).drop_columns(["url"])
    table = table.append_column("tags", pa.array([["x", str(i)] for i in range(60)]))
    table = table.append_column("kind", pa.array([str(i % 3) for i in range(60)]).dictionary_encode())
    path = write(tmp_path / "a.x", kind, table, 20)
    content = bytearray(path.read_bytes())
    for _ in range(chance.choice([1, 5, 20])):
        at = chance.randrange(len(content))
        content[at : at + 8] = chance.randbytes(min(8, len(content) - at))
    path.write_bytes(content)
    how = reader(kind, "tags", "kind")
    try:
        how.check_columns(files(path))
        first = read(path, how)
    except UserError as error:
        assert str(path) in str(error)
        return
    assert first == read(path, how)


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_an_arrow_file_that_is_cut(tmp_path, kind):
    table = some_table(50)
    path = write(tmp_path / "a.arrow", kind, table, 10)
    whole = path.read_bytes()
    seen = set()
    for end in range(0, len(whole), 97):
        path.write_bytes(whole[:end])
        got = read(path, reader(kind))
        rest = [(d.id, d.text, d.reason, d.byte) for d in got]
        bad, good = damage(path, reader(kind)), len(rest)
        assert rest == expected(table, "a.arrow")[:good]
        assert good % 10 == 0
        if bad:
            seen |= {each.reason for each in bad}
            assert damage(path, reader(kind), 500)[-1].reason == bad[0].reason
        else:
            assert good == 50
    assert seen == {"truncated Arrow file", "damaged Arrow file"} or kind == "stream"


@pytest.mark.parametrize("kind", ["stream", "file"])
@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_arrow_with_dictionaries_and_compression(tmp_path, kind, compression):
    """A dictionary lies before the batches of all pieces; the other columns are of no concern."""
    texts = [f"text {i % 3}" for i in range(50)]
    column = pa.array(texts).dictionary_encode()
    table = pa.table({"other": column, "text": column, "n": range(50), "list": [[i] for i in range(50)]})
    options = pa.ipc.IpcWriteOptions(compression=compression)
    path = write(tmp_path / "a.arrow", kind, table, 10, options=options)
    how = reader(kind, "n")
    found = units(files(path), how, 600)
    assert len(found) > 3
    got = [d for unit in found for d in UnitReader(unit, how)]
    assert [d.text for d in got] == texts
    assert [d.metadata for d in got] == [b'{"n":%d}' % i for i in range(50)]
    check_resume(together(*found), how)


def test_a_dataset_saved_to_disk(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    dataset = datasets.Dataset.from_dict({"text": [f"t{i}" for i in range(30)], "id": list(range(30))})
    chosen = dataset.select([4, 3, 2, 9, 11])
    dataset.save_to_disk(tmp_path / "one", num_shards=3)
    chosen.save_to_disk(tmp_path / "chosen")
    datasets.DatasetDict({"train": dataset, "test": chosen}).save_to_disk(tmp_path / "two")
    how = reader("stream")
    assert [file.name for file in files(tmp_path / "one", type="arrow")] == [
        f"data-{i:05d}-of-00003.arrow" for i in range(3)
    ]
    assert [d.text for d in read(tmp_path / "one", how)] == [f"t{i}" for i in range(30)]
    assert [d.id for d in read(tmp_path / "chosen", how)] == ["4", "3", "2", "9", "11"]
    assert [d.text for d in read(tmp_path / "two" / "test", how)] == ["t4", "t3", "t2", "t9", "t11"]
    with pytest.raises(UserError, match=r"holds the splits \['train', 'test'\]; give the folder of one: .*two/train"):
        files(tmp_path / "two", type="arrow")
    with pytest.raises(UserError, match="set type: arrow"):
        files(tmp_path / "one")
    state = json.loads((tmp_path / "one" / "state.json").read_text())
    (tmp_path / "one" / "state.json").write_text(json.dumps(state | {"_indices_files": [{"filename": "i.arrow"}]}))
    with pytest.raises(UserError, match="indices mapping.*flatten_indices"):
        files(tmp_path / "one", type="arrow")
    (tmp_path / "one" / "state.json").write_text("{")
    with pytest.raises(UserError, match="damaged"):
        files(tmp_path / "one", type="arrow")
    (tmp_path / "chosen" / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(UserError, match="lacks its file"):
        files(tmp_path / "chosen", type="arrow")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no state.json.*\*\.arrow"):
        files(tmp_path / "empty", type="arrow")
    assert find_files([f"{tmp_path}/one/*.arrow"], [], "k") == files(f"{tmp_path}/one/*.arrow", type="arrow")


@pytest.mark.guard
@ALL
def test_memory_is_that_of_a_batch(tmp_path, kind):
    """One row group of 300 MB: the process takes little more than pyarrow itself does."""
    text = "".join(random.Random(1).choices("abcdefgh ", k=30_000))
    table = pa.table({"text": pa.array([f"{i}{text}" for i in range(10_000)]), "other": [text[:500]] * 10_000})
    path = write(tmp_path / "a.x", kind, table, 10_000)
    del table
    code = """
import sys
from pipeline.data.sources.formats import SOURCE_FORMATS
from pipeline.data.sources.reader import UnitReader
from pipeline.data.sources.records import Unit
reader, files = SOURCE_FORMATS[sys.argv[2]]("text", "id").find([sys.argv[1]], [], "k", dict)
(pieces,) = reader.cut(files, 2**40)
print(sum(len(d.text) for d in UnitReader(Unit(0, "s", pieces), reader)))
print(next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
    run = subprocess.run(
        [sys.executable, "-c", code, path, reader(kind).type], capture_output=True, text=True, check=True
    )
    size, peak = map(int, run.stdout.split())
    assert size == 10_000 * 30_000 + sum(len(str(i)) for i in range(10_000))
    assert peak < 260_000  # kB; 110 MB of it are libraries


def test_rows_without_a_text_are_empty_and_not_bad(tmp_path):
    pq.write_table(pa.table({"text": ["one two three", None, "", "four five six"] * 3}), tmp_path / "a.parquet")
    config = make_config(tmp_path, [{"name": "s", "type": "parquet", "paths": [f"{tmp_path}/a.parquet"]}], heldout=0)
    preprocess(config)  # max_error_rate is 0
    report = json.loads((config.data_dir / "s" / "report.json").read_bytes())
    assert report["rejected"] == {NULL_TEXT: 3, EMPTY: 3}
