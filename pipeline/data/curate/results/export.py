"""Kept documents of a curation, edits applied, as JSON Lines or Parquet: a file per unit, for other programs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson
from rich.console import Console

from pipeline.common import storage
from pipeline.common.console import say
from pipeline.common.errors import UserError
from pipeline.common.format import counted
from pipeline.config.root import Config
from pipeline.data.curate.curation_plan import plan_sources, unit_source
from pipeline.data.curate.results.apply import AppliedCuration, decisions_of_run
from pipeline.data.sources.reader import UnitReader
from pipeline.data.sources.records import Document, Unit
from pipeline.data.work.progress import ProgressLine
from pipeline.data.work.receipts import Receipts
from pipeline.data.work.unit_source import UnitSource, without_damaged
from pipeline.data.work.units import find_source_files, reading
from pipeline.data.work.worker_count import worker_count
from pipeline.data.work.worker_pool import Progress, Workers

ExportFormat = Literal["jsonl", "parquet"]
EXPORT_FILE = "exported.json"
"""Beside the files: what they are of."""
_BATCH = 1000
_ADVANCE = 2**20


@dataclass(frozen=True)
class ExportJob:
    """A unit to export."""

    source: UnitSource
    unit: Unit
    curation: AppliedCuration
    path: Path
    form: ExportFormat

    def __str__(self) -> str:
        return str(self.unit)


def export(config: Config, folder: Path, form: ExportFormat, console: Console) -> int:
    """Write the kept documents of all sources below a folder; returns their number in files that this run wrote.

    The same call resumes: a unit whose file is there is complete.

    Args:
        config: the run.
        folder: where to.
        form: of the files.
        console: for messages.

    Raises:
        UserError: the decisions are not those of the run file, or the folder has an export of others.
    """
    sources = find_source_files(config, held_out=False)
    with reading(config, sources):
        plans = plan_sources(config, sources)
        curations = decisions_of_run(config, plans)
        jobs: list[ExportJob] = []
        units = 0
        for plan in plans:
            own, curation = folder / plan.name, curations[plan.name]
            _claim(own, {"curation": curation.hash, "format": form, "source": plan.name})
            source = without_damaged(unit_source(plan, config), plan.units, Receipts(plan.folder))
            paths = {unit.index: own / f"{unit.index:08d}.{form}" for unit in plan.units}
            units += len(paths)
            jobs += [
                ExportJob(source, unit, curation, paths[unit.index], form)
                for unit in plan.units
                if not paths[unit.index].exists()
            ]
        total = sum(job.unit.bytes for job in jobs)
        written = 0
        with (
            Workers[ExportJob, int](make_export, (), worker_count(config, max(len(jobs), 1))) as workers,
            ProgressLine(console, total, len(jobs), units - len(jobs), "exporting") as line,
        ):
            for documents in line.results(workers, jobs, "could not be exported"):
                written += documents
    done = f"wrote {counted(written, 'document')} in {counted(len(jobs), 'file')}" if jobs else "nothing to do"
    say(console, f"{done}: all kept documents are below {folder}")
    return written


def _claim(folder: Path, about: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / EXPORT_FILE
    there = storage.find_json(path, *about)
    if there is None and any(folder.iterdir()) and not path.exists():
        raise UserError(f"--export: {folder} is not empty, and no export; name another folder")
    if there is not None and there != about:
        raise UserError(f"--export: {folder} has an export of other decisions or format; name another folder")
    if there is None:
        storage.put_json(path, about)


def make_export() -> Any:
    """In a worker process: returns the function that runs an `ExportJob`."""
    return export_unit


def export_unit(job: ExportJob, progress: Progress) -> int:
    """Write the file of a unit; returns its documents."""
    curation = job.curation.open(job.unit.index)
    reader = UnitReader(job.unit, job.source.reader)
    reported = documents = 0
    writer: _Writer = _JsonLines(job.path) if job.form == "jsonl" else _Parquet(job.path)
    with writer:
        for document in curation.checked(job.unit, reader):
            raw = document.text.encode()
            if job.source.reason_against(document, raw) is None and curation.apply(document) is None:
                writer.add(_record(job.unit, document, job.source.reader.weight_key))
                documents += 1
            if reader.bytes_read - reported >= _ADVANCE:
                progress(reader.bytes_read - reported)
                reported = reader.bytes_read
        writer.commit()
    progress(reader.bytes_read - reported)
    return documents


def _record(unit: Unit, document: Document, weight_key: str | None) -> dict[str, Any]:
    """A document: its kept metadata and loss weight, then its text, id and place."""
    metadata = orjson.loads(document.metadata) if document.metadata else {}
    if weight_key is not None:
        metadata[weight_key] = document.weight
    piece = unit.pieces[document.piece]
    place = {"source": unit.source, "file": piece.file.path, "byte": document.byte, "unit": unit.index}
    return {**metadata, "id": document.id, "text": document.text, "origin": {**place, "row": document.row}}


class _Writer(ABC):
    """A file of documents. As a context manager it removes what is not committed."""

    def __init__(self, path: Path) -> None:
        self._file = storage.NewFile(path)

    @abstractmethod
    def add(self, record: dict[str, Any]) -> None:
        """Write a document."""

    def commit(self) -> None:
        self._file.commit()

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)


class _JsonLines(_Writer):
    def add(self, record: dict[str, Any]) -> None:
        self._file.file.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))


class _Parquet(_Writer):
    """Metadata is a column with a JSON object, as its keys may have values of any type."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        super().__init__(path)
        text, number = pa.string(), pa.int64()
        names = {"id": text, "text": text, "metadata": text, "source": text, "file": text}
        self._schema = pa.schema({**names, "byte": number, "unit": number, "row": number})
        self._pa = pa
        self._parquet = parquet.ParquetWriter(self._file.file, self._schema, compression="zstd")
        self._batch: list[dict[str, Any]] = []

    def add(self, record: dict[str, Any]) -> None:
        metadata = {name: value for name, value in record.items() if name not in ("id", "text", "origin")}
        row = {"id": record["id"], "text": record["text"], "metadata": orjson.dumps(metadata).decode()}
        self._batch.append({**row, **record["origin"]})
        if len(self._batch) >= _BATCH:
            self._flush()

    def commit(self) -> None:
        self._flush()
        self._parquet.close()
        super().commit()

    def _flush(self) -> None:
        if self._batch:
            self._parquet.write_table(self._pa.Table.from_pylist(self._batch, schema=self._schema))
        self._batch = []
