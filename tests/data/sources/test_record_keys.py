"""Keys that are not keys of the record itself: partitions of its file, written by pyarrow, and nested ones."""

from __future__ import annotations

import gzip
import json

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from pipeline.common.errors import UserError
from pipeline.config.data import InputConfig
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.sources.formats import SOURCE_FORMATS
from pipeline.data.sources.globs import find_files
from pipeline.data.sources.reader import UnitReader
from pipeline.data.sources.records import RecordKeys, partitions
from tests.data.reading import check_resume, files, together, units
from tests.data.runs import make_config

VALUES = ["de", "a/b c=d", "ü", None, "100%"]


def reader(kind, *metadata, text="text", id="id", **more):
    return SOURCE_FORMATS[kind](text, id, metadata, **more)


def partitioned(folder, form):
    """A dataset of pyarrow with a partition for each of `VALUES`, and rows by language."""
    rows = [{"id": f"{number}", "text": f"text {number}", "lang": lang} for number, lang in enumerate(VALUES * 3)]
    ds.write_dataset(
        pa.Table.from_pylist(rows),
        folder,
        format=form,
        partitioning=ds.partitioning(pa.schema([("lang", pa.string())]), flavor="hive"),
    )
    return {row["id"]: row["lang"] for row in rows}


def found(paths, how):
    """(id, metadata) of all records, in units and in one."""
    listed = find_files(paths, [], "data.sources.0")
    documents = [d for unit in units(listed, how, 10**9) for d in UnitReader(unit, how)]
    check_resume(together(*units(listed, how, 10**9)), how)
    assert all(d.reason is None for d in documents)
    return {d.id: json.loads(d.metadata) for d in documents}


@pytest.mark.parametrize(("kind", "form"), [("parquet", "parquet"), ("arrow", "ipc"), ("csv", "csv")])
def test_partitions_of_a_dataset_of_pyarrow(tmp_path, kind, form):
    langs = partitioned(tmp_path / "d", form)
    how = reader(kind, "lang")
    paths = [str(tmp_path / "d" / "**")]
    listed = find_files(paths, [], "data.sources.0")
    how.check_columns(listed, every=True)
    assert found(paths, how) == {id: {"lang": lang} for id, lang in langs.items()}


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz"])
def test_partitions_of_json_lines(tmp_path, kind):
    folder = tmp_path / "lang=de" / "year=2024" / "lang=fr"
    folder.mkdir(parents=True)
    lines = (
        b'{"id": "a", "text": "x"}\n{"id": "b", "text": "x", "lang": "it"}\n{"id": "c", "text": "x", "lang": null}\n'
    )
    lines += b'{"id": "d", "text": "x", "n": NaN}\n'
    path = folder / f"a=b.{kind}"
    path.write_bytes(gzip.compress(lines) if kind.endswith("gz") else lines)
    how = reader("jsonl", "lang", "year", "a")
    assert found([str(path)], how) == {
        "a": {"lang": "fr", "year": "2024"},
        "b": {"lang": "it", "year": "2024"},
        "c": {"lang": None, "year": "2024"},
        "d": {"lang": "fr", "year": "2024"},
    }


def test_a_column_of_the_file_wins(tmp_path):
    folder = tmp_path / "lang=de"
    folder.mkdir()
    pq.write_table(pa.table({"text": ["x"], "id": ["a"], "lang": ["it"]}), folder / "a.parquet")
    (folder / "a.csv").write_text("id,text,lang\na,x,it\n")
    for kind in ("parquet", "csv"):
        assert found([str(folder / f"a.{kind}")], reader(kind, "lang")) == {"a": {"lang": "it"}}


def test_partitions_of_texts_and_in_templates(tmp_path):
    folder = tmp_path / "lang=de"
    folder.mkdir()
    (folder / "a.txt").write_text("x")
    assert found([str(folder / "a.txt")], reader("text", "lang", "url")) == {"a.txt": {"lang": "de"}}
    (folder / "a.jsonl").write_text('{"id": "a", "text": "x"}\n')
    pq.write_table(pa.table({"text": ["x"], "id": ["a"]}), folder / "a.parquet")
    (folder / "a.csv").write_text("id,text\na,x\n")
    for kind in ("jsonl", "parquet", "csv"):
        source = InputConfig(name="s", type=kind, paths=["x"], text_template="{lang}: {text}")
        how = SOURCE_FORMATS[kind].from_config(source)
        (unit,) = units(files(folder / f"a.{kind}"), how)
        assert [d.text for d in UnitReader(unit, how)] == ["de: x"]


