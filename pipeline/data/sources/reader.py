"""Readers: files to documents, in units of bounded size.

A source's files are cut into units: byte ranges of line-based files and tables, whole text and compressed files, shards
of hub datasets, and groups of small ones. What a unit holds is known from the names and sizes of the files alone,
nothing is read for it. A reader goes through one unit in bounded memory and yields a `Document` for every record, good
or bad; it can begin behind any of them.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from pipeline.common.errors import UserError
from pipeline.data.sources.compression import compression_of
from pipeline.data.sources.globs import File
from pipeline.data.sources.lines import read_lines, read_text
from pipeline.data.sources.records import (
    EMPTY,
    HUB_PREFIX,
    MAX_RECORD_BYTES,
    START,
    Cursor,
    Document,
    Hub,
    Piece,
    Position,
    Reader,
    Unit,
    line_of,
    printable,
    where,
)

__all__ = [
    "EMPTY",
    "MAX_RECORD_BYTES",
    "START",
    "Document",
    "Hub",
    "Piece",
    "Position",
    "Reader",
    "Unit",
    "UnitReader",
    "check_columns",
    "cut",
    "expected_text_bytes",
    "line_of",
    "printable",
    "unit_size",
    "where",
]

_THREADS = 16
SMALLEST_UNIT = 16 * 2**20
UNITS_AT_LEAST = 64
COMPRESSED_EXPANSION = 4
PARQUET_EXPANSION = 3
"""Bytes of text that a byte on disk is expected to become. Units are cut by it; what they become does not depend on it
being right."""


def expected_text_bytes(file: File, reader: Reader) -> int:
    """About how much text a file holds."""
    if reader.type == "parquet" or (reader.type == "hub" and file.path.endswith(".parquet")):
        return file.size * PARQUET_EXPANSION
    if reader.type != "arrow" and compression_of(file.path):
        return file.size * COMPRESSED_EXPANSION
    return file.size


def unit_size(total_bytes: int, unit_bytes: int) -> int:
    """Size of a source's units: `unit_bytes`, but a small source is cut finer, so that it keeps all workers busy."""
    count = max(-(-total_bytes // unit_bytes), min(UNITS_AT_LEAST, -(-total_bytes // SMALLEST_UNIT)), 1)
    return max(1, -(-total_bytes // count))


def cut(files: list[File], reader: Reader, size: int) -> Iterator[tuple[Piece, ...]]:
    """Group files, in the order given, into pieces of work of about `size` bytes of text.

    Larger line-based files and tables are cut into byte ranges. Compressed files stay whole: they can only be read from
    their beginning. So do text files, and shards of the hub, each of which is a piece of work.
    """
    group: list[Piece] = []
    held = 0
    for file in files:
        compressed, tables = compression_of(file.path) is not None, reader.type in ("parquet", "arrow")
        lines = reader.type == "jsonl" and not compressed
        if lines and not file.size:
            continue  # an empty file of any other type is a document, or damaged
        linked = not lines and (reader.type != "text" or compressed)
        expected = expected_text_bytes(file, reader)
        whole = not file.size or not (lines or tables)
        step = file.size if whole else max(1, size * file.size // expected)
        starts = (0,) if whole else range(0, file.size, step)
        for start in starts:
            end = min(start + step, file.size)
            weight = expected * (end - start) // max(file.size, 1)
            if group and (held + weight > size or reader.type == "hub"):
                yield tuple(group)
                group, held = [], 0
            group.append(Piece(file, start, end, linked))
            held += weight
    if group:
        yield tuple(group)


def check_columns(files: list[File], reader: Reader, *, every: bool = False) -> None:
    """Look for the columns of a source of tables; nothing for other sources.

    Args:
        files: of the source.
        reader: how they are read.
        every: look at all files that can be read, and not at the first of them alone.

    Raises:
        UserError: a column is missing or cannot hold text.
    """
    if reader.type == "hub":
        from pipeline.data.sources import hub

        hub.check(reader)
    if reader.type not in ("parquet", "arrow"):
        return
    from pipeline.data.sources import arrow, parquet

    read_schema = parquet.parquet_schema if reader.type == "parquet" else arrow.arrow_schema

    def is_sound(file: File) -> bool:
        try:
            parquet.check_schema(read_schema(file.path), reader, file.path)
        except parquet.DAMAGED as error:
            with _named(file):
                parquet.raise_if_machine(error)  # reading it will say what else is wrong
            return False
        return True

    if not every:
        any(map(is_sound, files))
        return
    with ThreadPoolExecutor(_THREADS) as pool:  # a network file system takes long for each
        try:
            deque(pool.map(is_sound, files), maxlen=0)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


class UnitReader(Cursor):
    """Iterates over the records of a unit from `start` on, once. Memory: a few MiB, or a record.

    Started at the `position` that was seen after a record, it yields exactly the records behind that one. What counts
    and hashes along (see `Cursor`) is right after every document.
    """

    def __init__(self, unit: Unit, reader: Reader, start: Position = START) -> None:
        super().__init__(unit, reader, start)

    def __iter__(self) -> Iterator[Document]:
        for number in range(self.piece, len(self.unit.pieces)):
            piece = self.enter(number)
            if piece.file.name in self.reader.dropped:
                self.give_up(piece, *self.reader.dropped[piece.file.name])
                continue
            with _named(piece.file):
                _check_unchanged(piece.file)
                yield from self._read(piece)

    def _read(self, piece: Piece) -> Iterator[Document]:
        # What needs a heavy library is imported when it is read.
        match self.reader.type:
            case "jsonl":
                return read_lines(self, piece)
            case "parquet":
                from pipeline.data.sources.parquet import read_parquet

                return read_parquet(self, piece)
            case "arrow":
                from pipeline.data.sources.arrow import read_arrow

                return read_arrow(self, piece)
            case "hub":
                from pipeline.data.sources.hub import read_shard

                return read_shard(self, piece)
        return read_text(self, piece)


@contextmanager
def _named(file: File) -> Iterator[None]:
    """Have errors of the system say which file it is: those of pyarrow do not."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or file.path
        raise


def _check_unchanged(file: File) -> None:
    if file.path.startswith(HUB_PREFIX):
        return  # pinned to a commit
    size = os.stat(file.path).st_size
    if size != file.size:
        raise UserError(
            f"{file.path} changed while it was being read: {file.size} bytes became {size}; "
            "start again when nothing writes to it"
        )
