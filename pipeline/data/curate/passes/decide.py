"""The pass `decide`: rules over the measures of a chunk, and what was found by comparing, become verdicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import orjson

from pipeline.common import storage
from pipeline.common.hashing import value_hash
from pipeline.data.curate.chunk_writer import BAD_RECORD
from pipeline.data.curate.duplicates.lines import LINE, PARAGRAPH, lines_of, united_lines
from pipeline.data.curate.duplicates.passes import RULE_NAMES
from pipeline.data.curate.files import EDITED, FIRES_ALONE, NOBODY, REJECTED, VERDICT, verdicts_file
from pipeline.data.curate.passes.excerpts import StoredExcerpts
from pipeline.data.curate.report.domains import DOMAINS, domain_groups
from pipeline.data.curate.report.examples import is_early
from pipeline.data.curate.report.statistics import Groups, JudgedChunk, chunk_statistics
from pipeline.data.curate.rules.base import DocumentRule
from pipeline.data.curate.rules.evaluate import evaluate, fires_alone, first_fires, first_values
from pipeline.data.curate.rules.of_run import LINES_RULE, PARAGRAPHS_RULE
from pipeline.data.curate.scope import Chunk
from pipeline.data.curate.table import chunk_path, read_array
from pipeline.data.curate.verdicts import LINES_SUFFIX, STATISTICS_SUFFIX
from pipeline.data.datasets.indexed import HashedFile, numbered
from pipeline.data.work.job import ReceiptJob
from pipeline.data.work.worker_pool import Progress


class Comparison(Protocol):
    """Results of comparing the documents of a scope, for its chunks."""

    def chosen(self, chunk: Chunk) -> npt.NDArray[Any]:
        """Documents of a chunk that go as duplicates: `row`, `rule` from 1, `kept`, `value`; ascending by row."""

    def removed_lines(self, chunk: Chunk) -> npt.NDArray[Any]:
        """Lines of kept documents of a chunk that go, of type `LINE`, ascending."""

    def removed_paragraphs(self, chunk: Chunk) -> npt.NDArray[Any]:
        """Paragraphs of kept documents of a chunk that go, of type `PARAGRAPH`, ascending."""


@dataclass(frozen=True)
class Decider:
    """Settings that the chunks of a source have in common in the pass.

    Attributes:
        local: rules over the measures of a document alone.
        compared: rules of duplicates. The number of a rule is its place among these and those, from 1.
        open_table: opens the table of measures of a chunk, checked.
        comparison: of the scope; None if nothing is compared.
        labels: of languages, by their numbers in the table.
        seed: of examples.
        chunks: of the source.
        excerpts: of the source; None if none are kept.
        edits_paragraphs: whether repeated paragraphs are removed from documents that stay.
    """

    local: tuple[DocumentRule, ...]
    compared: tuple[DocumentRule, ...]
    open_table: Callable[[Chunk], npt.NDArray[Any]]
    comparison: Comparison | None
    labels: tuple[str, ...] = ()
    seed: int = 0
    chunks: int = 1
    excerpts: StoredExcerpts | None = None
    edits_paragraphs: bool = True

    @property
    def names(self) -> list[str]:
        """Names of all rules."""
        return [rule.name for rule in (*self.local, *self.compared)]


@dataclass(frozen=True)
class DecideJob(ReceiptJob):
    """The verdicts of a chunk. Its folder is that of the decisions, `shared` what has a `Decider` by source."""

    chunk: Chunk

    @property
    def receipt(self) -> Path:
        return decide_receipt(self.folder, self.chunk)

    def make(self, shared: Any, progress: Progress) -> dict[str, Any]:
        decider: Decider = shared[self.folder]
        table = decider.open_table(self.chunk)
        decided = decide(table, decider, self.chunk)
        path = verdicts_file(self.folder, self.chunk.unit, self.chunk.chunk)
        storage.make_below(self.folder, path.parent)
        with (
            HashedFile(path) as verdicts,
            HashedFile(path.with_suffix(LINES_SUFFIX)) as lines,
            HashedFile(path.with_suffix(STATISTICS_SUFFIX)) as statistics,
        ):
            verdicts.write(decided.verdicts.tobytes())
            statistics.write(orjson.dumps(statistics_of(table, decided, decider, self.chunk)))
            files = {str(file.final.relative_to(self.folder)): file for file in (verdicts, statistics)}
            if len(decided.lines):
                lines.write(decided.lines.tobytes())
                files[str(lines.final.relative_to(self.folder))] = lines
            progress(self.bytes)
            return self.commit(files, counts_of(table, decided, decider))


class Decided(NamedTuple):
    """Decisions about a chunk.

    Attributes:
        verdicts: `VERDICT` of each row.
        lines: `LINE` of each removed line of a kept document.
        fires: of shape (rules, rows): whether each rule fires.
        paragraphs: repeated ones in kept documents.
    """

    verdicts: npt.NDArray[Any]
    lines: npt.NDArray[Any]
    fires: npt.NDArray[np.bool_]
    paragraphs: int = 0


def decide(table: npt.NDArray[Any], decider: Decider, chunk: Chunk) -> Decided:
    """Decide about the rows of a chunk: the first rule that fires removes a document."""
    names = decider.names
    fires = np.zeros((len(names), len(table)), bool)
    fires[: len(decider.local)] = evaluate(decider.local, table)
    values = np.zeros(len(table), np.float32)
    kept = np.full(len(table), NOBODY, np.uint64)
    lines, paragraphs = np.zeros(0, LINE), np.zeros(0, PARAGRAPH)
    if decider.comparison is not None:
        chosen = decider.comparison.chosen(chunk)
        for code, name in RULE_NAMES.items():
            found = chosen[chosen["rule"] == code]
            if len(found):
                fires[names.index(name), found["row"]] = True
        values[chosen["row"]], kept[chosen["row"]] = chosen["value"], chosen["kept"]
        lines = decider.comparison.removed_lines(chunk)
        if LINES_RULE in names:
            # A document that nothing is left of.
            removed = np.bincount(lines["row"], minlength=len(table))
            fires[names.index(LINES_RULE)] = (removed > 0) & (removed >= table["lines"])
            values = np.where(fires[names.index(LINES_RULE)] & (kept == NOBODY), np.float32(1), values)
        if PARAGRAPHS_RULE in names:
            place = names.index(PARAGRAPHS_RULE)
            bound = decider.compared[place - len(decider.local)].bound
            paragraphs = decider.comparison.removed_paragraphs(chunk)
            fires[place], shares = _by_paragraphs(paragraphs, lines, table, bound)
            others = fires[:place].any(axis=0)
            values = np.where(fires[place] & ~others, shares, values)
            if decider.edits_paragraphs and len(paragraphs):
                lines = united_lines(lines, lines_of(paragraphs, blank=True))
    first = first_fires(fires)
    is_local = (first > 0) & (first <= len(decider.local))
    verdicts = np.zeros(len(table), VERDICT)
    verdicts["rule"] = first
    verdicts["value"] = np.where(is_local, first_values(decider.local, table, np.where(is_local, first, 0)), values)
    verdicts["kept"] = np.where(first > len(decider.local), kept, np.uint64(NOBODY))
    bad = table["state"] == BAD_RECORD
    lines = lines[first[lines["row"]] == 0]
    edited = table["edited"] != 0
    edited[lines["row"]] = True
    edited &= (first == 0) & ~bad
    verdicts["flags"] = REJECTED * bad + EDITED * edited + FIRES_ALONE * fires_alone(fires)
    return Decided(verdicts, lines, fires, int((first[paragraphs["row"]] == 0).sum()))


def _by_paragraphs(
    paragraphs: npt.NDArray[Any], lines: npt.NDArray[Any], table: npt.NDArray[Any], bound: float
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float32]]:
    """Documents that go by their repeated paragraphs, and the share of bytes in these of each.

    A document of which these and the repeated lines leave nothing goes whatever the bound is.
    """
    size = np.bincount(paragraphs["row"], paragraphs["bytes"], len(table))
    shares = size / np.maximum(table["bytes"], 1)
    gone = united_lines(lines, lines_of(paragraphs, blank=False))
    left = table["lines"].astype(np.int64) - np.bincount(gone["row"], minlength=len(table))
    fires = (size > 0) & ((shares > bound) | (left <= 0))
    return fires, shares.astype(np.float32)


def counts_of(table: npt.NDArray[Any], decided: Decided, decider: Decider) -> dict[str, Any]:
    """Counts of a chunk for its receipt."""
    verdicts, names = decided.verdicts, decider.names
    by_rule = np.bincount(verdicts["rule"], minlength=len(names) + 1)
    bad = int((table["state"] == BAD_RECORD).sum())
    return {
        "rows": len(table),
        "documents": len(table) - bad,
        "rejected": bad,
        "kept": int(by_rule[0]) - bad,
        "removed": {name: int(count) for name, count in zip(names, by_rule[1:], strict=True)},
        "lines": len(decided.lines),
        **({"paragraphs": decided.paragraphs} if PARAGRAPHS_RULE in names else {}),
    }


def statistics_of(table: npt.NDArray[Any], decided: Decided, decider: Decider, chunk: Chunk) -> dict[str, Any]:
    """Statistics of a chunk for the report."""
    verdicts, names = decided.verdicts, decider.names
    judged = JudgedChunk(
        chunk.unit, chunk.first, names, decider.local, table, decided.fires, verdicts, _groups(table, decider, chunk)
    )
    early = is_early(decider.seed, chunk.unit, chunk.chunk, decider.chunks)
    stored = None if decider.excerpts is None else decider.excerpts.rows(chunk)
    return chunk_statistics(judged, decider.seed, early=early, stored=stored)


def _groups(table: npt.NDArray[Any], decider: Decider, chunk: Chunk) -> dict[str, Groups]:
    """Groups that the report counts documents by."""
    found: dict[str, Groups] = {}
    if "language" in (table.dtype.names or ()):
        codes = table["language"].astype(np.int64)
        codes[(codes >= len(decider.labels)) | (table["state"] != 0)] = -1
        found["languages"] = Groups(codes, decider.labels)
    if DOMAINS in chunk.hashes:
        hosts = read_array(chunk_path(chunk, DOMAINS), np.dtype("u1"), chunk.hashes[DOMAINS], "measure")
        found["domains"] = domain_groups(table, hosts.tobytes())
    return found


def decide_receipt(decisions: Path, chunk: Chunk) -> Path:
    """Receipt of a chunk's verdicts."""
    path = numbered(decisions / "receipts", chunk.unit, chunk.chunk)
    return path.with_name(f"{path.name}.json")


def decide_jobs(
    decisions: Path, chunks: Sequence[Chunk], inputs: str, excerpts: StoredExcerpts | None = None
) -> list[DecideJob]:
    """Jobs of a source.

    Args:
        decisions: its folder of decisions.
        chunks: of the source.
        inputs: hash of everything that decides, and of the measures of the scope.
        excerpts: of the source; None if none are kept.
    """
    texts = [] if excerpts is None else [[excerpts.hash(chunk)] for chunk in chunks]
    return [
        DecideJob(
            decisions,
            f"decide-{chunk.unit:08d}-{chunk.chunk:05d}",
            value_hash([inputs, chunk.source, chunk.unit, chunk.chunk, *(texts[place] if texts else ())]),
            chunk.records * VERDICT.itemsize,
            chunk,
        )
        for place, chunk in enumerate(chunks)
    ]
