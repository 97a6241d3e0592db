"""`type: warc`: pages of crawls, from `response` records of WARC files and `conversion` records of WET files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from pipeline.common.errors import UserError
from pipeline.data.sources.compression import Decompressed, StreamError
from pipeline.data.sources.foreign_parser import SKIPPED, working_on
from pipeline.data.sources.globs import File
from pipeline.data.sources.reader import Cursor
from pipeline.data.sources.records import (
    EMPTY,
    NO_PAGE,
    NOT_UTF8,
    Document,
    Piece,
    Unit,
    UnusableRecord,
    metadata_json,
    record_name,
)
from pipeline.data.sources.web.html import PageReader
from pipeline.data.sources.web.pages import HTML_TYPES, TEXT_TYPE, characters, page_of, page_text
from pipeline.data.sources.web.records import BrokenWarcError, WarcHead, block_chunks, line_after, read_head

if TYPE_CHECKING:
    from pipeline.config.data import InputConfig

_FIELDS = {"url": "warc-target-uri", "date": "warc-date", "record_id": "warc-record-id"}
"""Fields of the header by the short names that metadata may have."""


@dataclass(frozen=True)
class WarcReader(PageReader):
    """One page a document. Records are numbered by row: those of type `response` and `conversion`, from 0.

    Where the next record begins is known only after the one before it, so a file is read from its beginning.

    Attributes:
        html: `WarcConfig.html`.
    """

    type = "warc"
    numbering = "row"
    magic = b"WARC/1."
    title = "WARC"

    html: str | None = dataclasses.field(default=None, kw_only=True)

    @property
    def reads_html(self) -> bool:
        """True if the library is needed."""
        return self.html not in (None, "skip")

    @classmethod
    def from_config(cls, source: InputConfig, **limits: Any) -> Self:
        """The reader of a source with the section `warc`."""
        return super().from_config(source, html=source.warc.html, **limits)

    @classmethod
    def from_plan(cls, settings: Mapping[str, Any], **limits: Any) -> Self:
        """The reader that a plan was made with."""
        return super().from_plan(settings, html=settings["warc"]["html"], **limits)

    def settings(self) -> dict[str, Any]:
        """Treatment of HTML."""
        return {"warc": {"html": self.html} | self.limits.settings()}

    def check_columns(self, files: Sequence[File], *, every: bool = False) -> None:
        """Read the first page of the first file: HTML is refused where the run file does not say what to do with it."""
        for file in files[:1]:
            piece = Piece(file, 0, file.size, chunked=True)
            # Where HTML is expected, that page need not be parsed here: it may take long.
            reader = dataclasses.replace(self, verify=False, html=self.html and "skip")
            next(reader.read(Cursor(Unit(0, "", (piece,)), reader), piece), None)

    def pieces(self, file: File, size: int) -> Iterator[Piece]:
        """All of a file."""
        yield Piece(file, 0, file.size, chunked=True)

    def read(self, cursor: Cursor, piece: Piece) -> Iterator[Document]:
        """The pages of a file. Of one that is damaged, those before the damage are given."""
        with cursor.open_stream(piece.file.path) as stream:
            place = _Place(stream)
            try:
                yield from self._documents(cursor, piece, stream, place)
            except (BrokenWarcError, StreamError) as error:
                if isinstance(error, BrokenWarcError):
                    error = StreamError(error.reason, error.detail, place.before)
                cursor.broken_stream(piece, error, f"{cursor.offset:,} pages before that are good")

    def _documents(self, cursor: Cursor, piece: Piece, stream: BinaryIO, place: _Place) -> Iterator[Document]:
        done, number = max(cursor.offset, 0), 0
        while number < done and (head := read_head(stream)) is not None:
            number += _is_page(head)
            _skip(stream, head)
        place.step()
        cursor.offset = done
        line: bytes | None = None
        while (head := read_head(stream, line)) is not None:
            if not _is_page(head):
                _skip(stream, head)
                line = None
                continue
            block, end, damage = self._block(cursor, stream, head), place.now, None
            try:
                line = line_after(stream, head.length)
            except StreamError as error:  # of what follows; the page itself is sound
                damage = error
            cursor.offset += 1
            cursor.input_bytes += len(head.raw) + head.length
            cursor.bytes_read += place.step(end)
            yield self._document(cursor, piece, head, block)
            if damage is not None:
                raise damage
        cursor.bytes_read += place.step()

    def _block(self, cursor: Cursor, stream: BinaryIO, head: WarcHead) -> bytes | None:
        """The block of a record; None if it is too long."""
        cursor.digest.update(head.raw)
        parts: list[bytes] = []
        for chunk in block_chunks(stream, head.length):
            cursor.digest.update(chunk)
            if head.length <= self.max_record_bytes:
                parts.append(chunk)
        return b"".join(parts) if head.length <= self.max_record_bytes else None

    def _document(self, cursor: Cursor, piece: Piece, head: WarcHead, block: bytes | None) -> Document:
        number = cursor.offset - 1
        own = head.fields.get("warc-record-id", "")
        try:
            if block is None:
                raise UnusableRecord(self.too_long, f"{head.length} bytes")
            if (name := record_name(piece.file.name, self.numbering, number)) in self.skip_records:
                raise UnusableRecord(SKIPPED, "")
            working_on(name)
            text = self._text(piece, number, head, block)
        except UnusableRecord as unusable:
            about = f"{unusable.detail} ({head.fields.get('warc-target-uri', own)[:200]})"
            return cursor.rejected(None, number, unusable.reason, about)
        metadata = None
        if cursor.kept:
            names = {key: _FIELDS.get(key, key.lower()) for key in cursor.kept}
            metadata = metadata_json(
                {key: _bare(head.fields[name]) for key, name in names.items() if name in head.fields}
            )
        row = cursor.row
        cursor.row += 1
        reason = None if text else EMPTY
        name = own or f"{piece.file.name}#{number}"
        return Document(text, name, cursor.unit.index, row, cursor.piece, None, number, reason, "", metadata)

    def _text(self, piece: Piece, number: int, head: WarcHead, block: bytes) -> str:
        """The text of a record.

        Raises:
            UnusableRecord: it has none.
            UserError: it is HTML, and nobody has said what is done with that.
        """
        if "warc-segment-number" in head.fields:
            raise UnusableRecord("segmented record", "it is a part of one that lies elsewhere")
        media_type = head.fields.get("content-type", "").partition(";")[0].strip().lower()
        if head.fields["warc-type"].lower() == "conversion":
            if media_type != TEXT_TYPE:
                raise UnusableRecord(NO_PAGE, media_type[:50] or "no Content-Type")
            try:
                return block.decode()
            except UnicodeDecodeError as error:
                raise UnusableRecord(NOT_UTF8, f"byte 0x{block[error.start]:02x} at {error.start}") from None
        if media_type != "application/http":
            raise UnusableRecord(NO_PAGE, media_type[:50] or "no Content-Type")
        page = page_of(block, self.max_record_bytes, self.too_long)
        if page.media_type not in HTML_TYPES:
            return characters(page)
        if self.html is None:
            raise UserError(
                f"{self.locate(piece, None, number)} is an HTML page: set warc.html of the source to trafilatura, "
                "which takes the main text out of pages, or to skip, to read plain text alone"
            )
        if self.html == "skip":
            raise UnusableRecord(NO_PAGE, page.media_type)
        return page_text(page, self.limits)


class _Place:
    """Progress in a file, in bytes on disk.

    Attributes:
        before: where the record that is being read begins, about.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.before = 0

    @property
    def now(self) -> int:
        """Bytes that were read."""
        raw = self._stream.raw
        return int(raw.consumed if isinstance(raw, Decompressed) else self._stream.tell())

    def step(self, end: int | None = None) -> int:
        """Bytes since the last step, up to `end` or now."""
        end = self.now if end is None else end
        step, self.before = end - self.before, end
        return step


def _is_page(head: WarcHead) -> bool:
    return head.fields.get("warc-type", "").lower() in ("response", "conversion")


def _skip(stream: BinaryIO, head: WarcHead) -> None:
    for _ in block_chunks(stream, head.length):
        pass


def _bare(value: str) -> str:
    """A value without the angle brackets that older crawlers write around addresses."""
    return value[1:-1] if value.startswith("<") and value.endswith(">") and "urn:" not in value else value
