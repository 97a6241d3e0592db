"""Kept documents of a curation, edits applied, as JSON Lines or Parquet: a file per unit, for other programs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console

from pipeline.common.console import say
from pipeline.common.format import counted
from pipeline.config.root import Config
from pipeline.data.curate.curation_plan import plan_sources, unit_source
from pipeline.data.curate.results.apply import AppliedCuration, decisions_of_run
from pipeline.data.sources.reader import UnitReader
from pipeline.data.sources.records import Document, Unit
from pipeline.data.work.document_files import ExportFormat, claim_folder, document_file
from pipeline.data.work.job_run import worker_count
from pipeline.data.work.progress import ProgressLine
from pipeline.data.work.receipts import Receipts
from pipeline.data.work.unit_source import UnitSource, without_damaged
from pipeline.data.work.units import find_source_files, reading
from pipeline.data.work.worker_pool import Progress, Workers

_ADVANCE = 2**20
_COLUMNS = dict.fromkeys(("id", "text", "metadata", "source", "file"), "string") | dict.fromkeys(
    ("byte", "unit", "row"), "int64"
)


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
            about = {"curation": curation.hash, "format": form, "source": plan.name}
            claim_folder(own, about, "--export", "decisions or format")
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


def make_export() -> Any:
    """In a worker process: returns the function that runs an `ExportJob`."""
    return export_unit


def export_unit(job: ExportJob, progress: Progress) -> int:
    """Write the file of a unit; returns its documents."""
    curation = job.curation.open(job.unit.index)
    reader = UnitReader(job.unit, job.source.reader)
    reported = documents = 0
    with document_file(job.path, job.form, _COLUMNS) as writer:
        for document in curation.checked(job.unit, reader):
            raw = document.text.encode()
            if job.source.reason_against(document, raw) is None and curation.apply(document) is None:
                shape, weight_key = _record if job.form == "jsonl" else _row, job.source.reader.weight_key
                writer.add(shape(job.unit, document, weight_key))
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


def _row(unit: Unit, document: Document, weight_key: str | None) -> dict[str, Any]:
    """A document as a row of a table: its metadata is a JSON object, as its keys may have values of any type."""
    record = _record(unit, document, weight_key)
    metadata = {name: value for name, value in record.items() if name not in ("id", "text", "origin")}
    row = {"id": record["id"], "text": record["text"], "metadata": orjson.dumps(metadata).decode()}
    return {**row, **record["origin"]}
