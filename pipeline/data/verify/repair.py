"""Repair of datasets: parts that are damaged or missing, made again from the files of their units.

A unit is made again in a folder of its own, from `plan.json` and the receipts of its other chunks. What it gives takes
the place of the damage if it has the hashes that the dataset was written with, and else nothing is changed.
"""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeline.common import links, storage
from pipeline.common.console import byte_progress
from pipeline.common.errors import UserError
from pipeline.common.hashing import file_hash, put_sealed
from pipeline.config.root import Config
from pipeline.data.curate.files import curate_folder
from pipeline.data.curate.results.apply import AppliedCuration, applied_from
from pipeline.data.datasets.files import PLAN_FILE, receipt_path, rejected_path
from pipeline.data.datasets.indexed import named_files, part_prefix
from pipeline.data.datasets.manifest import (
    CODE_VERSION,
    REPAIR,
    REPAIR_ADOPTED,
    generations_of,
    read_manifest,
    read_parts,
)
from pipeline.data.datasets.verify import Verification
from pipeline.data.preprocess.splits import Splits
from pipeline.data.preprocess.tokenize_unit import SourceJob, UnitJob, WorkerContext
from pipeline.data.sources.reader import Reader
from pipeline.data.sources.records import Piece
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.data.work.job import Busy, run_leased
from pipeline.data.work.leases import LeaseWatch
from pipeline.data.work.planned_units import PlannedUnits, refuse_objects_of_others
from pipeline.data.work.receipts import read_receipt, read_receipts

_SHOWN_FILES = 3


