"""Pass `choose`: which document is removed for which kept one. A job is a file of whole clusters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pipeline.common import links
from pipeline.common.hashing import value_hash
from pipeline.data.curate.duplicates.compared import Compared, read_compared
from pipeline.data.curate.duplicates.files import DECISION, MEMBER, NO_SHINGLES, ResultFile
from pipeline.data.curate.duplicates.kinds import CHECK_COLUMN, SIGNATURES
from pipeline.data.curate.duplicates.leaders.leader_choice import (
    CAN_LEAD,
    CANNOT_LEAD,
    EXACT,
    MUST_LEAD,
    NEAR,
    URL,
    Frequencies,
    LeaderChoice,
    Leaders,
    Members,
    empty_choice,
)
from pipeline.data.curate.duplicates.rank import ABSENT, REMOVED, WINNER, rank_keys, read_ranks, read_rows
from pipeline.data.curate.duplicates.shingles import Sets, read_sets
from pipeline.data.curate.duplicates.signature import band_hashes, signature_checks
from pipeline.data.work.job import ReceiptJob
from pipeline.data.work.sorted_runs import DamagedResult, write_sections
from pipeline.data.work.worker_pool import Progress

CHOOSE_VERSION = 2
MAX_SHOWN = 20
BLOCK = 2**13
"""Documents of clusters that are compared together; one cluster may have more."""
ROOM = 2**25
"""Shingles that are in memory at a time of a cluster with more documents, besides those of kept ones."""
_STRETCH = 2**9
"""Documents between two signs of life."""
Numbers = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class ChooseSettings:
    """Settings of the pass.

    Attributes:
        bands: number; 0 without signatures.
        values: of a signature.
        min_similarity: Jaccard similarity of sets of shingles.
        keep: `data.curate.duplicates.keep`.
        preference: names of sources, as `keep: [source]` prefers them.
        seed: of the choice among equals.
    """

    bands: int
    values: int
    min_similarity: float
    keep: tuple[str, ...]
    preference: tuple[str, ...]
    seed: int


@dataclass(frozen=True)
class ChooseJob(ReceiptJob):
    """The clusters of a file of `join`.

    Attributes:
        members: the file.
        scope: folder of the scope, which has the sets of shingles.
        chunks: of `write_compared`.
        settings: of the pass.
        engine: of the comparison.
    """

    members: ResultFile
    scope: Path
    chunks: Path
    settings: ChooseSettings
    engine: Literal["numba", "python"]

    @property
    def file(self) -> str:
        """Name of its file in `folder`: in sections, one per chunk."""
        return f"chosen/{self.members.path.name}"

    def make(self, shared: Any, progress: Progress) -> dict[str, Any]:
        """Write the documents that go, ascending.

        Raises:
            DamagedResult: a file is not as it was written.
        """
        compared = read_compared(self.chunks)
        clusters = _Clusters(self, compared)
        decisions, counts = clusters.decide(progress)
        chunks = compared.own_chunks
        places = compared.places(np.ascontiguousarray(decisions["document"]))
        bounds = np.searchsorted(places, np.arange(chunks + 1))
        links.make_folder(self.folder / "chosen")
        with write_sections(self.folder / self.file, decisions, bounds) as file:
            return self.commit({self.file: file}, counts)


class _Clusters:
    """Clusters of a job, their documents in rank order."""

    def __init__(self, job: ChooseJob, compared: Compared) -> None:
        self._job = job
        self._compared = compared
        settings = job.settings
        members = job.members.read(MEMBER)
        ranks = read_ranks(job.folder, compared, settings.keep, np.ascontiguousarray(members["document"]))
        here = ranks["state"] != ABSENT
        members, ranks = members[here], ranks[here]
        numbers = np.ascontiguousarray(members["document"])
        keys = rank_keys(ranks, numbers, settings.keep, compared.names, settings.preference, settings.seed)
        order = np.lexsort([*reversed(keys), members["root"]])
        self._members, self._numbers = members[order], numbers[order]
        self._checks = np.ascontiguousarray(ranks[CHECK_COLUMN][order])
        roles = np.full(len(ranks), CAN_LEAD, np.uint8)
        roles[ranks["state"] == REMOVED] = CANNOT_LEAD
        roles[ranks["state"] == WINNER] = MUST_LEAD
        self._roles = roles[order]
        roots = self._members["root"]
        self._bounds = np.concatenate([[0], np.flatnonzero(roots[1:] != roots[:-1]) + 1, [len(roots)]])
        if not len(roots):
            self._bounds = self._bounds[:1]

    def decide(self, progress: Progress) -> tuple[npt.NDArray[Any], dict[str, Any]]:
        """(documents that are removed, counts)."""
        choice = self._choose(progress)
        gone = np.flatnonzero(choice.rule)
        decisions = np.zeros(len(gone), DECISION)
        decisions["document"] = self._numbers[gone]
        decisions["kept"] = self._numbers[choice.leader[gone]]
        decisions["rule"] = choice.rule[gone]
        decisions["value"] = choice.similarity[gone]
        counts = {
            "documents": len(self._numbers),
            "clusters": len(self._bounds) - 1,
            "removed": {str(rule): int((choice.rule == rule).sum()) for rule in (EXACT, URL, NEAR)},
            "largest": self._largest(choice),
        }
        return decisions[np.argsort(decisions["document"], kind="stable")], counts

    def _choose(self, progress: Progress) -> LeaderChoice:
        total, done = empty_choice(len(self._numbers)), 0
        for low, high in _groups(self._bounds):
            for start, part in self._choose_group(low, high, progress):
                end = start + len(part.rule)
                total.leader[start:end] = np.where(part.leader < 0, -1, part.leader + low)
                total.rule[start:end] = part.rule
                total.similarity[start:end] = part.similarity
                amount = self._job.bytes * end // len(self._numbers) - done
                done += amount
                progress(amount)
        progress(self._job.bytes - done)
        return total

    def _choose_group(self, low: int, high: int, progress: Progress) -> Iterator[tuple[int, LeaderChoice]]:
        """(place of the first, choice among some) of whole clusters. If they are many, their sets are read twice."""
        places, sets = np.arange(low, high), None
        if high - low <= BLOCK:
            sets = self._sets(places)
            frequencies, sizes = self._count([sets])
        else:
            # In the order of the disk, which is not that of ranks.
            order = np.argsort(self._members["exact"][low:high], kind="stable")
            slabs = (self._sets(low + order[start : start + BLOCK]) for start in range(0, high - low, BLOCK))
            frequencies, found = self._count(slabs, -(-(high - low) // BLOCK), progress)
            sizes = np.empty_like(found)
            sizes[order] = found
        exact, url = (np.unique(self._members[name][low:high], return_inverse=True)[1] for name in ("exact", "url"))
        settings = self._job.settings
        leaders = make_leaders(self._job.engine, settings.min_similarity, frequencies, settings.bands, high - low)
        for start, end in _blocks(sizes):
            shingles, starts = sets or self._sets(places[start:end])
            bands = self._bands(low + start, low + end)
            members = Members(
                shingles, starts, bands, exact[start:end], url[start:end], self._roles[low + start : low + end]
            )
            for first in range(0, end - start, _STRETCH):
                last = min(first + _STRETCH, end - start)
                yield low + start + first, leaders.add(members.part(first, last))

    @staticmethod
    def _count(
        slabs: Iterable[Sets], number: int = 1, progress: Progress = lambda amount: None
    ) -> tuple[Frequencies, npt.NDArray[np.int64]]:
        """Frequencies of the shingles of all sets, and the size of each set."""
        frequencies: Frequencies | None = None
        sizes = [np.zeros(0, np.int64)]
        for shingles, starts in slabs:
            frequencies = frequencies or Frequencies(len(shingles) * number)
            frequencies.add(shingles, starts)
            sizes.append(np.diff(starts))
            progress(0)  # a sign of life
        return frequencies or Frequencies(0), np.concatenate(sizes)

    def _sets(self, places: npt.NDArray[np.int64]) -> Sets:
        """Sets of shingles of documents; that of an equal one if there is one before."""
        members = self._members[places]
        compared = np.flatnonzero(members["shingles"] != NO_SHINGLES)
        numbers, sections = (np.ascontiguousarray(members[name][compared]) for name in ("exact", "shingles"))
        shingles, bounds = read_sets(self._job.scope, self._compared, numbers, sections)
        sizes = np.zeros(len(places), np.int64)
        sizes[compared] = np.diff(bounds)
        return shingles, np.append(0, np.cumsum(sizes))

    def _bands(self, low: int, high: int) -> Numbers:
        """Hashes of the bands of documents that have a set, uint64 of shape (documents, bands)."""
        settings = self._job.settings
        bands = np.zeros((high - low, settings.bands), np.uint64)
        places = np.flatnonzero(self._members["shingles"][low:high] != NO_SHINGLES)
        for chunk, inside, rows in self._compared.by_chunk(self._numbers[low:high][places]):
            order = np.argsort(rows)  # ascending rows are read in the order of the disk
            where = places[inside[order]]
            signatures = self._signatures(chunk, rows[order], self._checks[low + where])
            bands[where] = band_hashes(signatures, settings.bands)
        return bands

    def _signatures(
        self, chunk: int, rows: npt.NDArray[np.int64], checks: npt.NDArray[np.uint32]
    ) -> npt.NDArray[np.uint32]:
        """Signatures of rows of a chunk, checked."""
        each = self._compared.chunks[chunk]
        path = each.path(SIGNATURES)
        with each.reading():
            shape = (each.chunk.records, self._job.settings.values)
            found = read_rows(path, "measure", np.dtype("<u4"), shape, rows)
            if not np.array_equal(signature_checks(found), checks):
                raise DamagedResult(path, "measure", "a signature is not as it was written")
        return found

    def _largest(self, choice: LeaderChoice) -> list[list[int]]:
        """[documents, removed ones, document that wins] of the largest clusters."""
        sizes = np.diff(self._bounds)
        removed = np.add.reduceat(choice.rule != 0, self._bounds[:-1], dtype=np.int64) if len(sizes) else sizes
        first = self._numbers[self._bounds[:-1]]
        order = np.lexsort([first, -sizes])[:MAX_SHOWN]
        return [[int(sizes[each]), int(removed[each]), int(first[each])] for each in order]


def _groups(bounds: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Ranges of whole clusters, of at most `BLOCK` documents unless one cluster has more."""
    first = 0
    while first < len(bounds) - 1:
        end = int(np.searchsorted(bounds, bounds[first] + BLOCK, "right")) - 1
        end = max(end, first + 1)
        yield int(bounds[first]), int(bounds[end])
        first = end


