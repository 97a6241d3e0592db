"""The end of the stage for a source whose chunks all have receipts: manifests, rejected records, report."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.common.format import counted
from pipeline.common.hashing import file_hash
from pipeline.config.root import Config
from pipeline.data.datasets.files import TRAIN, rejected_path
from pipeline.data.datasets.indexed import HashedFile
from pipeline.data.datasets.manifest import CODE_VERSION, PART, write_dataset
from pipeline.data.preprocess.report import SourceReport
from pipeline.data.preprocess.source_plan import SourcePlan
from pipeline.data.preprocess.splits import splits_in_words
from pipeline.data.sources.damage import DAMAGED_FILE, damage_in, damaged_error
from pipeline.data.sources.records import EMPTY, Piece, Unit
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.data.work.receipt_totals import Counts
from pipeline.data.work.receipts import Receipts
from pipeline.data.work.units import chunk_order

REJECTED_FILE = "rejected.jsonl"
REPORT_FILE = "report.json"


class Finalizer:
    """Finishes one source. Memory: some hundred bytes a chunk.

    Args:
        plan: of the source.
        config: the run.
        tokenizer: of the run.
        start_over: how to begin again with repaired files, for messages.
        condemned: engines that were seen to give other ids than `tokenizers`, with the evidence.
        receipts: of the source, complete.
    """

    def __init__(
        self,
        plan: SourcePlan,
        config: Config,
        tokenizer: Tokenizer,
        start_over: str,
        condemned: dict[str, str],
        receipts: Receipts,
    ) -> None:
        self._plan = plan
        self._receipts = receipts
        self._config = config
        self._tokenizer = tokenizer
        self._start_over = start_over
        self._folder = config.data_dir / plan.found.source.name
        self.report = SourceReport(
            plan.found.source.name, self._folder, len(plan.units), condemned=condemned, bytes=plan.found.bytes
        )
        self.parts: dict[str, npt.NDArray[Any]] = {}
        """`PART` records of each split in the order of the dataset."""

    def check(self) -> None:
        """Sum up the receipts, collect the rejected records.

        Raises:
            UserError: a file is damaged, too many records are bad, or nothing is left to train on.
        """
        report, seed = self.report, self._config.data.preprocess.seed
        rejected: Counter[str] = Counter()
        engines: Counter[str] = Counter()
        report.splits = {name: Counts() for name in self._plan.splits.names}
        rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in self._plan.splits.names}
        order = []
        for receipt in self._receipts_of(self._plan.units):
            rejected.update(receipt["rejected"])
            engines[receipt["engine"]] += 1
            report.damaged += damage_in(self._plan.units[receipt["unit"]], receipt)
            report.records += receipt["records"]
            report.checked += receipt["checked"]
            unit, chunk = receipt["unit"], receipt["link"]
            order.append(chunk_order(seed, self._plan.units[unit], chunk))
            for name, split in receipt["splits"].items():
                hashes = (int(split["files"].get(f, {"xxh3": "0"})["xxh3"], 16) for f in ("bin", "idx", "prov", "meta"))
                rows[name].append((split["tokens"], split["documents"], unit, chunk, *hashes))
                for count in ("documents", "tokens", "text_bytes"):
                    setattr(report.splits[name], count, getattr(report.splits[name], count) + split[count])
        report.rejected = dict(sorted(rejected.items()))
        report.engines = dict(sorted(engines.items()))
        places = np.argsort(np.array(order, dtype=np.uint64), kind="stable")
        self.parts = {name: np.array(table, dtype=PART)[places] for name, table in rows.items()}
        report.damaged.sort(key=lambda each: (each.file.name, each.detail))
        report.first_rejected = self._write_rejected()
        self._write_damaged()
        if report.damaged and self._config.data.preprocess.on_damaged_file == "fail":
            ways = (
                "Completed work is kept. If you repair a file and its size stays the same, the same command reads it "
                f"again; otherwise fetch the files again and {self._start_over}"
            )
            raise damaged_error(report.name, report.damaged, report.bytes, ways)
        self._check_rejected(rejected)
        if not report.splits[TRAIN].documents:
            raise self._nothing_to_train_on(rejected)

    def write(self) -> SourceReport:
        """Write the manifests of `parts` and the report."""
        path = self._folder / REPORT_FILE
        self.report.is_first = not path.exists()
        for name, parts in self.parts.items():
            about = {
                "source": self.report.name,
                "split": name,
                "text_bytes": self.report.splits[name].text_bytes,
                "settings": self._plan.settings,
                "config_hash": self._plan.config_hash,
                "code_version": CODE_VERSION,
            }
            _, is_new = write_dataset(self._folder / name, parts, self._tokenizer, about)
            if is_new:
                self.report.written.append(self._folder / name)
        text = orjson.dumps(self.report.as_json(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        if _put_changed(path, text):
            self.report.written.append(path)
        return self.report

    def _nothing_to_train_on(self, rejected: Counter[str]) -> UserError:
        records = self.report.records
        empty, elsewhere = rejected[EMPTY], records - rejected.total()
        bad = rejected.total() - empty
        kinds = [(bad, f"bad ({_reasons(rejected)})"), (empty, "empty"), (elsewhere, "held out")]
        what = " and ".join(f"{count} {'is' if count == 1 else 'are'} {kind}" for count, kind in kinds if count)
        found = f"of {counted(records, 'record')} {what}" if records else "its files hold no records"
        lower = f", or lower data.splits ({splits_in_words(self._config.data)})" if elsewhere else ""
        return UserError(f"source {self.report.name!r} has no document to train on: {found}; add documents{lower}")

    def _check_rejected(self, rejected: Counter[str]) -> None:
        bad = rejected.total() - rejected[EMPTY]
        settings = self._config.data.preprocess
        # With `fail`, chunks may be left of a run that skipped.
        limit = settings.max_error_rate if settings.on_error == "skip" else 0
        if bad > limit * self.report.records:
            path = self._folder / REJECTED_FILE
            allowed = f"max_error_rate {limit}" if settings.on_error == "skip" else "on_error: fail"
            with path.open("rb") as lines:
                first = next(record for record in map(orjson.loads, lines) if record["reason"] != EMPTY)
            empty = f" (with {counted(rejected[EMPTY], 'empty document')}, not counted here)" if rejected[EMPTY] else ""
            skipped = (
                "raise data.preprocess.max_error_rate"
                if settings.on_error == "skip"
                else ("skip bad records: data.preprocess.on_error: skip")
            )
            raise UserError(
                f"source {self.report.name!r}: {bad} of {counted(self.report.records, 'record')} "
                f"{'is' if bad == 1 else 'are'} bad, more than data.preprocess.{allowed} allows: "
                f"{_reasons(rejected)}. The first is {first['where']} ({first['reason']}); all are in {path}{empty}\n"
                "Do one of these, and run the same command again:\n"
                f"  1. correct type, text_key or paths of the source in the run file, and {self._start_over}\n"
                f"  2. fix the files, and {self._start_over}\n"
                f"  3. {skipped}"
            )

    def _write_damaged(self) -> None:
        lines = b"".join(
            orjson.dumps(
                {
                    "file": each.file.path,
                    "bytes": each.file.size,
                    "lost": each.lost,
                    "reason": each.reason,
                    "detail": each.detail,
                },
                option=orjson.OPT_APPEND_NEWLINE,
            )
            for each in self.report.damaged
        )
        _put_changed(self._folder / DAMAGED_FILE, lines)

    def _write_rejected(self) -> dict[str, str]:
        """Collect the rejected records in the order of the files, with lines counted from each file's start.

        Returns:
            By reason, file name and line of the first.
        """
        path = self._folder / REJECTED_FILE
        if not self.report.rejected:
            _put_changed(path, b"")
            return {}
        first: dict[str, str] = {}
        digest, size = xxhash.xxh3_64(), 0
        for line, reason, place in self._rejected():
            digest.update(line)
            size += len(line)
            first.setdefault(reason, place)
        # A finished source may lie on a disk that cannot be written.
        if not (path.exists() and path.stat().st_size == size and file_hash(path) == digest.intdigest()):
            with HashedFile(path) as file:
                for line, _, _ in self._rejected():
                    file.write(line)
                file.commit()
        return first

    def _rejected(self) -> Iterator[tuple[bytes, str, str]]:
        """Lines of the file, with the reason, and file name and line."""
        lines_before = self._lines_before()
        # Units were cut from the files in their order.
        units = sorted(self._plan.units, key=lambda unit: (unit.pieces[0].file.name, unit.pieces[0].start))
        for receipt in self._receipts_of(units):
            if not receipt["rejected"]:
                continue
            unit = self._plan.units[receipt["unit"]]
            with rejected_path(self._folder, unit.index, receipt["link"]).open("rb") as lines:
                for record in map(orjson.loads, lines):
                    piece: Piece = unit.pieces[record["piece"]]
                    line = record["line"]
                    if line is not None:
                        line += lines_before[piece.file.name, piece.start] + 1
                    entry = {
                        "where": self._plan.found.reader.locate(piece, line, record["byte"]),
                        "reason": record["reason"],
                        "detail": record["detail"],
                        "file": piece.file.path,
                        "line": line,
                        "byte": record["byte"],
                        "unit": unit.index,
                        "row": record["row"],
                    }
                    place = piece.file.name + str(entry["where"]).removeprefix(piece.file.path)
                    yield orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE), record["reason"], place

    def _receipts_of(self, units: Sequence[Unit]) -> Iterator[dict[str, Any]]:
        """The receipts of all chunks of the units, unit after unit."""
        return itertools.chain.from_iterable(self._receipts.of(unit.index) for unit in units)

    def _lines_before(self) -> dict[tuple[str, int], int]:
        """Lines of each file before each of its pieces, by (name, start): from the counts in the receipts."""
        lines: Counter[tuple[str, int]] = Counter()
        for receipt in self._receipts_of(self._plan.units):
            pieces = self._plan.units[receipt["unit"]].pieces
            for number, (count, _) in receipt["pieces"].items():
                piece = pieces[int(number)]
                lines[piece.file.name, piece.start] += count
        result = {}
        before: Counter[str] = Counter()
        for name, start in sorted({(p.file.name, p.start) for unit in self._plan.units for p in unit.pieces}):
            result[name, start] = before[name]
            before[name] += lines[name, start]
        return result


def _put_changed(path: Path, content: bytes) -> bool:
    """Write a file, or without content remove it, unless that was done: the source may lie on a read-only disk.

    Returns:
        Whether it was written.
    """
    if not content:
        if path.exists():
            path.unlink(missing_ok=True)
        return False
    if path.exists() and storage.read_bytes(path) == content:
        return False
    storage.put(path, content)
    return True


def _reasons(rejected: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in rejected.most_common() if reason != EMPTY)
