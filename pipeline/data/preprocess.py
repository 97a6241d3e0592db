"""The preprocess stage: documents to tokens. Plan units, tokenize them in worker processes, commit, write manifests.

Layout of a source below the data folder: `plan.json`, `receipts/`, a dataset for each split in `train/` and
`heldout/`, `rejected.jsonl` and `report.json`. A unit is done when its receipt is there and the sizes of its files are
those in it; a run does what is missing. The datasets are the same bytes for any number of workers and interruptions.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from rich.console import Console

from pipeline.config.data import SourceConfig
from pipeline.config.root import Config
from pipeline.console import say
from pipeline.data import store
from pipeline.data.dataset import Dataset
from pipeline.data.indexed import part_files, part_prefix
from pipeline.data.manifest import PART, write_dataset
from pipeline.data.plan import CODE_VERSION, Plan, cut_units, find_source_files, make_plan
from pipeline.data.progress import ProgressLine, counted, print_dry_run, print_report
from pipeline.data.sources import EMPTY, Piece, Unit, UnitReader, where
from pipeline.data.tokenizer import TOKENIZER_FILE, Tokenizer
from pipeline.data.tokenizer_stage import prepare_tokenizer, run_tokenizer, tokenizer_folder
from pipeline.data.unit import (
    RECEIPT_KEYS,
    SPLITS,
    SourceJob,
    UnitJob,
    input_stat,
    make_tokenize,
    read_receipt,
    receipt_path,
    rejected_path,
)
from pipeline.data.workers import Workers
from pipeline.errors import UserError

__all__ = ["PreprocessReport", "dataset_folder", "open_datasets", "preprocess", "run_tokenizer"]

REJECTED_FILE = "rejected.jsonl"
REPORT_FILE = "report.json"


@dataclass(frozen=True)
class SplitReport:
    """Counts of one dataset."""

    documents: int
    tokens: int
    text_bytes: int


@dataclass(frozen=True)
class SourceReport:
    """What became of one source."""

    name: str
    folder: Path
    units: int
    records: int
    splits: dict[str, SplitReport]
    rejected: dict[str, int]
    """Rejected records by reason."""
    first_rejected: dict[str, str] = field(default_factory=dict)
    """By reason, file and line of the first."""
    written: list[Path] = field(default_factory=list)
    """Datasets and files that this run finished or mended."""


@dataclass(frozen=True)
class PreprocessReport:
    """What became of all sources that have files."""

    sources: list[SourceReport] = field(default_factory=list)
    units_done: int = 0
    """Units tokenized by this run; the others were complete before."""
    seconds: float = 0.0

    def total(self, count: str) -> int:
        """Sum of `documents`, `tokens` or `text_bytes` over sources and splits."""
        return sum(getattr(split, count) for source in self.sources for split in source.splits.values())

    @property
    def documents(self) -> int:
        """Documents of all datasets."""
        return self.total("documents")

    @property
    def tokens(self) -> int:
        """Tokens of all datasets, end-of-document tokens included."""
        return self.total("tokens")

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes of all documents."""
        return self.total("text_bytes")

    @property
    def rejected(self) -> dict[str, dict[str, int]]:
        """Rejected records by source and reason."""
        return {source.name: source.rejected for source in self.sources}


def dataset_folder(config: Config, source: SourceConfig, split: str) -> Path:
    """Folder of a source's dataset.

    Args:
        split: `train` or `heldout`.
    """
    return (source.dataset or config.data_dir / source.name) / split


def open_datasets(config: Config, split: str) -> dict[str, Dataset]:
    """A split of each source by name, in the order of the run file.

    Raises:
        UserError: one is not finished, or damaged.
    """
    return {source.name: Dataset.open(dataset_folder(config, source, split)) for source in config.data.sources}


