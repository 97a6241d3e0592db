"""One unit of documents to measures: what worker processes of the first pass run. Imports stay light."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from pipeline.common import links, storage
from pipeline.common.errors import UserError
from pipeline.data.curate.batch import BATCH_BYTES, Measurer, TextBatch
from pipeline.data.curate.chunk_writer import BAD_RECORD, EMPTY_DOCUMENT, ChunkWriter
from pipeline.data.curate.cleaning.clean import Cleaner
from pipeline.data.curate.files import IDS, NOBODY, measured_file
from pipeline.data.curate.measurers import table_type
from pipeline.data.datasets.files import receipt_path, rejected_path
from pipeline.data.sources.records import Document, Position, Unit
from pipeline.data.work.receipts import read_receipt
from pipeline.data.work.unit_chunks import ChunkedUnit, ChunksJob, OpenChunk, UnitDone
from pipeline.data.work.unit_source import UnitSource, damage_is_known
from pipeline.data.work.worker_pool import Progress

_BATCH_ROWS = 2**14
"""Most rows of a batch, however short."""


class MeasureContext(Protocol):
    """State of a worker process for all its units, opened once; a pickled copy opens it again."""

    @property
    def engine_name(self) -> str:
        """Engine of the measures."""

    @property
    def cleaner(self) -> Cleaner:
        """Edits of the text."""

    def measurers(self, source: str) -> list[Measurer]:
        """Measures of a source, in the order of their columns."""

    @property
    def may_differ(self) -> bool:
        """True if another machine may measure slightly else: models of floats."""


@dataclass(frozen=True)
class MeasureJob(ChunksJob[UnitSource]):
    """A unit to measure."""

    def run(self, shared: MeasureContext, progress: Progress) -> UnitDone:
        """Make the chunks that have no receipt."""
        return _MeasuredUnit(self, shared, progress).run()


def chunk_is_valid(source: UnitSource, unit: Unit, receipt: Any, start: Position) -> bool:
    """Tell whether a receipt is of this plan, begins where the chunk begins, and its files are there."""
    return (
        receipt is not None
        and receipt["config_hash"] == source.config_hash
        and tuple(receipt["start"]) == start
        and damage_is_known(source, unit, receipt)
        and _files_are_there(source, receipt)
    )


def _files_are_there(source: UnitSource, receipt: dict[str, Any]) -> bool:
    unit, chunk = receipt["unit"], receipt["link"]
    try:
        files = receipt["files"].items()
        sizes = {measured_file(source.folder, unit, chunk, name): about["size"] for name, about in files}
    except (KeyError, TypeError, AttributeError):  # of another version, or of a stranger
        return False
    return storage.have_sizes(sizes) and (not receipt["rejected"] or rejected_path(source.folder, unit, chunk).exists())


@dataclass
class _Rows:
    """Rows of a chunk that wait to be measured together."""

    documents: list[Document] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    edited: list[bool] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    size: int = 0

    def add_record(self, document: Document, state: int) -> None:
        self._add_id(document)
        self.states.append(state)

    def _add_id(self, document: Document) -> None:
        self.ids.append(xxhash.xxh3_64_intdigest(document.id.encode()) if document.id else NOBODY)

    def add(self, document: Document, text: str, raw: bytes, edited: bool) -> None:
        self.places.append(len(self.states))
        self._add_id(document)
        self.states.append(0)
        self.documents.append(document)
        self.texts.append(text)
        self.raw.append(raw)
        self.edited.append(edited)
        self.size += len(raw)

    @property
    def is_full(self) -> bool:
        return self.size >= BATCH_BYTES or len(self.states) >= _BATCH_ROWS

    def batch(self, first: int) -> TextBatch:
        """Batch of the documents.

        Args:
            first: row in the chunk of the first of these rows.
        """
        starts = np.zeros(len(self.raw) + 1, np.int64)
        np.cumsum([len(raw) for raw in self.raw], out=starts[1:])
        return TextBatch(
            np.frombuffer(b"".join(self.raw), np.uint8),
            starts,
            self.texts,
            (np.array(self.places, np.int64) + first).astype(np.uint32),
            [document.id for document in self.documents],
            [document.metadata for document in self.documents],
            [document.name for document in self.documents],
        )


class _MeasuredUnit(ChunkedUnit):
    """Goes through the chunks of one unit."""

    was = "measured"
    again = "measure again"

    def __init__(self, job: MeasureJob, context: MeasureContext, progress: Progress) -> None:
        super().__init__(job.source, job.unit, progress)
        self._source = job.source
        self._context = context

    def _is_valid(self, receipt: Any, start: Position) -> bool:
        return chunk_is_valid(self._source, self._unit, receipt, start)

    def _open(self, chunk: int) -> _MeasuredChunk:
        return _MeasuredChunk(self._source, self._unit, chunk, self._context)

    def _put_receipt(self, path: Path, receipt: dict[str, Any]) -> None:
        storage.put_json(path, receipt)

    def _remove_files(self, chunk: int) -> None:
        measured = measured_file(self._source.folder, self._unit.index, chunk, "")
        for file in measured.parent.glob(f"{measured.name}*"):
            links.remove(file, missing_ok=True)


class _MeasuredChunk(OpenChunk):
    """Documents of a chunk on their way to its measures, many at a time."""

    def __init__(self, source: UnitSource, unit: Unit, chunk: int, context: MeasureContext) -> None:
        self._folder = source.folder
        self._unit = unit
        self._context = context
        self._cleaner = context.cleaner
        self._measurers = context.measurers(unit.source)
        self._type = table_type(self._measurers)
        self._writer = ChunkWriter(source.folder, lambda name: measured_file(source.folder, unit.index, chunk, name))
        self._rows = _Rows()
        self._first = 0
        """Row in the chunk of the first of these rows."""

    def __exit__(self, *error: Any) -> None:
        self._writer.__exit__(*error)

    def take(self, document: Document, raw: bytes) -> bool:
        if document.reason is not None:
            self._rows.add_record(document, BAD_RECORD)
        else:
            self._add(document, raw)
        if not self._rows.is_full:
            return False
        self._measure()
        return True

    def _add(self, document: Document, raw: bytes) -> None:
        if self._cleaner.changes_nothing:
            self._rows.add(document, document.text, raw, edited=False)
            return
        text = self._cleaner.clean(document.text)
        if not text:
            self._rows.add_record(document, EMPTY_DOCUMENT)
            return
        edited = text != document.text
        self._rows.add(document, text, text.encode() if edited else raw, edited)

    def flush(self) -> None:
        self._measure()  # also without rows: the files of a chunk are there, be they empty
        self._files = self._writer.finish()

    def commit(self, receipt: dict[str, Any]) -> None:
        receipt |= {
            "engine": self._context.engine_name,
            "checked": 0,
            "splits": {},
            "files": {name: file.listing() for name, file in self._files.items()},
            "counts": self._writer.counts,
        }
        self._refuse_other_result(receipt)
        for file in self._files.values():
            file.commit()

    def _measure(self) -> None:
        rows, writer = self._rows, self._writer
        places = np.array(rows.places, np.int64)
        writer.begin(places, len(rows.states))
        batch = rows.batch(self._first)
        table: npt.NDArray[Any] = np.zeros(len(places), self._type)
        table["edited"] = rows.edited
        table["bytes"] = np.minimum(np.diff(batch.starts), 2**32 - 1)
        for measurer in self._measurers:
            measurer.measure(batch, table, writer)
        block = np.zeros(len(rows.states), self._type)
        block[places] = table
        block["state"] = rows.states
        writer.table(block)
        writer.append(IDS, np.array(rows.ids, np.uint64))
        self._first += len(rows.states)
        self._rows = _Rows()

    def _refuse_other_result(self, receipt: dict[str, Any]) -> None:
        """Two results of one chunk are equal, or something is broken: then the one with a receipt stays."""
        unit, chunk = receipt["unit"], receipt["link"]
        other = read_receipt(self._folder, unit, chunk)
        if other is None or self._context.may_differ:
            return
        same = all(other[key] == receipt[key] for key in ("config_hash", "start", "dropped"))
        same = same and other["input"]["hash"] == receipt["input"]["hash"]
        before = other.get("files", {})
        files = {name: about for name, about in receipt["files"].items() if name != IDS or name in before}
        if same and before != files:
            path = receipt_path(self._folder, unit, chunk)
            raise UserError(
                f"{self._unit} gave other measures than when {path} was written ({other['engine']} then, "
                f"{self._context.engine_name} now), from the same input; a machine may be broken. Remove {path} and "
                "run the same command again"
            )
