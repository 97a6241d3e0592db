"""`type: jsonl`: one JSON object a line, plain or compressed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import BufferedReader
from typing import Any, BinaryIO, cast

import orjson

from pipeline.data.sources.compression import MOST_EXPANSION, Decompressed, StreamError, compression_of
from pipeline.data.sources.globs import File
from pipeline.data.sources.reader import Cursor, Reader
from pipeline.data.sources.records import (
    BAD_WEIGHT,
    BOM,
    EMPTY,
    NOT_UTF8,
    Document,
    Piece,
    UnusableRecord,
    bad_weight,
    escaped,
    loss_weight,
    metadata_json,
)

_BUFFER_BYTES = 2**18
_CHUNK_BYTES = 2**18
CUT_FILE = "truncated JSON lines file"
"""The reason where a file ends inside of a record: nobody knows what was behind it."""
_NESTING = 500
"""Levels of records that only Python's `json` reads: below what any version of Python takes."""
_BRACKETS = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|([\[{])|([\]}])', re.DOTALL)
"""A string, also one that is cut, or a bracket outside of strings."""
_BLANK = re.compile(rb"\s*\n")
FEW_BLANKS = 16
"""Blank lines in a row that are read one by one: to look for more of them copies the buffer."""
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class JsonlReader(Reader):
    """One JSON object a line; blank lines hold no record."""

    type = "jsonl"
    numbering = "line"

    def pieces(self, file: File, size: int) -> Iterator[Piece]:
        """Byte ranges of a plain file; an empty one has no line."""
        return super().pieces(file, size) if compression_of(file.path) else self.ranges(file, size)

    def most_records(self, file: File) -> int | None:
        """Number of shortest lines that fit: an object with a text, or any object if a template makes the text."""
        if type(self) is not JsonlReader:
            return None  # a plug-in may make several documents of a line
        least = len("{}\n") if self.template else len(f'{{"{self.text_key}":""}}\n'.encode())
        return file.size * MOST_EXPANSION.get(compression_of(file.path) or "", 1) // least + 1

    def read(self, cursor: Cursor, piece: Piece) -> Iterator[Document]:
        """A document a line."""
        return _read_lines(cursor, piece)


def _read_lines(cursor: Cursor, piece: Piece) -> Iterator[Document]:
    """One JSON object a line; blank lines hold no record. Of a key that is there twice the last value counts.

    Of a compressed file that is cut or damaged, the records of its sound members are given.
    """
    path = piece.file.path
    if compression_of(path) is None:
        with cursor.open_plain(piece, _BUFFER_BYTES) as file:
            seek_line(file, piece, cursor)
            yield from _lines(cursor, piece, file, piece.end, None)
        return
    with cursor.open_stream(path) as stream:
        source = stream.raw
        assert isinstance(source, Decompressed)
        try:
            skip_read(stream, cursor)
            yield from _lines(cursor, piece, stream, 2**63, source)
        except StreamError as error:
            cursor.broken_stream(piece, error, f"{cursor.line:,} lines before that are good")


def seek_line(file: BinaryIO, piece: Piece, cursor: Cursor) -> None:
    """Go to the first line that belongs to a piece, or to where reading resumes."""
    if cursor.offset >= 0:
        file.seek(cursor.offset)
        return
    position = 0
    if piece.start:
        # The line that runs over the start belongs to the piece before; if one ends there, this skips nothing.
        file.seek(piece.start - 1)
        position = piece.start - 1
        while position < piece.end and (skipped := file.readline(_CHUNK_BYTES)):
            position += len(skipped)
            if skipped.endswith(b"\n"):
                break
    else:
        file.seek(0)
    cursor.offset = position


def skip_read(stream: BinaryIO, cursor: Cursor, done: int = 0) -> None:
    """Decompress and forget what was read before. `done`: bytes that the stream has given by now."""
    cursor.offset = max(cursor.offset, 0)
    left = cursor.offset - done
    while left and (chunk := stream.read(min(left, _CHUNK_BYTES))):
        left -= len(chunk)


