"""The pass `decide`: rules over the measures of a chunk, and what was found by comparing, become verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pipeline.common.hashing import value_hash
from pipeline.data.curate.chunk_writer import BAD_RECORD, EMPTY_DOCUMENT
from pipeline.data.curate.files import EDITED, FIRES_ALONE, NOBODY, REJECTED, VERDICT, verdicts_file
from pipeline.data.curate.jobs import Job
from pipeline.data.curate.rules.base import Rule
from pipeline.data.curate.scope import Chunk
from pipeline.data.datasets.indexed import HashedFile, numbered
from pipeline.data.work.worker_pool import Progress

LINE = np.dtype([("row", "<u4"), ("line", "<u4"), ("kept", "<u8")])
"""A removed line: row in the chunk, number of the line in the cleaned text, and the document in which it stays."""
LINES_SUFFIX = ".lines"


class Chosen(NamedTuple):
    """Documents of a chunk that a rule of duplicates removes.

    Attributes:
        rows: uint32 of shape (documents,): in the chunk, ascending.
        kept: uint64: documents that they are duplicates of.
        values: float32: similarities.
    """

    rows: npt.NDArray[np.uint32]
    kept: npt.NDArray[np.uint64]
    values: npt.NDArray[np.float32]


class Comparison(Protocol):
    """Results of comparing the documents of a scope, for its chunks."""

    def inputs(self, chunk: Chunk) -> str:
        """Hash of what they are for a chunk."""

    def chosen(self, chunk: Chunk) -> dict[str, Chosen]:
        """Documents of a chunk that are removed, by the name of the rule."""

    def lines(self, chunk: Chunk) -> npt.NDArray[Any]:
        """Removed lines (`LINE`) of a chunk, by row and line."""


class Tables(Protocol):
    """Opens tables of measures."""

    def inputs(self, chunk: Chunk) -> str:
        """Hash of what the table depends on."""

    def open(self, chunk: Chunk) -> npt.NDArray[Any]:
        """Table of a chunk: checked, and with what is known only when all chunks were measured."""


@dataclass(frozen=True)
class Decider:
    """Settings that the chunks of a source have in common in the pass.

    Attributes:
        decide_hash: of everything that decides.
        rules: all rules in the order of their numbers; those of duplicates are at the end.
        compared: how many of them are rules of duplicates.
        tables: of the source.
        comparison: of the scope; None if nothing is compared.
    """

    decide_hash: str
    rules: tuple[Rule, ...]
    compared: int
    tables: Tables
    comparison: Comparison | None

    @property
    def local(self) -> tuple[Rule, ...]:
        """Rules over the measures of a document alone."""
        return self.rules[: len(self.rules) - self.compared]


@dataclass(frozen=True)
class DecideJob(Job):
    """The verdicts of a chunk. Its folder is that of the decisions."""

    chunk: Chunk
    decider: Decider

    @property
    def receipt(self) -> Path:
        return decide_receipt(self.folder, self.chunk)

    def run(self, progress: Progress) -> dict[str, Any]:
        table = self.decider.tables.open(self.chunk)
        decided = decide(table, self.decider, self.chunk)
        path = verdicts_file(self.folder, self.chunk.unit, self.chunk.chunk)
        path.parent.mkdir(parents=True, exist_ok=True)
        with HashedFile(path) as verdicts, HashedFile(path.with_suffix(LINES_SUFFIX)) as lines:
            verdicts.write(decided.verdicts.tobytes())
            files = {str(path.relative_to(self.folder)): verdicts}
            if len(decided.lines):
                lines.write(decided.lines.tobytes())
                files[str(lines.final.relative_to(self.folder))] = lines
            progress(self.bytes)
            return self.commit(files, self._counts(table, decided))

    def _counts(self, table: npt.NDArray[Any], decided: Decided) -> dict[str, Any]:
        rule = decided.verdicts["rule"]
        by_rule = np.bincount(rule, minlength=len(self.decider.rules) + 1)
        names = [each.name for each in self.decider.rules]
        is_document = table["state"] != BAD_RECORD
        kept = is_document & (rule == 0)
        return {
            "rows": len(table),
            "documents": int(is_document.sum()),
            "rejected": int((~is_document).sum()),
            "kept": int(kept.sum()),
            "kept_bytes": int(table["bytes"][kept].sum(dtype=np.int64)),
            "bytes": int(table["bytes"].sum(dtype=np.int64)),
            "removed": {name: int(count) for name, count in zip(names, by_rule[1:], strict=True)},
            "fires": {name: int(count) for name, count in zip(names, decided.fires, strict=True)},
            "alone": {name: int(count) for name, count in zip(names, decided.alone, strict=True)},
            "edited": int((decided.verdicts["flags"] & EDITED != 0).sum()),
            "lines": len(decided.lines),
        }


class Decided(NamedTuple):
    """Decisions about a chunk.

    Attributes:
        verdicts: `VERDICT` of each row.
        lines: `LINE` of each removed line of a kept document.
        fires: documents on which each rule fires.
        alone: documents that only this rule removes.
    """

    verdicts: npt.NDArray[Any]
    lines: npt.NDArray[Any]
    fires: npt.NDArray[np.int64]
    alone: npt.NDArray[np.int64]


def decide(table: npt.NDArray[Any], decider: Decider, chunk: Chunk) -> Decided:
    """Decide about the rows of a chunk: the first rule that fires removes a document."""
    rows, rules = len(table), decider.rules
    verdicts = np.zeros(rows, VERDICT)
    verdicts["kept"] = NOBODY
    state = table["state"]
    times = np.zeros(rows, np.int32)
    fires = np.zeros(len(rules), np.int64)

    def apply(number: int, fired: npt.NDArray[np.bool_], values: npt.NDArray[Any], kept: Any = None) -> None:
        fires[number] = fired.sum()
        times[fired] += 1
        first = fired & (verdicts["rule"] == 0)
        verdicts["rule"][first] = number + 1
        verdicts["value"][first] = values[first]
        if kept is not None:
            verdicts["kept"][first] = kept[first]

    for number, rule in enumerate(decider.local):
        fired = local_fires(rule, number, table)
        apply(number, fired, rule.values(table).astype(np.float32))
    chosen = {} if decider.comparison is None else decider.comparison.chosen(chunk)
    for number in range(len(rules) - decider.compared, len(rules)):
        found = chosen.get(rules[number].name)
        if found is not None:
            fired, values, kept = np.zeros(rows, bool), np.zeros(rows, np.float32), np.zeros(rows, np.uint64)
            fired[found.rows], values[found.rows], kept[found.rows] = True, found.values, found.kept
            apply(number, fired, values, kept)
    single = times == 1
    lines = np.zeros(0, LINE) if decider.comparison is None else decider.comparison.lines(chunk)
    lines = lines[verdicts["rule"][lines["row"]] == 0]
    edited = table["edited"] != 0
    edited[lines["row"]] = True
    edited &= (verdicts["rule"] == 0) & (state != BAD_RECORD)
    verdicts["flags"] = REJECTED * (state == BAD_RECORD) + EDITED * edited + FIRES_ALONE * single
    alone = np.bincount(verdicts["rule"][single], minlength=len(rules) + 1)[1:]
    return Decided(verdicts, lines, fires, alone)


def local_fires(rule: Rule, number: int, table: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Documents that a rule removes: no rejected records; of empty ones the first rule knows, and no other.

    Args:
        rule: over the measures.
        number: its place among the rules.
        table: of measures.
    """
    measured = table["state"] != BAD_RECORD if number == 0 else table["state"] < min(BAD_RECORD, EMPTY_DOCUMENT)
    return rule.fires(table) & measured


