"""Pass `choose`: which document goes for which kept one. A job is a file of whole clusters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pipeline.common.hashing import value_hash
from pipeline.data.curate.duplicates.compared import Compared, read_compared
from pipeline.data.curate.duplicates.files import DECISION, MEMBER, ResultFile
from pipeline.data.curate.duplicates.kinds import CHECK_COLUMN, SIGNATURES
from pipeline.data.curate.duplicates.leaders.leader_choice import (
    CAN_LEAD,
    CANNOT_LEAD,
    EXACT,
    LARGE,
    MUST_LEAD,
    NEAR,
    URL,
    ChooseLarge,
    ChooseSmall,
    LeaderChoice,
    Members,
    choose_large,
    choose_numpy,
    empty_choice,
)
from pipeline.data.curate.duplicates.rank import ABSENT, REMOVED, WINNER, rank_keys, read_ranks, read_rows
from pipeline.data.curate.duplicates.signature import NO_VALUE, fewest_equal, signature_checks
from pipeline.data.curate.passes.jobs import CurationJob
from pipeline.data.work.sorted_runs import DamagedResult, write_sections
from pipeline.data.work.worker_pool import Progress

CHOOSE_VERSION = 1
MAX_SHOWN = 20
_BLOCK = 2**16
"""Documents of a large cluster at a time."""
Numbers = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class ChooseSettings:
    """Settings of the pass.

    Attributes:
        bands: number; 0 without signatures.
        values: of a signature.
        min_similarity: share of equal values.
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

    @property
    def fewest(self) -> int:
        """Equal values from which on two documents resemble each other."""
        return fewest_equal(self.min_similarity, self.values)


@dataclass(frozen=True)
class ChooseJob(CurationJob):
    """The clusters of a file of `join`."""

    members: ResultFile
    chunks: Path
    settings: ChooseSettings
    engine: Literal["numba", "python"]

    @property
    def receipt(self) -> Path:
        return self.folder / "receipts" / f"{self.name}.json"

    @property
    def file(self) -> str:
        """Name of its file in `folder`: in sections, one per chunk."""
        return f"chosen/{self.members.path.name}"

    def run(self, progress: Progress) -> dict[str, Any]:
        """Write the documents that go, ascending.

        Raises:
            DamagedResult: a file is not as it was written.
        """
        compared = read_compared(self.chunks)
        clusters = _Clusters(self, compared)
        progress(self.bytes // 2)
        decisions, counts = clusters.decide()
        chunks = compared.own_chunks
        places = compared.places(np.ascontiguousarray(decisions["document"]))
        bounds = np.searchsorted(places, np.arange(chunks + 1))
        (self.folder / "chosen").mkdir(exist_ok=True)
        with write_sections(self.folder / self.file, decisions, bounds) as file:
            receipt = self.commit({self.file: file}, counts)
        progress(self.bytes - self.bytes // 2)
        return receipt


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

    def decide(self) -> tuple[npt.NDArray[Any], dict[str, Any]]:
        """(documents that go, counts)."""
        choice = self._choose()
        gone = np.flatnonzero(choice.rule)
        decisions = np.zeros(len(gone), DECISION)
        decisions["document"] = self._numbers[gone]
        decisions["kept"] = self._numbers[choice.leader[gone]]
        decisions["rule"] = choice.rule[gone]
        near = choice.rule[gone] == NEAR
        values = max(self._job.settings.values, 1)
        decisions["value"] = np.where(near, choice.equal[gone] / values, 1)
        estimates = np.bincount(choice.equal[gone][near], minlength=self._job.settings.values + 1)
        counts = {
            "documents": len(self._numbers),
            "clusters": len(self._bounds) - 1,
            "removed": {str(rule): int((choice.rule == rule).sum()) for rule in (EXACT, URL, NEAR)},
            "estimates": estimates.tolist(),
            "largest": self._largest(choice),
        }
        return decisions[np.argsort(decisions["document"], kind="stable")], counts

    def _choose(self) -> LeaderChoice:
        """Small clusters together, large ones in blocks."""
        settings = self._job.settings
        sizes = np.diff(self._bounds)
        total = empty_choice(len(self._numbers))
        small = np.repeat(sizes <= LARGE, sizes)
        where = np.flatnonzero(small)
        bounds = np.append(0, np.cumsum(sizes[sizes <= LARGE]))
        function = choose_small(self._job.engine)
        _put(total, where, function(self._load(where), bounds, settings.bands, settings.fewest), where)
        large = choose_in_one(self._job.engine)
        for cluster in np.flatnonzero(sizes > LARGE).tolist():
            places = np.arange(self._bounds[cluster], self._bounds[cluster + 1])
            blocks = (self._load(places[low : low + _BLOCK]) for low in range(0, len(places), _BLOCK))
            _put(total, places, large(blocks, settings.bands, settings.fewest), places)
        return total

    def _load(self, places: npt.NDArray[np.int64]) -> Members:
        values = self._job.settings.values
        signatures = np.full((len(places), values), NO_VALUE, np.uint32)
        if self._job.settings.bands:
            for chunk, inside, rows in self._compared.by_chunk(self._numbers[places]):
                # Ascending rows are read in the order of the disk.
                where = inside[np.argsort(rows)]
                signatures[where] = self._signatures(chunk, np.sort(rows), self._checks[places[where]])
        members = self._members[places]
        return Members(
            signatures,
            (signatures != NO_VALUE).any(axis=1) if values else np.zeros(len(places), np.bool_),
            np.ascontiguousarray(members["exact"]),
            np.ascontiguousarray(members["url"]),
            self._roles[places],
        )

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


def _put(total: LeaderChoice, where: npt.NDArray[np.int64], part: LeaderChoice, places: npt.NDArray[np.int64]) -> None:
    """Put the outcome of some documents among those of all."""
    total.leader[where] = np.where(part.leader < 0, -1, places[part.leader]) if len(places) else part.leader
    total.rule[where] = part.rule
    total.equal[where] = part.equal


def choose_jobs(
    folder: Path,
    chunks: Path,
    members: list[ResultFile],
    ranks: list[dict[str, Any]],
    settings: ChooseSettings,
    engine: Literal["numba", "python"],
) -> list[CurationJob]:
    """Jobs of the pass.

    Args:
        folder: of the choices.
        chunks: of `write_compared`.
        members: files of `join`.
        ranks: receipts of `rank`.
        settings: of the pass.
        engine: of the comparison.
    """
    compared = read_compared(chunks)
    hashes = [about["xxh3"] for receipt in ranks for about in receipt["files"].values()]
    common = value_hash([CHOOSE_VERSION, vars(settings), compared.names, hashes, compared.hashes(SIGNATURES)])
    jobs: list[CurationJob] = []
    for number, file in enumerate(members):
        inputs = value_hash([common, file.xxh3])
        size = file.size // MEMBER.itemsize * (settings.values * 4 + MEMBER.itemsize)
        jobs.append(ChooseJob(folder, f"choose-{number:05d}", inputs, size, file, chunks, settings, engine))
    return jobs


def choose_small(engine: Literal["numba", "python"]) -> ChooseSmall:
    """Function of an engine; `python` uses NumPy."""
    if engine == "numba":
        from pipeline.data.curate.duplicates.leaders.compiled import choose_compiled

        return choose_compiled
    return choose_numpy


def choose_in_one(engine: Literal["numba", "python"]) -> ChooseLarge:
    """Function of an engine for a large cluster."""
    if engine == "numba":
        from pipeline.data.curate.duplicates.leaders.large_compiled import choose_large_compiled

        return choose_large_compiled
    return choose_large