def _blocks(sizes: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Ranges of sets of at most `ROOM` shingles, unless one has more."""
    ends = np.cumsum(sizes)
    low = 0
    while low < len(sizes):
        before = int(ends[low - 1]) if low else 0
        high = max(int(np.searchsorted(ends, before + ROOM, "right")), low + 1)
        yield low, high
        low = high


def choose_jobs(
    folder: Path,
    scope: Path,
    chunks: Path,
    members: list[ResultFile],
    shingles: list[dict[str, Any]],
    ranks: list[dict[str, Any]],
    settings: ChooseSettings,
    engine: Literal["numba", "python"],
) -> list[ReceiptJob]:
    """Jobs of the pass.

    Args:
        folder: of the choices.
        scope: folder of the scope.
        chunks: of `write_compared`.
        members: files of `join`.
        shingles: receipts of that pass; none without signatures.
        ranks: receipts of `rank`.
        settings: of the pass.
        engine: of the comparison.
    """
    compared = read_compared(chunks)
    hashes = [about["xxh3"] for receipt in [*shingles, *ranks] for about in receipt["files"].values()]
    common = value_hash([CHOOSE_VERSION, vars(settings), compared.names, hashes, compared.hashes(SIGNATURES)])
    jobs: list[ReceiptJob] = []
    for number, file in enumerate(members):
        inputs = value_hash([common, file.xxh3])
        size = file.size // MEMBER.itemsize * (settings.values * 4 + MEMBER.itemsize)
        jobs.append(ChooseJob(folder, f"choose-{number:05d}", inputs, size, file, scope, chunks, settings, engine))
    return jobs


def make_leaders(
    engine: Literal["numba", "python"], bound: float, frequencies: Frequencies, bands: int, documents: int
) -> Leaders:
    """Leaders of an engine; `python` uses NumPy.

    Args:
        engine: their choices are the same.
        bound: of the similarity.
        frequencies: of the shingles of all documents.
        bands: number of bands.
        documents: of all blocks.
    """
    if engine == "numba":
        from pipeline.data.curate.duplicates.leaders.compiled import CompiledLeaders

        return CompiledLeaders(bound, frequencies, bands, documents)
    from pipeline.data.curate.duplicates.leaders.plain import PlainLeaders

    return PlainLeaders(bound, frequencies)
