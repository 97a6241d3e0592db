"""Origins of documents: (unit, row) of a `.prov` record <-> file and line or row.

`plan.json` beside a dataset has the files and how they were cut into units; the receipts have the numbers of lines and
records of each piece. Where these are equal, line and row differ by a constant; else (blank lines, damaged files) the
piece is read again. The source files are needed for that alone.
"""

from __future__ import annotations

import itertools
import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import orjson

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.data.datasets.files import rejected_path
from pipeline.data.datasets.manifest import REPAIR, Manifest, generations_of
from pipeline.data.sources.globs import File
from pipeline.data.sources.reader import Reader, UnitReader
from pipeline.data.sources.records import Document, Numbering, Position
from pipeline.data.work.planned_units import PlannedUnits
from pipeline.data.work.receipts import read_receipts

Key = tuple[int, int]
"""(unit, row in the unit), as in `.prov`."""
Kind = Numbering | Literal["document"]
"""A whole file; a line, from 1; a row of a table, or a document of an .idx file, from 0."""
_SHOWN = 5
_LONG_BYTES = 2**26


class Origin(NamedTuple):
    """A place in a source's files."""

    file: str | None
    """Path; None if it is not known."""
    kind: Kind
    """Kind of things that `number` counts."""
    number: int | None = None
    """None for a text, and where it is not known."""
    note: str = ""
    """Why something is not known."""
    id: str | None = None
    """The document's id, if it was read or follows from the place."""

    def __str__(self) -> str:
        place = self.file or ""
        if self.number is not None:
            place += f":{self.number}" if self.kind == "line" else f": {self.kind} {self.number}"
        return f"{place} ({self.note})".lstrip() if self.note else place

    @property
    def json(self) -> dict[str, Any]:
        """File, and the number in it unless the file is one text, for `--json`."""
        return {"file": self.file} | ({} if self.kind == "text" else {f"file_{self.kind}": self.number})


class _Stretch(NamedTuple):
    """The records that a chunk of a unit has of a piece of a file."""

    unit: int
    chunk: int
    piece: int
    """Its number in the unit."""
    row: int
    """Row in the unit of its first record."""
    records: int
    length: int
    """Lines, or rows, of the file."""
    direct: bool
    """True if each line or row of the file is a record, and so the numbers of both differ by a constant."""
    damaged: bool
    """True if something in the chunk could not be read."""
    start: Position
    """Position at which reading it begins."""


class UnknownFile(UserError):
    """A name that is not a file of the source."""