def removed_locally(table: npt.NDArray[Any], rules: Sequence[Rule]) -> npt.NDArray[np.bool_]:
    """Tell which rows rules over the measures remove, and rejected records: these are kept last among duplicates."""
    removed = table["state"] != 0
    for number, rule in enumerate(rules):
        removed |= local_fires(rule, number, table)
    return np.asarray(removed, bool)


def decide_receipt(decisions: Path, chunk: Chunk) -> Path:
    """Receipt of a chunk's verdicts."""
    path = numbered(decisions / "receipts", chunk.unit, chunk.chunk)
    return path.with_name(f"{path.name}.json")


def decide_jobs(decisions: Path, chunks: Sequence[Chunk], decider: Decider) -> list[DecideJob]:
    """Jobs of a source.

    Args:
        decisions: its folder of decisions.
        chunks: of the source.
        decider: of the source.
    """
    return [
        DecideJob(
            decisions,
            f"decide-{chunk.unit:08d}-{chunk.chunk:05d}",
            value_hash(
                [
                    decider.decide_hash,
                    decider.tables.inputs(chunk),
                    "" if decider.comparison is None else decider.comparison.inputs(chunk),
                ]
            ),
            chunk.records * VERDICT.itemsize,
            chunk,
            decider,
        )
        for chunk in chunks
    ]
