"""`type: text` and `type: html`: one document per file, plain or compressed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from pipeline.data.sources.compression import StreamError, compression_of
from pipeline.data.sources.foreign_parser import SKIPPED, working_on
from pipeline.data.sources.globs import File
from pipeline.data.sources.reader import Cursor, Reader
from pipeline.data.sources.records import BOM, EMPTY, NOT_UTF8, Document, Piece, metadata_json, record_name
from pipeline.data.sources.template import UnusableRecord
from pipeline.data.sources.web.budget import DEFAULT_LIMITS, MarkupLimits
from pipeline.data.sources.web.pages import HTML_TYPES, LIBRARY, WebPage, library_version, page_text

if TYPE_CHECKING:
    from pipeline.config.data import InputConfig

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


@dataclass(frozen=True)
class HtmlReader(TextReader):
    """The main text of one HTML page per file, as `warc.html: trafilatura` takes it out of the pages of a crawl.

    Attributes:
        limits: of the markup of a page.
        library: with its version; the plan has it, so that texts of two versions are not mixed.
    """

    type = "html"
    pinned = (LIBRARY,)

    limits: MarkupLimits = dataclasses.field(default=DEFAULT_LIMITS, kw_only=True)
    library: str = dataclasses.field(default="", kw_only=True)

    @classmethod
    def from_config(cls, source: InputConfig, **limits: Any) -> Self:
        """The reader of a source, with the limits of the section `warc`."""
        return super().from_config(source, limits=MarkupLimits.of(source.warc), **limits)

    @classmethod
    def from_plan(cls, settings: Mapping[str, Any], **limits: Any) -> Self:
        """The reader that a plan was made with."""
        return super().from_plan(settings, limits=MarkupLimits.of(settings["warc"]), **limits)

    def settings(self) -> dict[str, Any]:
        """Limits of the markup that are not the default."""
        return {"warc": self.limits.settings()}

    def pins(self) -> dict[str, Any]:
        """The library that reads HTML, with its version."""
        return {LIBRARY: self.library} if self.library else {}

    def find(
        self, paths: list[str], exclude: list[str], key: str, planned: Callable[[], Mapping[str, Any]]
    ) -> tuple[Self, list[File]]:
        """The files, and the reader with the version of its library."""
        found, files = super().find(paths, exclude, key, planned)
        return dataclasses.replace(found, library=library_version()), files

    def _text(self, cursor: Cursor, piece: Piece, raw: bytes) -> str | Document:
        name = record_name(piece.file.name, self.numbering, 0)
        try:
            if name in self.skip_records:
                raise UnusableRecord(SKIPPED, "")  # before it is parsed: it may be named because that takes hours
            working_on(name)
            return page_text(WebPage(HTML_TYPES[0], None, raw), self.limits)
        except UnusableRecord as unusable:
            return cursor.rejected(None, 0, unusable.reason, unusable.detail)


def _chunks(stream: BinaryIO, limit: int) -> Iterator[bytes]:
    """At most `limit` bytes. `read(limit)` would allocate as much for every small file."""
    while limit > 0 and (chunk := stream.read(min(limit, _CHUNK_BYTES))):
        yield chunk
        limit -= len(chunk)
