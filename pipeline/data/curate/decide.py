"""The pass `decide`: rules over the measures of a chunk, and what was found by comparing, become verdicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pipeline.common.hashing import value_hash
from pipeline.data.curate.chunk_writer import BAD_RECORD, EMPTY_DOCUMENT
from pipeline.data.curate.files import EDITED, FIRES_ALONE, NOBODY, REJECTED, VERDICT, verdicts_file
from pipeline.data.curate.jobs import SharedJob
from pipeline.data.curate.rules.base import Rule
from pipeline.data.curate.scope import Chunk
from pipeline.data.datasets.indexed import HashedFile, numbered
from pipeline.data.work.worker_pool import Progress

COMPARED = {1: "duplicates.exact", 2: "duplicates.url", 3: "duplicates.near"}
"""Names of the rules of duplicates by the numbers that `Comparison.chosen` has."""
LINES_SUFFIX = ".lines"
"""Of a file of removed lines beside verdicts: records of `duplicates.passes.LINE`."""
LINE = np.dtype([("row", "<u4"), ("line", "<u4")])
"""A line that goes: the row of its document in the chunk, and its number in the cleaned text, from 0."""


class Comparison(Protocol):
    """Results of comparing the documents of a scope, for its chunks."""

    def chosen(self, chunk: Chunk) -> npt.NDArray[Any]:
        """Documents of a chunk that go as duplicates: `row`, `rule` from 1, `kept`, `value`; ascending by row."""

    def removed_lines(self, chunk: Chunk) -> npt.NDArray[Any]:
        """Lines of kept documents of a chunk that go, of type `LINE`, ascending."""


@dataclass(frozen=True)
class Decider:
    """Settings that the chunks of a source have in common in the pass.

    Attributes:
        rules: all rules in the order of their numbers; those of duplicates are at the end.
        compared: how many of them are rules of duplicates.
        open_table: opens the table of measures of a chunk, checked.
        comparison: of the scope; None if nothing is compared.
        labels: of languages, by their numbers in the table.
        seed: of examples.
    """

    rules: tuple[Rule, ...]
    compared: int
    open_table: Callable[[Chunk], npt.NDArray[Any]]
    comparison: Comparison | None
    labels: tuple[str, ...] = ()
    seed: int = 0

    @property
    def local(self) -> tuple[Rule, ...]:
        """Rules over the measures of a document alone."""
        return self.rules[: len(self.rules) - self.compared]


@dataclass(frozen=True)
class DecideJob(SharedJob):
    """The verdicts of a chunk. Its folder is that of the decisions, `shared` what has a `Decider` by source."""

    chunk: Chunk

    @property
    def receipt(self) -> Path:
        return decide_receipt(self.folder, self.chunk)

    def run_with(self, shared: Any, progress: Progress) -> dict[str, Any]:
        decider: Decider = shared[self.folder]
        table = decider.open_table(self.chunk)
        decided = decide(table, decider, self.chunk)
        path = verdicts_file(self.folder, self.chunk.unit, self.chunk.chunk)
        path.parent.mkdir(parents=True, exist_ok=True)
        with HashedFile(path) as verdicts, HashedFile(path.with_suffix(LINES_SUFFIX)) as lines:
            verdicts.write(decided.verdicts.tobytes())
            files = {str(path.relative_to(self.folder)): verdicts}
            if len(decided.lines):
                lines.write(decided.lines.tobytes())
                files[str(lines.final.relative_to(self.folder))] = lines
            progress(self.bytes)
            return self.commit(files, counts_of(table, decided, decider, self.chunk))


class Decided(NamedTuple):
    """Decisions about a chunk.

    Attributes:
        verdicts: `VERDICT` of each row.
        lines: `LINE` of each removed line of a kept document.
        fires: of shape (rules, rows): whether each rule fires.
    """

    verdicts: npt.NDArray[Any]
    lines: npt.NDArray[Any]
    fires: npt.NDArray[np.bool_]


def decide(table: npt.NDArray[Any], decider: Decider, chunk: Chunk) -> Decided:
    """Decide about the rows of a chunk: the first rule that fires removes a document."""
    rows, rules = len(table), decider.rules
    verdicts = np.zeros(rows, VERDICT)
    verdicts["kept"] = NOBODY
    state = table["state"]
    fires = np.zeros((len(rules), rows), bool)

    def apply(number: int, fired: npt.NDArray[np.bool_], values: npt.NDArray[Any], kept: Any = None) -> None:
        fires[number] = fired
        first = fired & (verdicts["rule"] == 0)
        verdicts["rule"][first] = number + 1
        verdicts["value"][first] = values[first]
        if kept is not None:
            verdicts["kept"][first] = kept[first]

    for number, rule in enumerate(decider.local):
        apply(number, local_fires(rule, number, table), rule.values(table).astype(np.float32))
    if decider.comparison is not None:
        chosen = decider.comparison.chosen(chunk)
        names = [each.name for each in rules]
        for code, name in COMPARED.items():
            found = chosen[chosen["rule"] == code]
            if not len(found):
                continue
            fired, values, kept = np.zeros(rows, bool), np.zeros(rows, np.float32), np.zeros(rows, np.uint64)
            fired[found["row"]], values[found["row"]], kept[found["row"]] = True, found["value"], found["kept"]
            apply(names.index(name), fired, values, kept)
    lines = np.zeros(0, LINE) if decider.comparison is None else decider.comparison.removed_lines(chunk)
    lines = lines[verdicts["rule"][lines["row"]] == 0]
    edited = table["edited"] != 0
    edited[lines["row"]] = True
    edited &= (verdicts["rule"] == 0) & (state != BAD_RECORD)
    alone = fires.sum(axis=0, dtype=np.int32) == 1
    verdicts["flags"] = REJECTED * (state == BAD_RECORD) + EDITED * edited + FIRES_ALONE * alone
    return Decided(verdicts, lines, fires)


def counts_of(table: npt.NDArray[Any], decided: Decided, decider: Decider, chunk: Chunk) -> dict[str, Any]:
    """Counts of a chunk for its receipt, and statistics for the report."""
    verdicts, names = decided.verdicts, [each.name for each in decider.rules]
    by_rule = np.bincount(verdicts["rule"], minlength=len(names) + 1)
    bad = int((table["state"] == BAD_RECORD).sum())
    return {
        "rows": len(table),
        "documents": len(table) - bad,
        "rejected": bad,
        "kept": int(by_rule[0]) - bad,
        "removed": {name: int(count) for name, count in zip(names, by_rule[1:], strict=True)},
        "lines": len(decided.lines),
    }


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


def decide_jobs(decisions: Path, chunks: Sequence[Chunk], inputs: str) -> list[DecideJob]:
    """Jobs of a source.

    Args:
        decisions: its folder of decisions.
        chunks: of the source.
        inputs: hash of everything that decides, and of the measures of the scope.
    """
    return [
        DecideJob(
            decisions,
            f"decide-{chunk.unit:08d}-{chunk.chunk:05d}",
            value_hash([inputs, chunk.source, chunk.unit, chunk.chunk]),
            chunk.records * VERDICT.itemsize,
            chunk,
        )
        for chunk in chunks
    ]
