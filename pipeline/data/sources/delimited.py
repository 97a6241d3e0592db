"""`type: csv` and `type: tsv`: one record a document, plain or compressed.

Records are those of RFC 4180, with two liberties that other readers take, too: lines may end with LF alone, and a
quote inside of a field that does not begin with one is a character like any other. What else is wrong with a record
rejects it.

Whether a byte lies inside of quotes depends on all bytes before it: a line end there may be one of a record or of a
field. So a file is read from its beginning, as one unit, in as many chunks as it takes; a reader resumes at the byte
where a record begins. Without quoting each line is a record, and plain files are cut into byte ranges like JSON lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Self

from pipeline.common.errors import UserError
from pipeline.common.storage import naming
from pipeline.data.sources.compression import Decompressed, StreamError, compression_of, open_stream
from pipeline.data.sources.globs import File
from pipeline.data.sources.jsonl import FEW_BLANKS, blank_lines, seek_line, skip_read
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
    loss_weight,
    metadata_json,
)

if TYPE_CHECKING:
    from pipeline.config.data import InputConfig

CUT_FILE = "truncated CSV file"
"""The reason where a file ends inside of a record."""
_BUFFER_BYTES = 2**18
_HEAD_BYTES = 200
_BLANK = re.compile(rb"(?:\n++|(?:\r\n)++)++")
_THREADS = 16
_MOST_COLUMNS = 2**16
_OTHERS = ",;\t|"
"""Delimiters that a header may have been written with."""


@dataclass(frozen=True)
class CsvReader(Reader):
    """One record a document, by the columns of a header; blank lines hold no record.

    Attributes:
        delimiter: between fields.
        quoting: whether fields may stand in quotes.
        columns: of files without a header.
    """

    type = "csv"
    numbering = "line"

    delimiter: str = field(default=",", kw_only=True)
    quoting: bool = field(default=True, kw_only=True)
    columns: tuple[str, ...] = field(default=(), kw_only=True)

    @classmethod
    def from_config(cls, source: InputConfig, **limits: Any) -> Self:
        """The reader of a source with the section `csv`."""
        own = {"delimiter": source.csv.delimiter} if source.csv.delimiter is not None else {}
        return super().from_config(
            source, quoting=source.csv.quoting, columns=tuple(source.csv.columns), **own, **limits
        )

    @classmethod
    def from_plan(cls, settings: Mapping[str, Any], **limits: Any) -> Self:
        """The reader that a plan was made with."""
        made = settings["csv"]
        return super().from_plan(settings, **made | {"columns": tuple(made["columns"])}, **limits)

    def settings(self) -> dict[str, Any]:
        """Keys and the dialect."""
        dialect = {"delimiter": self.delimiter, "quoting": self.quoting, "columns": list(self.columns)}
        return super().settings() | {"csv": dialect}

    def check_columns(self, files: Sequence[File], *, every: bool = False) -> None:
        """Look for the columns in the headers of the files."""
        if not every:
            any(map(self._has_header, files))
            return
        with ThreadPoolExecutor(_THREADS) as pool:  # a network file system takes long for each
            try:
                for _ in pool.map(self._has_header, files):
                    pass
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def pieces(self, file: File, size: int) -> Iterator[Piece]:
        """All of a file; byte ranges of a plain one in which each line is a record. An empty file has none."""
        if compression_of(file.path) is None and (not self.quoting or not file.size):
            return self.ranges(file, size)
        return iter((Piece(file, 0, file.size, chunked=True),))

    def read(self, cursor: Cursor, piece: Piece) -> Iterator[Document]:
        """The records of a piece. Of a compressed file that is damaged, those of its sound members are given."""
        path = piece.file.path
        if compression_of(path) is None:
            with cursor.open_plain(piece, _BUFFER_BYTES) as file:
                header = self._header(file, path)
                seek_line(file, piece, cursor)
                if 0 < cursor.offset < header.end:  # blank lines before it
                    cursor.offset = file.seek(header.end)
                yield from self._documents(cursor, piece, file, header, piece.end, None)
            return
        with cursor.open_stream(path) as stream:
            source = stream.raw
            assert isinstance(source, Decompressed)
            try:
                if cursor.offset > 0:
                    header = self._header(stream, path)
                    skip_read(stream, cursor, header.end)
                else:
                    with self._opened_again(cursor, piece) as again:
                        header = self._header(again, path)
                yield from self._documents(cursor, piece, stream, header, 2**63, source)
            except StreamError as error:
                cursor.broken_stream(piece, error, f"{cursor.line:,} lines before that are good")

    def _opened_again(self, cursor: Cursor, piece: Piece) -> BinaryIO:
        """The file of a piece once more, for its header; an object without looking at all of a member for that."""
        file = piece.file
        if not file.is_object:
            return cursor.open_stream(file.path)
        return open_stream(file.path, file.open(self.remote), verify=False)

    def _has_header(self, file: File) -> bool:
        """Look for the columns of a file; False if it is damaged, which reading it will say."""
        try:
            with naming(file.path), open_stream(file.path, file.open(self.remote), verify=False) as stream:
                return bool(self._header(stream, file.path).names)
        except StreamError:
            return False

    def _header(self, stream: BinaryIO, path: str) -> _Header:
        """The columns of a file, from its first record or the run file.

        Raises:
            UserError: a column that is needed is not there, or is there twice; or the header cannot be read.
            StreamError: the file is damaged.
        """
        names, end = list(self.columns), 0
        if not names:
            for record in _records(stream.readline, self, _MOST_COLUMNS, begin=True):
                end += record.size
                if record.problem:
                    what = "the header of {} cannot be read: {} ({}); repair it, or leave the file out with exclude"
                    raise UserError(what.format(path, *record.problem))
                while record.blank and (more := blank_lines(stream, _BLANK, _BUFFER_BYTES)):
                    end += len(more)
                if not record.blank:
                    names = [name.decode("utf-8", "backslashreplace") for name in record.fields or ()]
                    break
            if not end:
                return _Header((), 0)
        given = dict(self.record_keys(path).partitions)
        for key, wanted in (
            (self.text_config_key, self.text_keys),
            ("metadata", self.metadata),
            ("weight_key", self.weight_keys),
        ):
            for name in wanted:
                if names.count(name) > 1:
                    raise UserError(f"{path} has several columns named {name!r}; rename all but one")
                if name not in names and name not in given:
                    raise UserError(self._missing(path, key, name, names))
        return _Header(tuple(names), end)

    def _missing(self, path: str, key: str, name: str, names: list[str]) -> str:
        there = ", ".join(repr(each[:50]) for each in names[:20]) or "none"
        hint = ""
        if len(names) == 1 and (other := max(_OTHERS, key=names[0].count)) in names[0] and other != self.delimiter:
            hint = f"; its header has {other!r}: set csv.delimiter to it"
        elif any("\0" in each for each in names):
            hint = "; it may be UTF-16: convert it to UTF-8"
        return (
            f"{path} has no column {name!r}; its columns are {there}: set {key} to one of them, name the columns of a "
            f"file without a header with csv.columns, or leave the file out with exclude{hint}"
        )

    def _documents(
        self, cursor: Cursor, piece: Piece, file: BinaryIO, header: _Header, end: int, source: Decompressed | None
    ) -> Iterator[Document]:
        """The records that begin before `end`."""
        names, template, unit, prefix = header.names, self.template, cursor.unit.index, f"{piece.file.name}@"
        weight = None
        wanted = tuple(dict.fromkeys((*self.text_keys, *cursor.kept, *self.weight_keys)))
        places = {name: names.index(name) for name in wanted if name in names}
        given = dict(self.record_keys(piece.file.path).partitions)
        own_id = names.index(self.id_key) if names.count(self.id_key) == 1 else None
        cursor.offset = max(cursor.offset, 0)
        consumed = source.consumed if source else 0
        records = _records(file.readline, self, len(names), cursor.offset == 0, cursor.digest.update)
        blanks, blank_end = 0, -1
        while cursor.offset < end and (record := next(records, None)) is not None:
            byte, line = cursor.offset, cursor.line
            cursor.offset += record.size
            cursor.line += record.lines
            cursor.input_bytes += record.size
            if source is None:
                cursor.bytes_read += record.size
            else:
                cursor.bytes_read += source.consumed - consumed
                consumed = source.consumed
            if record.blank or cursor.offset <= header.end:
                blanks = 0 if not record.blank else blanks + 1 if byte == blank_end else 1
                blank_end = cursor.offset
                while blanks >= FEW_BLANKS and (more := blank_lines(file, _BLANK, end - cursor.offset)):
                    cursor.digest.update(more)
                    cursor.offset += len(more)
                    cursor.line += more.count(b"\n")
                    cursor.input_bytes += len(more)
                    if source is None:
                        cursor.bytes_read += len(more)
                    blank_end = cursor.offset
                continue
            fields = record.fields
            if record.cut or (fields is not None and record.last and record.width < len(names)):
                lost = record.size if source is None else piece.file.size * record.size // cursor.offset
                about = ": a quote in it is not closed" if record.cut else ""
                cursor.damaged(CUT_FILE, f"the record of byte {byte} ends inside{about}", lost)
                continue
            if fields is None or record.width != len(names):
                problem = record.problem or ("wrong number of fields", f"{record.width} instead of {len(names)}")
                yield cursor.rejected(line, byte, *problem, record.head)
                continue
            name = self.id_key
            try:
                own = "" if own_id is None else fields[own_id].decode()
                values = dict(given)
                for name, place in places.items():
                    values[name] = fields[place].decode()
                text = values[self.text_key] or "" if template is None else template.render(values).text
            except UnicodeDecodeError as error:
                detail = f"byte 0x{error.object[error.start]:02x} at {error.start} of column {name!r}"
                yield cursor.rejected(line, byte, NOT_UTF8, detail, record.head)
                continue
            except UnusableRecord as unusable:
                yield cursor.rejected(line, byte, unusable.reason, unusable.detail, record.head)
                continue
            if self.weight_key is not None:
                written = values[self.weight_key]
                weight = loss_weight(_number(written or ""))
                if weight is None:
                    yield cursor.rejected(line, byte, BAD_WEIGHT, bad_weight(self.weight_key, written), record.head)
                    continue
            metadata = metadata_json({key: values[key] for key in cursor.kept}) if cursor.kept else None
            row = cursor.row
            cursor.row += 1
            reason = None if text else EMPTY
            own = own or f"{prefix}{byte}"
            document = Document(text, own, unit, row, cursor.piece, line, byte, reason, "", metadata)
            if weight is not None:
                document.weight = weight
            yield document
        if source is not None:
            cursor.bytes_read += source.consumed - consumed


@dataclass(frozen=True)
class TsvReader(CsvReader):
    """Records as of `CsvReader`, in columns that tabs divide."""

    type = "tsv"

    delimiter: str = field(default="\t", kw_only=True)


def _number(written: str) -> float | None:
    """A field as a number; None where it is none."""
    try:
        return float(written)
    except ValueError:
        return None


class _Header(NamedTuple):
    """The columns of a file, and where the record that has them ends; 0 where the run file has them."""

    names: tuple[str, ...]
    end: int


class _Record(NamedTuple):
    """A record as it lies in a file.

    Attributes:
        fields: their bytes; None of a blank line, and of a record that `problem` or `cut` is about.
        width: number of fields; of more than are wanted none is held.
        size: bytes.
        lines: that it takes; the last one of a file may lack its end.
        head: its first bytes.
        problem: (one of a few reasons, the detail).
        last: whether it ends with the file, without a line end.
        cut: whether the file ends inside of quotes.
    """

    fields: list[bytes] | None
    width: int
    size: int
    lines: int
    head: bytes
    problem: tuple[str, str] | None = None
    last: bool = False
    cut: bool = False

    @property
    def blank(self) -> bool:
        """True of a line without any character."""
        return self.fields is None and self.problem is None and not self.cut


_RETURN = ("carriage return outside of quotes", "lines end with LF or CR LF")
_BEHIND = ("text behind a closing quote", "a quote inside of quotes is doubled")


def _records(
    readline: Callable[[int], bytes],
    reader: CsvReader,
    most: int,
    begin: bool,
    update: Callable[[bytes], object] = lambda _: None,
) -> Iterator[_Record]:
    """The records of a stream. At most about `max_record_bytes` are held.

    Args:
        readline: of the stream.
        reader: has the dialect.
        most: number of fields that a record may have.
        begin: whether this is the beginning of the file, where there may be a byte order mark.
        update: is given all bytes that are read, before their record.
    """
    delimiter, quoting, longest = reader.delimiter.encode(), reader.quoting, reader.max_record_bytes
    plain = re.compile(rb"[^" + re.escape(delimiter) + rb"\n]*+")
    while raw := readline(longest):
        update(raw)
        size = len(raw)
        ends = raw.endswith(b"\n")
        if begin:
            raw, begin = raw.removeprefix(BOM), False
        head = raw[:_HEAD_BYTES]
        if (quoting and b'"' in raw) or (size == longest and not ends):
            splitter = _Splitter(delimiter, plain, quoting, most)
            lines, size, last = _read_on(splitter, raw, size, readline, longest, update)
            if size > longest:
                yield _Record(None, 0, size, lines, head, (reader.too_long, f"{size} bytes"), last, splitter.is_open)
            else:
                fields = None if splitter.problem or splitter.is_open else splitter.fields
                yield _Record(fields, splitter.count, size, lines, head, splitter.problem, last, splitter.is_open)
            continue
        line = (raw[:-1] if ends else raw).removesuffix(b"\r")
        if not line:
            yield _Record(None, 0, size, 1, head)
        elif b"\r" in line:
            yield _Record(None, 0, size, 1, head, _RETURN)
        else:
            count = line.count(delimiter) + 1
            yield _Record(line.split(delimiter) if count <= most else [], count, size, 1, head, last=not ends)


def _read_on(
    splitter: _Splitter,
    raw: bytes,
    size: int,
    readline: Callable[[int], bytes],
    longest: int,
    update: Callable[[bytes], object],
) -> tuple[int, int, bool]:
    """Read until the record ends, or the file; returns its lines and bytes, and whether it has no line end."""
    lines = 0
    while True:
        if size > longest:
            splitter.drop()
        splitter.take(raw)
        ends = raw.endswith(b"\n")
        lines += ends
        if splitter.is_done:
            return lines, size, False
        more = readline(longest)
        if not more:
            splitter.end()
            return lines + (not ends), size, True
        update(more)
        size += len(more)
        raw = more


_START, _PLAIN, _OPEN, _CLOSED, _DONE = range(5)
_INSIDE = re.compile(rb'[^"]*+(?:""[^"]*+)*+')
"""What lies between the quotes of a field."""


class _Splitter:
    """Fields of a record that is given in parts, which may be cut anywhere.

    Attributes:
        fields: so far, `most` of them.
        count: of all fields so far.
        problem: of the record.

    Args:
        delimiter: one byte.
        plain: matches what a field without quotes has.
        quoting: whether fields may stand in quotes.
        most: number of fields that are held.
    """

    def __init__(self, delimiter: bytes, plain: re.Pattern[bytes], quoting: bool, most: int) -> None:
        self._delimiter = delimiter
        self._plain = plain
        self._quoting = quoting
        self._state = _START
        self._parts: list[bytes] = []
        self._in_quotes = False
        self._holds = True
        self._most = most
        self.count = 0
        self.fields: list[bytes] = []
        self.problem: tuple[str, str] | None = None

    @property
    def is_done(self) -> bool:
        """True if the record has ended."""
        return self._state == _DONE

    @property
    def is_open(self) -> bool:
        """True inside of quotes."""
        return self._state == _OPEN

    def drop(self) -> None:
        """Hold nothing from here on, only look for the end."""
        self._holds = False
        self.fields, self._parts = [], []

    def take(self, raw: bytes) -> None:
        """Go through a part, in which a line end is the last byte."""
        if self._state == _OPEN and b'"' not in raw:
            self._hold(raw)
            return
        at, size = 0, len(raw)
        while at < size:
            if self._state == _START:
                self._in_quotes = self._quoting and raw[at] == 0x22
                self._state = _OPEN if self._in_quotes else _PLAIN
                at += self._in_quotes
            elif self._state == _PLAIN:
                stop = self._end_of(self._plain, raw, at)
                self._hold(raw[at:stop])
                at = self._end_field(raw, stop) if stop < size else stop
            elif self._state == _OPEN:
                stop = self._end_of(_INSIDE, raw, at)
                self._hold(raw[at:stop].replace(b'""', b'"'))
                if stop < size:
                    self._state = _CLOSED
                    stop += 1
                at = stop
            elif raw[at] == 0x22:  # the first quote of two was the last byte of the part before
                self._hold(b'"')
                self._state = _OPEN
                at += 1
            elif raw.startswith((self._delimiter, b"\n"), at):
                at = self._end_field(raw, at)
            elif raw.startswith(b"\r\n", at) or raw[at:] == b"\r":
                at += 1
            else:
                self.problem = self.problem or _BEHIND
                self._state = _PLAIN

    def end(self) -> None:
        """Take the end of the file for that of the record, unless it lies inside of quotes."""
        if self._state != _OPEN:
            self._close(is_last=True)

    @staticmethod
    def _end_of(pattern: re.Pattern[bytes], raw: bytes, at: int) -> int:
        found = pattern.match(raw, at)
        assert found is not None  # it matches nothing, too
        return found.end()

    def _hold(self, part: bytes) -> None:
        if self._holds:
            self._parts.append(part)

    def _end_field(self, raw: bytes, at: int) -> int:
        """Close a field at the delimiter or line end after it."""
        is_last = raw[at] == 0x0A
        self._close(is_last)
        self._state = _DONE if is_last else _START
        return at + 1

    def _close(self, is_last: bool) -> None:
        value = b"".join(self._parts)
        self._parts = []
        if not self._in_quotes:
            value = value.removesuffix(b"\r") if is_last else value
            if b"\r" in value:
                self.problem = self.problem or _RETURN
        self._in_quotes = False
        self.count += 1
        if self._holds and self.count <= self._most:
            self.fields.append(value)
