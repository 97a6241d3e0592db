"""Sorted runs on disk: records in sections, of which a reader takes some, checked, without reading the rest.

A file has a head, a directory and the records. The directory has a record per section: the place of its first record
and the hash of its bytes. A reader of some sections reads the head, their part of the directory and their records, and
finds whatever is not as it was written before it gives a record out.

In a run the sections are equal ranges of hashes, and records are sorted by all of their fields, of which the first is
`hash`. Sections hold some 2 kB, so a bucket, which is a range of hashes, reads hardly more than its own records.
"""

from __future__ import annotations

import itertools
import os
import struct
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.data.datasets.indexed import HashedFile

RUN_VERSION = 1
HASHES = 2**64
"""Hashes are below it."""
MAX_RANGES = 2**14
"""Most ranges of hashes of a run."""
_RANGE_BYTES = 2048
_MAGIC = b"sections"
_HEAD = struct.Struct("<8sIIQQ")  # magic, version, bytes of the type as JSON, sections, records
_CHECK = struct.Struct("<Q")  # hash of the head and the type
_ENTRY = np.dtype([("first", "<u8"), ("xxh3", "<u8")])
_CLOSING = struct.Struct("<QQ")  # the last entry of the directory: records, and 0
_WRITE_BYTES = 2**22


class DamagedResult(UserError):
    """A file of a pass does not have the bytes that were written. Whoever finds it may remove it, to be made again.

    Args:
        path: of the file.
        made_by: pass that wrote it.
        how: the difference.
    """

    def __init__(self, path: Path, made_by: str, how: str) -> None:
        super().__init__(path, made_by, how)
        self.path = path
        self.made_by = made_by
        self.how = how

    def __str__(self) -> str:
        return f"{self.path} is damaged ({self.how}); pass {self.made_by!r} makes it again: run the same command again"


def run_ranges(size: int) -> int:
    """Number of ranges of a run.

    Args:
        size: bytes of its records.
    """
    ranges = 1
    while ranges < MAX_RANGES and ranges * _RANGE_BYTES < size:
        ranges *= 2
    return ranges


