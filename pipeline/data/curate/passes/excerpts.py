"""The pass `excerpts`: beginnings of some documents, so that the report of any bounds reads no texts.

Which documents depends on measures and the seed alone: from about 64 chunks, all documents of a short chunk; of a long
one some by key, some more for each stretch of the values that rules may have bounds for, and some with n-grams of
evaluations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from pipeline.common import storage
from pipeline.common.hashing import key, mix, value_hash
from pipeline.data.curate.decontamination.measure import HITS
from pipeline.data.curate.files import MEASURES
from pipeline.data.curate.models.measure import score_column
from pipeline.data.curate.passes.contamination import read_hits
from pipeline.data.curate.passes.names import EXCERPTS_PASS
from pipeline.data.curate.report.bins import bins, scale_of
from pipeline.data.curate.report.build import CHARACTERS, Excerpt, Key, as_utf8
from pipeline.data.curate.report.examples import is_early
from pipeline.data.curate.rules.presets import MEASURES as PRESETS
from pipeline.data.curate.scope import Chunk
from pipeline.data.curate.table import check_result, open_table
from pipeline.data.datasets.indexed import HashedFile, numbered
from pipeline.data.work.job import ReceiptJob
from pipeline.data.work.worker_pool import Progress

ReadTexts = Callable[[Path, Sequence[Key]], Mapping[Key, Excerpt]]
"""Reads the beginnings of documents, as far as it can: by the folder of a curation, and (unit, row)."""
_VERSION = 1
_ALL = 4096
"""Documents of a chunk up to which all have an excerpt."""
_BY_KEY, _WITH_HITS = 2048, 64
"""Documents of a longer chunk that are chosen by key alone, and of those with n-grams of evaluations."""
_STRETCH, _OF_STRETCH = 8, 4
"""Bins of a value in a stretch, and documents that are chosen in each."""


class ExcerptSource(NamedTuple):
    """State that the jobs of a source have in common.

    Attributes:
        curation: folder of the curation.
        kind: of the records of its tables of measures.
        read_texts: reads the texts.
    """

    curation: Path
    kind: np.dtype[Any]
    read_texts: ReadTexts


@dataclass(frozen=True)
class ExcerptJob(ReceiptJob):
    """Beginnings of documents of a chunk. `shared` has an `ExcerptSource` by folder."""

    chunk: Chunk
    seed: int

    @property
    def receipt(self) -> Path:
        path = numbered(self.folder / "receipts", self.chunk.unit, self.chunk.chunk)
        return path.with_name(f"{path.name}.json")

    @property
    def path(self) -> Path:
        """File with [row in the chunk, place, id, beginning] of each, as JSON."""
        path = numbered(self.folder, self.chunk.unit, self.chunk.chunk)
        return path.with_name(f"{path.name}.excerpts")

    def make(self, shared: Any, progress: Progress) -> dict[str, Any]:
        source: ExcerptSource = shared[self.folder]
        chunk = self.chunk
        table = open_table(chunk, source.kind)
        hits = np.unique(read_hits(chunk)["row"]) if HITS in chunk.hashes else np.zeros(0, np.uint32)
        rows = excerpt_rows(table, hits, self.seed, chunk)
        found = source.read_texts(source.curation, [(chunk.unit, chunk.first + row) for row in rows])
        records = [
            [row - chunk.first, *map(as_utf8, (each.place, each.id, each.text[:CHARACTERS]))]
            for (_, row), each in sorted(found.items())
        ]
        storage.make_below(self.folder, self.path.parent)
        with HashedFile(self.path) as file:
            file.write(orjson.dumps(records))
            progress(self.bytes)
            return self.commit({str(self.path.relative_to(self.folder)): file}, {"excerpts": len(records)})


def excerpt_jobs(curation: Path, chunks: Sequence[Chunk], seed: int) -> list[ExcerptJob]:
    """Jobs of a source.

    Args:
        curation: folder of its curation.
        chunks: of the source.
        seed: of the curation.
    """
    return [
        ExcerptJob(
            curation / EXCERPTS_PASS,
            f"excerpts-{chunk.unit:08d}-{chunk.chunk:05d}",
            value_hash([_VERSION, seed, chunk.unit, chunk.first, chunk.hashes[MEASURES], chunk.hashes.get(HITS)]),
            chunk.sizes[MEASURES],
            chunk,
            seed,
        )
        for chunk in chunks
        if chunk.records and is_early(seed, chunk.unit, chunk.chunk, len(chunks))
    ]


def excerpt_rows(table: npt.NDArray[Any], hits: npt.NDArray[Any], seed: int, chunk: Chunk) -> list[int]:
    """Rows of a chunk that have an excerpt, ascending.

    Args:
        table: of measures.
        hits: rows with n-grams of evaluations.
        seed: of the curation.
        chunk: it.
    """
    rows = np.flatnonzero(table["state"] == 0)
    if len(rows) <= _ALL:
        return [int(row) for row in rows]
    places = (rows + chunk.first).astype(np.uint64) | np.uint64(chunk.unit << 32)
    rows = rows[np.argsort(mix(places, key(seed, "excerpts")), kind="stable")]
    chosen = np.zeros(len(table), np.bool_)
    chosen[rows[:_BY_KEY]] = True
    chosen[rows[np.isin(rows, hits)][:_WITH_HITS]] = True
    documents = table[rows]
    for values, about in _values(documents):
        stretch = (bins(values, scale_of(about), "max") // _STRETCH).astype(np.uint8)
        order = np.argsort(stretch, kind="stable")
        ordered = stretch[order]
        inside = np.arange(len(order)) - np.searchsorted(ordered, ordered)
        chosen[rows[order[inside < _OF_STRETCH]]] = True
    return [int(row) for row in np.flatnonzero(chosen)]


def _values(documents: npt.NDArray[Any]) -> Iterator[tuple[npt.NDArray[np.float64], str]]:
    """Values that rules may have bounds for, with what each is."""
    measures = {each.formula: each for preset in PRESETS.values() for each in preset.values()}
    for measure in measures.values():
        count = documents[measure.numerator].astype(np.float64)
        of = np.maximum(documents[measure.denominator], 1) if measure.denominator else 1
        yield count / of, measure.about
    for name in documents.dtype.names or ():
        if name == "language_score" or name.startswith(score_column("")):
            yield documents[name].astype(np.float64) / 2**16, "score"


@dataclass(frozen=True)
class StoredExcerpts:
    """Excerpts of a source that are made.

    Attributes:
        files: by (unit, chunk): first row, path and hash.
    """

    files: Mapping[tuple[int, int], tuple[int, Path, str]]

    def hash(self, chunk: Chunk) -> str | None:
        """Hash of those of a chunk; None if it has none."""
        found = self.files.get((chunk.unit, chunk.chunk))
        return None if found is None else found[2]

    def rows(self, chunk: Chunk) -> list[int]:
        """Rows of a chunk that have one, ascending.

        Raises:
            DamagedResult: the file is not as it was written.
        """
        return [record[0] for record in self._read(chunk.unit, chunk.chunk)]

    def of(self, keys: Iterable[Key]) -> dict[Key, Excerpt]:
        """Excerpts of documents, without those that have none.

        Raises:
            DamagedResult: a file is not as it was written.
        """
        wanted = set(keys)
        units = {unit for unit, _ in wanted}
        found: dict[Key, Excerpt] = {}
        for unit, chunk in self.files:
            first = self.files[unit, chunk][0]
            for row, place, id, text in self._read(unit, chunk) if unit in units else ():
                if (unit, first + row) in wanted:
                    found[unit, first + row] = Excerpt(place, text, id)
        return found

    def _read(self, unit: int, chunk: int) -> list[list[Any]]:
        if (unit, chunk) not in self.files:
            return []
        _, path, xxh3 = self.files[unit, chunk]
        check_result(path, xxh3, EXCERPTS_PASS)
        found: list[list[Any]] = orjson.loads(storage.read_bytes(path))
        return found


def stored_excerpts(jobs: Sequence[ExcerptJob], receipts: Sequence[Mapping[str, Any]]) -> StoredExcerpts:
    """Excerpts of a source.

    Args:
        jobs: all of its jobs.
        receipts: of these.
    """
    files = {}
    for job, receipt in zip(jobs, receipts, strict=True):
        ((_, about),) = receipt["files"].items()
        files[job.chunk.unit, job.chunk.chunk] = (job.chunk.first, job.path, str(about["xxh3"]))
    return StoredExcerpts(files)
