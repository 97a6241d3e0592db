"""Beginnings of documents, read from the source files for the report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pipeline.common.errors import UserError
from pipeline.data.curate.report.build import Excerpt, Key
from pipeline.data.sources.reader import Reader, UnitReader
from pipeline.data.sources.records import Document, Unit
from pipeline.data.work.receipts import Receipts

_CHUNKS = 128
"""Most chunks that are read. Examples are taken from fewer, unless a rule removes documents nowhere else."""
_CLEANED = 20_000
"""Characters of a document that are cleaned."""


class _Place(NamedTuple):
    """A chunk: its unit, and where reading it begins."""

    unit: int
    start: tuple[int, int, int, int]


def read_excerpts(
    reader: Reader,
    units: Mapping[int, Unit] | Sequence[Unit],
    receipts: Receipts,
    keys: Iterable[Key],
    clean: Callable[[str], str] = lambda text: text,
) -> dict[Key, Excerpt]:
    """Beginnings of documents; those in files that cannot be read any more are left out.

    Args:
        reader: of the source.
        units: of the source, by number.
        receipts: of the chunks that were measured.
        keys: of the documents.
        clean: edits of the text.
    """
    chunks: dict[_Place, set[int]] = defaultdict(set)
    for unit, row in sorted(keys):
        if (start := _start(receipts.of(unit), row)) is not None:
            chunks[_Place(unit, start)].add(row)
    chosen = sorted(chunks, key=lambda place: (-len(chunks[place]), place))[:_CHUNKS]
    found: dict[Key, Excerpt] = {}
    for place in chosen:
        try:
            found |= _read(reader, units[place.unit], place, chunks[place], clean)
        except (UserError, OSError):
            continue
    return found


def _start(receipts: Iterable[Any], row: int) -> tuple[int, int, int, int] | None:
    """Position at which the chunk of a row begins."""
    for receipt in receipts:
        first = receipt["start"][3]
        if first <= row < first + receipt["records"]:
            piece, offset, line, _ = receipt["start"]
            return piece, offset, line, first
    return None


def _read(
    reader: Reader, unit: Unit, place: _Place, rows: set[int], clean: Callable[[str], str]
) -> dict[Key, Excerpt]:
    found: dict[Key, Excerpt] = {}
    for document in UnitReader(unit, reader, place.start):
        if document.row in rows:
            text = clean(document.text[:_CLEANED])
            found[unit.index, document.row] = Excerpt(_where(reader, unit, document), text, document.id)
            if len(found) == len(rows):
                break
    return found


def _where(reader: Reader, unit: Unit, document: Document) -> str:
    piece = unit.pieces[document.piece]
    if reader.numbering == "text":
        return piece.file.path
    # Lines are counted from the beginning of the piece.
    line = document.line + 1 if document.line is not None and piece.start == 0 else None
    return reader.locate(piece, line, document.byte)
