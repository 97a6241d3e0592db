"""Datasets through `datasets` streaming, offline: local builders and folders."""

import gzip
import os
import pickle
import subprocess
import sys

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"

from pipeline.common.errors import UserError
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.sources import hub_stream
from pipeline.data.sources.hub import HubReader
from pipeline.data.sources.hub_stream import hub_files
from pipeline.data.sources.reader import UnitReader
from pipeline.data.sources.records import Hub
from tests.data.reading import check_chain, check_resume, together, units
from tests.data.runs import make_config

ROWS = 70
"""More than are asked for at a time."""


@pytest.fixture(autouse=True)
def _fresh():
    """What is kept of one dataset must not answer for another of the same name."""
    hub_stream._builder.cache_clear()
    hub_stream._stream.cache_clear()


def records(shard):
    return [
        {"id": f"{shard}-{i}" if i % 3 else None, "text": f"text {shard} {i} é" * (i % 4), "url": f"u{i}", "n": i}
        for i in range(ROWS)
    ]


def write(folder, kind, shards=3):
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(shards):
        rows = records(shard)
        if kind == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), folder / f"{shard}.parquet", row_group_size=30)
        else:
            raw = b"".join(orjson.dumps(row) + b"\n" for row in rows)
            path = folder / f"{shard}.jsonl{'.gz' if kind == 'gz' else ''}"
            path.write_bytes(gzip.compress(raw) if kind == "gz" else raw)
    return folder


def the_hub(folder, kind):
    return Hub("json" if kind in ("jsonl", "gz") else kind, data_files=(f"{folder}/*.{kind}",))


def read_all(hub, *metadata, **keys):
    hub, found = hub_files(hub)
    reader = HubReader(keys.get("text", "text"), "id", metadata, hub=hub)
    return [d for unit in units(found, reader) for d in UnitReader(unit, reader)]


@pytest.mark.parametrize("kind", ["jsonl", "gz", "parquet"])
def test_shards_are_files(tmp_path, kind):
    folder = write(tmp_path / "d", kind)
    hub, found = hub_files(the_hub(folder, kind))
    assert hub.revision is None
    assert pickle.loads(pickle.dumps(hub)) == hub
    assert [file.name for file in found] == [f"default/train/{i:05d}-of-00003" for i in range(3)]
    stats = [path.stat() for path in sorted(folder.iterdir())]
    assert [(file.size, file.mtime_ns) for file in found] == [(stat.st_size, stat.st_mtime_ns) for stat in stats]
    reader = HubReader("text", "id", (), hub=hub)
    cut = units(found, reader)
    assert [len(unit.pieces) for unit in cut] == [1, 1, 1]
    assert all(unit.chunked for unit in cut)
    assert str(cut[1]).startswith(f"unit 1 of s ({folder}/1.")
    assert reader.expected_text_bytes(found[0]) == found[0].size * {"jsonl": 1, "gz": 4, "parquet": 3}[kind]
    for shard, unit in enumerate(cut):
        one = UnitReader(unit, reader)
        got = list(one)
        assert [d.text for d in got] == [row["text"] for row in records(shard)]
        assert [d.id for d in got] == [
            row["id"] or f"default/train/{shard:05d}-of-00003#{i}" for i, row in enumerate(records(shard))
        ]
        assert one.bytes_read == unit.bytes


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_resume_behind_every_record(tmp_path, kind):
    hub, found = hub_files(the_hub(write(tmp_path / "d", kind, 2), kind))
    reader = HubReader("text", "id", ("url", "n"), hub=hub)
    whole = together(*units(found, reader))
    documents = check_resume(whole, reader)
    assert len(documents) == 2 * ROWS
    assert [d.metadata for d in documents[:2]] == [b'{"n":0,"url":"u0"}', b'{"n":1,"url":"u1"}']
    check_chain(whole, reader, 50)


def test_a_local_folder_with_splits_is_read_and_its_code_is_not_run(tmp_path):
    folder = write(tmp_path / "corpus" / "data" / "train", "parquet").parent.parent
    (folder / "data" / "test").mkdir()
    pq.write_table(
        pa.table({"id": ["only"], "text": ["t"], "url": ["u"], "n": [1]}), folder / "data" / "test" / "x.parquet"
    )
    assert len(read_all(Hub(str(folder)))) == 3 * ROWS
    assert [d.id for d in read_all(Hub(str(folder), split="test"))] == ["only"]
    (folder / "corpus.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit\n")
    hub_stream._builder.cache_clear()
    hub_stream._stream.cache_clear()
    with pytest.raises(UserError, match="a script, and scripts are never run"):
        hub_files(Hub(str(folder)))
    assert not (tmp_path / "ran").exists()


