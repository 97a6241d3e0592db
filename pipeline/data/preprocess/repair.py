"""`data verify --repair`: parts that are damaged or missing, made again from the files of their units.

A unit is made again in a folder of its own, from `plan.json` and the receipts of its other chunks. What it gives takes
the place of the damage if it has the hashes that the dataset was written with, and else nothing is changed.
"""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeline.common import links, storage
from pipeline.common.console import alarm, byte_progress, echo
from pipeline.common.errors import UserError
from pipeline.common.hashing import file_hash, put_sealed
from pipeline.config.load import load_run
from pipeline.config.root import Config
from pipeline.data.curate.files import curate_folder
from pipeline.data.curate.results.apply import AppliedCuration, applied_from
from pipeline.data.datasets.files import PLAN_FILE, receipt_path, rejected_path
from pipeline.data.datasets.indexed import named_files, part_prefix
from pipeline.data.datasets.manifest import (
    CODE_VERSION,
    PLAN_KEYS,
    REPAIR,
    REPAIR_ADOPTED,
    generations_of,
    read_manifest,
    read_parts,
)
from pipeline.data.datasets.packing.verify import verify_packs
from pipeline.data.datasets.verify import Verification, verify
from pipeline.data.preprocess.splits import Splits
from pipeline.data.preprocess.tokenize_unit import SourceJob, UnitJob, WorkerContext
from pipeline.data.sources.formats import planned_reader
from pipeline.data.sources.globs import NO_REMOTE, File
from pipeline.data.sources.reader import Reader
from pipeline.data.sources.records import MAX_RECORD_BYTES, Piece, Unit
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.data.work.frozen_plan import VERSIONS
from pipeline.data.work.job import Busy, run_leased
from pipeline.data.work.leases import LeaseWatch
from pipeline.data.work.planned_units import planned_access, planned_file, refuse_objects_of_others
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
        size = sum(made.unit(unit).bytes for unit in units)
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
        self._plan = storage.get_json(folder / PLAN_FILE, *PLAN_KEYS)
        self._remote = NO_REMOTE
        if VERSIONS in self._plan:
            refuse_objects_of_others(folder / PLAN_FILE, self._plan)
            self._remote = planned_access(self._plan) if config is None else config.data.remote.access
        settings = self._plan["settings"]
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
        self._splits = list(self._plan["splits"])
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
        names = list(dict.fromkeys(piece.file.path for piece in self.unit(unit).pieces))
        files = ", ".join(names[:_SHOWN_FILES]) + (f" and {len(names) - _SHOWN_FILES} more" if names[3:] else "")
        numbers = ", ".join(map(str, sorted(chunks)))
        return f"{self.folder}: unit {unit}, {'chunks' if len(chunks) > 1 else 'chunk'} {numbers}, of {files}"

    def unit(self, number: int) -> Unit:
        """A unit as the plan cuts it, of the files as they are now."""
        pieces = []
        for file, start, end in self._plan["units"][number]:
            known = planned_file(self._plan, file)
            pieces.append(Piece(known, start, end, self._is_chunked(known)))
        return Unit(number, self._plan["settings"]["name"], tuple(pieces))

    def problem(self, number: int) -> str:
        """Reason why a unit cannot be made again, as far as its files' sizes tell; empty if there is none."""
        if self._reader.is_remote:
            return ""
        for piece in self.unit(number).pieces:
            if piece.file.is_object:
                try:
                    piece.file.stored(self._remote).check()
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
            job = UnitJob(self._job(known), self._with_times(number))
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

    @property
    def _reader(self) -> Reader:
        settings = self._plan["settings"]
        longest = settings.get("data.preprocess.max_record_bytes", MAX_RECORD_BYTES)
        limits: dict[str, Any] = {"max_record_bytes": longest}
        if VERSIONS in self._plan:
            limits["remote"] = self._remote
        return planned_reader(self.folder / PLAN_FILE, settings, **limits)

    def _is_chunked(self, file: File) -> bool:
        pieces = next(iter(self._reader.pieces(file, 2**62)), None)
        return pieces is not None and pieces.chunked

    def _with_times(self, number: int) -> Unit:
        """The unit with the times of its files, which receipts have."""
        unit = self.unit(number)
        if self._reader.is_remote:
            return unit
        pieces = [
            piece
            if piece.file.is_object
            else replace(piece, file=replace(piece.file, mtime_ns=os.stat(piece.file.path).st_mtime_ns))
            for piece in unit.pieces
        ]
        return replace(unit, pieces=tuple(pieces))

    def _job(self, receipts: dict[int, Any]) -> SourceJob:
        assert self._scratch is not None
        settings = self._plan["settings"]
        dropped = {name: ("damaged", "") for receipt in receipts.values() for name in receipt.get("dropped", [])}
        salvages = any(receipt.get("salvage") for receipt in receipts.values())
        refused = [found for receipt in receipts.values() if (found := receipt.get("max_zstd_window"))]
        ends = tuple(settings["ends of splits"][name] for name in self._splits[1:])
        *earlier, (newest, _) = generations_of(self._plan)
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


