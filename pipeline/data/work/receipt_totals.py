"""Sums over the receipts of a source, for whoever looks on while it is being made: read fast, and never trusted."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.data.datasets.files import PLAN_FILE
from pipeline.data.datasets.manifest import PLAN_KEYS, generations_of
from pipeline.data.sources.records import Damage
from pipeline.data.work.receipts import ReceiptCounts, ReceiptSplit
from pipeline.data.work.unit_source import hash_of_unit

_MAX_RECEIPT = 2**26
"""A longer file is not a receipt."""
_READERS = 8
"""Folders that are read at once: a network file system takes its time for each file."""
_RECEIPT = re.compile(r"(\d{8,})(?:-(\d{5,}))?\.json")


@dataclass
class Counts:
    """Counts of a split."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    trained_tokens: int | None = None
    """Tokens of conversations that are trained on."""

    def add(self, other: ReceiptSplit | Counts) -> None:
        """Add those of a chunk."""
        if other.trained_tokens is not None:
            self.trained_tokens = (self.trained_tokens or 0) + other.trained_tokens
        self.documents += other.documents
        self.tokens += other.tokens
        self.text_bytes += other.text_bytes


@dataclass
class ReceiptTotals:
    """Sums over the receipts of some units.

    Attributes:
        sizes: bytes on disk of all units of the plan.
        config_hash: of the plan; receipts of others are skipped.
        earlier: of each earlier generation of the plan: its hash, and the number of units up to its end.
        rejected_engines: engines whose chunks are made again.
        done: units whose chunks are all there.
        redo: units with a chunk of a rejected engine.
        open: of units that have chunks, but not all: bytes on disk that were read.
        chunks: (time, bytes on disk, unit) of every chunk.
        splits: by name.
        records: read.
        rejected: records by reason.
        curated: documents that curation removed, by rule.
        engines: chunks by the engine that made them.
        unreadable: receipts that are damaged.
        damaged: (unit, what could not be read of its input).
    """

    sizes: list[int]
    config_hash: str
    rejected_engines: frozenset[str] = frozenset()
    earlier: Sequence[tuple[str, int]] = ()
    done: set[int] = field(default_factory=set)
    redo: set[int] = field(default_factory=set)
    open: dict[int, int] = field(default_factory=dict)
    chunks: list[tuple[float, int, int]] = field(default_factory=list)
    splits: dict[str, Counts] = field(default_factory=dict)
    records: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    curated: Counter[str] = field(default_factory=Counter)
    engines: Counter[str] = field(default_factory=Counter)
    unreadable: int = 0
    damaged: list[tuple[int, Damage]] = field(default_factory=list)

    def read(self, receipts: Path) -> None:
        """Add all receipts below a folder."""
        try:
            with os.scandir(receipts) as entries:
                folders = sorted(entry.path for entry in entries)
        except FileNotFoundError:
            return
        with ThreadPoolExecutor(_READERS) as readers:
            for totals in readers.map(self._read_folder, folders):
                self._merge(totals)

    def _read_folder(self, folder: str) -> ReceiptTotals:
        """The sums over a folder, which has all chunks of its units."""
        totals = ReceiptTotals(self.sizes, self.config_hash, self.rejected_engines, self.earlier)
        units: dict[int, list[tuple[ReceiptCounts, float]]] = {}
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
            for entry in entries:
                if name := _RECEIPT.fullmatch(entry.name):
                    try:
                        found = self._read(entry.path, int(name[1]), int(name[2] or 0))
                    except FileNotFoundError:
                        continue
                    except (OSError, ValueError, TypeError, KeyError):
                        totals.unreadable += 1
                        continue
                    if found is not None:
                        units.setdefault(int(name[1]), []).append(found)
        for unit, receipts in units.items():
            totals._add(unit, sorted(receipts, key=lambda each: each[0].link))
        return totals

    def _read(self, path: str, unit: int, chunk: int) -> tuple[ReceiptCounts, float] | None:
        """A receipt and when it was written; None if it is of another plan."""
        with storage.open_regular(Path(path)) as file:
            time = os.fstat(file.fileno()).st_mtime
            value = orjson.loads(file.read(_MAX_RECEIPT))
        if value["config_hash"] != hash_of_unit(self.earlier, self.config_hash, unit):
            return None
        receipt = ReceiptCounts.model_validate(value)
        if (receipt.unit, receipt.link) != (unit, chunk) or unit >= len(self.sizes):
            raise ValueError("another unit's")
        return receipt, time

    def _add(self, unit: int, receipts: list[tuple[ReceiptCounts, float]]) -> None:
        read = 0
        for number, (receipt, time) in enumerate(receipts):
            if receipt.link != number:
                break  # one is missing, so those behind it are not looked at yet
            if receipt.engine in self.rejected_engines:
                self.redo.add(unit)
                break
            read += receipt.input.read
            self.chunks.append((time, receipt.input.read, unit))
            self.records += receipt.records
            self.rejected.update(receipt.rejected)
            self.curated.update(receipt.curated)
            self.damaged += [(unit, Damage(**dict(damage))) for damage in receipt.damaged]
            self.engines[receipt.engine] += 1
            for name, counts in receipt.splits.items():
                self.splits.setdefault(name, Counts()).add(counts)
            if receipt.last:
                self.done.add(unit)
                self.open.pop(unit, None)
                break
            self.open[unit] = min(read, self.sizes[unit])

    def _merge(self, other: ReceiptTotals) -> None:
        for name, counts in other.splits.items():
            self.splits.setdefault(name, Counts()).add(counts)
        self.done |= other.done
        self.redo |= other.redo
        self.open |= other.open
        self.chunks += other.chunks
        self.records += other.records
        self.rejected.update(other.rejected)
        self.curated.update(other.curated)
        self.engines.update(other.engines)
        self.unreadable += other.unreadable
        self.damaged += other.damaged


def whole(value: Any) -> int:
    """A number that is not negative.

    Raises:
        ValueError: it is none.
    """
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


@dataclass(frozen=True)
class PlanTotals:
    """A plan and the sums over its receipts.

    Attributes:
        plan: as JSON.
        planned: when it was written.
        totals: of the receipts.
    """

    plan: Any
    planned: float
    totals: ReceiptTotals


def read_plan_totals(folder: Path, rejected_engines: frozenset[str] = frozenset()) -> PlanTotals:
    """Read the plan of a folder, and its receipts.

    Args:
        folder: of a source, or of its curation.
        rejected_engines: whose chunks are made again.

    Raises:
        FileNotFoundError: there is no plan.
        UserError: the plan is damaged.
    """
    path = folder / PLAN_FILE
    plan = storage.get_json(path, *PLAN_KEYS)
    try:
        sizes = [sum(whole(end - start) for _, start, end in unit) for unit in plan["units"]]
        earlier = generations_of(plan)[:-1]
    except (TypeError, ValueError, KeyError):
        raise UserError(f"{path} is damaged: its units are not byte ranges") from None
    totals = ReceiptTotals(sizes, str(plan["config_hash"]), rejected_engines, earlier)
    totals.read(folder / "receipts")
    return PlanTotals(plan, path.stat().st_mtime, totals)