def test_columns(tmp_path):
    hub, found = hub_files(the_hub(write(tmp_path / "d", "parquet"), "parquet"))
    for keys, said in (
        ({"text_key": "body"}, "no column 'body'; its columns are 'id', 'text', 'url', 'n'"),
        ({"text_key": "n"}, "column 'n' is of type int64"),
        ({"metadata": ("link",)}, "no column 'link'.*metadata"),
    ):
        reader = HubReader(**{"text_key": "text", "id_key": "id", "hub": hub, **keys})
        with pytest.raises(UserError, match=said):
            reader.check_columns(found)
    HubReader("text", "id", ("url",), hub=hub).check_columns(found)


def test_a_local_shard_that_changed(tmp_path):
    folder = write(tmp_path / "d", "jsonl")
    hub, found = hub_files(the_hub(folder, "jsonl"))
    reader = HubReader("text", "id", (), hub=hub)
    (folder / "1.jsonl").write_bytes(b'{"text": "other"}\n')
    unit = units(found, reader)[1]
    with pytest.raises(UserError, match=r"1\.jsonl changed while it was being read"):
        list(UnitReader(unit, reader))


def write_three(tmp_path, last):
    for shard, content in enumerate([b'{"text": "a", "n": 1}', b'{"text": "b", "n": 2}', last]):
        (tmp_path / f"{shard}.jsonl").write_bytes(content + b"\n")
    return the_hub(tmp_path, "jsonl")


@pytest.mark.parametrize("other", [b'{"text": "c", "n": {"x": 1}}', b'{"text": ["c"], "n": 1}'])
def test_a_shard_of_other_columns(tmp_path, other):
    with pytest.raises(UserError, match=r"2\.jsonl: its columns are not those of the other files"):
        read_all(write_three(tmp_path, other), "n")


def test_a_shard_without_the_column(tmp_path):
    assert [d.reason for d in read_all(write_three(tmp_path, b'{"n": 3}'))] == [None, None, "text is null"]


def test_a_damaged_shard(tmp_path):
    folder = write(tmp_path / "d", "gz")
    path = folder / "1.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-30])
    hub, found = hub_files(the_hub(folder, "gz"))
    reader = HubReader("text", "id", (), hub=hub)
    readers = [UnitReader(unit, reader) for unit in units(found, reader)]
    assert [len(list(each)) for each in readers] == [ROWS, 0, ROWS]
    assert [[damage.reason for damage in each.damage] for each in readers] == [[], ["truncated gzip file"], []]
    check_resume(together(*units(found[1:], reader)), reader)


@pytest.mark.parametrize(
    ("hub", "said"),
    [
        (Hub("no/such-dataset"), "'no/such-dataset'.*cannot reach the hub.*hf download"),
        (Hub("no/such-dataset", revision="a" * 40), "cannot reach the hub"),
        (Hub("json", data_files=("/no/such/*.jsonl",)), "hub.data_files"),
        (Hub("json"), "hub.data_files"),
    ],
)
def test_what_cannot_be_opened(hub, said):
    with pytest.raises(UserError, match=said):
        hub_files(hub)


def test_other_mistakes(tmp_path):
    folder = write(tmp_path / "d", "parquet")
    with pytest.raises(UserError, match="'vali'.*check hub.path, hub.name, hub.split"):
        hub_files(Hub(str(folder), split="vali"))
    with pytest.raises(UserError, match="hub.name"):
        hub_files(Hub(str(folder), name="english"))
    import datasets

    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "saved")
    with pytest.raises(UserError, match="type: arrow"):
        hub_files(Hub(str(tmp_path / "saved")))


def test_heavy_libraries_are_imported_by_those_who_need_them():
    heavy = "[m for m in ('pyarrow', 'datasets', 'zstandard') if m in sys.modules]"
    code = f"import sys, pipeline.data.sources.formats; print({heavy})"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out == "[]\n"


@pytest.mark.parametrize("kind", ["gz", "parquet"])
def test_the_dry_run_does_not_take_its_files_for_those_of_another_type(tmp_path, kind):
    """`datasets` decompresses files and reads tables by itself: here only the column is wrong."""
    if kind == "parquet":
        pq.write_table(pa.table({"text": pa.nulls(5, pa.string())}), tmp_path / "a.parquet")
    else:
        (tmp_path / "a.gz").write_bytes(gzip.compress(b'{"text": null}\n' * 5))
    files = the_hub(tmp_path, kind)
    source = {"name": "s", "type": "hub", "hub": {"path": files.path, "data_files": list(files.data_files)}}
    with pytest.raises(UserError) as error:
        preprocess(make_config(tmp_path / "out", [source]), dry_run=True)
    assert "5 text is null" in str(error.value)
    assert "data.sources.0.text_key (now 'text')" in str(error.value)
