"""Arrow files: record batches as messages, one behind the other.

Source: the Arrow columnar format, "Serialization and Interprocess Communication (IPC)", and the tables `Message` and
`RecordBatch` of its FlatBuffers schemas. Headers are parsed here, because pyarrow does not say where a message lies and
how many rows it has without reading its body.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterable, Iterator
from io import RawIOBase
from typing import Any, NamedTuple

import pyarrow as pa

from pipeline.common.objects.access import RemoteAccess
from pipeline.common.objects.partial_copy import PartialCopy
from pipeline.data.sources.globs import File
from pipeline.data.sources.reader import Cursor
from pipeline.data.sources.records import ROW_BYTES, Document, Piece
from pipeline.data.sources.table_rows import (
    DAMAGED,
    HELD_BYTES,
    TableColumns,
    check_schema,
    damaged_file,
    one_line,
    raise_if_machine,
    rows,
)

_MAGIC = b"ARROW1\0\0"
"""Begins the file format, in which the messages of the streaming format follow, then a footer."""
_SCHEMA, _DICTIONARY, _RECORDS = 1, 2, 3
Need = Callable[[Iterable[tuple[int, int]]], None]
"""Called with byte ranges that are about to be read."""
_DROP_BYTES = 2**26
"""After so much text the pages of a mapped file are given back: they would count as memory of this process."""


def _nothing(ranges: Iterable[tuple[int, int]]) -> None:
    """A file on this machine has all of its bytes."""


class _Message(NamedTuple):
    kind: int
    start: int
    end: int
    rows: int
    held: int
    """Bytes of its body, decompressed."""


class _BrokenError(Exception):
    """There is no sound message at `byte`."""

    def __init__(self, word: str, byte: int) -> None:
        super().__init__(word)
        self.reason = f"{word} Arrow file"
        self.byte = byte


def arrow_schema(file: File, remote: RemoteAccess) -> pa.Schema:
    """Schema of an Arrow file."""
    if not file.is_object:
        with pa.memory_map(file.path) as mapped:
            return _schema_in(mapped)
    with file.open_anywhere(remote) as raw, pa.PythonFile(raw, mode="r") as opened:
        return _schema_in(opened)


def _schema_in(opened: Any) -> pa.Schema:
    if opened.read(len(_MAGIC)) != _MAGIC:
        opened.seek(0)
    return pa.ipc.read_schema(opened)


def read_arrow(cursor: Cursor, piece: Piece) -> Iterator[Document]:
    """One document a row, of the record batches whose message begins in the piece.

    Both the streaming format (as `Dataset.save_to_disk` writes) and the file format are understood. A batch that is
    damaged is lost; where the messages end too early, all that is behind them is.
    """
    if not piece.file.size:
        damaged_file(cursor, piece, "truncated Arrow file", EOFError("it is empty"))
        return
    with piece.file.open_anywhere(cursor.reader.remote) as raw:
        yield from _read_open(cursor, piece, raw)


def _read_open(cursor: Cursor, piece: Piece, raw: RawIOBase) -> Iterator[Document]:
    path, need = piece.file.path, _nothing
    if isinstance(raw, PartialCopy):
        # What is in memory of an object is what was fetched by then.
        data, need = raw.whole(), raw.need
    else:
        data = mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        schema = arrow_schema(piece.file, cursor.reader.remote)
        columns = check_schema(schema, cursor.reader, path)
    except DAMAGED as error:
        damaged_file(cursor, piece, "damaged Arrow file", error)
        return
    batches = _Batches(data, schema, columns, need)
    base, first, dropped = cursor.bytes_read, 0, cursor.input_bytes
    try:
        for message in _messages(data, need):
            if message.start >= piece.end:
                break
            on_disk = message.end - message.start
            cursor.check_expansion(piece, message.held, "a compressed batch needs", on_disk, HELD_BYTES)
            batches.see(message)
            if message.kind != _RECORDS:
                continue
            begin, first = first, first + message.rows
            cursor.check_expansion(piece, first * ROW_BYTES, f"{first:,} rows, which take")
            ends = min(message.end, piece.end) - piece.start
            if message.start < piece.start:
                continue
            if first <= cursor.offset:  # read before the start
                base = cursor.bytes_read - ends
                continue
            bytes_read = (base + message.start - piece.start, base + ends)
            try:
                for document in rows(cursor, piece, batches.read(message), begin, bytes_read, trusted=False):
                    yield document
                    if cursor.input_bytes - dropped > _DROP_BYTES:
                        dropped = cursor.input_bytes
                        data.madvise(mmap.MADV_DONTNEED)
            except DAMAGED as error:
                raise_if_machine(error)
                bad, cursor.offset = max(begin, cursor.offset), first
                detail = f"record batch at byte {message.start}, from row {bad} of the file on: {one_line(error)}"
                cursor.damaged("damaged Arrow file", detail, on_disk * (first - bad) // max(message.rows, 1))
    except _BrokenError as error:
        # One of the pieces that the file was cut into has this byte.
        if piece.start <= min(error.byte, piece.file.size - 1) < piece.end:
            cursor.ended = True
            detail = f"there is no complete message at byte {error.byte}, after row {first}"
            cursor.damaged(error.reason, detail, piece.file.size - error.byte)
    cursor.bytes_read = max(cursor.bytes_read, base + piece.end - piece.start)


class _Batches:
    """Record batches of a mapped file, with the columns asked for. Nothing is copied unless it is compressed."""

    def __init__(self, data: mmap.mmap, schema: pa.Schema, columns: TableColumns, need: Need) -> None:
        self._need = need
        self._buffer = pa.py_buffer(data)
        self._schema = schema
        self._columns = columns
        self._stream: Any = None
        need([(0, len(_MAGIC))])
        self._begin = len(_MAGIC) if data[: len(_MAGIC)] == _MAGIC else 0
        self._seen = self._taken = 0

    def see(self, message: _Message) -> None:
        """Take note of a message. If there are dictionaries, pyarrow has to read all that lies before a batch."""
        if message.kind == _DICTIONARY and self._stream is None:
            self._need([(0, message.end)])
            wanted = [self._schema.get_field_index(name) for name in self._columns.top]
            options = pa.ipc.IpcReadOptions(included_fields=wanted, use_threads=False)
            self._stream = pa.ipc.open_stream(pa.BufferReader(self._buffer.slice(self._begin)), options=options)
        self._seen += message.kind == _RECORDS

    def read(self, message: _Message) -> pa.RecordBatch:
        """The batch of the message that was seen last."""
        self._need([(message.start if self._stream is None else 0, message.end)])
        if self._stream is None:
            whole = self._buffer.slice(message.start, message.end - message.start)
            return self._columns.of_keys(pa.ipc.read_record_batch(whole, self._schema).select(self._columns.top))
        batch = None
        while self._taken < self._seen:
            self._taken += 1
            batch = self._stream.read_next_batch()
        return batch and self._columns.of_keys(batch)


def _messages(data: mmap.mmap, need: Need) -> Iterator[_Message]:
    """The messages of a file, without their bodies.

    Args:
        data: the file.
        need: called with the bytes that are looked at next.

    Raises:
        _BrokenError: it is cut short, or what stands where a message should begin is none.
    """
    size = len(data)
    need([(0, len(_MAGIC))])
    is_file = data[: len(_MAGIC)] == _MAGIC
    at = len(_MAGIC) if is_file else 0
    while is_file or at < size:  # a stream may end without a mark
        if at + 8 > size:
            raise _BrokenError("truncated", at)
        need([(at, at + 8)])
        mark, length = struct.unpack_from("<Ii", data, at)
        if mark != 0xFFFFFFFF or length < 0:
            raise _BrokenError("damaged", at)
        if length == 0:
            return
        if at + 8 + length > size:
            raise _BrokenError("truncated", at)
        need([(at, at + 8 + length)])
        try:
            kind, count, body, held = _header(data, at + 8, at + 8 + length, need)
        except (struct.error, IndexError):
            raise _BrokenError("damaged", at) from None
        if body < 0 or count < 0 or held < 0:
            raise _BrokenError("damaged", at)
        end = at + 8 + length + body
        if end > size:
            raise _BrokenError("truncated", at)
        yield _Message(kind, at, end, count, held)
        at = end


def _header(data: mmap.mmap, start: int, end: int, need: Need) -> tuple[int, int, int, int]:
    """Kind of a FlatBuffers table `Message`, its rows, and the lengths of its body as it is and decompressed."""

    def number(format: str, at: int) -> int:
        if not start <= at < end:
            raise IndexError(at)
        return int(struct.unpack_from(format, data, at)[0])

    def field(table: int, index: int) -> int:
        """Place of a field of a table; 0 if it has its default."""
        fields = table - number("<i", table)
        offset = number("<H", fields + 4 + 2 * index) if 4 + 2 * index < number("<H", fields) else 0
        return table + offset if offset else 0

    message = start + number("<I", start)
    kind_at, header_at, body_at = field(message, 1), field(message, 2), field(message, 3)
    kind = number("<B", kind_at) if kind_at else 0
    body = number("<q", body_at) if body_at else 0
    count = held = 0
    if kind in (_DICTIONARY, _RECORDS) and header_at:
        header = header_at + number("<I", header_at)
        if kind == _DICTIONARY and (data_at := field(header, 1)):
            header = data_at + number("<I", data_at)
        length_at, buffers_at = field(header, 0), field(header, 2)
        count = number("<q", length_at) if length_at else 0
        if field(header, 3) and buffers_at:  # each buffer begins with its length, -1 where it is not compressed
            buffers = buffers_at + number("<I", buffers_at)
            for index in range(number("<I", buffers)):
                at, size = (number("<q", buffers + 4 + 16 * index + 8 * part) for part in (0, 1))
                if size >= 8:
                    if not 0 <= at <= body - size:
                        raise IndexError(at)
                    need([(end + at, end + at + 8)])
                    held += max(0, int(struct.unpack_from("<q", data, end + at)[0]))
    return kind, count if kind == _RECORDS else 0, body, held
