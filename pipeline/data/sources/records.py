"""What readers read and yield: pieces of files, units of work, documents, and how far the reading has come."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import xxhash

from pipeline.common.errors import UserError
from pipeline.data.sources.compression import StreamError, open_stream
from pipeline.data.sources.globs import File

MAX_RECORD_BYTES = 32 * 2**20
"""A longer file, line or value is rejected without being held, by default."""
EMPTY = "empty document"
"""The one reason that is no error: the record is sound, there is only nothing in it."""
NOT_UTF8 = "not UTF-8"
HUB_PREFIX = "hf://"
"""Begins the paths of files that lie on the Hugging Face hub."""
MAX_EXPANSION = 200
"""Bytes of text that a byte of a table may become by default."""
ANY_EXPANSION = 2**62
"""For files that were read before."""
FREE_BYTES = 64 * 2**20
"""So much text a table may become however small it is."""
ROW_BYTES = 64
"""What a row counts for besides its text: empty ones take time, too."""

Position = tuple[int, int, int, int]
"""Where to read on: (piece, offset in the piece's file, line in the piece, row in the unit).

The offset is a byte of the decompressed file for lines and text, and a row of the file for tables.
"""
START: Position = (0, -1, 0, 0)
"""The beginning of a unit; offset -1 is the beginning of a piece."""


@dataclass(frozen=True, slots=True)
class Hub:
    """A dataset that `datasets.load_dataset` streams; the meaning of the fields is that of its arguments."""

    path: str
    name: str | None = None
    split: str = "train"
    revision: str | None = None
    data_files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reader:
    """How a source's files are read.

    Attributes:
        type: `text`, `jsonl`, `parquet`, `arrow` or `hub`.
        text_key: key or column of the text.
        id_key: key or column of the id.
        metadata: keys or columns that are kept beside the text.
        hub: what `hub` streams, with its revision pinned to a commit.
        max_expansion: bytes of text that a byte of a table may become; see `Cursor.expand`.
        max_record_bytes: a longer file, line or value is rejected.
        verify: whether all of a compressed member is read before any of its text is given. Samples do without.
        dropped: damaged files of which nothing is taken, by name, with the reason and the detail.
    """

    type: str
    text_key: str
    id_key: str
    metadata: tuple[str, ...] = ()
    hub: Hub | None = None
    max_expansion: int = MAX_EXPANSION
    max_record_bytes: int = MAX_RECORD_BYTES
    verify: bool = True
    dropped: Mapping[str, tuple[str, str]] = field(default_factory=dict, hash=False)

    @property
    def too_long(self) -> str:
        """The reason to reject a longer record."""
        return f"longer than data.preprocess.max_record_bytes ({self.max_record_bytes})"


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [start, end) of a file as it lies on disk. What begins in them belongs to the piece.

    Attributes:
        linked: whether it may hold far more text than its bytes say: it is compressed, or a table.
    """

    file: File
    start: int
    end: int
    linked: bool = False


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
        """Bytes of input on disk."""
        return sum(piece.end - piece.start for piece in self.pieces)

    @property
    def linked(self) -> bool:
        """Whether what it becomes may need more than one link."""
        return any(piece.linked for piece in self.pieces)

    def __str__(self) -> str:
        first, more = self.pieces[0], len(self.pieces) - 1
        whole = first.start == 0 and first.end == first.file.size
        where = "" if whole else f" bytes {first.start}-{first.end}"
        others = f" and {more} more {'file' if more == 1 else 'files'}" if more else ""
        return f"unit {self.index} of {self.source} ({first.file.path}{where}{others})"


@dataclass(slots=True)
class Document:
    """A record of a source: a document, or with `reason` a rejected record.

    Attributes:
        text: the text; empty when rejected.
        id: the record's own id; else `NAME` (text), `NAME@BYTE` (lines) or `NAME#ROW` (tables) from the file's name.
        unit: index of the unit.
        row: number of the record in its unit, from 0; lines without a record (blank ones) have no number.
        piece: number of the piece of the unit that it was read from.
        line: line in the piece, from 0; None where files have no lines.
        byte: byte offset in the (decompressed) file: of the record, or of the first byte that is not UTF-8. In tables:
            the row of the file.
        reason: why it is rejected; one of a few, so that they can be counted.
        detail: more on the reason, and the beginning of the record.
        metadata: the kept keys as a JSON object, if any are asked for.
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
    metadata: bytes | None = None


@dataclass(frozen=True, slots=True)
class Damage:
    """What could not be read of a file.

    Attributes:
        piece: number of the piece of the unit.
        reason: one of a few, like `truncated gzip file`.
        detail: what was found, and where.
        lost: bytes on disk whose text is missing.
    """

    piece: int
    reason: str
    detail: str
    lost: int


class Cursor:
    """How far the reading of a unit has come; right after every document, while what yields it waits.

    Attributes:
        unit: what is read.
        reader: how.
        piece: number of the piece.
        offset: as in `Position`: where the next record of the piece begins.
        line: lines of the piece that lie before that.
        row: number of the next record.
        ended: nothing more can be read of the piece.
        input_bytes: bytes of decompressed lines and text, or of the values of columns, since the start.
        bytes_read: bytes on disk since the start; for compressed files and tables about as many.
        digest: of what `input_bytes` counts.
        damage: what could not be read since the start.
        beat: called now and then while a compressed file is read, much of which may give no document.
    """

    def __init__(self, unit: Unit, reader: Reader, start: Position) -> None:
        self.unit = unit
        self.reader = reader
        self.piece, self.offset, self.line, self.row = start
        self.ended = False
        self.input_bytes = 0
        self.bytes_read = 0
        self.digest = xxhash.xxh3_128()
        self.damage: list[Damage] = []
        self.beat: Callable[[], None] = lambda: None
        self._start = start
        self._counts: dict[int, tuple[int, int]] = {}
        self._first: tuple[int, int] | None = None
        self._expanded = 0

    @property
    def position(self) -> Position:
        """Where a reader has to start to get the next record."""
        return (self.piece + 1, -1, 0, self.row) if self.ended else (self.piece, self.offset, self.line, self.row)

    @property
    def input_hash(self) -> str:
        """Hash (xxh3-128) of what was read since the start."""
        return self.digest.hexdigest()

    @property
    def records(self) -> int:
        """Records since the start, good or bad."""
        return self.row - self._start[3]

    @property
    def pieces(self) -> dict[int, tuple[int, int]]:
        """(lines, records) since the start, by the number of the piece."""
        if self._first is None:
            return {}
        line, row = self._first
        return {**self._counts, self.piece: (self.line - line, self.row - row)}

    def enter(self, number: int) -> Piece:
        """Begin a piece, or go on with the one that the start lies in."""
        if self._first is not None:
            line, row = self._first
            self._counts[self.piece] = (self.line - line, self.row - row)
        if number != self.piece:
            self.piece, self.offset, self.line = number, -1, 0
        self.ended = False
        self._first = (self.line, self.row)
        self._expanded = 0
        return self.unit.pieces[number]

    def expand(self, piece: Piece, size: int) -> None:
        """Count what the rows of a table become, over all links of a piece: a few bytes can stand for billions of rows.

        Raises:
            UserError: it is more than a file of this size may become.
        """
        self._expanded += size
        self.check_expansion(piece, self._expanded, "its rows make")

    def check_expansion(
        self, piece: Piece, size: int, what: str, on_disk: int | None = None, free: int = FREE_BYTES
    ) -> None:
        """Refuse what a table says that a part of it becomes.

        Args:
            piece: of the table.
            size: bytes, more or less.
            what: the part that takes those bytes, for the message.
            on_disk: of which part; by default of the whole file.
            free: so much it may be however small that is.

        Raises:
            UserError: it is too much for what there is on disk.
        """
        if piece.file.path.startswith(HUB_PREFIX):
            return  # nobody knows how large it is
        limit = max(free, self.reader.max_expansion * (piece.file.size if on_disk is None else on_disk))
        if size > limit:
            raise UserError(
                f"{piece.file.path} has {piece.file.size:,} bytes, and {what} {size:,} bytes or more, above the limit "
                f"of {limit:,}: a file that is made to exhaust the machine looks like this. Leave it out (exclude); "
                "or, if you know where it comes from, raise data.preprocess.max_expansion "
                f"({self.reader.max_expansion}), the bytes of text that a byte on disk may become"
            )

    def count_anew(self) -> None:
        """Count and hash from here on, as a reader does that is started at `position`; but for `bytes_read`."""
        self._start = self.position
        self._counts = {}
        self._first = (self.line, self.row)
        self.input_bytes = 0
        self.digest.reset()
        self.damage = []

    def damaged(self, reason: str, detail: str, lost: int) -> None:
        """Take note of what cannot be read of the piece. It is no record, and has no row."""
        self.damage.append(Damage(self.piece, reason, printable(detail), lost))

    def give_up(self, piece: Piece, reason: str, detail: str) -> None:
        """Take note that all of the piece is lost, and end it."""
        self.bytes_read += piece.end - piece.start
        self.ended = True
        self.damaged(reason, detail, piece.end - piece.start)

    def rejected(self, line: int | None, byte: int, reason: str, detail: str, raw: bytes = b"") -> Document:
        """A rejected record, of which `raw` is the beginning. It counts as read."""
        begin = printable(raw[:200].rstrip(b"\r\n").decode("utf-8", "backslashreplace"))
        detail = f"{detail}: {begin}" if detail and begin else detail or begin
        self.row += 1
        return Document("", "", self.unit.index, self.row - 1, self.piece, line, byte, reason, detail)

    @cached_property
    def kept(self) -> tuple[str, ...]:
        """Keys of the metadata, each once."""
        return tuple(dict.fromkeys(self.reader.metadata))


def printable(text: str, keep: str = "") -> str:
    """Control characters as escapes, but for those to keep: a document must not command a terminal or break a line."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def line_of(path: str, byte: int) -> int:
    """Line number, from 1, of a byte of a (decompressed) file. Reads everything before it."""
    line = 1
    with open_stream(path, verify=False) as stream:
        try:
            while byte > 0 and (chunk := stream.read(min(2**20, byte))):
                line += chunk.count(b"\n")
                byte -= len(chunk)
        except StreamError:
            pass  # what was asked for is where it ends
    return line


def where(piece: Piece, line: int | None, byte: int, type: str = "text") -> str:
    """`FILE:LINE`; `FILE: byte N` where files have no lines, `FILE: row N` for tables. `line` counts from 1."""
    if line is not None:
        return f"{Path(piece.file.path)}:{line}"
    return f"{piece.file.path}: {'byte' if type in ('text', 'jsonl') else 'row'} {byte}"