class Origins:
    """The places of a source's documents. Nothing is read before it is needed.

    Args:
        folder: of the source, in which the plan and the receipts are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._planned = PlannedUnits(folder)
        self._receipts = lru_cache(maxsize=None)(self._receipts_of)
        self._stretches = lru_cache(maxsize=None)(self._stretches_of)
        self._places = lru_cache(maxsize=None)(self._places_of)
        # A unit of small files has many pieces, and each of its files is a stretch.
        self._unit = lru_cache(maxsize=2)(self._planned.unit)

    def file_of(self, unit: int, row: int) -> str | None:
        """Path of the file that a document is from, of which nothing is read; None where its receipt is missing."""
        stretch = self._stretch_of(unit, row)
        return None if stretch is None else self._file(self._file_of(stretch)).path

    def places(
        self, keys: Iterable[Key], *, read: bool = False, report: Callable[[str], None] = lambda _: None
    ) -> dict[Key, Origin]:
        """Places of documents.

        Args:
            keys: of the documents.
            read: read their ids from the source files.
            report: called with what is about to be read, if that may take long.
        """
        found: dict[Key, Origin] = {}
        to_read: dict[_Stretch, list[int]] = defaultdict(list)
        for unit, row in keys:
            stretch = self._stretch_of(unit, row)
            if stretch is None:
                found[unit, row] = Origin(None, self._kind, None, "its receipt is missing")
                continue
            found[unit, row] = self._place(stretch, row)
            if read or (found[unit, row].number is None and self._kind != "text"):
                to_read[stretch].append(row)
        for stretch, rows in to_read.items():
            file = self._file(self._file_of(stretch))
            if file.size >= _LONG_BYTES:
                report(f"reading {file.path}, for {len(rows)} {'record' if len(rows) == 1 else 'records'} of it")
            try:
                documents = self._read(stretch, set(rows))
                note = "the file has changed and no longer has such a record"
            except (UserError, OSError) as error:
                documents = {}
                note = str(error) if isinstance(error, UserError) else f"{file.path}: {error.strerror}"
            for row in rows:
                known: dict[str, Any] = {"note": note}
                if (document := documents.get(row)) is not None:
                    known = {"number": self._number(stretch, document), "id": document.id}
                found[stretch.unit, row] = found[stretch.unit, row]._replace(**known)
        return found

    def find(self, file: str, number: int | None) -> Key:
        """The record at a place.

        Args:
            file: a path as in `plan.json`, or the end of one.
            number: line from 1, or row from 0; None for a text.

        Raises:
            UserError: the source has no such file, or the file no such record.
        """
        index, path = self._file_named(file)
        places = self._places(index)
        if self._kind == "text":
            if number is not None:
                raise UserError(f"--row: {path} is one document: name it without a number")
            if not places:
                raise self._without_receipts(path)
            stretch = next(iter(places))
            return stretch.unit, stretch.row
        if number is None:
            raise UserError(f"--row: say which {self._kind} of {path}, as in {path}:7")
        wanted = number - (self._kind == "line")
        if wanted < 0:
            raise UserError(f"--row: {path}:{number}: lines are counted from 1")
        end = 0
        for stretch, place in places.items():
            if place is not None and stretch.direct:
                if place <= wanted < place + stretch.length:
                    return stretch.unit, stretch.row + wanted - place
            # The end of a damaged file is a record behind the last line.
            elif place is None or stretch.damaged or place <= wanted < place + stretch.length:
                for document in self._documents(stretch):
                    if self._number(stretch, document) == number:
                        return stretch.unit, document.row
            end = max(end, (place or 0) + stretch.length)
        if self._kind == "row" and any(stretch.damaged for stretch in places):
            raise UserError(f"--row: row {number} of {path} holds no record: the file was damaged, and rows of it lost")
        if wanted < end:
            raise UserError(f"--row: line {number} of {path} holds no record: it is blank, or no record begins there")
        if not all(self._has_all_receipts(unit) for _, unit, _ in self._pieces[index]):
            raise self._without_receipts(path)
        raise UserError(f"--row: {path} had {end:,} {self._kind}s when it was read, so it has no {self._kind} {number}")

    def rejected(self, key: Key) -> str | None:
        """Reason why a record was rejected; None if it was not."""
        unit, row = key
        stretch = self._stretch_of(unit, row)
        if stretch is None or not any(self._receipts(unit)[stretch.chunk]["rejected"].values()):
            return None
        with storage.open_regular(rejected_path(self.folder, unit, stretch.chunk)) as lines:
            for record in map(orjson.loads, lines):
                if record["row"] == row:
                    return f"{record['reason']} ({record['detail']})" if record["detail"] else str(record["reason"])
        return None

    def read(self, keys: Iterable[Key], *, report: Callable[[str], None] = lambda _: None) -> dict[Key, Document]:
        """Records with their texts, read from the source files; without those that the files no longer have.

        Args:
            keys: of the records.
            report: called with what is about to be read, if that may take long.

        Raises:
            UserError: a file has changed.
            OSError: a file cannot be read.
        """
        wanted: dict[_Stretch, set[int]] = defaultdict(set)
        for unit, row in keys:
            if (stretch := self._stretch_of(unit, row)) is not None:
                wanted[stretch].add(row)
        found: dict[Key, Document] = {}
        for stretch, rows in wanted.items():
            file = self._file(self._file_of(stretch))
            if file.size >= _LONG_BYTES:
                report(f"reading {file.path}")
            left = len(rows)
            for document in self._documents(stretch):
                if document.row in rows:
                    found[stretch.unit, document.row] = document
                    left -= 1
                    if not left:
                        break
        return found

    def chunk_of(self, key: Key) -> tuple[int, int] | None:
        """(number of the chunk that a record is in, row in the unit of its first record); None without a receipt."""
        stretch = self._stretch_of(*key)
        if stretch is None:
            return None
        return stretch.chunk, self._receipts(key[0])[stretch.chunk]["start"][3]

    def find_id(
        self, id: str, among: Iterable[Key] | None = None, *, report: Callable[[str], None] = lambda _: None
    ) -> list[Key]:
        """Records that have an id. Ids made of a file's name lead to the file; for others all files are read.

        Args:
            id: of the records.
            among: records of which one may have it; None if all may.
            report: called with what is about to be read.

        Raises:
            UserError: a file has changed.
        """
        if among is not None:
            found = self.read(among, report=report)
            return sorted(key for key, document in found.items() if document.id == id)
        names = {name: number for number, (name, _, _) in enumerate(self._plan["files"])}
        cut = max(id.rfind("@"), id.rfind("#"))
        file = names.get(id) if id in names else names.get(id[:cut]) if cut > 0 else None
        if file is None:
            size = sum(size for _, _, size in self._plan["files"])
            report(f"looking for the id in all files of {self.folder} ({size:,} bytes): their ids are stored nowhere")
        files = range(len(names)) if file is None else [file]
        return [
            (stretch.unit, document.row)
            for number in files
            if number in self._pieces
            for stretch in self._places(number)
            for document in self._documents(stretch)
            if document.id == id
        ]

    @property
    def id_key(self) -> str | None:
        """Key of the documents' own ids; None where they have no keys."""
        return self._reader.id_key if self._reader.has_keys else None

    def is_of(self, manifest: Manifest) -> bool:
        """True if the plan, or an earlier generation of it, is the one that a dataset was made by."""
        return manifest.config_hash in [config_hash for config_hash, _ in generations_of(self._plan)]

    @property
    def _plan(self) -> Any:
        return self._planned.plan

    @property
    def _reader(self) -> Reader:
        return self._planned.reader

    @property
    def _kind(self) -> Numbering:
        return self._reader.numbering

    @cached_property
    def _pieces(self) -> Mapping[int, list[tuple[int, int, int]]]:
        """By file, in the order of the file: (first byte, unit, number of the piece)."""
        pieces = defaultdict(list)
        for unit, cut in enumerate(self._plan["units"]):
            for number, (file, start, _) in enumerate(cut):
                pieces[file].append((start, unit, number))
        return {file: sorted(found) for file, found in pieces.items()}

    def _file_named(self, text: str) -> tuple[int, str]:
        """Number and path of a file."""
        files = self._plan["files"]
        exact = [number for number, (name, path, _) in enumerate(files) if text in (name, path)]
        ends = exact or [number for number, (_, path, _) in enumerate(files) if path.endswith(f"/{text}")]
        absolute = os.path.abspath(os.path.expanduser(text))
        ends = ends or [number for number, (_, path, _) in enumerate(files) if path == absolute]
        if not ends:
            shown = some_of([path for _, path, _ in files])
            raise UnknownFile(f"--row: {text} is not one of the files that {self.folder} was made from: {shown}")
        if len(ends) > 1:
            raise UserError(f"--row: {text} may be {' or '.join(files[n][1] for n in ends[:_SHOWN])}; name one of them")
        if ends[0] not in self._pieces:
            raise UserError(f"--row: {files[ends[0]][1]} is empty: it has no record")
        return ends[0], files[ends[0]][1]

    def _file(self, number: int) -> File:
        return self._planned.file(number)

    def _file_of(self, stretch: _Stretch) -> int:
        file: int = self._plan["units"][stretch.unit][stretch.piece][0]
        return file

    def _receipts_of(self, unit: int) -> list[Any]:
        return list(read_receipts(self.folder, unit))

    def _stretches_of(self, unit: int) -> list[_Stretch]:
        """The stretches of a unit in the order of its rows."""
        result = []
        for receipt in self._receipts(unit):
            start: Position = tuple(receipt["start"])
            # Datasets of earlier versions count damage among the rejected records.
            before = any(reason.startswith(("truncated ", "damaged ")) for reason in receipt["rejected"])
            damaged = before or bool(receipt.get("damaged"))
            row = start[3]
            pieces = sorted((int(number), counts) for number, counts in receipt["pieces"].items())
            for number, (lines, records) in pieces:
                begin = start if number == start[0] else (number, -1, 0, row)
                length = lines if self._kind == "line" else records
                direct = not damaged and length == records
                result.append(_Stretch(unit, receipt["link"], number, row, records, length, direct, damaged, begin))
                row += records
        return result

    def _stretch_of(self, unit: int, row: int) -> _Stretch | None:
        """The stretch that a record is in."""
        stretches = self._stretches(unit)
        # Those without records begin where the next one does.
        index = bisect_right(stretches, row, key=attrgetter("row")) - 1
        found = stretches[index] if index >= 0 else None
        return found if found is not None and row < found.row + found.records else None

    def _places_of(self, file: int) -> dict[_Stretch, int | None]:
        """First line or row, from 0, of the stretches of a file, in its order; None where damage hides it.

        It ends where a receipt is missing.
        """
        result: dict[_Stretch, int | None] = {}
        place: int | None = 0
        for start, unit, number in self._pieces[file]:
            for stretch in self._stretches(unit):
                if stretch.piece != number:
                    continue
                offset = stretch.start[1]
                if self._kind == "row" and (offset >= 0 or start == 0):
                    place = max(offset, 0)
                result[stretch] = place
                # Rows of a damaged table are not records.
                lost = self._kind == "row" and stretch.damaged
                place = None if place is None or lost else place + stretch.length
            if not self._has_all_receipts(unit):
                break
        return result

    def _has_all_receipts(self, unit: int) -> bool:
        receipts = self._receipts(unit)
        return bool(receipts) and bool(receipts[-1]["last"])

    def _without_receipts(self, path: str) -> UserError:
        return UserError(f"--row: receipts of {path} are missing in {self.folder / 'receipts'}; {REPAIR}")

    def _place_of(self, stretch: _Stretch) -> int | None:
        """First line or row, from 0, of a stretch."""
        return self._places(self._file_of(stretch)).get(stretch)

    def _place(self, stretch: _Stretch, row: int) -> Origin:
        """Place of a record as far as the receipts tell."""
        file = self._file(self._file_of(stretch))
        if self._kind == "text":
            return Origin(file.path, "text", id=file.name)
        first = self._place_of(stretch) if stretch.direct else None
        if first is None:
            return Origin(file.path, self._kind)
        place = first + row - stretch.row
        if self._kind == "line":
            return Origin(file.path, "line", place + 1)
        return Origin(file.path, "row", place, id=f"{file.name}#{place}")

    def _documents(self, stretch: _Stretch) -> Iterator[Document]:
        """Read the records of a stretch."""
        file = self._file(self._file_of(stretch))
        if not self._reader.is_remote and not file.is_object and (now := os.stat(file.path).st_size) != file.size:
            raise UserError(f"{file.path} has changed: it had {file.size:,} bytes when it was read first, now {now:,}")
        yield from itertools.islice(UnitReader(self._unit(stretch.unit), self._reader, stretch.start), stretch.records)

    def _read(self, stretch: _Stretch, rows: set[int]) -> dict[int, Document]:
        """Records of a stretch by row, without their texts."""
        found = {}
        for document in self._documents(stretch):
            if document.row in rows:
                document.text = ""
                found[document.row] = document
                if len(found) == len(rows):
                    break
        return found

    def _number(self, stretch: _Stretch, document: Document) -> int | None:
        """Line, or row, of a document that was read."""
        if self._kind != "line":
            return document.byte if self._kind == "row" else None
        first = self._place_of(stretch)
        # Lines are counted from the beginning of the piece.
        return None if first is None or document.line is None else first - stretch.start[2] + document.line + 1


def some_of(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else "")