def _lines(cursor: Cursor, piece: Piece, file: BinaryIO, end: int, source: Decompressed | None) -> Iterator[Document]:
    """The records of the lines that begin before `end`. This is the loop that runs for every record of a corpus."""
    reader, unit, number, kept = cursor.reader, cursor.unit.index, cursor.piece, cursor.kept
    text_key, id_key, prefix, template = reader.text_key, reader.id_key, f"{piece.file.name}@", reader.template
    longest, weight_key = reader.max_record_bytes, reader.weight_key
    readline, update, loads = file.readline, cursor.digest.update, orjson.loads
    more = reader.record_keys(piece.file.path)
    complete = more.complete if more else None
    position, line = cursor.offset, cursor.line
    consumed = source.consumed if source else 0
    blanks, blank_end = 0, -1
    while position < end and (raw := readline(longest)):
        byte, size = position, len(raw)
        update(raw)
        position += size
        too_long = size == longest and not raw.endswith(b"\n")
        if too_long:
            raw = raw[:200]
            while rest := readline(_CHUNK_BYTES):
                update(rest)
                position += len(rest)
                if rest.endswith(b"\n"):
                    break
        line += 1
        cursor.offset = position
        cursor.line = line
        # Added up, because who reads may set the counts to zero in between.
        cursor.input_bytes += position - byte
        if source is None:
            cursor.bytes_read += position - byte
        else:
            cursor.bytes_read += source.consumed - consumed
            consumed = source.consumed
        if too_long:
            yield cursor.rejected(line - 1, byte, reader.too_long, f"{position - byte} bytes", raw)
            continue
        if byte == 0 and raw.startswith(BOM):
            raw = raw[len(BOM) :]
        try:
            record = loads(raw)
        except orjson.JSONDecodeError as error:
            if not raw or raw.isspace():
                blanks = blanks + 1 if byte == blank_end else 1
                blank_end = position
                # Below `longest` no line among them is too long.
                while blanks >= FEW_BLANKS and (blank := blank_lines(file, _BLANK, min(end - position, longest - 1))):
                    update(blank)
                    position += len(blank)
                    line += blank.count(b"\n")
                    cursor.offset = blank_end = position
                    cursor.line = line
                    cursor.input_bytes += len(blank)
                    if source is None:
                        cursor.bytes_read += len(blank)
                continue
            try:
                record = _as_python_reads(raw, error, reader, complete)
            except _Rejected as rejected:
                reason, detail = rejected.args
                if reason == CUT_FILE:
                    lost = size if source is None else piece.file.size * size // position
                    cursor.damaged(reason, f"the line of byte {byte} ends inside of its record", lost)
                    continue
                yield cursor.rejected(line - 1, byte, reason, detail, raw)
                continue
        if complete is not None and type(record) is dict:
            complete(record)
        text, spans = record.get(text_key) if type(record) is dict else None, None
        if template is not None and type(record) is dict:
            try:
                text, spans = template.render(record)
            except UnusableRecord as unusable:
                yield cursor.rejected(line - 1, byte, unusable.reason, unusable.detail, raw)
                continue
        if type(text) is not str:
            reason, detail = _text_reason(record, text_key)
            yield cursor.rejected(line - 1, byte, reason, detail, raw)
            continue
        weight = None if weight_key is None else loss_weight(record.get(weight_key))
        if weight_key is not None and weight is None:
            detail = bad_weight(weight_key, record.get(weight_key))
            yield cursor.rejected(line - 1, byte, BAD_WEIGHT, detail, raw)
            continue
        own = record.get(id_key)
        if type(own) is not str:
            own = str(own) if type(own) is int else ""
        metadata = metadata_json({key: record[key] for key in kept if key in record}) if kept else None
        row = cursor.row
        cursor.row = row + 1
        document = Document(
            text, own or f"{prefix}{byte}", unit, row, number, line - 1, byte, None if text else EMPTY, "", metadata
        )
        if weight is not None:
            document.weight = weight
        if spans is not None:
            document.spans = spans
        yield document
    if source is not None:
        cursor.bytes_read += source.consumed - consumed


