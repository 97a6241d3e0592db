"""Hashes of files."""

from __future__ import annotations

from pathlib import Path

import pytest
import xxhash

from pipeline.common import hashing
from pipeline.common.hashing import file_hash


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 1000])
def test_a_file_is_hashed_whole_whatever_its_size(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "_HASHED_AT_ONCE", 100)
    data = bytes(number % 251 for number in range(size))
    (tmp_path / "file").write_bytes(data)
    read: list[int] = []
    assert file_hash(tmp_path / "file", read.append) == xxhash.xxh3_64_intdigest(data)
    assert sum(read) == size
