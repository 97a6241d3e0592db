"""Counts of a chunk under all rules, and their sum over chunks: integers, so the order of chunks does not matter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import add
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.data.curate.files import EDITED, NOBODY, REJECTED
from pipeline.data.curate.report.bins import BINS, Scale, bins, dense, scale_of, sparse
from pipeline.data.curate.report.examples import MOST, ExampleSampler, first_of
from pipeline.data.curate.rules.base import DocumentRule

_BLOCK = 2**16
_TOTALS = ("rows", "rejected", "documents", "bytes", "kept", "kept_bytes", "edited", "duplicates")
_OF_RULE = ("fires", "first", "first_bytes", "alone", "otherwise")
NEAR_RULE = "duplicates.near"
"""Name of the rule whose values are estimates of similarity."""
EMPTY_RULE = "clean.empty"
"""Name of the rule of documents without text, which has nothing else to measure."""
GROUPS = ("languages", "domains")


class Groups(NamedTuple):
    """Groups that documents are counted by: languages, say.

    Attributes:
        codes: of shape (records,): number of each record's group; one that has no name is none.
        names: of the groups.
    """

    codes: npt.NDArray[Any]
    names: Sequence[str]


@dataclass(frozen=True)
class JudgedChunk:
    """A chunk whose verdicts are known.

    Attributes:
        unit: number of the unit.
        first: row in the unit of its first record.
        rules: names of all rules; the number of a rule in verdicts is its place here + 1.
        local: the rules that read measures, which are the first of `rules`; the others compare documents.
        table: the table of measures, of shape (records,).
        fires: bool of shape (rules, records); what it says of rejected records does not matter.
        verdicts: of shape (records,).
        groups: by name, one of `GROUPS`.
    """

    unit: int
    first: int
    rules: Sequence[str]
    local: Sequence[DocumentRule]
    table: npt.NDArray[Any]
    fires: npt.NDArray[np.bool_]
    verdicts: npt.NDArray[Any]
    groups: Mapping[str, Groups] = field(default_factory=dict)


def chunk_statistics(
    chunk: JudgedChunk, seed: int, *, early: bool = True, stored: Sequence[int] | None = None
) -> dict[str, Any]:
    """Statistics of a chunk, as JSON.

    Args:
        chunk: its measures and verdicts.
        seed: of the curation, for examples.
        early: `examples.is_early` of the chunk.
        stored: rows of the chunk whose beginnings are stored; None if none of the source are.

    Returns:
        `rows`, `rejected`, `documents`, `bytes`, `kept`, `kept_bytes`, `edited` (kept documents whose text is edited),
        `duplicates` (documents that name a kept one); `rules`: of each its counts and histograms (see `_of_rule`);
        `together`: documents that two rules remove both; `similarity`: histogram of the values of `NEAR_RULE`;
        `examples`; `languages` and `domains`: of each [documents, bytes, kept documents, kept bytes].
    """
    verdicts, table = chunk.verdicts, chunk.table
    documents = verdicts["flags"] & REJECTED == 0
    kept = documents & (verdicts["rule"] == 0)
    size = table["bytes"].astype(np.int64)
    fires = chunk.fires & documents
    number = fires.sum(axis=0, dtype=np.int64)
    late = np.full(len(table), stored is not None or not early, np.uint8)
    late[np.array(stored or (), np.int64)] = 0
    sampler = ExampleSampler(seed, chunk.unit, chunk.first, late)
    near = documents & np.isin(verdicts["rule"], [n for n, name in enumerate(chunk.rules, 1) if name == NEAR_RULE])
    rules, examples = [], []
    for place in range(len(chunk.rules)):
        of_rule, chosen = _of_rule(chunk, place, documents, number, sampler)
        rules.append(of_rule)
        examples.append(chosen)
    return {
        "rows": len(table),
        "rejected": int((~documents).sum()),
        "documents": int(documents.sum()),
        "bytes": int(size[documents].sum()),
        "kept": int(kept.sum()),
        "kept_bytes": int(size[kept].sum()),
        "edited": int((kept & (verdicts["flags"] & EDITED != 0)).sum()),
        "duplicates": int((documents & (verdicts["kept"] != NOBODY)).sum()),
        "rules": rules,
        "together": _together(fires).tolist(),
        "similarity": sparse(_histogram(verdicts["value"][near].astype(np.float64), "linear", "min")),
        "examples": examples,
        **{name: _grouped(chunk.groups.get(name), documents, kept, size) for name in GROUPS},
    }


def merge(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The sum of statistics; of none, those of no document under no rule.

    Args:
        parts: `chunk_statistics` under the same rules, or sums of them; each is let go after it was added.
    """
    total: _Sum | None = None
    for part in parts:
        total = total or _Sum(len(part["rules"]))
        total.add(part)
    return (total or _Sum(0)).result()


