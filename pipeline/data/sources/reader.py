"""Readers: files to documents, in units of bounded size.

A source's files are cut into units: byte ranges of line-based files and tables, whole text and compressed files, shards
of hub datasets, and groups of small ones. What a unit holds is known from the names and sizes of the files alone,
nothing is read for it. `UnitReader` goes through one unit in bounded memory and yields a `Document` for every record,
good or bad; it can begin behind any of them.

A format is a subclass of `Reader` in a module of its own, with a place in `pipeline.data.sources.formats`; or in
another package, as a plug-in (`docs/plugins.md`).
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import xxhash

from pipeline.common.errors import UserError
from pipeline.common.objects.access import RemoteAccess
from pipeline.common.storage import naming
from pipeline.config.plugins import find_plugin, is_plugin
from pipeline.data.sources.compression import MAX_ZSTD_WINDOW, Decompressed, StreamError, compression_of, open_stream
from pipeline.data.sources.foreign_parser import SKIPPED, working_on
from pipeline.data.sources.globs import NO_REMOTE, File, find_files
from pipeline.data.sources.records import (
    BAD_WEIGHT,
    EMPTY,
    FREE_BYTES,
    HUB_PREFIX,
    MAX_EXPANSION,
    MAX_RECORD_BYTES,
    NOT_BAD,
    START,
    Damage,
    Document,
    Numbering,
    Piece,
    Position,
    RecordKeys,
    Unit,
    UnusableRecord,
    bad_weight,
    escaped,
    loss_weight,
    metadata_json,
    printable,
    record_name,
)
from pipeline.data.sources.templates.record_templates import configured_template, planned_template
from pipeline.data.sources.templates.template import RecordTemplate

if TYPE_CHECKING:
    from pipeline.config.base import Section
    from pipeline.config.data import InputConfig

    SectionClass = type[Section]

OPTIONS, PLUGIN = "options", "plugin"
"""Keys of plans of sources that plug-ins read: values of `Options`, and the package with its version."""
PARTITIONS = "partitions"
"""Key of plans: partitions above the names of files."""
COMPRESSED_EXPANSION = 4
"""Bytes of text that a byte on disk is expected to become. Units are cut by it; what they become does not depend on it
being right."""


@dataclass(frozen=True)
class Reader(ABC):
    """Reader of a source's files: a format, with the settings of the source.

    Plug-ins extend it. A format needs `type`, `numbering` and `read`, and `pieces` unless a file is one piece. What a
    file becomes may depend on its bytes and on the settings alone, never on the machine, the time or the process:
    workers read pieces in any order, and anew after a crash, and all of it has to be equal.

    The defaults are those of files that are streams of bytes, plain or compressed. An instance is sent to worker
    processes, so a format can be imported by its name, and holds no open file.

    Attributes:
        type: name of the format, which `type` of a source has; of a plug-in, its name.
        Options: section of the keys below `options` of a source; plug-ins may have one.
        numbering: what the number of a document's place in its file counts.
        key: key of the source that names its input.
        has_keys: whether records have keys; else `text_key` and `id_key` mean nothing.
        is_remote: whether reading something twice means to fetch it twice.
        sample_bytes: size of the pieces of files that a sample of the source is drawn from.
        magic: bytes that every file of the format begins with, and `title`, the format's name in a sentence, if a file
            of another source that begins with them is likely one of these.
        pinned: names of `pins()`.
        text_key: key or column of the text.
        id_key: key or column of the id.
        metadata: keys or columns that are kept beside the text.
        max_expansion: bytes of text that a byte of a table may become; see `Cursor.expand`.
        max_record_bytes: a longer file, line or value is rejected.
        verify: whether all of a compressed member is read before any of its text is given. Samples do without.
        salvage: whether text before the break of a compressed member that is cut is given, though nothing checks it.
        max_zstd_window: bytes; a zstd frame with a larger window is refused.
        dropped: damaged files of which nothing is taken, by name, with the reason and the detail.
        weight_key: key or column of the document's weight in the training loss, if it has one.
        template: puts the text together, in place of the value of `text_key`.
        options: values of `Options`.
        skip_records: names of records that are left out (`record_name`).
        most_bad: bad records after which a source is refused, whatever the rest of its files holds.
        remote: settings of access to object storage.
    """

    type: ClassVar[str]
    Options: ClassVar[SectionClass | None] = None
    numbering: ClassVar[Numbering]
    key: ClassVar[str] = "paths"
    has_keys: ClassVar[bool] = True
    is_remote: ClassVar[bool] = False
    sample_bytes: ClassVar[int] = 2**18
    magic: ClassVar[bytes] = b""
    title: ClassVar[str] = ""
    pinned: ClassVar[tuple[str, ...]] = ()

    text_key: str
    id_key: str
    metadata: tuple[str, ...] = ()
    max_expansion: int = MAX_EXPANSION
    max_record_bytes: int = MAX_RECORD_BYTES
    verify: bool = True
    salvage: bool = False
    max_zstd_window: int = MAX_ZSTD_WINDOW
    dropped: Mapping[str, tuple[str, str]] = field(default_factory=dict, hash=False)
    weight_key: str | None = None
    template: RecordTemplate | None = None
    options: Any = field(default=None, hash=False)
    skip_records: frozenset[str] = frozenset()
    most_bad: int | None = None
    remote: RemoteAccess = NO_REMOTE

    @classmethod
    def from_config(cls, source: InputConfig, **limits: Any) -> Self:
        """The reader of a source of the run file. `limits`: fields behind `metadata`, and `tokenizer` of the file."""
        keys = (source.text_key, source.id_key, tuple(source.metadata))
        template = configured_template(source, limits.pop("tokenizer", None))
        weight_key = getattr(source, "weight_key", None)  # sources that are never trained on have none
        limits |= {"options": source.options, "skip_records": frozenset(source.skip_records)}
        return cls(*keys, weight_key=weight_key, template=template, **limits)

    @classmethod
    def from_plan(cls, settings: Mapping[str, Any], **limits: Any) -> Self:
        """The reader that a plan was made with, whose settings have `plan_settings()` and `plan_pins()`."""
        keys = settings.get("text_key", "text"), settings.get("id_key", "id")
        metadata, weight_key = tuple(settings["metadata"]), settings.get("weight_key")
        template = planned_template(settings)
        options = cls.Options.model_validate(settings[OPTIONS]) if cls.Options and OPTIONS in settings else None
        limits |= {"options": options, "skip_records": frozenset(settings.get("skip_records", ()))}
        return cls(*keys, metadata, weight_key=weight_key, template=template, **limits)

    def settings(self) -> dict[str, Any]:
        """Values of the run file that decide the documents of the source, besides `metadata` and limits."""
        if not self.has_keys:
            return {}
        # Plans of sources without weights do not name the key.
        weight = {} if self.weight_key is None else {"weight_key": self.weight_key}
        text = self.template.settings() if self.template else {"text_key": self.text_key}
        return {"id_key": self.id_key} | text | weight

    def plan_settings(self) -> dict[str, Any]:
        """`settings()`, options of a plug-in and skipped records, as plans have them. Formats extend `settings()`."""
        options = {} if self.options is None else {OPTIONS: self.options.model_dump(mode="json")}
        return self.settings() | options | ({"skip_records": sorted(self.skip_records)} if self.skip_records else {})

    def plan_pins(self) -> dict[str, Any]:
        """`pins()` and the identity of a plug-in, as plans have them. Formats extend `pins()`."""
        return (
            self.pins() | {PLUGIN: find_plugin("sources", self.type).identity} if is_plugin(self.type) else self.pins()
        )

    @property
    def text_keys(self) -> tuple[str, ...]:
        """Keys or columns that the text is made from."""
        return self.template.keys if self.template else (self.text_key,)

    @property
    def keeps_mask(self) -> bool:
        """True if only some tokens of the documents are trained on."""
        return self.template is not None and self.template.masks

    @property
    def weight_keys(self) -> tuple[str, ...]:
        """The key or column of the weight, if there is one."""
        return () if self.weight_key is None else (self.weight_key,)

    def record_keys(self, path: str) -> RecordKeys:
        """Places of keys that the records of a file do not have themselves."""
        wanted = (*self.text_keys, self.id_key, *self.metadata, *self.weight_keys)
        of_text = self.text_keys if self.template else ()
        return RecordKeys.of(path, wanted, (*of_text, *self.metadata))

    def plan_partitions(self, files: Iterable[File]) -> dict[str, Any]:
        """Partitions in the fixed part of the globs, as plans have them: documents get them, and no name shows them."""
        above = {file.path.removesuffix(file.name) for file in files}
        found = {pair for each in above for pair in self.record_keys(f"{each}x").partitions}
        return {PARTITIONS: sorted(map(list, found), key=str)} if found else {}

    @property
    def text_config_key(self) -> str:
        """Key of the source in the run file that names these."""
        if self.template is None:
            return "text_key"
        return self.template.config_key

    def pins(self) -> dict[str, Any]:
        """Values that `find` has settled and the run file leaves open; kept in the plan beside `settings()`."""
        return {}

    def find(
        self, paths: list[str], exclude: list[str], key: str, planned: Callable[[], Mapping[str, Any]]
    ) -> tuple[Self, list[File]]:
        """The files of the source, and the reader for exactly these.

        Args:
            paths: globs of the run file.
            exclude: globs of the run file.
            key: config key of the source, for messages (`data.sources.0`).
            planned: `plan_settings()` and `plan_pins()` of an earlier plan of the source, if there is one.

        Raises:
            UserError: there are none, or something that cannot be read as one.
        """
        return self, find_files(paths, exclude, key, remote=self.remote)

    def check_columns(self, files: Sequence[File], *, every: bool = False) -> None:
        """Look for the columns of the text and the metadata, if files say which they have.

        Args:
            files: of the source.
            every: look at all files that can be read, and not at the first of them alone.

        Raises:
            UserError: a column is missing or cannot hold text.
        """
        return

    def expected_text_bytes(self, file: File) -> int:
        """About how much text a file holds."""
        return file.size * COMPRESSED_EXPANSION if compression_of(file.path) else file.size

    def most_records(self, file: File) -> int | None:
        """Records that are not bad of which a file cannot have more; None if its size does not tell."""
        return None

    def cut(self, files: Iterable[File], size: int) -> Iterator[tuple[Piece, ...]]:
        """Group files, in the order given, into pieces of work of about `size` bytes of text.

        Plans of users hold what this gives: for the same names and sizes it is always the same.
        """
        group: list[Piece] = []
        held = 0
        for file in files:
            expected = self.expected_text_bytes(file)
            for piece in self.pieces(file, size):
                weight = expected * (piece.end - piece.start) // max(file.size, 1)
                if group and held + weight > size:
                    yield tuple(group)
                    group, held = [], 0
                group.append(piece)
                held += weight
        if group:
            yield tuple(group)

    def pieces(self, file: File, size: int) -> Iterator[Piece]:
        """A file in pieces of about `size` bytes of text. Here all of it: it can only be read from its beginning."""
        yield Piece(file, 0, file.size, chunked=compression_of(file.path) is not None)

    def ranges(self, file: File, size: int, *, chunked: bool = False) -> Iterator[Piece]:
        """Byte ranges of a file of about `size` bytes of text each; none of an empty one.

        For formats in which the first record behind any byte can be found.
        """
        step = max(1, size * file.size // max(self.expected_text_bytes(file), 1))
        for start in range(0, file.size, step):
            yield Piece(file, start, min(start + step, file.size), chunked)

    def suspects(self, files: Sequence[File]) -> Sequence[File]:
        """Files whose first or last bytes may tell that they are damaged."""
        return [file for file in files if compression_of(file.path)]

    def check_ends(self, file: File) -> None:
        """Look at these bytes, with one read.

        Raises:
            StreamError: it is damaged.
        """
        with file.open_to_look(self.remote) as raw:
            Decompressed(raw, compression_of(file.path) or "", verify=False).check_begin()

    @abstractmethod
    def read(self, cursor: Cursor, piece: Piece) -> Iterator[Document]:
        """The records of a piece from `cursor.offset` on, each after `cursor` was moved behind it.

        It streams: memory is bounded by the largest record, never by the file. A bad record is `cursor.rejected(...)`
        with one of a few reasons; where a file cannot be read on, `cursor.damaged(...)` or `cursor.give_up(...)` say
        what is lost. What needs a heavy library is imported here.
        """

    def locate(self, piece: Piece, line: int | None, byte: int) -> str:
        """A document's place for messages: `FILE:LINE`, or `FILE: byte N` without lines, or `FILE: row N` of tables.

        Args:
            piece: that the document lies in.
            line: from 1, of the file.
            byte: as in `Document`.
        """
        if line is not None:
            return f"{_normal(piece.file.path)}:{line}"
        return f"{piece.file.path}: {'row' if self.numbering == 'row' else 'byte'} {byte}"

    @property
    def too_long(self) -> str:
        """The reason to reject a longer record."""
        return f"longer than data.preprocess.max_record_bytes ({self.max_record_bytes})"


class Cursor:
    """Progress of reading a unit; right after every document, while what yields it waits.

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
        is_salvaged: whether documents may come from a compressed member that is cut, which nothing checks.
    """

    def __init__(self, unit: Unit, reader: Reader, start: Position = START) -> None:
        self.unit = unit
        self.reader = reader
        self.piece, self.offset, self.line, self.row = start
        self.ended = False
        self.input_bytes = 0
        self.bytes_read = 0
        self.digest = xxhash.xxh3_128()
        self.damage: list[Damage] = []
        self.beat: Callable[[], None] = lambda: None
        self.is_salvaged = False
        self._start = start
        self._counts: dict[int, tuple[int, int]] = {}
        self._first: tuple[int, int] | None = None
        self._expanded = 0
        self._bad = 0

    @property
    def position(self) -> Position:
        """Start position of a reader that gets the next record."""
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
        """Begin a piece, or continue the one that the start lies in."""
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
        """Count what the rows of a table become, over a whole piece: a few bytes can stand for billions of rows.

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
        if piece.file.path.startswith(HUB_PREFIX) and not piece.file.is_object:
            return  # nobody knows how large it is
        limit = max(free, self.reader.max_expansion * (piece.file.size if on_disk is None else on_disk))
        if size > limit:
            raise UserError(
                f"{piece.file.path} has {piece.file.size:,} bytes, and {what} {size:,} bytes or more, which is above "
                f"the limit of {limit:,}; files made to exhaust memory (decompression bombs) look like this. Leave it "
                "out (exclude); or, if you trust its origin, raise data.preprocess.max_expansion "
                f"({self.reader.max_expansion}), the maximum of bytes of text per byte on disk"
            )

    def count_anew(self) -> None:
        """Count and hash from here on, as a reader does that is started at `position`; but for `bytes_read`."""
        self._start = self.position
        self._counts = {}
        self._first = (self.line, self.row)
        self.input_bytes = 0
        self.digest.reset()
        self.damage = []

    def open_stream(self, path: str) -> BufferedReader:
        """Open a file of the piece, plain or compressed, as the settings of the reader say."""
        reader, file = self.reader, self.unit.pieces[self.piece].file
        salvage = self._note_salvage if reader.salvage else None
        window = reader.max_zstd_window
        raw = None
        if file.is_object and file.path == path:
            twice = compression_of(path) is not None and reader.verify
            raw = file.open_kept(reader.remote) if twice else file.open(reader.remote)
        return open_stream(path, raw, verify=reader.verify, beat=self.beat, salvage=salvage, max_window=window)

    def open_plain(self, piece: Piece, most: int) -> BufferedReader:
        """Open the file of a piece, which is not compressed, to read its byte range.

        Args:
            piece: of a plain file.
            most: bytes of the buffer.
        """
        size = min(most, max(piece.file.size, 1024))
        return BufferedReader(piece.file.open(self.reader.remote, piece.end), size)

    def _note_salvage(self) -> None:
        self.is_salvaged = True

    def damaged(self, reason: str, detail: str, lost: int, salvaged: int = 0) -> None:
        """Take note of what cannot be read of the piece. It is not a record, and has no row."""
        self.damage.append(Damage(self.piece, reason, printable(detail), lost, salvaged))

    def broken_stream(self, piece: Piece, error: StreamError, before: str) -> None:
        """Take note that the stream of a piece cannot be read on, and end it. `before`: what was read of it."""
        lost = piece.file.size - error.sound
        self.ended = True
        self.bytes_read += lost
        self.damaged(error.reason, f"{error.detail}; {before}", lost, error.salvaged)

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

    def document(self, values: Mapping[str, Any], line: int | None, byte: int, id: str, raw: bytes = b"") -> Document:
        """A record with keys as a document, by the keys of the run file, or as a rejected one. It counts as read.

        Args:
            values: of the record, by key; a text is a `str`.
            line: as in `Document`.
            byte: the same.
            id: of a record without its own.
            raw: the beginning of the record, for the list of rejected ones.
        """
        reader = self.reader
        if more := reader.record_keys(self.unit.pieces[self.piece].file.path):
            values = dict(values)
            more.complete(values)
        try:
            text, spans = values.get(reader.text_key), None
            if reader.template is not None:
                text, spans = reader.template.render(values)
        except UnusableRecord as unusable:
            return self.rejected(line, byte, unusable.reason, unusable.detail, raw)
        if not isinstance(text, str):
            has = reader.text_key in values
            keys = f"keys: {', '.join(map(repr, list(values)[:10])) or 'none'}"
            reason = ("text is not a string", "") if has else (f"no key {reader.text_key!r}", keys)
            return self.rejected(line, byte, *reason, raw)
        if escaped(text) != text:
            return self.rejected(line, byte, "lone surrogate", "", raw)
        weight = 1.0
        if reader.weight_key is not None:
            found = loss_weight(values.get(reader.weight_key))
            if found is None:
                detail = bad_weight(reader.weight_key, values.get(reader.weight_key))
                return self.rejected(line, byte, BAD_WEIGHT, detail, raw)
            weight = found
        own = values.get(reader.id_key)
        own = own if isinstance(own, str) else str(own) if type(own) is int else ""
        metadata = metadata_json({key: values[key] for key in self.kept if key in values}) if self.kept else None
        self.row += 1
        place = self.unit.index, self.row - 1, self.piece, line, byte
        reason_empty = None if text else EMPTY
        return Document(text, escaped(own) or id, *place, reason_empty, "", metadata, weight=weight, spans=spans)

    @cached_property
    def kept(self) -> tuple[str, ...]:
        """Keys of the metadata, each once."""
        return tuple(dict.fromkeys(self.reader.metadata))