@dataclass
class Repair:
    """Result of `repair`.

    Attributes:
        done: chunks of units that were made again, or would be.
        failed: why others were not.
    """

    done: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def repair(found: Verification, config: Config | None, console: Console, *, dry_run: bool = False) -> Repair:
    """Make again what a verification found to be damaged, as far as the source files give the same bytes.

    Args:
        found: the verification.
        config: the run, if it is known; documents that curation edits are made again with its help.
        console: for the progress bar.
        dry_run: only look whether the source files are there.
    """
    result = Repair()
    chunks: dict[Path, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for folder, unit, chunk in found.damaged:
        if folder in found.adopted:
            path = part_prefix(folder, unit, chunk)
            result.failed.append(f"{path}: other programs made it, and nothing says from what; {REPAIR_ADOPTED}")
        else:
            chunks[folder.parent][unit].add(chunk)
    for source, unit, chunk in found.lost:
        chunks[source][unit].add(chunk)
    for source, units in sorted(chunks.items()):
        try:
            made = _Source(source, config)
        except (UserError, FileNotFoundError) as error:
            result.failed.append(f"{source}: {error}")
            continue
        if dry_run:
            for unit, wanted in sorted(units.items()):
                problem = made.problem(unit)
                line = made.describe(unit, wanted)
                (result.failed if problem else result.done).append(f"{line}: {problem}" if problem else line)
            continue
        size = sum(made.planned.unit(unit).bytes for unit in units)
        with made.scratch(), byte_progress(console, f"repair {source.name}", size) as advance:
            for unit, wanted in sorted(units.items()):
                problem = made.problem(unit) or made.remake(unit, wanted, advance)
                line = made.describe(unit, wanted)
                (result.failed if problem else result.done).append(f"{line}: {problem}" if problem else line)
    return result


class _Source:
    """A source whose units are made again, known by its plan."""

    def __init__(self, folder: Path, config: Config | None) -> None:
        self.folder = folder
        self.planned = PlannedUnits(folder, None if config is None else config.data.remote.access)
        refuse_objects_of_others(folder / PLAN_FILE, self.planned.plan)
        self._settings = settings = self.planned.plan["settings"]
        if settings["data.preprocess.shuffle"] == "global":
            raise UserError(
                "data.preprocess.shuffle: global: each part has documents of all units, so none is made again alone; "
                f"remove what is damaged, and {REPAIR} (all units are read again)"
            )
        if settings["code_version"] != CODE_VERSION:
            raise UserError(
                f"version {settings['code_version']} of the stage made it, and this program has {CODE_VERSION}, which "
                "gives other bytes; use the program that made it"
            )
        self._splits = list(self.planned.plan["splits"])
        tables = {name: read_parts(folder / name, read_manifest(folder / name)) for name in self._splits}
        self._records = {
            name: {(int(part["unit"]), int(part["link"])): part for part in table} for name, table in tables.items()
        }
        self._curation = _curation(folder, settings, config)
        tokenizer = next(
            (
                path
                for path in (folder.parent / "tokenizer", folder / self._splits[0])
                if _has_tokenizer(path, settings)
            ),
            None,
        )
        if tokenizer is None:
            raise UserError(
                f"its tokenizer is in neither {folder.parent / 'tokenizer'} nor {folder / self._splits[0]}; {REPAIR}"
            )
        self._context = WorkerContext(tokenizer, verify_rate=0.0)
        self._scratch: Path | None = None

    def describe(self, unit: int, chunks: set[int]) -> str:
        """The chunks of a unit, in words."""
        names = list(dict.fromkeys(piece.file.path for piece in self.planned.unit(unit).pieces))
        files = ", ".join(names[:_SHOWN_FILES]) + (f" and {len(names) - _SHOWN_FILES} more" if names[3:] else "")
        numbers = ", ".join(map(str, sorted(chunks)))
        return f"{self.folder}: unit {unit}, {'chunks' if len(chunks) > 1 else 'chunk'} {numbers}, of {files}"

    def problem(self, number: int) -> str:
        """Reason why a unit cannot be made again, as far as its files' sizes tell; empty if there is none."""
        if self._reader.is_remote:
            return ""
        for piece in self.planned.unit(number).pieces:
            if piece.file.is_object:
                try:
                    piece.file.stored(self.planned.remote).check()
                except UserError as error:
                    return f"the source cannot be read: {error}"
                continue
            try:
                size = os.stat(piece.file.path).st_size
            except OSError as error:
                return f"the source file {piece.file.path} cannot be read ({error.strerror})"
            if size != piece.file.size:
                return (
                    f"the source has changed: {piece.file.path} has {size:,} bytes, and had {piece.file.size:,} then; "
                    "restore the file"
                )
        return ""

    def scratch(self) -> _Scratch:
        """The folder in which units are made again, as a context."""
        made = _Scratch(self.folder)
        self._scratch = made.path
        return made

    def remake(self, number: int, chunks: set[int], advance: Any) -> str:
        """Make chunks of a unit again and put them in their places; the reason why not, if they were not."""
        assert self._scratch is not None
        known: dict[int, Any] = {}
        # Every split has a record of each chunk.
        every = {chunk for unit, chunk in self._records[self._splits[0]] if unit == number}
        for chunk in every:
            receipt = read_receipt(self.folder, number, chunk)
            if receipt is not None:
                known[chunk] = receipt
                if chunk not in chunks:
                    path = receipt_path(self._scratch, number, chunk)
                    storage.make_below(self._scratch, path.parent)
                    put_sealed(path, receipt)
        try:
            unit = self.planned.unit(number)
            unit = replace(unit, pieces=tuple(map(self._as_read, unit.pieces)))
            job = UnitJob(self._job(known), unit)
            result = run_leased(job, self._context, LeaseWatch(), advance)
        except (UserError, OSError) as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise  # of what is written
            return f"the source has changed, or cannot be read: {error}"
        if isinstance(result, Busy):
            return f"it is held by {result.holder}; run the same command when that has ended"
        chunks = chunks | {
            chunk for unit, chunk in self._records[self._splits[0]] if unit == number and chunk not in known
        }
        made = {receipt["link"]: receipt for receipt in read_receipts(self._scratch, number)}
        for chunk in sorted(chunks):
            if problem := self._difference(number, chunk, made.get(chunk), known.get(chunk)):
                return problem
        for chunk in sorted(chunks):
            self._put(number, chunk, is_new=chunk not in known)
        return ""

    def _difference(self, number: int, chunk: int, made: Any, known: Any) -> str:
        if made is None:
            return "the source has changed: it has fewer documents than it had then; restore the files"
        for name in self._splits:
            record = self._records[name].get((number, chunk))
            hashes = {file: int(about["xxh3"], 16) for file, about in made["splits"][name]["files"].items()}
            wanted = {} if record is None else {file: int(record[file]) for file in hashes}
            if hashes != wanted:
                if known is not None and known["input"]["hash"] == made["input"]["hash"]:
                    return f"it gives other bytes for {name} from the same source ({made['engine']}); {REPAIR}"
                return f"the source has changed: it gives other bytes for {name} than were written; restore the files"
        return ""

    def _put(self, number: int, chunk: int, *, is_new: bool) -> None:
        """Move what was made to where it differs from what is there."""
        assert self._scratch is not None
        for name in self._splits:
            there = named_files(part_prefix(self.folder / name, number, chunk))
            for file, path in named_files(part_prefix(self._scratch / name, number, chunk)).items():
                if path.exists() and not _is_equal(there[file], path, int(self._records[name][number, chunk][file])):
                    storage.make_below(self.folder, there[file].parent)
                    storage.commit(path, there[file])
        if is_new:
            for path_of in (rejected_path, receipt_path):
                path, final = path_of(self._scratch, number, chunk), path_of(self.folder, number, chunk)
                if path.exists():
                    storage.make_below(self.folder, final.parent)
                    storage.commit(path, final)

    @cached_property
    def _reader(self) -> Reader:
        return self.planned.open_reader()

    def _as_read(self, piece: Piece) -> Piece:
        """A piece as workers get it: chunked by the format, and with the time of its file, which receipts have."""
        first = next(iter(self._reader.pieces(piece.file, 2**62)), None)
        file = piece.file
        if not self._reader.is_remote and not file.is_object:
            file = replace(file, mtime_ns=os.stat(file.path).st_mtime_ns)
        return replace(piece, file=file, chunked=first is not None and first.chunked)

    def _job(self, receipts: dict[int, Any]) -> SourceJob:
        assert self._scratch is not None
        settings = self._settings
        dropped = {name: ("damaged", "") for receipt in receipts.values() for name in receipt.get("dropped", [])}
        salvages = any(receipt.get("salvage") for receipt in receipts.values())
        refused = [found for receipt in receipts.values() if (found := receipt.get("max_zstd_window"))]
        ends = tuple(settings["ends of splits"][name] for name in self._splits[1:])
        *earlier, (newest, _) = generations_of(self.planned.plan)
        return SourceJob(
            folder=self._scratch,
            reader=replace(self._reader, dropped=dropped, salvage=salvages, max_zstd_window=min([2**31, *refused])),
            seed=settings["data.preprocess.seed"],
            splits=Splits(tuple(self._splits), ends, settings["data.split_by"] == "id"),
            unit_bytes=settings["data.preprocess.unit_bytes"],
            max_document_bytes=settings["data.preprocess.max_document_bytes"],
            splits_long=settings["data.preprocess.on_long_document"] == "split",
            config_hash=newest,
            below="",
            has_parts=False,
            fail_on_error=False,
            drops_damaged=bool(dropped),
            start_over="restore the files",
            curation=self._curation,
            earlier=tuple(earlier),
        )


class _Scratch:
    """A temporary folder beside the datasets of a source, with its plan; removed at the end."""

    def __init__(self, source: Path) -> None:
        for path in source.glob(f".repair.*{storage.TEMPORARY_SUFFIX}"):
            if storage.is_stale(path):
                links.remove_tree(path, ignore_errors=True)
        self._source = source
        self.path = storage.temporary(source / "repair")

    def __enter__(self) -> _Scratch:
        links.make_folder(self.path)
        storage.put(self.path / PLAN_FILE, storage.read_bytes(self._source / PLAN_FILE, storage.MAX_JSON_BYTES))
        return self

    def __exit__(self, *_: object) -> None:
        links.remove_tree(self.path, ignore_errors=True)


def _curation(folder: Path, settings: dict[str, Any], config: Config | None) -> AppliedCuration | None:
    if "curation" not in settings:
        return None
    if config is None or config.data.curate is None:
        raise UserError("its documents were curated: name the run file, `pipeline data verify RUN.yaml --repair`")
    curation = applied_from(curate_folder(folder), config.data.curate)
    if curation is None or curation.hash != settings["curation"]:
        raise UserError(
            f"{curate_folder(folder)} does not have the decisions that its documents followed; set data.curate back, "
            "and run `pipeline curate RUN.yaml`"
        )
    return curation


def _has_tokenizer(folder: Path, settings: dict[str, Any]) -> bool:
    try:
        return bool(Tokenizer.open(folder).fingerprint == settings["tokenizer"])
    except (UserError, OSError, ValueError):
        return False


def _is_equal(path: Path, made: Path, wanted: int) -> bool:
    """Tell whether a file has the size of one that was made again, and its hash; not so of a pipe, say."""
    try:
        return path.stat().st_size == made.stat().st_size and file_hash(path) == wanted
    except (OSError, UserError):
        return False
