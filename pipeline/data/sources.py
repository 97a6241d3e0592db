"""Readers: files to documents, in units of bounded size.

A source's files are cut into units: byte ranges of line-based files, whole text files, and groups of small ones. What
a unit holds is known from the names and sizes of the files alone, nothing is read for it. A reader goes through one
unit in bounded memory and yields a `Document` for every record, good or bad.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import orjson
import xxhash

from pipeline.data.files import File
from pipeline.errors import UserError

MAX_RECORD_BYTES = 16 * 2**20
"""A longer file or line is rejected: encoding one takes about a hundred times its size in memory."""
SMALLEST_UNIT = 2**20
UNITS_AT_LEAST = 64
EMPTY = "empty document"
"""The one reason that is no error: the record is sound, there is only nothing in it."""
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Reader:
    """How a source's files are read."""

    type: str
    text_key: str
    id_key: str


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [start, end) of a file. A line belongs to the piece that its first byte lies in."""

    file: File
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Unit:
    """A piece of work: what one worker reads at a time, and what is redone after a crash.

    Attributes:
        index: place in the plan; the number of the part it becomes, and `unit` in the provenance of its documents.
    """

    index: int
    source: str
    pieces: tuple[Piece, ...]

    @property
    def bytes(self) -> int:
        """Bytes of input."""
        return sum(piece.end - piece.start for piece in self.pieces)

    def __str__(self) -> str:
        first, more = self.pieces[0], len(self.pieces) - 1
        whole = first.start == 0 and first.end == first.file.size
        where = "" if whole else f" bytes {first.start}-{first.end}"
        return (
            f"unit {self.index} of {self.source} ({first.file.path}{where}{f' and {more} more files' if more else ''})"
        )


@dataclass(frozen=True, slots=True)
class Document:
    """A record of a source: a document, or with `reason` a rejected record.

    Attributes:
        text: the text; empty when rejected.
        id: the record's own id, or `NAME` (text) or `NAME@BYTE` (lines) from the file's name.
        unit: index of the unit.
        row: number of the record in its unit, from 0; lines without a record (blank ones) have no number.
        piece: number of the piece of the unit that it was read from.
        line: line in the piece, from 0; None where files have no lines.
        byte: byte offset in the file: of the record, or of the first byte that is not UTF-8.
        reason: why it is rejected; one of a few, so that they can be counted.
        detail: more on the reason, and the beginning of the record.
    """

    text: str
    id: str
    unit: int
    row: int
    piece: int
    line: int | None
    byte: int
    reason: str | None = None
    detail: str = ""


def unit_size(total_bytes: int, unit_bytes: int) -> int:
    """Size of a source's units: `unit_bytes`, but a small source is cut finer, so that it keeps all workers busy."""
    return min(unit_bytes, max(SMALLEST_UNIT, -(-total_bytes // UNITS_AT_LEAST)))


def cut(files: list[File], reader: Reader, size: int) -> Iterator[tuple[Piece, ...]]:
    """Group files, in the order given, into pieces of work of about `size` bytes; larger line-based files are cut."""
    group: list[Piece] = []
    held = 0
    for file in files:
        ranges = [(0, file.size)]
        if reader.type == "jsonl":
            ranges = [(start, min(start + size, file.size)) for start in range(0, file.size, size)]
        for start, end in ranges:
            if group and held + end - start > size:
                yield tuple(group)
                group, held = [], 0
            group.append(Piece(file, start, end))
            held += end - start
    if group:
        yield tuple(group)


class UnitReader:
    """Iterates over the records of a unit, once. Memory: one record.

    After the iteration `input_hash` (xxh3-128 of the bytes that the unit holds), `lines` (lines of each piece; 0 for
    files without lines) and `records` are complete; `bytes_read` counts along.
    """

    def __init__(self, unit: Unit, reader: Reader) -> None:
        self.unit = unit
        self.reader = reader
        self.bytes_read = 0
        self.records = 0
        self.lines: list[int] = []
        self._digest = xxhash.xxh3_128()

    @property
    def input_hash(self) -> str:
        """Hash of the input so far."""
        return self._digest.hexdigest()

    def __iter__(self) -> Iterator[Document]:
        read = self._read_lines if self.reader.type == "jsonl" else self._read_text
        for number, piece in enumerate(self.unit.pieces):
            with open(piece.file.path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != piece.file.size:
                    raise UserError(
                        f"{piece.file.path} changed while it was being read: {piece.file.size} bytes became {size}; "
                        "start again when nothing writes to it"
                    )
                for document in read(file, piece, number):
                    self.records += 1
                    yield document

    def _document(self, piece: int, line: int | None, byte: int, text: str, id: str) -> Document:
        return Document(text, id, self.unit.index, self.records, piece, line, byte, None if text else EMPTY)

    def _rejected(self, piece: int, line: int | None, byte: int, reason: str, detail: str, raw: bytes) -> Document:
        start = printable(raw[:200].rstrip(b"\r\n").decode("utf-8", "backslashreplace"))
        detail = f"{detail}: {start}" if detail and start else detail or start
        return Document("", "", self.unit.index, self.records, piece, line, byte, reason, detail)

    def _read_text(self, file: BinaryIO, piece: Piece, number: int) -> Iterator[Document]:
        """One document a file. A byte order mark is no part of the text; line ends stay as they are."""
        self.lines.append(0)
        if piece.file.size > MAX_RECORD_BYTES:
            while chunk := file.read(2**20):
                self._digest.update(chunk)
                self.bytes_read += len(chunk)
            yield self._rejected(number, None, 0, _TOO_LONG, f"{piece.file.size} bytes", b"")
            return
        raw = file.read()
        self._digest.update(raw)
        self.bytes_read += len(raw)
        try:
            yield self._document(number, None, 0, raw.decode("utf-8-sig"), piece.file.name)
        except UnicodeDecodeError as error:
            # utf-8-sig counts from behind the mark.
            byte = error.start + (len(_BOM) if raw.startswith(_BOM) else 0)
            around = raw[max(0, byte - 20) : byte + 20]
            yield self._rejected(number, None, byte, _NOT_UTF8, f"byte 0x{raw[byte]:02x} at {byte}", around)

    def _read_lines(self, file: BinaryIO, piece: Piece, number: int) -> Iterator[Document]:
        """One JSON object a line; blank lines hold no record."""
        position = 0
        if piece.start:
            # The line that runs over the start belongs to the piece before; if one ends there, this skips nothing.
            file.seek(piece.start - 1)
            position = piece.start - 1
            while position < piece.end and (skipped := file.readline(2**20)):
                position += len(skipped)
                if skipped.endswith(b"\n"):
                    break
        self.lines.append(0)
        while position < piece.end and (raw := file.readline(MAX_RECORD_BYTES)):
            byte, line = position, self.lines[-1]
            self._digest.update(raw)
            position += len(raw)
            too_long = len(raw) == MAX_RECORD_BYTES and not raw.endswith(b"\n")
            if too_long:
                while rest := file.readline(2**20):
                    self._digest.update(rest)
                    position += len(rest)
                    if rest.endswith(b"\n"):
                        break
            self.lines[-1] += 1
            self.bytes_read += position - byte
            if too_long:
                yield self._rejected(number, line, byte, _TOO_LONG, f"{position - byte} bytes", raw)
                continue
            record = raw[len(_BOM) :] if byte == 0 and raw.startswith(_BOM) else raw
            if not record.strip():
                continue
            yield self._parse(record, number, line, byte, piece)

    def _parse(self, raw: bytes, number: int, line: int, byte: int, piece: Piece) -> Document:
        try:
            record = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            reason, detail = _json_reason(raw, error)
            return self._rejected(number, line, byte, reason, detail, raw)
        if not isinstance(record, dict):
            return self._rejected(number, line, byte, "not a JSON object", "", raw)
        if self.reader.text_key not in record:
            keys = ", ".join(map(repr, list(record)[:10])) or "none"
            return self._rejected(number, line, byte, f"no key {self.reader.text_key!r}", f"keys: {keys}", raw)
        text = record[self.reader.text_key]
        if not isinstance(text, str):
            return self._rejected(number, line, byte, "text is not a string", "", raw)
        own = record.get(self.reader.id_key)
        is_id = isinstance(own, (str, int)) and not isinstance(own, bool) and own != ""
        return self._document(number, line, byte, text, str(own) if is_id else f"{piece.file.name}@{byte}")


_TOO_LONG = f"longer than {MAX_RECORD_BYTES // 2**20} MiB"
_NOT_UTF8 = "not UTF-8"


def _json_reason(raw: bytes, error: orjson.JSONDecodeError) -> tuple[str, str]:
    """Why a line is no JSON: (one of a few reasons, the detail)."""
    try:
        raw.decode()
    except UnicodeDecodeError as bad:
        return _NOT_UTF8, f"byte 0x{raw[bad.start]:02x} at column {bad.start + 1}"
    if not raw.endswith(b"\n"):
        return "cut line", "the file ends inside of it"
    if error.pos >= len(raw.decode().rstrip("\r\n")):
        return "cut line", f"the line ends inside {'a string' if 'in string' in error.msg else 'the record'}"
    try:
        if re.search(r"[\ud800-\udfff]", json.dumps(json.loads(raw), ensure_ascii=False)):
            return "lone surrogate", str(error)
    except (ValueError, RecursionError):
        pass
    return "invalid JSON", str(error)


def printable(text: str, keep: str = "") -> str:
    """Control characters as escapes, but for those to keep: a document must not command a terminal or break a line."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def line_of(path: str, byte: int) -> int:
    """Line number, from 1, of a byte of a file. Reads everything before it."""
    line = 1
    with open(path, "rb") as file:
        while byte > 0 and (chunk := file.read(min(2**20, byte))):
            line += chunk.count(b"\n")
            byte -= len(chunk)
    return line


def where(piece: Piece, line: int | None, byte: int) -> str:
    """`FILE:LINE`, or `FILE: byte N` where files have no lines. `line` counts from 1 in the file."""
    return f"{Path(piece.file.path)}:{line}" if line is not None else f"{piece.file.path}: byte {byte}"