class UnitReader(Cursor):
    """Iterates over the records of a unit from `start` on, once. Memory: a few MiB, or a record.

    Started at the `position` that was seen after a record, it yields exactly the records behind that one. What counts
    and hashes along (see `Cursor`) is right after every document.
    """

    def __iter__(self) -> Iterator[Document]:
        for number in range(self.piece, len(self.unit.pieces)):
            piece = self.enter(number)
            if piece.file.name in self.reader.dropped:
                self.give_up(piece, *self.reader.dropped[piece.file.name])
                continue
            with naming(piece.file.path):
                _check_unchanged(piece.file)
                for document in self.reader.read(self, piece):
                    document.name = name = record_name(piece.file.name, self.reader.numbering, document.byte)
                    if name in self.reader.skip_records and document.reason is None:
                        document.text, document.metadata, document.reason = "", None, SKIPPED
                    if document.reason is not None and document.reason not in NOT_BAD:
                        self._count_bad(piece, document)
                    working_on(name)
                    yield document

    def _count_bad(self, piece: Piece, document: Document) -> None:
        """Refuse a source that has too many bad records for certain, instead of reading and listing millions more.

        Raises:
            UserError: it has.
        """
        self._bad += 1
        most = self.reader.most_bad
        if most is not None and self._bad > most:
            raise UserError(
                f"{self.reader.locate(piece, None, document.byte)}: so far {self._bad:,} records of a unit of source "
                f"{self.unit.source!r} are bad, more than data.preprocess.on_error and max_error_rate allow whatever "
                f"the rest of its files holds, which is not read; this one: {document.reason} ({document.detail}). "
                "Correct type, text_key or paths of the source, or leave the file out (exclude); or, if the others are "
                "good, set data.preprocess.on_error: skip and raise max_error_rate"
            )


@lru_cache(maxsize=1)
def _normal(path: str) -> str:
    """A path as `Path` writes it; for millions of records of one file."""
    return str(Path(path))


def _check_unchanged(file: File) -> None:
    if file.is_object or file.path.startswith(HUB_PREFIX):
        return  # each request asks for the version; pinned to a commit
    size = os.stat(file.path).st_size
    if size != file.size:
        raise UserError(
            f"{file.path} changed while it was being read: {file.size} bytes became {size}; "
            "start again when nothing writes to it"
        )