def blank_lines(file: BinaryIO, kind: re.Pattern[bytes], most: int) -> bytes:
    """Blank lines that come next, of those that are in the buffer; the file is moved behind them.

    One by one they cost microseconds each, and a few kB of a compressed file can be hundreds of millions.

    Args:
        file: buffered, and at the beginning of a line.
        kind: matches whole blank lines.
        most: bytes.
    """
    found = kind.match(cast(BufferedReader, file).peek(), 0, most) if most > 0 else None
    return file.read(found.end()) if found else b""


class _Rejected(Exception):
    """A record cannot be used: (one of a few reasons, the detail)."""


def _as_python_reads(
    raw: bytes, error: orjson.JSONDecodeError, reader: Reader, complete: Callable[[dict[str, Any]], None] | None
) -> Any:
    """The value of a line that orjson refuses, if Python's `json` takes it: NaN, infinities and lone surrogates.

    Raises:
        _Rejected: it does not, or such a surrogate is in the text.
    """
    if raw.count(b"[") + raw.count(b"{") > _NESTING and _depth(raw) > _NESTING:
        reason = CUT_FILE if _is_cut(raw) else "invalid JSON"
        raise _Rejected(reason, f"nested deeper than {_NESTING} levels, or not closed")
    try:
        record = json.loads(raw.decode(), parse_int=_number)
    except ValueError as again:
        if _is_cut(raw, again):
            raise _Rejected(CUT_FILE, "") from None
        raise _Rejected(*_json_reason(raw, error)) from None
    if isinstance(record, dict):
        if complete is not None:
            complete(record)
        text, own = record.get(reader.text_key), record.get(reader.id_key)
        if reader.template is not None:
            with suppress(UnusableRecord):
                text = reader.template.render(record).text
        if isinstance(text, str) and _LONE_SURROGATE.search(text):
            raise _Rejected("lone surrogate", f"in the value of {' or '.join(map(repr, reader.text_keys))}")
        if isinstance(own, str):
            record[reader.id_key] = escaped(own)
    return record


def _is_cut(raw: bytes, error: ValueError | None = None) -> bool:
    """Tell whether a record that cannot be read is cut by the end of its file. `error`: that of Python's `json`."""
    if raw.endswith(b"\n") or not raw.lstrip().startswith(b"{"):
        return False
    if not raw.rstrip().endswith(b"}"):
        return True
    return isinstance(error, json.JSONDecodeError) and (
        error.msg.startswith("Unterminated string") or error.pos >= len(error.doc.rstrip())
    )


def _depth(raw: bytes) -> int:
    """Deepest nesting of JSON."""
    depth = deepest = 0
    for found in _BRACKETS.finditer(raw):
        depth += (found[1] is not None) - (found[2] is not None)
        deepest = max(deepest, depth)
    return deepest


def _number(digits: str) -> int | float:
    """A whole number as orjson reads it: as a float if it does not fit into 64 bits."""
    value = float(digits)
    return int(digits) if abs(value) <= 2**64 and -(2**63) <= int(digits) < 2**64 else value


def _text_reason(record: Any, text_key: str) -> tuple[str, str]:
    """Reason why a JSON value has no text: (one of a few reasons, the detail)."""
    if not isinstance(record, dict):
        return "not a JSON object", ""
    if text_key not in record:
        return f"no key {text_key!r}", f"keys: {', '.join(map(repr, list(record)[:10])) or 'none'}"
    return "text is not a string", ""


def _json_reason(raw: bytes, error: orjson.JSONDecodeError) -> tuple[str, str]:
    """Reason why a line is not JSON: (one of a few reasons, the detail)."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as bad:
        return NOT_UTF8, f"byte 0x{raw[bad.start]:02x} at column {bad.start + 1}"
    if error.pos >= len(text.rstrip("\r\n")):
        return "cut line", f"the line ends inside {'a string' if 'in string' in error.msg else 'the record'}"
    return "invalid JSON", str(error)
