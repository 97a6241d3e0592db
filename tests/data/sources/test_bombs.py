"""Small files that would exhaust the machine: each is refused before it has taken much of anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.data.sources.globs import File
from pipeline.data.sources.parquet import ParquetReader
from pipeline.data.sources.reader import UnitReader
from pipeline.data.sources.records import Piece, Unit
from tests import bounded

pytestmark = pytest.mark.guard

_IMPORTS = """
from pipeline.data.sources import arrow_messages, parquet_groups
from pipeline.data.sources.formats import SOURCE_FORMATS
from pipeline.data.sources.globs import File
from pipeline.data.sources.reader import UnitReader
from pipeline.data.sources.records import Piece, Unit
"""
_READ = """
path, type, metadata, size, expansion = sys.argv[1:]
reader = SOURCE_FORMATS[type]("text", "id", tuple(metadata.split()), int(expansion))
for document in UnitReader(Unit(0, "bomb", (Piece(File("f", path, int(size), 0), 0, int(size), True),)), reader):
    assert not document.reason or "damaged" not in document.reason, document.detail
"""


def arguments(path: Path, metadata: str = "", expansion: int = 200) -> tuple[Any, ...]:
    return path, path.suffix[1:], metadata, path.stat().st_size, expansion


def refused(path: Path, metadata: str = "") -> str:
    assert path.stat().st_size < 500_000
    message = bounded.refused(_READ, _IMPORTS, *arguments(path, metadata))
    assert str(path) in message and "data.preprocess.max_expansion (200)" in message
    return message


def zeros(count: int) -> pa.Array:
    return pa.Array.from_buffers(pa.int8(), count, [None, pa.py_buffer(bytes(count))])


def repeated(count: int, value: Any) -> pa.Array:
    return pa.DictionaryArray.from_arrays(zeros(count), pa.array([value]))


def parquet(folder: Path, columns: dict[str, pa.Array], **options: Any) -> Path:
    path = folder / "bomb.parquet"
    table = pa.table(columns)
    options = {"compression": "zstd", "store_schema": False, "row_group_size": len(table)} | options
    pq.write_table(table, path, **options)
    return path


@pytest.mark.parametrize("store_schema", [False, True], ids=["text", "dictionary"])
def test_a_long_value_that_is_repeated(tmp_path: Path, store_schema: bool) -> None:
    path = parquet(tmp_path, {"text": repeated(3000, "x" * 2**20)}, store_schema=store_schema)
    assert "its rows make" in refused(path)


def test_many_short_rows(tmp_path: Path) -> None:
    assert "20,000,000 rows, which take" in refused(parquet(tmp_path, {"text": repeated(20_000_000, "some text")}))
    assert "rows, which take" in refused(parquet(tmp_path, {"text": pa.nulls(20_000_000, pa.string())}))


def test_a_page_that_is_one_run_of_zeros(tmp_path: Path) -> None:
    path = parquet(tmp_path, {"text": pa.array(["x" * 2**26])}, use_dictionary=False)
    assert "a page needs" in refused(path)


def test_values_that_are_beginnings_of_others(tmp_path: Path) -> None:
    columns = {"text": pa.array(["x" * 2**20] * 200)}
    path = parquet(tmp_path, columns, use_dictionary=False, column_encoding={"text": "DELTA_BYTE_ARRAY"})
    assert "its rows make" in refused(path)


def test_long_lists_in_metadata(tmp_path: Path) -> None:
    def lists(values: pa.Array) -> pa.Array:
        return pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)

    few = {"text": pa.array(["a"]), "tags": lists(repeated(3000, "x" * 2**20))}
    assert "lists and structs of one batch" in refused(parquet(tmp_path, few), "tags")
    many = {"text": pa.array(["a"]), "tags": lists(pa.nulls(20_000_000, pa.int64()))}
    assert "the lists of tags" in refused(parquet(tmp_path, many), "tags")


def arrow(folder: Path, columns: dict[str, pa.Array], **options: Any) -> Path:
    path = folder / "bomb.arrow"
    batch = pa.record_batch(columns)
    with (
        pa.OSFile(str(path), "wb") as file,
        pa.ipc.new_stream(file, batch.schema, options=pa.ipc.IpcWriteOptions(**options)) as out,
    ):
        out.write_batch(batch)
    return path


def test_arrow_files(tmp_path: Path) -> None:
    large = pa.array(["x" * 2**26])
    assert "a compressed batch needs" in refused(arrow(tmp_path, {"text": large}, compression="zstd"))
    assert "rows, which take" in refused(arrow(tmp_path, {"text": pa.nulls(2**28)}))
    path = arrow(tmp_path, {"text": repeated(3000, "x" * 2**20)}, compression="zstd")
    assert "its rows make" in refused(path)
    lists = pa.ListArray.from_arrays(pa.array([0, 2**26], pa.int32()), pa.nulls(2**26))
    path = arrow(tmp_path, {"text": pa.array(["a"]), "tags": lists})
    assert "lists and structs of one batch" in refused(path, "tags")


def test_views_of_the_same_bytes(tmp_path: Path) -> None:
    view = (2**18).to_bytes(4, "little") + b"xxxx" + bytes(8)
    shared = pa.py_buffer(b"x" * 2**18)
    column = pa.Array.from_buffers(pa.string_view(), 2000, [None, pa.py_buffer(view * 2000), shared])
    assert "its rows make" in refused(arrow(tmp_path, {"text": column}))
    path = arrow(tmp_path, {"text": pa.array(["a"] * 2000), "tags": column})
    assert "its rows make" in refused(path, "tags")


def test_text_that_repeats_is_still_read(tmp_path: Path) -> None:
    """Up to 64 MiB whatever the ratio, and above it where the user says so; in the memory of a batch."""
    text = "the same text in every row " * 40
    path = parquet(tmp_path, {"text": repeated(50_000, text), "id": pa.array(map(str, range(50_000)))})
    bounded.allowed(_READ, _IMPORTS, *arguments(path))
    path = parquet(tmp_path, {"text": repeated(150, "x" * 2**20)})
    assert "its rows make" in refused(path)
    bounded.allowed(_READ, _IMPORTS, *arguments(path, expansion=10**7))
    piece = Piece(File("f", str(path), path.stat().st_size, 0), 0, path.stat().st_size, True)
    reader = ParquetReader("text", "id", max_expansion=10**7)
    assert [len(each.text) for each in UnitReader(Unit(0, "s", (piece,)), reader)] == [2**20] * 150