def sort_records(records: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Records sorted by all fields, the first one first.

    Args:
        records: structured, of unsigned integers.
    """
    names = records.dtype.names or ()
    first = np.ascontiguousarray(records[names[0]])
    order = np.argsort(first, kind="stable")
    ordered = records[order]
    if _is_sorted(ordered, names):  # records mostly come in the order of their other fields
        return ordered
    return records[np.lexsort([records[name] for name in reversed(names)])]


def _is_sorted(records: npt.NDArray[Any], names: tuple[str, ...]) -> bool:
    tied = np.ones(max(len(records) - 1, 0), np.bool_)
    for name in names:
        before, after = records[name][:-1], records[name][1:]
        if (tied & (before > after)).any():
            return False
        tied &= before == after
    return True


def write_sections(path: Path, records: npt.NDArray[Any], bounds: npt.NDArray[Any]) -> HashedFile:
    """Write records in sections; the file is not committed yet.

    Args:
        path: of the file.
        records: structured.
        bounds: shape (sections + 1,): place of the first record of each section, and the number of records.
    """
    file = HashedFile(path)
    try:
        fill_sections(file, records, bounds)
    except BaseException:
        file.__exit__(None, None, None)
        raise
    return file


def fill_sections(file: HashedFile, records: npt.NDArray[Any], bounds: npt.NDArray[Any]) -> None:
    """`write_sections` into a new file."""
    records = np.ascontiguousarray(records)
    data = records.view(np.uint8).reshape(-1).data
    width = records.dtype.itemsize
    kind = _type_bytes(records.dtype)
    directory = np.zeros(len(bounds), _ENTRY)
    directory["first"] = bounds
    places = (np.asarray(bounds).astype(np.int64) * width).tolist()
    hashes = [xxhash.xxh3_64_intdigest(data[low:high]) for low, high in itertools.pairwise(places)]
    directory["xxh3"][:-1] = hashes
    head = _HEAD.pack(_MAGIC, RUN_VERSION, len(kind), len(bounds) - 1, len(records)) + kind
    with storage.naming(file.final):
        file.write(head + _CHECK.pack(xxhash.xxh3_64_intdigest(head)))
        file.write(directory.tobytes())
        for start in range(0, len(data), _WRITE_BYTES):
            file.write(data[start : start + _WRITE_BYTES])


def _type_bytes(dtype: np.dtype[Any]) -> bytes:
    fields = [[name, dtype[name].newbyteorder("<").str] for name in dtype.names or ()]
    return orjson.dumps(fields)


def write_run(path: Path, records: npt.NDArray[Any]) -> HashedFile:
    """Write a run; the file is not committed yet.

    Args:
        path: of the file.
        records: structured, in any order; the first field is `hash`.
    """
    file = HashedFile(path)
    try:
        _fill_run(file, records)
    except BaseException:
        file.__exit__(None, None, None)
        raise
    return file


def _fill_run(file: HashedFile, records: npt.NDArray[Any]) -> None:
    ordered = sort_records(records)
    ranges = run_ranges(ordered.nbytes)
    starts = np.array([HASHES * place // ranges for place in range(ranges)], np.uint64)
    bounds = np.append(np.searchsorted(ordered["hash"], starts), len(ordered))
    fill_sections(file, ordered, bounds)


class RunWriter:
    """A run that is gathered in memory. As a context manager it removes what is not committed.

    Args:
        path: of the file.
        dtype: of the records: structured, unsigned integers, the first field is `hash`.
    """

    def __init__(self, path: Path, dtype: npt.DTypeLike) -> None:
        self._dtype = np.dtype(dtype)
        self._file = HashedFile(path)
        self._blocks: list[npt.NDArray[Any]] = []

    def add(self, records: npt.NDArray[Any]) -> None:
        """Add records, in any order."""
        self._blocks.append(records.astype(self._dtype, copy=False))

    def finish(self) -> HashedFile:
        """Sort and write; the file, not committed yet."""
        records = np.concatenate([np.zeros(0, self._dtype), *self._blocks])
        self._blocks.clear()
        _fill_run(self._file, records)
        return self._file

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)


class SectionFile:
    """A file in sections, open for reading. Use as a context manager.

    Args:
        path: of the file.
        dtype: of its records.
        made_by: pass that wrote it, for messages.

    Attributes:
        records: number of records.
        sections: number of sections.

    Raises:
        DamagedResult: it is missing, cut, of another type or version, or its head is not as it was written.
    """

    def __init__(self, path: Path, dtype: npt.DTypeLike, made_by: str) -> None:
        self.path = path
        self._dtype = np.dtype(dtype)
        self._made_by = made_by
        try:
            self._file = storage.open_regular(path)
        except FileNotFoundError:
            raise self._damaged("it is missing") from None
        try:
            self._read_head()
        except BaseException:
            self._file.close()
            raise

    def _damaged(self, how: str) -> DamagedResult:
        return DamagedResult(self.path, self._made_by, how)

    def _read_head(self) -> None:
        kind = _type_bytes(self._dtype)
        size = _HEAD.size + len(kind)
        head = self._pread(size + _CHECK.size, 0)
        magic, version, _, self.sections, self.records = _HEAD.unpack_from(head)
        if magic != _MAGIC or version != RUN_VERSION:
            raise self._damaged(f"it is not a file of sections of version {RUN_VERSION}")
        if (
            _CHECK.unpack_from(head, size)[0] != xxhash.xxh3_64_intdigest(head[:size])
            or head[_HEAD.size : size] != kind
        ):
            raise self._damaged(f"its head is not that of records {kind.decode()}")
        self._directory = size + _CHECK.size
        self._data = self._directory + (self.sections + 1) * _ENTRY.itemsize
        wanted = self._data + self.records * self._dtype.itemsize
        if (found := os.fstat(self._file.fileno()).st_size) != wanted:
            raise self._damaged(f"{found} bytes instead of {wanted}")

    def _pread(self, size: int, offset: int) -> bytes:
        blocks = []
        with storage.naming(self.path):
            while size and (block := os.pread(self._file.fileno(), size, offset)):
                blocks.append(block)
                size, offset = size - len(block), offset + len(block)
        if size:
            raise self._damaged("it is cut")
        return b"".join(blocks)

    def read_sections(self, first: int, end: int) -> npt.NDArray[Any]:
        """Records of sections [first, end).

        Raises:
            DamagedResult: they are not as they were written.
        """
        return self.read_ragged(first, end)[0]

    def read_ragged(self, first: int, end: int) -> tuple[npt.NDArray[Any], list[int]]:
        """Records of sections [first, end), and where each section begins among them, with the end of the last.

        Raises:
            DamagedResult: they are not as they were written.
        """
        entries = self._pread((end - first + 1) * _ENTRY.itemsize, self._directory + first * _ENTRY.itemsize)
        directory = np.frombuffer(entries, _ENTRY)
        places = directory["first"].tolist()
        closes = end < self.sections or entries[-_ENTRY.itemsize :] == _CLOSING.pack(self.records, 0)
        if places != sorted(places) or places[-1] > self.records or not closes:
            raise self._damaged("its directory is not in order")
        width = self._dtype.itemsize
        data = memoryview(self._pread((places[-1] - places[0]) * width, self._data + places[0] * width))
        for section, xxh3 in enumerate(directory["xxh3"][:-1].tolist()):
            low, high = ((place - places[0]) * width for place in places[section : section + 2])
            if xxhash.xxh3_64_intdigest(data[low:high]) != xxh3:
                raise self._damaged(f"section {first + section} is not as it was written")
        return np.frombuffer(data, self._dtype), [place - places[0] for place in places]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.close()


class RunFile(SectionFile):
    """A run, open for reading. Use as a context manager."""

    def read_range(self, first: int, end: int) -> npt.NDArray[Any]:
        """Records with first <= hash < end, sorted by all fields.

        Args:
            first: hash.
            end: hash, at most 2^64.

        Raises:
            DamagedResult: they are not as they were written.
        """
        low, high = first * self.sections // HASHES, -(-end * self.sections // HASHES)
        records = self.read_sections(low, high)
        hashes = np.ascontiguousarray(records["hash"])
        start = int(np.searchsorted(hashes, np.uint64(first)))
        stop = int(np.searchsorted(hashes, np.uint64(end))) if end < HASHES else len(records)
        return records[start:stop]


def bucket_range(bucket: int, buckets: int) -> tuple[int, int]:
    """Hashes of a bucket: the first, and the end, at most 2^64."""
    first, end = (-(-HASHES * place // buckets) for place in (bucket, bucket + 1))
    return first, end


def bucket_count(rows: int, row_bytes: int, bucket_bytes: int) -> int:
    """Number of buckets: a function of the records and the setting alone, never of workers.

    Args:
        rows: of all runs.
        row_bytes: memory of a row while a bucket is sorted.
        bucket_bytes: memory of a bucket.
    """
    return max(1, -(-rows * row_bytes // bucket_bytes))
