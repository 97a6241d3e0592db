"""A format of tests alone: texts that lines with a `%` end, as the program `fortune` has them. All of it is here."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.data.sources.globs import File
from pipeline.data.sources.reader import Cursor, Reader
from pipeline.data.sources.records import EMPTY, NOT_UTF8, Document, Piece

MARK = b"%\n"


class FortuneReader(Reader):
    """The texts between the marks of a plain file, found by the line that they begin at."""

    type = "fortunes"
    numbering = "line"
    has_keys = False

    def pieces(self, file: File, size: int) -> Iterator[Piece]:
        """All of a file, which becomes as many links as it takes."""
        yield Piece(file, 0, file.size, chunked=True)

    def read(self, cursor: Cursor, piece: Piece) -> Iterator[Document]:
        """A document a text."""
        cursor.offset = max(cursor.offset, 0)
        with open(piece.file.path, "rb") as file:
            file.seek(cursor.offset)
            lines: list[bytes] = []
            for raw in iter(file.readline, b""):
                lines.append(raw)
                if raw == MARK:
                    yield self._document(cursor, piece, lines)
                    lines = []
            if lines:
                yield self._document(cursor, piece, lines)

    def _document(self, cursor: Cursor, piece: Piece, lines: list[bytes]) -> Document:
        whole, line, byte = b"".join(lines), cursor.line, cursor.offset
        cursor.digest.update(whole)
        cursor.offset += len(whole)
        cursor.input_bytes += len(whole)
        cursor.bytes_read += len(whole)
        cursor.line += len(lines)
        try:
            text = whole.removesuffix(MARK).decode()
        except UnicodeDecodeError as error:
            return cursor.rejected(line, byte, NOT_UTF8, f"byte {error.start} of the text", whole)
        row, unit, reason = cursor.row, cursor.unit.index, None if text else EMPTY
        cursor.row += 1
        return Document(text, f"{piece.file.name}@{byte}", unit, row, cursor.piece, line, byte, reason)
