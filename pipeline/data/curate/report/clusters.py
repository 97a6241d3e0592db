"""Clusters of duplicates: a kept document and those that were removed for it. Read from the verdicts alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.data.curate.files import NOBODY, VERDICT

LARGEST = 20
"""Clusters that are listed."""
MEMBERS = 10
"""Members of each that are listed."""
_ROOM = 2**26
"""Keepers that are counted at a time, at most: 0.5 GiB and as much again for sorting."""


@dataclass(frozen=True)
class VerdictFile:
    """Verdicts of a chunk.

    Attributes:
        path: of the file.
        unit: number of the unit.
        first: row in the unit of its first record.
    """

    path: Path
    unit: int
    first: int

    def read(self) -> npt.NDArray[Any]:
        """The verdicts, in the order of the rows."""
        return np.fromfile(self.path, VERDICT)


def clusters(files: Sequence[VerdictFile], duplicates: int, room: int = _ROOM) -> dict[str, Any]:
    """Sizes of clusters and the largest ones.

    Args:
        files: all verdicts of a source, ascending by (unit, row).
        duplicates: documents that name a kept one, from the statistics.
        room: keepers held in memory at a time; for more, the files are read several times.

    Returns:
        `sizes`: for each number of removed documents, the clusters that have it: [number, clusters] ascending;
        `largest`: of each [keeper, removed documents, [[unit, row, value, rule], ...]], the first `MEMBERS` of them.
        Documents of other sources that were removed for the same one are in the report of these.
    """
    passes = max(1, -(-duplicates // room))
    sizes: dict[int, int] = {}
    largest: list[tuple[int, int]] = []
    for number in range(passes):
        keepers, counts = _keepers(files, number, passes)
        for size, times in zip(*np.unique(counts, return_counts=True), strict=True):
            sizes[int(size)] = sizes.get(int(size), 0) + int(times)
        order = np.lexsort((keepers, -counts))[:LARGEST]
        found = zip((-counts[order]).tolist(), keepers[order].tolist(), strict=True)
        largest = sorted([*largest, *found])[:LARGEST]
    members = _members(files, [keeper for _, keeper in largest])
    return {
        "sizes": [[size, sizes[size]] for size in sorted(sizes)],
        "largest": [[keeper, -count, members[keeper]] for count, keeper in largest],
    }


def members_of(files: Iterable[VerdictFile], keeper: int) -> Iterator[tuple[int, int, float, int]]:
    """(unit, row, value, rule) of the documents of a source that were removed for a kept one."""
    for file in files:
        verdicts = file.read()
        for row in np.flatnonzero(verdicts["kept"] == np.uint64(keeper)).tolist():
            yield file.unit, file.first + row, float(verdicts["value"][row]), int(verdicts["rule"][row])


def _keepers(
    files: Sequence[VerdictFile], number: int, passes: int
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """Keepers of one of several classes, and the documents that each has removed."""
    found = [np.zeros(0, np.uint64)]
    for file in files:
        kept = file.read()["kept"]
        kept = kept[kept != np.uint64(NOBODY)]
        found.append(kept[kept % np.uint64(passes) == np.uint64(number)] if passes > 1 else kept)
    keepers, counts = np.unique(np.concatenate(found), return_counts=True)
    return keepers, counts.astype(np.int64)


def _members(files: Sequence[VerdictFile], keepers: Sequence[int]) -> dict[int, list[list[Any]]]:
    members: dict[int, list[list[Any]]] = {keeper: [] for keeper in keepers}
    wanted = np.array(sorted(keepers), np.uint64)
    for file in files if keepers else ():
        verdicts = file.read()
        for row in np.flatnonzero(np.isin(verdicts["kept"], wanted)).tolist():
            of_keeper = members[int(verdicts["kept"][row])]
            if len(of_keeper) < MEMBERS:
                value, rule = float(verdicts["value"][row]), int(verdicts["rule"][row])
                of_keeper.append([file.unit, file.first + row, value, rule])
    return members
