"""Settings that all units of a source have in common, and what is done about bad records and damaged files.

Whatever reads a source treats these in the same way, so that all stages see the same documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.data.datasets.files import PLAN_FILE
from pipeline.data.sources.damage import damage_in
from pipeline.data.sources.reader import Reader
from pipeline.data.sources.records import NOT_BAD, Document, Unit, line_of
from pipeline.data.work.receipts import Receipts
from pipeline.data.work.units import input_stat

S = TypeVar("S", bound="UnitSource")
_PLAN_HEAD = 1024
"""Bytes."""


@dataclass(frozen=True)
class UnitSource:
    """Settings that all units of a source have in common."""

    folder: Path
    reader: Reader
    unit_bytes: int
    max_document_bytes: int
    splits_long: bool
    """True if longer documents are split, and not rejected."""
    config_hash: str
    fail_on_error: bool
    drops_damaged: bool
    """True if nothing is taken of files that are damaged, as far as `reader.dropped` knows them by now."""
    start_over: str
    """Advice on starting over with repaired files, for messages."""
    earlier: tuple[tuple[str, int], ...] = field(default=(), kw_only=True)
    """Of each earlier generation of the plan: its `config_hash`, and the number of units up to its end."""

    def hash_of(self, unit: int) -> str:
        """The `config_hash` that receipts of a unit have: that of its generation."""
        return hash_of_unit(self.earlier, self.config_hash, unit)

    def reason_against(self, document: Document, raw: bytes) -> str | None:
        """Reason to reject a sound record; None for a document."""
        if len(raw) > self.max_document_bytes and not self.splits_long:
            return f"longer than data.preprocess.max_document_bytes ({self.max_document_bytes})"
        return document.reason

    def check_plan(self) -> None:
        """Look whether the plan is still there, now that the lease is (see `frozen_plan.remove_unused_plan`).

        Raises:
            UserError: it is another one.
        """
        with suppress(FileNotFoundError), storage.open_regular(self.folder / PLAN_FILE) as file:
            if self.config_hash.encode() in file.read(_PLAN_HEAD):  # it is the first key
                return
        raise UserError(
            f"{self.folder / PLAN_FILE} was removed, or replaced by another command with other settings; end that one, "
            "or run this one with another data.dir"
        )

    def check_on_error(self, unit: Unit, document: Document) -> None:
        """Refuse a rejected record where `data.preprocess.on_error` says so."""
        if self.fail_on_error and document.reason not in NOT_BAD:
            piece = unit.pieces[document.piece]
            line = None
            if document.line is not None:
                line = line_of(piece.file.path, document.byte, piece.file.open(self.reader.remote))
            place = self.reader.locate(piece, line, document.byte)
            raise UserError(
                f"{place}: {document.reason} ({document.detail}); repair the record and {self.start_over}; "
                "or set data.preprocess.on_error: skip to skip bad records"
            )

    def dropped(self, unit: Unit) -> list[str]:
        """Names of the files of a unit of which nothing is to be taken."""
        if not self.reader.dropped:
            return []
        return sorted({piece.file.name for piece in unit.pieces} & self.reader.dropped.keys())


def hash_of_unit(earlier: Sequence[tuple[str, int]], newest: str, unit: int) -> str:
    """The `config_hash` of the generation that a unit belongs to."""
    return next((config_hash for config_hash, end in earlier if unit < end), newest)


def damage_is_known(source: UnitSource, unit: Unit, receipt: Any) -> bool:
    """Tell whether the same files were dropped as are to be now. What was damaged may have been repaired since."""
    dropped, wanted = receipt.get("dropped", []), source.dropped(unit)
    # Another command that drops may have seen more damage by now.
    if dropped != wanted and not (source.drops_damaged and set(dropped) > set(wanted)):
        return False
    salvaged = receipt.get("salvage", False)
    if salvaged if not source.reader.salvage else receipt.get("damaged") and not salvaged:
        return False
    if receipt.get("max_zstd_window") not in (None, source.reader.max_zstd_window):
        return False
    return not (dropped or receipt.get("damaged")) or bool(receipt["input"]["stat"] == input_stat(unit))


def without_damaged(source: S, units: Sequence[Unit], receipts: Receipts) -> S:
    """The source; with `drops_damaged`, without the files that its receipts say are damaged."""
    if not source.drops_damaged:
        return source
    dropped: dict[str, tuple[str, str]] = {}
    for unit in units:
        for receipt in receipts.of(unit.index):
            if not receipt.get("damaged") or receipt["config_hash"] != source.hash_of(unit.index):
                continue
            if receipt["input"]["stat"] == input_stat(unit):
                for damaged in damage_in(unit, receipt):
                    dropped.setdefault(damaged.file.name, (damaged.reason, damaged.detail))
    return replace(source, reader=replace(source.reader, dropped=dropped))


def rejected_record(document: Document) -> dict[str, Any]:
    """Line about a rejected record."""
    return {
        "row": document.row,
        "piece": document.piece,
        "line": document.line,
        "byte": document.byte,
        "reason": document.reason,
        "detail": document.detail,
    }