def preprocess(config: Config, *, dry_run: bool = False) -> PreprocessReport:
    """Run the stage; prints progress and a table.

    Args:
        config: the run.
        dry_run: only print what there is to do.

    Raises:
        UserError: something in the config or the data has to be mended first.
        OSError: the disk is full or read-only, say; what was committed stays.
    """
    started = time.monotonic()
    console = Console()
    _check_data_dir(config)
    sources = find_source_files(config)
    if dry_run:
        settings = config.data.preprocess
        units = [len(cut_units(found, settings.seed, settings.unit_bytes)) for found in sources]
        print_dry_run(console, config, list(zip(sources, units, strict=True)))
        return PreprocessReport()
    tokenizer = _tokenizer(config, console, sources)
    for number, source in enumerate(config.data.sources):
        if source.dataset is not None:
            _check_dataset(config, number, source, tokenizer)
    plans = [make_plan(found, tokenizer, config) for found in sources]
    for plan in plans:
        plan.freeze(config.data_dir / plan.found.source.name)
    missing = [job for plan in plans for job in _missing(plan, config)]
    _remove_stale(config, plans)
    if missing:
        _tokenize(config, console, plans, missing)
    reports = [_finish(plan, config, tokenizer) for plan in plans]
    report = PreprocessReport(reports, len(missing), time.monotonic() - started)
    print_report(console, report, config.data.heldout)
    return report


def _check_data_dir(config: Config) -> None:
    for path in (config.data_dir, *config.data_dir.parents):
        if path.exists() and not path.is_dir():
            within = "" if path == config.data_dir else f"{config.data_dir}: "
            raise UserError(f"data.dir {within}{path} is a file; set data.dir to a folder")


def _tokenizer(config: Config, console: Console, sources: list[Any]) -> Tokenizer:
    trains = config.tokenizer.train is not None and not (tokenizer_folder(config) / "origin.json").exists()
    if trains:
        say(console, "training the tokenizer")
    tokenizer = prepare_tokenizer(config, sources)
    wanted = config.tokenizer.train.vocab_size if config.tokenizer.train else 0
    if trains and tokenizer.vocab_size < wanted:
        say(
            console,
            f"the tokenizer has {tokenizer.vocab_size:,} entries instead of {wanted:,} (tokenizer.train.vocab_size): "
            "the text has no more pairs that occur tokenizer.train.min_frequency times",
        )
    return tokenizer


def _check_dataset(config: Config, number: int, source: SourceConfig, tokenizer: Tokenizer) -> None:
    """A dataset made elsewhere has to be there and to have the run's tokenizer."""
    folder = dataset_folder(config, source, "train")
    key = f"data.sources.{number}.dataset"
    if not folder.is_dir():
        raise UserError(f"{key}: {source.dataset} has no folder train/; name the folder that has train/ and heldout/")
    info = Dataset.open(folder).manifest.tokenizer
    if info.fingerprint != tokenizer.fingerprint:
        raise UserError(
            f"{key}: {folder} was made with another tokenizer ({info.vocab_size} entries, fingerprint "
            f"{info.fingerprint}) than this run's ({tokenizer.vocab_size} entries, {tokenizer.fingerprint}); set "
            f"tokenizer.path: {folder / 'tokenizer.json'}, or make the dataset again with this run's tokenizer"
        )


def _missing(plan: Plan, config: Config) -> Iterator[UnitJob]:
    """The units that have no complete receipt."""
    folder = config.data_dir / plan.found.source.name
    source = SourceJob(
        folder=folder,
        reader=plan.found.reader,
        seed=config.data.preprocess.seed,
        heldout=config.data.heldout,
        config_hash=plan.config_hash,
        fail_on_error=config.data.preprocess.on_error == "fail",
        start_over=_start_over(config, folder),
    )
    for unit in plan.units:
        receipt = read_receipt(folder, unit.index)
        if receipt is None or receipt["config_hash"] != plan.config_hash or not _files_are_there(folder, receipt):
            yield UnitJob(source, unit)
        elif receipt["input"]["stat"] != input_stat(unit):
            _check_same_input(folder, plan, unit, receipt)


def _start_over(config: Config, folder: Path) -> str:
    """How to begin a source again whose files have changed: its plan and a trained tokenizer are of the old ones."""
    if config.tokenizer.path is not None:
        return f"remove {folder}, which was begun with the files as they are now"
    if any(config.data_dir.glob("*/*/manifest.json")):
        kept = tokenizer_folder(config) / TOKENIZER_FILE
        return (
            f"remove {folder}, which was begun with the files as they are now, and keep the tokenizer that other "
            f"sources are finished with by tokenizer.path: {kept} in place of tokenizer.train"
        )
    return f"remove {config.data_dir}, which was begun with the files as they are now"


