"""A source: the elements of XML-like dumps, as `<doc id="1" title="A">`, lines of text, `</doc>`."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from io import BufferedReader

from pydantic import Field

from pipeline.config.base import Section
from pipeline.data.sources.compression import StreamError, open_stream
from pipeline.data.sources.globs import File
from pipeline.data.sources.reader import Cursor, Reader
from pipeline.data.sources.records import NOT_UTF8, Document, Piece

CUT_FILE = "truncated XML file"
_ATTRIBUTE = re.compile(r'([\w:-]+)="([^"]*)"')


class XmlReader(Reader):
    """Elements that begin and end at lines of their own, plain or compressed; lines between them are left out.

    Keys of a record are the attributes, and `text` for the lines.
    """

    type = "example.xml"
    numbering = "line"

    class Options(Section):
        """Options of `type: example.xml`."""

        tag: str = Field(default="doc", pattern=r"^[A-Za-z][\w.-]*$")
        """Name of the elements."""

    def pieces(self, file: File, size: int) -> Iterator[Piece]:
        """All of a file: only from its beginning is it known which lines are inside of an element."""
        yield Piece(file, 0, file.size, chunked=True)

    def read(self, cursor: Cursor, piece: Piece) -> Iterator[Document]:
        """A document per element; of a damaged file, the elements before the damage."""
        with open_stream(piece.file.path, verify=self.verify, beat=cursor.beat) as stream:
            try:
                yield from self._elements(cursor, piece, stream)
            except StreamError as error:
                lost = piece.file.size - error.sound
                cursor.ended = True
                cursor.bytes_read += lost
                cursor.damaged(error.reason, error.detail, lost)

    def _elements(self, cursor: Cursor, piece: Piece, stream: BufferedReader) -> Iterator[Document]:
        cursor.offset = left = max(cursor.offset, 0)
        while left and (chunk := stream.read(min(left, 2**18))):
            left -= len(chunk)
        begin, end = f"<{self.options.tag}".encode(), f"</{self.options.tag}>".encode()
        disk = getattr(stream.raw, "consumed", 0)
        lines: list[bytes] = []
        size = line = byte = 0
        while raw := stream.readline(self.max_record_bytes):
            if not lines:
                line, byte = cursor.line, cursor.offset
            self._count(cursor, raw, stream, disk)
            disk = getattr(stream.raw, "consumed", 0)
            if not lines and not raw.startswith(begin):
                continue
            size += len(raw)
            if size <= self.max_record_bytes or not lines:
                lines.append(raw)
            if raw.startswith(end):
                yield self._document(cursor, piece, lines, line, byte, size)
                lines, size = [], 0
        if lines:
            cursor.damaged(CUT_FILE, f"the element of line {line + 1} has no end", piece.file.size if disk else size)

    def _count(self, cursor: Cursor, raw: bytes, stream: BufferedReader, disk: int) -> None:
        cursor.digest.update(raw)
        cursor.offset += len(raw)
        cursor.line += raw.endswith(b"\n")
        cursor.input_bytes += len(raw)
        now = getattr(stream.raw, "consumed", None)
        cursor.bytes_read += len(raw) if now is None else now - disk

    def _document(self, cursor: Cursor, piece: Piece, lines: list[bytes], line: int, byte: int, size: int) -> Document:
        if size > self.max_record_bytes:
            return cursor.rejected(line, byte, self.too_long, f"{size} bytes", lines[0])
        try:
            head, *body = b"".join(lines[:-1]).decode().split("\n")
        except UnicodeDecodeError as error:
            return cursor.rejected(line, byte, NOT_UTF8, f"byte {error.start} of the element", lines[0])
        values = {name: html.unescape(value) for name, value in _ATTRIBUTE.findall(head)}
        values["text"] = html.unescape("\n".join(body)).rstrip("\n")
        return cursor.document(values, line, byte, f"{piece.file.name}@{byte}", lines[0])
