"""Reading of sources for tests: everything at once, and begun again behind every record."""

from __future__ import annotations

from pathlib import Path

from pipeline.data.sources.formats import SOURCE_FORMATS
from pipeline.data.sources.globs import File
from pipeline.data.sources.jsonl import JsonlReader
from pipeline.data.sources.reader import Reader, UnitReader
from pipeline.data.sources.records import Damage, Document, Piece, Unit

LINES = JsonlReader("text", "id", ("url",))


def files(*paths: object, type: str = "text") -> list[File]:
    reader = SOURCE_FORMATS[type]("text", "id")
    return reader.find([str(path) for path in paths], [], "data.sources.0", dict)[1]


def units(found: list[File], reader: Reader, size: int = 2**40) -> list[Unit]:
    return [Unit(number, "s", pieces) for number, pieces in enumerate(reader.cut(found, size))]


def read(path: Path | list[Path], reader: Reader, size: int = 2**40) -> list[Document]:
    paths = path if isinstance(path, list) else [path]
    return [d for unit in units(files(*paths, type=reader.type), reader, size) for d in UnitReader(unit, reader)]


def damage(path: Path | list[Path], reader: Reader, size: int = 2**40) -> list[Damage]:
    """What could not be read."""
    paths = path if isinstance(path, list) else [path]
    found: list[Damage] = []
    for unit in units(files(*paths, type=reader.type), reader, size):
        through = UnitReader(unit, reader)
        for _ in through:
            pass
        found += through.damage
    return found


def together(*units: Unit) -> Unit:
    """One unit of the pieces of several, which may lie in one file."""
    return Unit(0, "s", tuple(piece for unit in units for piece in unit.pieces))


def middle(unit: Unit, start: int, end: int) -> Unit:
    return Unit(0, "s", (Piece(unit.pieces[0].file, start, end),))


def check_resume(unit: Unit, reader: Reader) -> list[Document]:
    """Started at the position behind any record, a reader yields the rest, and its counts add up to the whole."""
    whole = UnitReader(unit, reader)
    documents, seen, damage = [], [], []
    for document in whole:
        documents.append(document)
        seen.append((whole.position, whole.input_bytes, whole.bytes_read, whole.records, whole.pieces))
        damage.append(len(whole.damage))
        assert whole.records == len(documents) == document.row + 1 == whole.position[3]
    assert [s[1] for s in seen] == sorted(s[1] for s in seen)
    assert [s[2] for s in seen] == sorted(s[2] for s in seen)
    assert whole.bytes_read >= seen[-1][2] if seen else True
    for number, (position, input_bytes, _, records, pieces) in enumerate(seen):
        rest = UnitReader(unit, reader, position)
        assert list(rest) == documents[number + 1 :]
        assert rest.damage == whole.damage[damage[number] :]
        assert input_bytes + rest.input_bytes == whole.input_bytes
        assert records + rest.records == whole.records
        first = {piece: pieces.get(piece, (0, 0)) for piece in whole.pieces}
        second = {piece: rest.pieces.get(piece, (0, 0)) for piece in whole.pieces}
        added = {p: (first[p][0] + second[p][0], first[p][1] + second[p][1]) for p in whole.pieces}
        assert added == whole.pieces
    return documents


def check_chain(unit: Unit, reader: Reader, step: int) -> None:
    """A chain of readers that stop after `step` records hashes the same wherever its links begin."""
    position, hashes, count = (0, -1, 0, 0), [], 0
    whole = list(UnitReader(unit, reader))
    while count < len(whole):
        link = UnitReader(unit, reader, position)
        for document in link:
            assert document == whole[count]
            count += 1
            if count % step == 0:
                break
        hashes.append(link.input_hash)
        position = link.position
    again = UnitReader(unit, reader)
    for document in again:
        if document.row + 1 == step:
            break
    assert again.input_hash == hashes[0] or len(whole) < step
