"""Input and output of readers: pieces of files, units of work and documents."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from io import RawIOBase
from numbers import Real
from typing import Any, Literal
from urllib.parse import unquote

import orjson

from pipeline.common.errors import UserError
from pipeline.config.blend import LEAST_LOSS_WEIGHT, MOST_LOSS_WEIGHT
from pipeline.data.sources.compression import StreamError, open_stream
from pipeline.data.sources.globs import File

MAX_RECORD_BYTES = 32 * 2**20
"""A longer file, line or value is rejected without being held, by default."""
EMPTY = "empty document"
"""The reason of a record that is sound, and there is only nothing in it."""
NULL_TEXT = "text is null"
"""The reason of a row of a table without a text, which is as good as an empty one."""
NO_PAGE = "not a page of text"
"""The reason of a sound record of a crawl that is an image, say, or a page that was not found."""
NOT_BAD = frozenset({EMPTY, NULL_TEXT, NO_PAGE})
"""Reasons that are no error."""
NOT_UTF8 = "not UTF-8"
BAD_WEIGHT = "bad loss weight"
NO_TARGET = "nothing to train on"
BOM = b"\xef\xbb\xbf"
HUB_PREFIX = "hf://"
"""Begins the paths of files that lie on the Hugging Face hub."""
MAX_EXPANSION = 200
"""Bytes of text that a byte of a table may become by default."""
ANY_EXPANSION = 2**62
"""For files that were read before."""
FREE_BYTES = 64 * 2**20
"""So much text a table may become however small it is."""
ROW_BYTES = 64
"""Bytes that a row counts for besides its text: empty ones take time, too."""

NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
"""Name that writers give to a partition without a value."""

Position = tuple[int, int, int, int]
"""Position to resume reading at: (piece, offset in the piece's file, line in the piece, row in the unit).

The offset is a byte of the decompressed file for lines and text, and a row of the file for tables.
"""
START: Position = (0, -1, 0, 0)
"""The beginning of a unit; offset -1 is the beginning of a piece."""
Numbering = Literal["text", "line", "row"]
"""Unit of the number of a document's place: nothing, where a file is one text; lines, from 1; rows of a table, from
0."""


@dataclass(frozen=True, slots=True)
class Hub:
    """A dataset that `datasets.load_dataset` streams; the meaning of the fields is that of its arguments."""

    path: str
    name: str | None = None
    split: str = "train"
    revision: str | None = None
    data_files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [start, end) of a file as it lies on disk. What begins in them belongs to the piece.

    Attributes:
        chunked: whether it may hold far more text than its bytes say: it is compressed, or a table.
    """

    file: File
    start: int
    end: int
    chunked: bool = False


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
    def chunked(self) -> bool:
        """Tell whether what it becomes may need more than one chunk."""
        return any(piece.chunked for piece in self.pieces)

    def __str__(self) -> str:
        first, more = self.pieces[0], len(self.pieces) - 1
        whole = first.start == 0 and first.end == first.file.size
        range_text = "" if whole else f" bytes {first.start}-{first.end}"
        others = f" and {more} more {'file' if more == 1 else 'files'}" if more else ""
        return f"unit {self.index} of {self.source} ({first.file.path}{range_text}{others})"


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
    edited: bool = False
    """Its text is not that of the source any more."""
    weight: float = 1.0
    """Weight of its tokens in the training loss, if the source has such a key."""
    spans: tuple[tuple[int, int], ...] | None = None
    """Characters of a conversation that are trained on, see `RecordText`."""
    name: str = field(default="", compare=False)
    """`record_name` of it, which messages and `skip_records` have."""


class UnusableRecord(Exception):
    """A record gives no document.

    Attributes:
        reason: one of a few.
        detail: more on it.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True, slots=True)
class Damage:
    """A part of a file that could not be read.

    Attributes:
        piece: number of the piece of the unit.
        reason: one of a few, like `truncated gzip file`.
        detail: what was found, and where.
        lost: bytes on disk whose text is missing.
        salvaged: bytes of text that are used all the same, without a checksum: those before the break of a member.
    """

    piece: int
    reason: str
    detail: str
    lost: int
    salvaged: int = 0


def partitions(path: str) -> dict[str, str | None]:
    """Values of the partitions that the folders of a path name, as text; the innermost of several with one name.

    Names and values are URL-decoded, as Hive, Spark and pyarrow encode them: `lang=de/part-0.parquet`.

    Raises:
        UserError: one is not UTF-8.
    """
    found: dict[str, str | None] = {}
    for folder in path.split("/")[:-1]:
        key, sign, value = folder.partition("=")
        if key and sign:
            try:
                name, decoded = unquote(key, errors="strict"), unquote(value, errors="strict")
            except UnicodeDecodeError:
                raise UserError(
                    f"{path}: the name of the folder {folder} is not UTF-8, URL-encoded; rename it"
                ) from None
            found[name] = None if value == NO_VALUE else decoded
    return found


@dataclass(frozen=True)
class RecordKeys:
    """Places of keys that the records of a file do not have themselves.

    Attributes:
        nested: (key, its parts) of keys with a dot.
        partitions: (key, value) of the file.
    """

    nested: tuple[tuple[str, tuple[str, ...]], ...]
    partitions: tuple[tuple[str, str | None], ...]

    @classmethod
    def of(cls, path: str, keys: Iterable[str], partition_keys: Iterable[str]) -> RecordKeys:
        """Those of a file.

        Args:
            path: of the file.
            keys: of the run file.
            partition_keys: of these, keys that a partition may give.
        """
        nested = tuple((key, tuple(key.split("."))) for key in dict.fromkeys(keys) if "." in key)
        named = partitions(path) if "=" in path else {}
        given = tuple((key, named[key]) for key in dict.fromkeys(partition_keys) if key in named)
        return cls(nested, given)

    def __bool__(self) -> bool:
        """True if there are any; else each key can only be one of the record itself."""
        return bool(self.nested or self.partitions)

    def complete(self, record: dict[str, Any]) -> None:
        """Add the values that a record does not have under their whole keys. What it has stays, be it null."""
        for key, parts in self.nested:
            if key in record:
                continue
            value: Any = record
            for part in parts:
                if type(value) is not dict or part not in value:
                    break
                value = value[part]
            else:
                record[key] = value
        for key, given in self.partitions:
            record.setdefault(key, given)


def record_name(file: str, numbering: Numbering, byte: int) -> str:
    """Name of a record, by its place: `NAME` (text), `NAME@BYTE` (lines) or `NAME#ROW` (tables, crawls).

    Args:
        file: name of the file.
        numbering: of the format.
        byte: as in `Document`.
    """
    return file if numbering == "text" else f"{file}{'@' if numbering == 'line' else '#'}{byte}"


def loss_weight(value: Any) -> float | None:
    """A value of `weight_key` as a weight; None for one that is not a number within the bounds."""
    if isinstance(value, bool) or not isinstance(value, (Real, Decimal)):
        return None
    number = float(value)
    return number if LEAST_LOSS_WEIGHT <= number <= MOST_LOSS_WEIGHT else None


def bad_weight(key: str, value: Any) -> str:
    """Detail of a record whose weight is missing or no weight."""
    found = "missing" if value is None else escaped(repr(value)[:80])
    return f"{key!r} is {found}; it must be a number from {LEAST_LOSS_WEIGHT:f} to {MOST_LOSS_WEIGHT:,.0f}"


def printable(text: str, keep: str = "") -> str:
    """Control characters as escapes, but for those to keep: a document must not command a terminal or break a line."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def line_of(path: str, byte: int, raw: RawIOBase | None = None) -> int:
    """Line number, from 1, of a byte of a (decompressed) file. Reads everything before it.

    Args:
        path: of the file.
        byte: of its content.
        raw: the file, if it is open or lies elsewhere.
    """
    line = 1
    with open_stream(path, raw, verify=False) as stream:
        try:
            while byte > 0 and (chunk := stream.read(min(2**20, byte))):
                line += chunk.count(b"\n")
                byte -= len(chunk)
        except StreamError:
            pass  # what was asked for is where it ends
    return line


def escaped(text: str) -> str:
    """Lone surrogates spelled out."""
    return text.encode("utf-8", "backslashreplace").decode()


def metadata_json(values: dict[str, Any]) -> bytes:
    """Kept values as a JSON object: dates in ISO form, numbers that are none as null, all else as text."""
    try:
        return orjson.dumps(values, default=_as_text, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:  # nested deeper than can be written, or with lone surrogates
        return orjson.dumps({key: _writable(value) for key, value in values.items()}, option=orjson.OPT_SORT_KEYS)


def _writable(value: Any) -> orjson.Fragment | None:
    if isinstance(value, str):
        value = escaped(value)
    try:
        return orjson.Fragment(orjson.dumps(value, default=_as_text, option=orjson.OPT_SORT_KEYS))
    except orjson.JSONEncodeError:
        return None


def _as_text(value: Any) -> str:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
