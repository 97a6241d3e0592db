"""Rejected records and damaged files of a source whose chunks all have receipts: listed, and refused if too many."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import xxhash

from pipeline.common import links, storage
from pipeline.common.errors import UserError
from pipeline.common.format import counted
from pipeline.common.hashing import file_hash
from pipeline.config.data import PreprocessConfig
from pipeline.data.datasets.files import rejected_path
from pipeline.data.datasets.indexed import HashedFile
from pipeline.data.sources.damage import DAMAGED_FILE, DamagedFile, damage_in, damaged_error
from pipeline.data.sources.reader import Reader
from pipeline.data.sources.records import EMPTY, NOT_BAD, NULL_TEXT, Piece, Unit
from pipeline.data.work.receipts import Receipts

REJECTED_FILE = "rejected.jsonl"


class BadInput:
    """Rejected records and damaged files of a source.

    Attributes:
        records: of the source, good or bad.
        rejected: records by reason.
        damaged: parts of files that could not be read, by file.
        first: by reason, file name and line of the first record.

    Args:
        folder: with the receipts, where they are listed.
        name: of the source.
        units: of the source.
        reader: of the source.
        receipts: of all units.
        start_over: how to begin again with repaired files, for messages.
    """

    def __init__(
        self, folder: Path, name: str, units: Sequence[Unit], reader: Reader, receipts: Receipts, start_over: str
    ) -> None:
        self._folder = folder
        self._name = name
        self._units = units
        self._reader = reader
        self._receipts = receipts
        self._start_over = start_over
        self.records = 0
        self.rejected: Counter[str] = Counter()
        self.damaged: list[DamagedFile] = []
        self.first: dict[str, str] = {}
        for receipt in self._receipts_of(units):
            self.rejected.update(receipt["rejected"])
            self.damaged += damage_in(units[receipt["unit"]], receipt)
            self.records += receipt["records"]
        self.damaged.sort(key=lambda each: (each.file.name, each.detail))

    def write(self) -> None:
        """Write the lists."""
        self.first = self._write_rejected()
        self._write_damaged()

    def check(self, settings: PreprocessConfig) -> None:
        """Refuse a source with damaged files, or too many bad records.

        Raises:
            UserError: it has.
        """
        if self.damaged and settings.on_damaged_file == "fail":
            ways = (
                "Completed work is kept. If you repair a file and its size stays the same, the same command reads it "
                f"again; otherwise fetch the files again and {self._start_over}"
            )
            size = sum({piece.file.name: piece.file.size for unit in self._units for piece in unit.pieces}.values())
            raise damaged_error(self._name, self.damaged, size, ways)
        self._check_rejected(settings)

    def _check_rejected(self, settings: PreprocessConfig) -> None:
        rejected, records = self.rejected, self.records
        bad = rejected.total() - sum(rejected[reason] for reason in NOT_BAD)
        # With `fail`, chunks may be left of a run that skipped.
        limit = settings.bad_share
        if bad > limit * records:
            path = self._folder / REJECTED_FILE
            allowed = f"max_error_rate {limit}" if settings.on_error == "skip" else "on_error: fail"
            with storage.open_regular(path) as lines:
                first = next(record for record in map(orjson.loads, lines) if record["reason"] not in NOT_BAD)
            none = rejected[EMPTY] + rejected[NULL_TEXT]
            empty = f" (with {counted(none, 'empty document')}, not counted here)" if none else ""
            skipped = (
                "raise data.preprocess.max_error_rate"
                if settings.on_error == "skip"
                else "skip bad records: data.preprocess.on_error: skip"
            )
            # Of a source without a good record nothing would be left.
            third = f"\n  3. {skipped}" if rejected.total() < records else ""
            raise UserError(
                f"source {self._name!r}: {bad} of {counted(records, 'record')} "
                f"{'is' if bad == 1 else 'are'} bad, more than data.preprocess.{allowed} allows: "
                f"{reasons_in_words(rejected)}. The first is {first['where']} ({first['reason']}); "
                f"all are in {path}{empty}\n"
                "Do one of these, and run the same command again:\n"
                f"  1. correct type, text_key or paths of the source in the run file, and {self._start_over}\n"
                f"  2. fix the files, and {self._start_over}{third}"
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
                    **({"salvaged": each.salvaged} if each.salvaged else {}),
                },
                option=orjson.OPT_APPEND_NEWLINE,
            )
            for each in self.damaged
        )
        put_changed(self._folder / DAMAGED_FILE, lines)

    def _write_rejected(self) -> dict[str, str]:
        """Collect the rejected records in the order of the files, with lines counted from each file's start.

        Returns:
            By reason, file name and line of the first.
        """
        path = self._folder / REJECTED_FILE
        if not self.rejected:
            put_changed(path, b"")
            return {}
        if path.exists():  # a finished source may lie on a disk that cannot be written
            digest, size = xxhash.xxh3_64(), 0
            first: dict[str, str] = {}
            for line in self._rejected(first):
                digest.update(line)
                size += len(line)
            if path.stat().st_size == size and file_hash(path) == digest.intdigest():
                return first
        first = {}
        with HashedFile(path) as file:
            for line in self._rejected(first):
                file.write(line)
            file.commit()
        return first

    def _rejected(self, first: dict[str, str]) -> Iterator[bytes]:
        """Lines of the file. Each costs a part of the time of a record, of which there can be hundreds of millions.

        Args:
            first: gets, by reason, file name and line of the first.
        """
        lines_before = self._lines_before()
        # Units were cut from the files in their order.
        units = sorted(self._units, key=lambda unit: (unit.pieces[0].file.name, unit.pieces[0].start))
        for receipt in self._receipts_of(units):
            if not receipt["rejected"]:
                continue
            unit = self._units[receipt["unit"]]
            with storage.open_regular(rejected_path(self._folder, unit.index, receipt["link"])) as lines:
                for record in map(orjson.loads, lines):
                    piece: Piece = unit.pieces[record["piece"]]
                    line, reason = record["line"], record["reason"]
                    if line is not None:
                        line += lines_before[piece.file.name, piece.start] + 1
                    where = self._reader.locate(piece, line, record["byte"])
                    if reason not in first:
                        first[reason] = piece.file.name + where.removeprefix(piece.file.path)
                    yield orjson.dumps(
                        {
                            "where": where,
                            "reason": reason,
                            "detail": record["detail"],
                            "file": piece.file.path,
                            "line": line,
                            "byte": record["byte"],
                            "unit": unit.index,
                            "row": record["row"],
                        },
                        option=orjson.OPT_APPEND_NEWLINE,
                    )

    def _receipts_of(self, units: Sequence[Unit]) -> Iterator[dict[str, Any]]:
        """The receipts of all chunks of the units, unit after unit."""
        return itertools.chain.from_iterable(self._receipts.of(unit.index) for unit in units)

    def _lines_before(self) -> dict[tuple[str, int], int]:
        """Lines of each file before each of its pieces, by (name, start): from the counts in the receipts."""
        lines: Counter[tuple[str, int]] = Counter()
        for receipt in self._receipts_of(self._units):
            pieces = self._units[receipt["unit"]].pieces
            for number, (count, _) in receipt["pieces"].items():
                piece = pieces[int(number)]
                lines[piece.file.name, piece.start] += count
        result = {}
        before: Counter[str] = Counter()
        for name, start in sorted({(p.file.name, p.start) for unit in self._units for p in unit.pieces}):
            result[name, start] = before[name]
            before[name] += lines[name, start]
        return result


def put_changed(path: Path, content: bytes) -> bool:
    """Write a file, or without content remove it, unless that was done: the source may lie on a read-only disk.

    Returns:
        Whether it was written.
    """
    if not content:
        if path.exists():
            links.remove(path, missing_ok=True)
        return False
    if path.exists() and path.stat().st_size == len(content) and storage.read_bytes(path) == content:
        return False
    storage.put(path, content)
    return True


def reasons_in_words(rejected: Counter[str]) -> str:
    """Numbers of records by reason, but for those that are not bad."""
    return ", ".join(f"{count} {reason}" for reason, count in rejected.most_common() if reason not in NOT_BAD)
