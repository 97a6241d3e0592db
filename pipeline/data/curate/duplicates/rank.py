"""Pass `rank`: what orders documents, out of the table of measures, in few bytes each. A job is a chunk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.common.hashing import key, mix, value_hash
from pipeline.data.curate.duplicates.compared import Compared, ComparedChunk, read_compared
from pipeline.data.curate.duplicates.files import ResultFile, write_array
from pipeline.data.curate.duplicates.kinds import CHECK_COLUMN, SIGNATURES, date_column
from pipeline.data.curate.duplicates.signature import signature_checks
from pipeline.data.curate.files import MEASURES, VERDICT
from pipeline.data.curate.rules.base import DocumentRule
from pipeline.data.curate.scope import Chunk
from pipeline.data.datasets.indexed import numbered
from pipeline.data.work.job import ReceiptJob
from pipeline.data.work.sorted_runs import DamagedResult
from pipeline.data.work.worker_pool import Progress

RANK_VERSION = 1
OpenTable = Callable[[Chunk], npt.NDArray[Any]]
GOOD, REMOVED, ABSENT, WINNER = 0, 1, 2, 3
"""States: a document that no rule removes; one that a rule removes; a record that is not a document here; a kept
document of a finished curation, which always wins."""
_CHECK = 0x1B873593CC9E2D51
_MOST = np.uint64(2**64 - 1)


def rank_type(keep: tuple[str, ...]) -> np.dtype[Any]:
    """Record of a row: its state, the columns that `keep` reads, the check of its signature, and one of itself."""
    dated = sorted({each.split(":", 1)[1] for each in keep if ":" in each})
    dates = [(date_column(each), "<u8") for each in dated]
    size = [("bytes", "<u4")] if {"longest", "shortest"} & set(keep) else []
    return np.dtype([("state", "u1"), *size, *dates, (CHECK_COLUMN, "<u4"), ("check", "<u4")])


def rank_file(folder: Path, place: int) -> Path:
    """Ranks of a chunk, by its place among all that are compared."""
    return numbered(folder / "rank", place).with_suffix(".rank")


def row_checks(records: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """Check values of records, shape (records,), so that one can be read alone."""
    total = np.zeros(len(records), np.uint64)
    for place, name in enumerate(records.dtype.names or ()):
        if name != "check":
            total = mix(total ^ records[name].astype(np.uint64), key(_CHECK, place))
    return (total >> np.uint64(32)).astype(np.uint32)


@dataclass(frozen=True)
class RankJob(ReceiptJob):
    """The ranks of a chunk."""

    place: int
    chunks: Path
    rules: tuple[tuple[DocumentRule, ...], ...]
    open_table: OpenTable
    keep: tuple[str, ...]

    @property
    def receipt(self) -> Path:
        return numbered(self.folder / "receipts" / "rank", self.place).with_suffix(".json")

    def make(self, shared: Any, progress: Progress) -> dict[str, Any]:
        """Write a record per row.

        Raises:
            DamagedResult: a file of the chunk is not as it was written.
        """
        compared = read_compared(self.chunks)
        each = compared.chunks[self.place]
        ranks = np.zeros(each.chunk.records, rank_type(self.keep))
        if each.verdicts is None:
            table = self.open_table(each.chunk)
            ranks["state"] = self._states(each.chunk, table)
            for name in set(ranks.dtype.names or ()) & set(table.dtype.names or ()):
                if name != "state":
                    ranks[name] = table[name]
        else:
            with each.reading():
                self._of_verdicts(each, each.verdicts, ranks)
        ranks["check"] = row_checks(ranks)
        name = str(rank_file(self.folder, self.place).relative_to(self.folder))
        with write_array(self.folder, name, ranks) as file:
            receipt = self.commit({name: file}, {"states": np.bincount(ranks["state"], minlength=4).tolist()})
        progress(self.bytes)
        return receipt

    def _states(self, chunk: Chunk, table: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
        removed = np.zeros(len(table), np.bool_)
        for rule in self.rules[chunk.source]:
            removed |= rule.fires(table)
        states = np.where(removed, REMOVED, GOOD).astype(np.uint8)
        states[table["state"] != 0] = ABSENT
        return states

    def _of_verdicts(self, each: ComparedChunk, path: Path, ranks: npt.NDArray[Any]) -> None:
        size = each.chunk.records * VERDICT.itemsize
        verdicts = ResultFile(path, size, each.chunk.hashes["verdicts"], "decide").read(VERDICT)
        ranks["state"] = np.where((verdicts["rule"] == 0) & (verdicts["flags"] & 1 == 0), WINNER, ABSENT)
        # Its table of measures has a type of its own. The check of a signature is of that file as it is now.
        ranks[CHECK_COLUMN] = _checks_of_signatures(each)


def _checks_of_signatures(each: ComparedChunk) -> npt.NDArray[np.uint32]:
    if SIGNATURES not in each.chunk.hashes or not each.chunk.records:
        return np.zeros(each.chunk.records, np.uint32)
    file = ResultFile(each.path(SIGNATURES), each.size(SIGNATURES), each.chunk.hashes[SIGNATURES], "measure")
    signatures = file.read(np.dtype("<u4")).reshape(each.chunk.records, -1)
    return signature_checks(signatures)


def read_ranks(
    folder: Path, compared: Compared, keep: tuple[str, ...], numbers: npt.NDArray[np.uint64]
) -> npt.NDArray[Any]:
    """Ranks of documents, wherever they are; each record is checked.

    Raises:
        DamagedResult: one is not as it was written.
    """
    kind = rank_type(keep)
    found = np.zeros(len(numbers), kind)
    for place, inside, rows in compared.by_chunk(numbers):
        path = rank_file(folder, place)
        records = read_rows(path, "rank", kind, (compared.chunks[place].chunk.records,), rows)
        if not np.array_equal(records["check"], row_checks(records)):
            raise DamagedResult(path, "rank", "a record is not as it was written")
        found[inside] = records
    return found


def read_rows(
    path: Path, made_by: str, kind: np.dtype[Any], shape: tuple[int, ...], rows: npt.NDArray[np.int64]
) -> npt.NDArray[Any]:
    """Some rows of an array on disk.

    Raises:
        DamagedResult: it is missing or has another size.
    """
    wanted = int(np.prod(shape)) * kind.itemsize
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise DamagedResult(path, made_by, "it is missing") from None
    if size != wanted:
        raise DamagedResult(path, made_by, f"{size} bytes instead of {wanted}")
    return np.array(np.memmap(path, kind, "r", shape=shape)[rows])


def rank_keys(
    ranks: npt.NDArray[Any],
    numbers: npt.NDArray[np.uint64],
    keep: tuple[str, ...],
    names: tuple[str, ...],
    preference: tuple[str, ...],
    seed: int,
) -> list[npt.NDArray[np.uint64]]:
    """Keys by which documents are ordered, the first one first; less is better, and no two documents are equal.

    Args:
        ranks: of `read_ranks`.
        numbers: of the documents.
        keep: `data.curate.duplicates.keep`.
        names: of sources by number.
        preference: the names of the scope, as `keep: [source]` prefers them.
        seed: of the choice among equals.
    """
    order = np.array([0, 1, 2, 0], np.uint64)  # by state: good ones after winners, which are all of other sources
    order[[GOOD, REMOVED, WINNER]] = [1, 2, 0]
    keys = [order[ranks["state"]]]
    sources = (numbers >> np.uint64(56)).astype(np.int64)
    for each in keep:
        keys.append(_keep_key(each, ranks, sources, names, preference))
    # Of units and rows that are frozen, so independent of which other sources there are.
    units = numbers >> np.uint64(32) & np.uint64(2**24 - 1)
    salts = np.array([key(seed, "duplicates", name) for name in names], np.uint64)
    keyed = mix(mix(units, 0) ^ salts[sources], 0)
    keys.append(mix(keyed + (numbers & np.uint64(2**32 - 1)), 0))
    return [*keys, numbers]


def _keep_key(
    entry: str,
    ranks: npt.NDArray[Any],
    sources: npt.NDArray[np.int64],
    names: tuple[str, ...],
    preference: tuple[str, ...],
) -> npt.NDArray[np.uint64]:
    if entry == "source":
        places = [preference.index(name) if name in preference else 0 for name in names]
        return np.array(places, np.uint64)[sources]
    if entry in ("longest", "shortest"):
        size = ranks["bytes"].astype(np.uint64)
        return size if entry == "shortest" else np.uint64(2**32 - 1) - size
    which, name = entry.split(":", 1)
    date = ranks[date_column(name)]
    if which == "newest":
        return np.asarray(_MOST - date)
    return np.where(date == 0, _MOST, date)  # without a date: last


def rank_jobs(
    folder: Path,
    chunks: Path,
    rules: tuple[tuple[DocumentRule, ...], ...],
    open_table: OpenTable,
    keep: tuple[str, ...],
) -> list[ReceiptJob]:
    """Jobs of the pass.

    Args:
        folder: of the choices.
        chunks: of `write_compared`.
        rules: of each source of the scope.
        open_table: opens a table of measures.
        keep: `data.curate.duplicates.keep`.
    """
    compared = read_compared(chunks)
    jobs: list[ReceiptJob] = []
    for place, each in enumerate(compared.chunks):
        own = rules[each.chunk.source] if each.verdicts is None else ()
        hashes = [each.chunk.hashes.get(name) for name in (MEASURES, "verdicts", "signatures")]
        inputs = value_hash([RANK_VERSION, keep, [repr(rule) for rule in own], hashes, each.chunk.records])
        size = each.size(MEASURES) if each.verdicts is None else each.chunk.records * VERDICT.itemsize
        jobs.append(RankJob(folder, f"rank-{place:05d}", inputs, size, place, chunks, rules, open_table, keep))
    return jobs
