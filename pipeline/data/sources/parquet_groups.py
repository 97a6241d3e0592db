"""Row groups of Parquet files.

Only the columns that are asked for are read, a few MiB at a time, so that memory does not depend on the size of row
groups. (A page must be held whole.) This module imports pyarrow: import it where it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from io import RawIOBase
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.common.objects.access import RemoteAccess
from pipeline.common.objects.partial_copy import PartialCopy
from pipeline.data.sources.globs import File
from pipeline.data.sources.parquet_pages import first_byte, pages
from pipeline.data.sources.reader import Cursor
from pipeline.data.sources.records import ROW_BYTES, Document, Piece
from pipeline.data.sources.table_rows import (
    BATCH_BYTES,
    BATCH_ROWS,
    DAMAGED,
    HELD_BYTES,
    TableColumns,
    check_schema,
    damaged_file,
    one_line,
    raise_if_machine,
    rows,
)

_READ_BYTES = 2**20


def parquet_schema(file: File, remote: RemoteAccess) -> pa.Schema:
    """Schema of a Parquet file."""
    if not file.is_object:
        return pq.read_schema(file.path)
    with file.open_anywhere(remote) as raw:
        return pq.read_schema(raw)


class _Group(NamedTuple):
    """A row group: its number, its first row in the file, how many rows it has in all and a batch, and its size."""

    number: int
    row: int
    rows: int
    batch_rows: int
    bytes: int
    """On disk."""


def read_parquet(cursor: Cursor, piece: Piece) -> Iterator[Document]:
    """One document a row, of the row groups whose first byte lies in the piece.

    Where a row group is damaged, the rest of it is lost; without a sound footer all of the file is.
    """
    path = piece.file.path
    with piece.file.open_anywhere(cursor.reader.remote) as raw:
        yield from _read_open(cursor, piece, path if not piece.file.is_object else raw, raw)


def _read_open(cursor: Cursor, piece: Piece, source: Any, raw: RawIOBase) -> Iterator[Document]:
    """Read the rows of a piece.

    Args:
        cursor: of the piece.
        piece: to read.
        source: its file, for pyarrow.
        raw: the same file, for its pages.
    """
    path = piece.file.path
    try:
        options = {"pre_buffer": False, "buffer_size": _READ_BYTES, "page_checksum_verification": True}
        file = pq.ParquetFile(source, **options)
        found = check_schema(file.schema_arrow, cursor.reader, path)
        columns = found.leaves
        cursor.check_expansion(
            piece, file.metadata.num_rows * ROW_BYTES, f"{file.metadata.num_rows:,} rows, which take"
        )
        if repeated := _repeated(file, columns):
            file = pq.ParquetFile(source, **options, read_dictionary=repeated)
        groups = list(_groups(file.metadata, piece, columns))
    except DAMAGED as error:
        damaged_file(cursor, piece, "damaged Parquet file", error)
        return
    with file:
        total, span = sum(group.rows for group in groups), piece.end - piece.start
        done = sum(min(max(cursor.offset - group.row, 0), group.rows) for group in groups)
        base = cursor.bytes_read - (span * done // total if total else 0)
        before = 0
        for group in groups:
            if cursor.offset < group.row + group.rows:
                ends = (base + span * before // total, base + span * (before + group.rows) // total)
                yield from _read_group(cursor, piece, raw, file, found, group, ends)
                if isinstance(raw, PartialCopy):
                    raw.forget()
            before += group.rows
        cursor.bytes_read = base + span


def _groups(metadata: Any, piece: Piece, columns: list[str]) -> Iterator[_Group]:
    """The row groups of a piece."""
    row = 0
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        begins, wanted, stored = [], 0, 0
        for number in range(group.num_columns):
            chunk = group.column(number)
            # Some writers put 0 where there is no dictionary.
            begins.append(
                min(at for at in (chunk.dictionary_page_offset or 0, chunk.data_page_offset, 2**63) if at > 0)
            )
            stored += chunk.total_compressed_size
            if _is_of(chunk.path_in_schema, columns):
                wanted += chunk.total_uncompressed_size
        # Whatever a footer says, a row group belongs to one piece.
        begin = min(*begins, piece.file.size - 1) if begins else 0
        if group.num_rows and piece.start <= begin < piece.end:
            rows = max(1, min(BATCH_ROWS, BATCH_BYTES * group.num_rows // max(wanted, 1)))
            yield _Group(index, row, group.num_rows, rows, stored)
        row += group.num_rows
    if row != metadata.num_rows:
        raise pa.ArrowInvalid(f"its footer counts {metadata.num_rows} rows, but {row} in its row groups")


def _read_group(
    cursor: Cursor, piece: Piece, raw: RawIOBase, file: Any, found: TableColumns, group: _Group, ends: tuple[int, int]
) -> Iterator[Document]:
    """The rows of a row group that were not read yet. Batches lie equal wherever the reading begins."""
    first, (low, high), columns = group.row, ends, found.leaves
    try:
        if isinstance(raw, PartialCopy):
            raw.need(_chunk_ranges(file, columns, group))
        batch_rows = min(group.batch_rows, _look_at_pages(cursor, piece, raw, file, columns, group))
        for batch in file.iter_batches(batch_rows, [group.number], columns=columns, use_threads=False):
            done, more = first - group.row, first + len(batch) - group.row
            bytes_read = (low + (high - low) * done // group.rows, low + (high - low) * more // group.rows)
            yield from rows(cursor, piece, found.of_keys(batch), first, bytes_read)
            first += len(batch)
        if first != group.row + group.rows:
            raise pa.ArrowInvalid(f"there are {first - group.row} rows instead of {group.rows}")
    except DAMAGED as error:
        raise_if_machine(error)
        cursor.offset = group.row + group.rows
        cursor.bytes_read = high
        detail = f"row group {group.number}, from row {first} of the file on: {one_line(error)}"
        cursor.damaged("damaged Parquet file", detail, group.bytes * (group.row + group.rows - first) // group.rows)


def _repeated(file: Any, columns: list[str]) -> list[str]:
    """Columns of lists: however many values a row has, those of a dictionary are held once."""
    leaves = (file.schema.column(number) for number in range(len(file.schema.names)))
    return [leaf.path for leaf in leaves if leaf.max_repetition_level and _is_of(leaf.path, columns)]


def _is_of(path: str, columns: list[str]) -> bool:
    return any(path == column or path.startswith(f"{column}.") for column in columns)


def _chunk_ranges(file: Any, columns: list[str], group: _Group) -> Iterator[tuple[int, int]]:
    """Byte ranges of the column chunks of a row group that are read."""
    about = file.metadata.row_group(group.number)
    for number in range(about.num_columns):
        chunk = about.column(number)
        if _is_of(chunk.path_in_schema, columns):
            yield (begin := first_byte(chunk)), begin + chunk.total_compressed_size


def _look_at_pages(cursor: Cursor, piece: Piece, raw: RawIOBase, file: Any, columns: list[str], group: _Group) -> int:
    """Refuse pages that ask for far more memory than they have bytes; returns how many rows can be held at a time.

    Raises:
        UserError: there is one.
        pa.ArrowInvalid: a page's header is damaged.
    """
    about, longest = file.metadata.row_group(group.number), 1
    for number in range(about.num_columns):
        chunk, leaf = about.column(number), file.schema.column(number)
        if not _is_of(chunk.path_in_schema, columns):
            continue
        longest = max(longest, leaf.length or 0)  # of values that are all as long
        values = stored = 0
        for page in pages(raw, chunk):
            values, stored = values + page.values, stored + page.compressed
            asked = max(page.uncompressed, 8 * page.values if page.by_difference else 0)
            cursor.check_expansion(piece, asked, "a page needs", page.compressed, HELD_BYTES)
            if page.repeats:
                longest = max(longest, page.uncompressed)
        if not leaf.max_repetition_level and values != group.rows:
            raise pa.ArrowInvalid(f"{chunk.path_in_schema} has {values} values in {group.rows} rows")
        if leaf.max_repetition_level:  # a row may have all of them
            size = values * max(16, leaf.length or 0)
            cursor.check_expansion(piece, size, f"the lists of {chunk.path_in_schema} take", stored, HELD_BYTES)
    return max(1, HELD_BYTES // longest)
