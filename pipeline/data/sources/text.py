"""`type: text`: one document per file, plain or compressed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from pipeline.data.sources.compression import StreamError, compression_of
from pipeline.data.sources.reader import Cursor, Reader
from pipeline.data.sources.records import BOM, EMPTY, NOT_UTF8, Document, Piece, metadata_json

_CHUNK_BYTES = 2**18


class TextReader(Reader):
    """One document per file. A byte order mark is dropped; line ends stay as they are."""

    type = "text"
    numbering = "text"
    has_keys = False

    def read(self, cursor: Cursor, piece: Piece) -> Iterator[Document]:
        """The document of a file."""
        path, longest = piece.file.path, self.max_record_bytes
        try:
            with cursor.open_stream(path) as stream:
                # A plain file that is too long is not even begun to be held; of a compressed one nobody knows before.
                limit = longest + 1 if compression_of(path) or piece.file.size <= longest else 0
                raw = b"".join(_chunks(stream, limit))
                cursor.digest.update(raw)
                size = len(raw)
                if too_long := size == limit:
                    raw = b""
                    while chunk := stream.read(_CHUNK_BYTES):
                        cursor.digest.update(chunk)
                        size += len(chunk)
        except StreamError as error:
            cursor.give_up(piece, error.reason, error.detail)  # a part of a text is none
            return
        cursor.input_bytes += size
        cursor.bytes_read += piece.file.size
        cursor.offset = size
        cursor.ended = True
        if too_long:
            yield cursor.rejected(None, 0, self.too_long, f"{size} bytes")
            return
        text = self._text(cursor, piece, raw)
        if isinstance(text, Document):
            yield text
            return
        row = cursor.row
        cursor.row += 1
        reason = None if text else EMPTY
        metadata = None
        if cursor.kept:
            metadata = metadata_json(dict(cursor.reader.record_keys(piece.file.path).partitions))
        yield Document(text, piece.file.name, cursor.unit.index, row, cursor.piece, None, 0, reason, "", metadata)

    def _text(self, cursor: Cursor, piece: Piece, raw: bytes) -> str | Document:
        """The text of a file, or its rejection."""
        try:
            return raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            # utf-8-sig counts from behind the mark.
            byte = error.start + (len(BOM) if raw.startswith(BOM) else 0)
            around = raw[max(0, byte - 20) : byte + 20]
            return cursor.rejected(None, byte, NOT_UTF8, f"byte 0x{raw[byte]:02x} at {byte}", around)


def _chunks(stream: BinaryIO, limit: int) -> Iterator[bytes]:
    """At most `limit` bytes. `read(limit)` would allocate as much for every small file."""
    while limit > 0 and (chunk := stream.read(min(limit, _CHUNK_BYTES))):
        yield chunk
        limit -= len(chunk)