def verify_all(
    data: Path,
    overrides: Sequence[str],
    console: Console,
    *,
    repairs: bool = False,
    dry_run: bool = False,
    seals: bool = False,
) -> bool:
    """Check datasets, print what is wrong, and repair it if that is asked for; returns whether all is sound.

    Args:
        data: folder of a dataset, or of several; or a run file, for all datasets of its sources.
        overrides: `key.path=value` for the run file.
        console: for the progress bar.
        repairs: make damaged parts again.
        dry_run: only say what would be made again.
        seals: add the hashes that files of earlier versions lack, if all else is sound.

    Raises:
        UserError: there is no dataset.
    """
    if dry_run and not repairs:
        raise UserError("--dry-run shows what --repair would do; add --repair")
    config, folders = None, [data]
    if data.is_file() or (data.suffix in (".yaml", ".yml") and not data.is_dir()):
        config = load_run(data, overrides)
        made = [source.dataset for source in config.data.inputs.values()]
        folders = [*([config.data_dir] if None in made else []), *dict.fromkeys(filter(None, made))]
    elif overrides:
        raise UserError(f"{overrides[0]!r} overrides a key of a run file, but {data} is not one; name the run file")
    elif not data.is_dir() and any(data.with_name(data.name + suffix).exists() for suffix in ("", ".bin", ".idx")):
        raise UserError(
            f"{data} is a pair of .bin and .idx without a manifest, so nothing says what its bytes should be: verify "
            "the dataset that it was merged from, and merge that again (`pipeline data merge`); or adopt it"
        )
    sound = [_verify_folder(folder, config, console, repairs, dry_run, seals) for folder in folders]
    return all(sound)


def _seal(found: Verification, seals: bool) -> None:
    """Give sound files of earlier versions the hash of their own that they lack; or say that they lack it."""
    if not found.unsealed:
        return
    if seals:
        for path in found.unsealed:
            put_sealed(path, storage.get_json(path))
        echo(f"sealed: {len(found.unsealed):,} manifests, plans and receipts have a hash of their own now")
    else:
        echo(
            f"note: {len(found.unsealed):,} manifests, plans and receipts of an earlier version have no hash of their "
            f"own ({found.unsealed[0]}, say): a change that agrees with all other files is not seen in them. To add "
            "the hashes, run the same command with --seal"
        )


def _verify_folder(
    folder: Path, config: Config | None, console: Console, repairs: bool, dry_run: bool, seals: bool
) -> bool:
    found = verify(folder)
    for problem in found.problems:
        alarm("bad:", problem)
    if found.problems and not repairs:
        if found.lost or any(dataset not in found.adopted for dataset, _, _ in found.damaged):
            alarm("to repair:", "run the same command with --repair: it makes parts again from the source files")
        for advice in found.repairs:
            alarm("to repair:", advice)
        return False
    if not found.problems:
        return _verify_packs(folder, found, seals)
    result = repair(found, config, console, dry_run=dry_run)
    for line in result.done:
        echo(f"{'would be made again' if dry_run else 'made again'}: {line}")
    for line in result.failed:
        alarm("not repaired:", line)
    if not result.done and not result.failed:
        alarm("not repaired:", f"no part is damaged; {REPAIR}")
    if dry_run or not result.done:
        return False
    left = verify(folder)
    for problem in left.problems:
        alarm("still bad:", problem)
    return not left.problems and _verify_packs(folder, left, seals)


def _verify_packs(folder: Path, datasets: Verification, seals: bool) -> bool:
    """Check the packs of datasets that are sound, and print the result of both."""
    packs = verify_packs(folder)
    for problem in packs.problems:
        alarm("bad:", problem)
    for advice in packs.repairs:
        alarm("to repair:", advice)
    if not packs.problems:
        what = "everything that has a hash" if datasets.unsealed else "everything"
        echo(f"{folder}: {', '.join(filter(None, map(str, (datasets, packs))))}: {what} is as it was written")
        _seal(datasets, seals)
    return not packs.problems
