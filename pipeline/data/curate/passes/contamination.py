"""The pass `contamination`: which n-grams of evaluations are common text, and which items documents have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.common import storage
from pipeline.common.hashing import value_hash
from pipeline.data.curate.decontamination.index import open_index
from pipeline.data.curate.decontamination.matching import HIT
from pipeline.data.curate.decontamination.measure import HITS
from pipeline.data.curate.decontamination.rule import (
    TouchedItems,
    common_ngrams,
    count_documents,
    fill_contamination,
)
from pipeline.data.curate.passes.names import CONTAMINATION_PASS
from pipeline.data.curate.scope import Chunk, document
from pipeline.data.curate.table import chunk_path, open_table, read_array
from pipeline.data.datasets.indexed import HashedFile
from pipeline.data.work.job import ReceiptJob
from pipeline.data.work.worker_pool import Progress

_COUNTS = np.dtype("<i8")


@dataclass(frozen=True)
class ContaminationJob(ReceiptJob):
    """Documents with each n-gram, over all chunks of a scope: they are what is shared.

    Attributes:
        index: of the items.
        max_documents: documents from which on an n-gram is common text.
    """

    index: Path
    max_documents: int

    @property
    def receipt(self) -> Path:
        return self.folder / f"{self.name}.json"

    @property
    def counts(self) -> Path:
        """File with the documents of each n-gram: int64 of shape (n-grams,)."""
        return self.folder / f"{self.name}.counts"

    @property
    def touched(self) -> Path:
        """File with the items that documents have, as JSON."""
        return self.folder / f"{self.name}.items.json"

    def make(self, shared: Any, progress: Progress) -> dict[str, Any]:
        chunks: Sequence[Chunk] = shared[self.folder]
        index = open_index(self.index)
        counts = count_documents(index, map(read_hits, chunks))
        touched = TouchedItems(index, counts, common_ngrams(counts, self.max_documents))
        for chunk in chunks:
            hits = read_hits(chunk)
            touched.add(hits, document(chunk.source, chunk.unit, chunk.first))
            progress(hits.nbytes)
        with HashedFile(self.counts) as numbers, HashedFile(self.touched) as items:
            numbers.write(counts.astype(_COUNTS).tobytes())
            items.write(storage.json_bytes(touched.report()))
            return self.commit({self.counts.name: numbers, self.touched.name: items}, {})


def contamination_job(folder: Path, chunks: Sequence[Chunk], index: Path, max_documents: int) -> ContaminationJob:
    """The job of a scope.

    Args:
        folder: of the scope.
        chunks: of the scope.
        index: of the items.
        max_documents: documents from which on an n-gram is common text.
    """
    chunk_hits = [[c.source, c.unit, c.first, c.hashes[HITS]] for c in chunks]
    inputs = value_hash([max_documents, open_index(index).hash, chunk_hits])
    size = sum(chunk.sizes[HITS] for chunk in chunks)
    name = f"contamination-{inputs[:16]}"
    return ContaminationJob(folder / CONTAMINATION_PASS, name, inputs, size, index, max_documents)


def read_hits(chunk: Chunk) -> npt.NDArray[Any]:
    """Hits of a chunk, checked."""
    return read_array(chunk_path(chunk, HITS), HIT, chunk.hashes[HITS], "measure")


@dataclass(frozen=True)
class TableOpener:
    """Opens tables of measures of a scope.

    Attributes:
        types: of the records of a table, by the number of the source.
        counts: file with the documents of each n-gram, its hash, and from how many on one is common; None where
            contamination is not measured.
    """

    types: tuple[np.dtype[Any], ...]
    counts: tuple[Path, str, int] | None = None

    def __call__(self, chunk: Chunk) -> npt.NDArray[Any]:
        table = open_table(chunk, self.types[chunk.source])
        if self.counts is None:
            return table
        table = np.array(table)
        fill_contamination(table, read_hits(chunk), _common(*self.counts))
        return table


@lru_cache(maxsize=1)
def _common(path: Path, xxh3: str, max_documents: int) -> npt.NDArray[np.bool_]:
    return common_ngrams(np.array(read_array(path, _COUNTS, xxh3, CONTAMINATION_PASS)), max_documents)


def common_of(folder: Path, about: Mapping[str, Any]) -> npt.NDArray[np.bool_] | None:
    """N-grams that are common text by decisions: bool of shape (n-grams,); None if that is not stored any more.

    Args:
        folder: of the scope.
        about: content of `curation.json`.
    """
    settings = about["settings"].get("data.curate.decontaminate")
    path = folder / CONTAMINATION_PASS / str(about.get("contamination"))
    if settings is None or not path.is_file():
        return None
    return common_ngrams(np.fromfile(path, _COUNTS), settings["max_documents"])
