"""Chunks that are compared with each other, in a file that jobs name: thousands are not pickled with each job."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.common import links, storage
from pipeline.common.errors import UserError
from pipeline.common.hashing import value_hash
from pipeline.data.curate.files import measured_file, portable
from pipeline.data.curate.scope import Chunk, document, documents
from pipeline.data.work.sorted_runs import DamagedResult


@dataclass(frozen=True)
class ComparedChunk:
    """A chunk of the scope, or of a finished curation that it is compared with.

    Attributes:
        chunk: its source is numbered as in `Compared.names`.
        verdicts: of a finished curation: the verdicts of the chunk, whose hash is that of `verdicts` in the chunk.
    """

    chunk: Chunk
    verdicts: Path | None = None

    @property
    def base(self) -> int:
        """Document of its first row."""
        return document(self.chunk.source, self.chunk.unit, self.chunk.first)

    def path(self, name: str) -> Path:
        """A measured file."""
        return measured_file(self.chunk.curation, self.chunk.unit, self.chunk.chunk, name)

    def size(self, name: str) -> int:
        """Bytes of a measured file.

        Raises:
            DamagedResult: it is missing.
        """
        if name in self.chunk.sizes:
            return self.chunk.sizes[name]
        try:
            return self.path(name).stat().st_size
        except FileNotFoundError:
            raise DamagedResult(self.path(name), "measure", "it is missing") from None

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Read its files inside: what is damaged in a finished curation is not removed and made again from here.

        Raises:
            UserError: a file of a finished curation is damaged.
            DamagedResult: one of the scope is.
        """
        try:
            yield
        except DamagedResult as error:
            if self.verdicts is None:
                raise
            raise UserError(
                f"data.curate.against: {error.path} is damaged ({error.how}); remove it and run `pipeline curate` "
                f"again with the run file that wrote {self.chunk.curation}"
            ) from None

    def numbers(self, rows: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
        """Documents of rows of the chunk."""
        return documents(self.chunk.source, self.chunk.unit, rows.astype(np.uint64) + np.uint64(self.chunk.first))


@dataclass(frozen=True)
class Compared:
    """All chunks that are compared, ascending by the number of their documents.

    Attributes:
        names: of sources by number: those of the scope, then folders of finished curations.
        own: number of sources of the scope.
        chunks: those of the scope first.
    """

    names: tuple[str, ...]
    own: int
    chunks: tuple[ComparedChunk, ...]

    @property
    def own_chunks(self) -> int:
        """Number of chunks of the scope."""
        return sum(each.chunk.source < self.own for each in self.chunks)

    def hashes(self, *names: str) -> list[Any]:
        """Hashes of some files of all chunks, and what numbers their documents, for `ReceiptJob.inputs`."""
        return [
            [each.chunk.source, each.chunk.unit, each.chunk.first, each.chunk.records]
            + [each.chunk.hashes.get(name) for name in names]
            for each in self.chunks
        ]

    @functools.cached_property
    def _bases(self) -> npt.NDArray[np.uint64]:
        return np.array([each.base for each in self.chunks], np.uint64)

    def place(self, chunk: Chunk) -> int:
        """Place of a chunk in `chunks`."""
        return int(self.places(np.array([document(chunk.source, chunk.unit, chunk.first)], np.uint64))[0])

    def places(self, numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Places in `chunks` of documents."""
        # Chunks without a record share their base with the next one, which comes last.
        return np.searchsorted(self._bases, numbers, "right").astype(np.int64) - 1

    def by_chunk(
        self, numbers: npt.NDArray[np.uint64]
    ) -> Iterator[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """(place of a chunk, which of the documents are in it, their rows there) for each chunk that has some."""
        places = self.places(numbers)
        order = np.argsort(places, kind="stable")
        found, starts = np.unique(places[order], return_index=True)
        ends = np.append(starts, len(order))[1:]
        for place, start, end in zip(found.tolist(), starts.tolist(), ends.tolist(), strict=True):
            inside = order[start:end]
            yield place, inside, (numbers[inside] - self._bases[place]).astype(np.int64)


def write_compared(folder: Path, names: Sequence[str], own: int, chunks: Sequence[ComparedChunk]) -> Path:
    """Write a list of chunks below `DATA_DIR/curate/SCOPE`, which exists; its name is its hash."""
    data_dir = _data_dir(folder)
    rows = [
        {
            **asdict(each.chunk),
            "curation": portable(each.chunk.curation, data_dir),
            "verdicts": each.verdicts and portable(each.verdicts, data_dir),
        }
        for each in chunks
    ]
    value = {"names": list(names), "own": own, "chunks": rows}
    path = folder / f"{value_hash(value)}.json"
    if not path.exists():
        links.make_folder(folder)
        storage.put_json(path, value)
    return path


def _data_dir(folder: Path) -> Path:
    """The data folder, by that of the lists of a scope."""
    return folder.parents[2]


@functools.lru_cache(maxsize=4)
def read_compared(path: Path) -> Compared:
    """The list of chunks of a file of `write_compared`.

    Raises:
        DamagedResult: it is not as it was written.
    """
    value = storage.find_json(path, "names", "own", "chunks")
    if value is None or value_hash(value) != path.stem:
        raise DamagedResult(path, "match", "it is missing, or not as it was written")
    chunks, data_dir = [], _data_dir(path.parent)
    for row in value["chunks"]:
        verdicts = row.pop("verdicts")
        chunk = Chunk(**{**row, "curation": data_dir / row["curation"]})
        chunks.append(ComparedChunk(chunk, verdicts and data_dir / verdicts))
    return Compared(tuple(value["names"]), value["own"], tuple(chunks))