class _Sum:
    """A sum of statistics that grows."""

    def __init__(self, rules: int) -> None:
        self._totals: Counter[str] = Counter()
        self._rules: list[Counter[str]] = [Counter() for _ in range(rules)]
        self._histograms = {name: np.zeros((rules, BINS), np.int64) for name in ("all", "free")}
        self._similarity = np.zeros(BINS, np.int64)
        self._together = np.zeros((rules, rules), np.int64)
        self._examples: list[dict[str, Any]] = [{kind: [] for kind in MOST} for _ in range(rules)]
        self._groups: dict[str, dict[str, list[int]]] = {name: {} for name in GROUPS}

    def add(self, part: Mapping[str, Any]) -> None:
        """Add statistics."""
        self._totals.update({name: part[name] for name in _TOTALS})
        for place, of_rule in enumerate(part["rules"]):
            self._rules[place].update({name: of_rule[name] for name in _OF_RULE})
            for name, histogram in self._histograms.items():
                histogram[place] += dense(of_rule[name])
        self._similarity += dense(part["similarity"])
        self._together += np.array(part["together"], np.int64).reshape(self._together.shape)
        for own, other in zip(self._examples, part["examples"], strict=True):
            for kind in MOST:
                own[kind] = first_of(kind, (own[kind], other[kind]))
        for name, groups in self._groups.items():
            for group, counts in part[name].items():
                before = groups.get(group)  # there may be millions, so without an array for each
                groups[group] = list(counts) if before is None else list(map(add, before, counts))

    def result(self) -> dict[str, Any]:
        """The sum."""
        return {
            **{name: self._totals[name] for name in _TOTALS},
            "rules": [
                {name: counts[name] for name in _OF_RULE}
                | {name: sparse(histogram[place]) for name, histogram in self._histograms.items()}
                for place, counts in enumerate(self._rules)
            ],
            "together": self._together.tolist(),
            "similarity": sparse(self._similarity),
            "examples": self._examples,
            **{name: {group: groups[group] for group in sorted(groups)} for name, groups in self._groups.items()},
        }


def _of_rule(
    chunk: JudgedChunk,
    place: int,
    documents: npt.NDArray[np.bool_],
    number: npt.NDArray[np.int64],
    sampler: ExampleSampler,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Counts of a rule, and its examples.

    `fires`: documents it removes; `first`: those whose verdict names it, of `first_bytes` bytes; `alone`: those that
    no other rule removes; `otherwise`: those that it removes for another reason than its bound. Histograms of its
    values, without those removed otherwise: `all` documents with text, and `free` ones, whose fate is the bound's
    alone: no other rule removes them.
    """
    fires = chunk.fires[place] & documents
    first = documents & (chunk.verdicts["rule"] == place + 1)
    alone = number - fires == 0
    counts = {
        "fires": int(fires.sum()),
        "first": int(first.sum()),
        "first_bytes": int(chunk.table["bytes"][first].sum(dtype=np.int64)),
        "alone": int((fires & alone).sum()),
        "otherwise": 0,
        "all": [[], []],
        "free": [[], []],
    }
    rows = np.flatnonzero(first)
    drawn = chunk.verdicts["value"][rows].astype(np.float64)
    name = chunk.rules[place]
    examples: dict[str, Any] = {kind: [] for kind in MOST}
    examples["removed"] = sampler.choose(name, rows, drawn, np.zeros(len(rows)), MOST["removed"])
    if place < len(chunk.local) and name != EMPTY_RULE:
        rule = chunk.local[place]
        scale, values = scale_of(rule.about), rule.values(chunk.table)
        beyond = values < rule.bound if rule.keeps == "min" else values > rule.bound
        other, measured = fires & ~beyond, chunk.table["state"] == 0
        free = measured & alone & ~other
        counts["otherwise"] = int(other.sum())
        counts["all"] = sparse(_histogram(values[measured & ~other], scale, rule.keeps))
        counts["free"] = sparse(_histogram(values[free], scale, rule.keeps))
        for kind, side in (("inside", free & ~beyond), ("beyond", free & beyond)):
            rows = np.flatnonzero(side)
            away = np.abs(values[rows] - rule.bound)
            examples[kind] = sampler.choose(name, rows, values[rows], away, MOST[kind])
    return counts, examples


def _histogram(values: npt.NDArray[np.float64], scale: Scale, keeps: str) -> npt.NDArray[np.int64]:
    return np.bincount(bins(values, scale, keeps), minlength=BINS).astype(np.int64)


def _together(fires: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Documents that rules i and j both remove, of shape (rules, rules)."""
    total = np.zeros((len(fires), len(fires)), np.int64)
    every, fires = fires.sum(axis=1), fires[:, fires.sum(axis=0) > 1]
    for start in range(0, fires.shape[1], _BLOCK):
        # Sums of a block are whole numbers far below 2^24, which float32 has exactly.
        block = fires[:, start : start + _BLOCK].astype(np.float32)
        total += (block @ block.T).astype(np.int64)
    np.fill_diagonal(total, every)
    return total


def _grouped(
    groups: Groups | None,
    documents: npt.NDArray[np.bool_],
    kept: npt.NDArray[np.bool_],
    size: npt.NDArray[np.int64],
) -> dict[str, list[int]]:
    """[documents, bytes, kept documents, kept bytes] of each group that has documents."""
    if groups is None:
        return {}
    counts: dict[str, npt.NDArray[np.int64]] = {}
    codes = groups.codes.astype(np.int64)
    sums = np.zeros((len(groups.names), 4), np.int64)
    for column, chosen in ((0, documents), (2, kept)):
        rows = np.flatnonzero(chosen & (codes >= 0) & (codes < len(groups.names)))
        np.add.at(sums[:, column], codes[rows], 1)
        np.add.at(sums[:, column + 1], codes[rows], size[rows])
    for code in np.flatnonzero(sums[:, 0]).tolist():  # two numbers may have one name
        name = groups.names[code]
        counts[name] = counts.get(name, np.zeros(4, np.int64)) + sums[code]
    return {name: counts[name].tolist() for name in sorted(counts)}
