"""Files of a measured chunk, read: each is checked against its receipt before anything is decided by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.common.hashing import file_hash
from pipeline.data.curate.files import MEASURES, measured_file
from pipeline.data.curate.scope import Chunk
from pipeline.data.work.sorted_runs import DamagedResult


def check_result(path: Path, xxh3: str, made_by: str) -> None:
    """Compare a file with its hash.

    Args:
        path: of the file.
        xxh3: hash in its receipt.
        made_by: pass that wrote it, for the message.

    Raises:
        DamagedResult: it is another one, or is missing.
    """
    try:
        found = f"{file_hash(path):016x}"
    except FileNotFoundError:
        raise DamagedResult(path, made_by, "it is missing") from None
    if found != xxh3:
        raise DamagedResult(path, made_by, f"hash {found} instead of {xxh3}")


def read_array(
    path: Path, dtype: np.dtype[Any], xxh3: str, made_by: str, records: int | None = None
) -> npt.NDArray[Any]:
    """An array that a pass has written, mapped, after its hash was checked.

    Args:
        path: of the file.
        dtype: of its records.
        xxh3: hash in its receipt.
        made_by: pass that wrote it.
        records: that it has to have.

    Raises:
        DamagedResult: it is another one.
    """
    check_result(path, xxh3, made_by)
    size = path.stat().st_size
    if size % dtype.itemsize or (records is not None and size != records * dtype.itemsize):
        raise DamagedResult(path, made_by, f"{size} bytes are not {records} records of {dtype.itemsize} bytes")
    return np.memmap(path, dtype, "r") if size else np.zeros(0, dtype)


def chunk_path(chunk: Chunk, name: str) -> Path:
    """A file of a measured chunk."""
    return measured_file(chunk.curation, chunk.unit, chunk.chunk, name)


def open_table(chunk: Chunk, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Table of measures of a chunk: a record for each row, read-only.

    Raises:
        DamagedResult: it is not the one that was written.
    """
    return read_array(chunk_path(chunk, MEASURES), dtype, chunk.hashes[MEASURES], "measure", chunk.records)
