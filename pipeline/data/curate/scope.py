"""Scopes: sources whose documents are compared with each other, and the numbers of documents in them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_UNIT_SHIFT = 32
_SOURCE_SHIFT = 56
MAX_SOURCES = 2**8
MAX_UNITS = 2**24


def document(source: int, unit: int, row: int) -> int:
    """Number of a document in its scope: ascending in the order of the plan.

    Args:
        source: its place among the sources of the scope, sorted by name.
        unit: of the source.
        row: in the unit.
    """
    return source << _SOURCE_SHIFT | unit << _UNIT_SHIFT | row


def documents(source: int, unit: int, rows: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """`document` for many rows of a unit."""
    return rows.astype(np.uint64) | np.uint64(document(source, unit, 0))


def place(number: int) -> tuple[int, int, int]:
    """(source, unit, row) of a document's number."""
    return number >> _SOURCE_SHIFT, number >> _UNIT_SHIFT & MAX_UNITS - 1, number & 2**_UNIT_SHIFT - 1


@dataclass(frozen=True)
class Chunk:
    """A measured chunk of a unit.

    Attributes:
        curation: folder of the source's curation.
        source: number of the source in its scope.
        unit: number of the unit.
        chunk: number of the chunk.
        first: row in the unit of its first record.
        records: records, good or bad; the files of the chunk have a record for each.
        hashes: xxh3 of its files by name, from the receipt.
        sizes: bytes of its files by name, from the receipt.
    """

    curation: Path
    source: int
    unit: int
    chunk: int
    first: int
    records: int
    hashes: dict[str, str]
    sizes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Scope:
    """Sources that are compared with each other.

    Attributes:
        name: of the scope.
        folder: `DATA_DIR/curate/NAME`.
        sources: names, sorted; the place in it is the number of the source.
        preference: the same names in the order of the run file, in which `keep: [source]` prefers them.
        chunks: all measured chunks, ascending by (source, unit, chunk).
    """

    name: str
    folder: Path
    sources: tuple[str, ...]
    preference: tuple[str, ...]
    chunks: tuple[Chunk, ...]

    @property
    def data_dir(self) -> Path:
        """The data folder."""
        return self.folder.parent.parent