def _files_are_there(folder: Path, receipt: dict[str, Any]) -> bool:
    expected = [
        (path, receipt["splits"][split]["files"][name]["size"])
        for split in SPLITS
        for path, name in zip(
            part_files(part_prefix(folder / split, receipt["unit"])), ("bin", "idx", "prov"), strict=True
        )
    ]
    try:
        return all(os.stat(path).st_size == size for path, size in expected) and (
            not receipt["rejected"] or rejected_path(folder, receipt["unit"]).exists()
        )
    except FileNotFoundError:
        return False


def _check_same_input(folder: Path, plan: Plan, unit: Unit, receipt: dict[str, Any]) -> None:
    """A file has another time than when its unit was done; its bytes decide whether it changed."""
    reader = UnitReader(unit, plan.found.reader)
    for _ in reader:
        pass
    if reader.input_hash != receipt["input"]["hash"]:
        raise UserError(
            f"the input of {unit} changed since it was tokenized; restore the files, or remove {folder} to make the "
            "dataset again from them as they are now"
        )
    receipt["input"]["stat"] = input_stat(unit)
    with contextlib.suppress(OSError):  # on a disk that cannot be written, the next run reads the input again
        store.put_json(receipt_path(folder, unit.index), receipt)


def _tokenize(config: Config, console: Console, plans: list[Plan], missing: list[UnitJob]) -> None:
    count = min(config.data.preprocess.workers or len(os.sched_getaffinity(0)), len(missing))
    done = sum(len(plan.units) for plan in plans) - len(missing)
    total_bytes = sum(job.unit.bytes for job in missing)
    try:
        with (
            ProgressLine(console, total_bytes, len(missing), done) as line,
            Workers[UnitJob, dict[str, Any]](make_tokenize, (tokenizer_folder(config),), count) as workers,
        ):
            for _, amount, receipt in workers.run(missing):
                if amount is not None:
                    line.advance(amount)
                if receipt is not None:
                    line.unit_done(receipt)
    finally:
        _remove_stale(config, plans)


def _remove_stale(config: Config, plans: list[Plan]) -> None:
    """Remove what processes of this host that were killed left half-written."""
    for folder in (tokenizer_folder(config), *(config.data_dir / plan.found.source.name for plan in plans)):
        for path in folder.rglob(f"*{store.TEMPORARY_SUFFIX}"):
            store.remove_if_stale(path)


