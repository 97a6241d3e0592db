"""Sources of which so many records are bad that the rest of their files cannot change what is said of them."""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zstandard

from pipeline.common.errors import UserError
from pipeline.data.sources.jsonl import JsonlReader
from pipeline.data.work.units import CHUNK_RECORDS, find_source_files
from tests.data.reading import files, read
from tests.data.runs import make_config

LINES = JsonlReader("text", "id")
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


def write(folder: Path, data: bytes, name: str = "a.jsonl") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def test_one_more_than_there_may_be_ends_the_reading(tmp_path: Path) -> None:
    good, bad, empty = b'{"text": "a"}\n', b"{}\n", b'{"text": ""}\n'
    path = write(tmp_path, good + bad * 3 + empty * 9 + b"nonsense\n" * 2)
    assert len(read(path, replace(LINES, most_bad=5))) == 15
    with pytest.raises(
        UserError, match=r"a\.jsonl: byte 149: so far 5 records of a unit of source 's' are bad"
    ) as error:
        read(path, replace(LINES, most_bad=4))
    assert "invalid JSON" in str(error.value) and "max_error_rate" in str(error.value)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_no_file_has_more_good_records_than_its_size_says(tmp_path: Path, suffix: str) -> None:
    count = 2**17
    path = write(tmp_path, COMPRESS[suffix](b'{"text":""}\n' * count), f"a.jsonl{suffix}")
    (file,) = files(path, type="jsonl")
    assert LINES.most_records(file) >= count
    assert suffix or LINES.most_records(file) == count + 1


def most_bad(folder: Path, path: Path, type: str = "jsonl", **settings: Any) -> int | None:
    (found,) = find_source_files(
        make_config(folder, [{"name": "s", "type": type, "paths": [str(path)]}], preprocess=settings)
    )
    return found.reader.most_bad


def test_how_many_may_be_bad(tmp_path: Path) -> None:
    path = write(tmp_path, b'{"text": "a"}\n')
    assert most_bad(tmp_path, path) == most_bad(tmp_path, path, on_error="fail") == CHUNK_RECORDS
    assert most_bad(tmp_path, path, max_error_rate=1) is None
    assert most_bad(tmp_path, path, on_damaged_file="drop") is None
    with path.open("r+b") as file:
        file.truncate(12 * 2**31)
    # Of so many good ones and a tenth as many bad ones, not more than an eleventh is bad.
    assert abs((most_bad(tmp_path, path, max_error_rate=1 / 11) or 0) - 2**31 // 10) < 3
    assert most_bad(tmp_path, write(tmp_path, b"words", "a.txt"), type="text") is None