def test_a_partition_is_no_text_id_or_weight(tmp_path):
    folder = tmp_path / "text=x" / "id=1"
    folder.mkdir(parents=True)
    (folder / "a.jsonl").write_text("{}\n")
    (unit,) = units(files(folder / "a.jsonl"), reader("jsonl"))
    (document,) = UnitReader(unit, reader("jsonl"))
    assert document.reason == "no key 'text'"
    pq.write_table(pa.table({"id": ["a"]}), folder / "a.parquet")
    with pytest.raises(UserError, match="has no column 'text'"):
        reader("parquet").check_columns(files(folder / "a.parquet"))


def test_names_of_folders():
    assert partitions("/a=1/b%20c=d%3De/=x/e=/f=2") == {"a": "1", "b c": "d=e", "e": ""}
    assert not RecordKeys.of("/a=1/f", ["text", "b"], ["b"])


RECORDS = [
    {"doc": {"text": "one", "meta": {"id": "i1", "lang": "de"}}},
    {"doc": {"text": None, "meta": {"id": "i2", "lang": None}}},
    {"doc": None},
    {"doc": {"text": "", "meta": None}},
    {"doc": {"text": "five", "meta": {"id": None, "lang": "fr"}}},
]
KEYS = {"text": "doc.text", "id": "doc.meta.id"}


def nested_files(folder):
    """The same records in each format that nests."""
    table = pa.Table.from_pylist(RECORDS)
    (folder / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in RECORDS))
    pq.write_table(table, folder / "a.parquet", row_group_size=2)
    for name, opened in (("a.arrow", pa.ipc.new_file), ("b.arrow", pa.ipc.new_stream)):
        with opened(str(folder / name), table.schema) as writer:
            writer.write_table(table, max_chunksize=2)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow", "b.arrow"])
def test_nested_keys(tmp_path, name):
    nested_files(tmp_path)
    kind = name.partition(".")[2]
    how = reader(kind, "doc.meta.lang", **KEYS)
    how.check_columns(files(tmp_path / name))
    (unit,) = units(files(tmp_path / name), how, 10**9)
    documents = check_resume(unit, how)
    assert [d.text for d in documents] == ["one", "", "", "", "five"]
    assert [bool(d.reason) for d in documents] == [False, True, True, True, False]
    assert documents[3].reason == "empty document"
    assert documents[0].id == "i1" and json.loads(documents[0].metadata) == {"doc.meta.lang": "de"}
    assert documents[4].id.startswith(name) and json.loads(documents[4].metadata) == {"doc.meta.lang": "fr"}


def test_a_literal_key_with_a_dot_wins(tmp_path):
    table = pa.table({"doc.text": ["literal", None], "doc": [{"text": "nested"}, {"text": "nested"}]})
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in table.to_pylist()))
    for kind in ("parquet", "arrow", "jsonl"):
        how = reader(kind, text="doc.text")
        (unit,) = units(files(tmp_path / f"a.{kind}"), how)
        assert [(d.text, bool(d.reason)) for d in UnitReader(unit, how)] == [("literal", False), ("", True)]


def test_only_the_field_is_read(tmp_path):
    """All of the struct's other field is overwritten, which nobody sees who does not read it."""
    rows = 50
    docs = [{"other": f"{number} other" * 20, "text": f"text {number}"} for number in range(rows)]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"doc": docs}), path, write_page_checksum=True)
    group = pq.ParquetFile(path).metadata.row_group(0)
    (other,) = [group.column(n) for n in range(2) if group.column(n).path_in_schema == "doc.other"]
    begin = other.dictionary_page_offset or other.data_page_offset
    content = bytearray(path.read_bytes())
    content[begin : begin + other.total_compressed_size] = bytes(other.total_compressed_size)
    path.write_bytes(content)
    how = reader("parquet", text="doc.text")
    (unit,) = units(files(path), how, 10**9)
    assert [d.text for d in UnitReader(unit, how)] == [doc["text"] for doc in docs]


@pytest.mark.parametrize("key", ["doc.nothing", "doc.list.text", "doc.text.more"])
def test_a_field_that_is_not_there(tmp_path, key):
    pq.write_table(pa.table({"doc": [{"text": "x", "list": [{"text": "x"}]}]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=f"has no column '{key}'"):
        reader("parquet", text=key).check_columns(files(tmp_path / "a.parquet"))


def test_a_renamed_partition_above_the_names_of_files_is_another_source(tmp_path):
    def config(lang):
        source = {
            "name": "s",
            "type": "jsonl",
            "paths": [str(tmp_path / f"lang={lang}" / "*.jsonl")],
            "metadata": ["lang"],
        }
        return make_config(tmp_path, [source])

    (tmp_path / "lang=de").mkdir()
    lines = [json.dumps({"id": str(n), "text": f"some words of {n} " * 9}) for n in range(40)]
    (tmp_path / "lang=de" / "a.jsonl").write_text("\n".join(lines))
    preprocess(config("de"))
    preprocess(config("de"))
    (tmp_path / "lang=de").rename(tmp_path / "lang=fr")
    with pytest.raises(UserError, match="partitions"):
        preprocess(config("fr"))