def _finish(plan: Plan, config: Config, tokenizer: Tokenizer) -> SourceReport:
    """Write the datasets of a source whose units are all done, and what is to be said about it."""
    name = plan.found.source.name
    folder = config.data_dir / name
    receipts = [store.get_json(receipt_path(folder, unit.index), *RECEIPT_KEYS) for unit in plan.units]
    rejected: Counter[str] = Counter()
    for receipt in receipts:
        rejected.update(receipt["rejected"])
    records = sum(receipt["records"] for receipt in receipts)
    first_rejected = _write_rejected(folder, plan, receipts)
    _check_rejected(config, folder, name, records, rejected)
    splits = {}
    written = []
    for split in SPLITS:
        parts = [receipt["splits"][split] for receipt in receipts]
        text_bytes = sum(part["text_bytes"] for part in parts)
        table = np.array(
            [
                (p["tokens"], p["documents"], *(int(p["files"][f]["xxh3"], 16) for f in ("bin", "idx", "prov")))
                for p in parts
            ],
            dtype=PART,
        )
        if split == "train" and not table["documents"].sum():
            raise _nothing_to_train_on(config, name, records, rejected)
        about = {
            "source": name,
            "split": split,
            "text_bytes": text_bytes,
            "settings": plan.settings,
            "config_hash": plan.config_hash,
            "code_version": CODE_VERSION,
        }
        manifest, is_new = write_dataset(folder / split, table, tokenizer, about)
        if is_new:
            written.append(folder / split)
        splits[split] = SplitReport(manifest.documents, manifest.tokens, text_bytes)
    report = SourceReport(
        name, folder, len(plan.units), records, splits, dict(sorted(rejected.items())), first_rejected, written
    )
    text = orjson.dumps(_report_json(report), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    if _put_if_other(folder / REPORT_FILE, text):
        written.append(folder / REPORT_FILE)
    return report


def _report_json(report: SourceReport) -> dict[str, Any]:
    return {
        "records": report.records,
        "rejected": report.rejected,
        "splits": {name: vars(split) for name, split in report.splits.items()},
        "units": report.units,
    }


def _reasons(rejected: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in rejected.most_common() if reason != EMPTY)


def _nothing_to_train_on(config: Config, name: str, records: int, rejected: Counter[str]) -> UserError:
    empty, heldout = rejected[EMPTY], records - rejected.total()
    bad = rejected.total() - empty
    kinds = [(bad, f"bad ({_reasons(rejected)})"), (empty, "empty"), (heldout, "held out")]
    what = " and ".join(f"{count} {'is' if count == 1 else 'are'} {kind}" for count, kind in kinds if count)
    found = f"of {counted(records, 'record')} {what}" if records else "its files hold no records"
    lower = f", or lower data.heldout ({config.data.heldout})" if heldout else ""
    return UserError(f"source {name!r} has no document to train on: {found}; add documents{lower}")


def _check_rejected(config: Config, folder: Path, name: str, records: int, rejected: Counter[str]) -> None:
    bad = rejected.total() - rejected[EMPTY]
    limit = config.data.preprocess.max_error_rate
    if bad > limit * records:
        lines = (folder / REJECTED_FILE).read_bytes().splitlines()
        first = next(record for record in map(orjson.loads, lines) if record["reason"] != EMPTY)
        raise UserError(
            f"source {name!r}: {bad} of {counted(records, 'record')} {'is' if bad == 1 else 'are'} bad, more than "
            f"data.preprocess.max_error_rate {limit} allows: {_reasons(rejected)}. The first is {first['where']} "
            f"({first['reason']}); all are in {folder / REJECTED_FILE}. Either mend the data or the source's settings "
            f"and {_start_over(config, folder)}; or raise the limit"
        )


def _write_rejected(folder: Path, plan: Plan, receipts: list[dict[str, Any]]) -> dict[str, str]:
    """Collect the units' rejected records in the order of the files, with lines counted from each file's start.

    Returns:
        By reason, file name and line of the first.
    """
    lines_before = _lines_before(plan.units, receipts)
    found: list[tuple[str, int, dict[str, Any]]] = []
    for unit, receipt in zip(plan.units, receipts, strict=True):
        if not receipt["rejected"]:
            continue
        for raw in rejected_path(folder, unit.index).read_bytes().splitlines():
            record = orjson.loads(raw)
            piece: Piece = unit.pieces[record["piece"]]
            line = record["line"]
            if line is not None:
                line += lines_before[piece.file.name, piece.start] + 1
            entry = {
                "where": where(piece, line, record["byte"]),
                "reason": record["reason"],
                "detail": record["detail"],
                "file": piece.file.path,
                "line": line,
                "byte": record["byte"],
                "unit": unit.index,
                "row": record["row"],
            }
            found.append((piece.file.name, record["byte"], entry))
    found.sort(key=lambda entry: entry[:2])
    if found:
        lines = [orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE) for *_, entry in found]
        _put_if_other(folder / REJECTED_FILE, b"".join(lines))
    elif (folder / REJECTED_FILE).exists():
        (folder / REJECTED_FILE).unlink()
    first: dict[str, str] = {}
    for name, _, entry in found:
        first.setdefault(entry["reason"], name + entry["where"].removeprefix(entry["file"]))
    return first


def _put_if_other(path: Path, data: bytes) -> bool:
    """Write a file unless it has these bytes already: a finished source may lie on a disk that cannot be written."""
    if path.exists() and path.read_bytes() == data:
        return False
    store.put(path, data)
    return True


def _lines_before(units: list[Unit], receipts: list[dict[str, Any]]) -> dict[tuple[str, int], int]:
    """Lines of each file before each of its pieces, by (name, start): from the counts in the receipts."""
    counted = sorted(
        (piece.file.name, piece.start, lines)
        for unit, receipt in zip(units, receipts, strict=True)
        for piece, lines in zip(unit.pieces, receipt["lines"], strict=True)
    )
    result = {}
    before, current = 0, ""
    for name, start, lines in counted:
        before = before if name == current else 0
        current = name
        result[name, start] = before
        before += lines
    return result
