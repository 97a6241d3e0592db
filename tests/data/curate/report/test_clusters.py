"""Clusters against a count in a dictionary, with any number of passes."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from pipeline.data.curate.files import NOBODY, VERDICT
from pipeline.data.curate.report.clusters import LARGEST, MEMBERS, VerdictFile, clusters, members_of
from pipeline.data.curate.scope import document


@pytest.fixture
def files(tmp_path: Path) -> list[VerdictFile]:
    chance = np.random.default_rng(4)
    found = []
    for unit in range(5):
        verdicts = np.zeros(300, VERDICT)
        verdicts["kept"] = NOBODY
        rows = chance.random(300) < 0.6
        # Few large clusters and many small ones, in two sources.
        keepers = [document(int(n) % 2, int(n) % 3, int(n)) for n in chance.zipf(1.3, rows.sum()) % 10**6]
        verdicts["kept"][rows] = keepers
        verdicts["rule"][rows], verdicts["value"][rows] = 9, chance.random(rows.sum())
        path = tmp_path / f"{unit}.verdicts"
        verdicts.tofile(path)
        found.append(VerdictFile(path, unit, 10 * unit))
    return found


@pytest.mark.parametrize("room", [10**6, 300, 50])
def test_sizes_and_the_largest(files: list[VerdictFile], room: int) -> None:
    members = defaultdict(list)
    for file in files:
        for row, verdict in enumerate(file.read()):
            if verdict["kept"] != NOBODY:
                value = float(verdict["value"])
                members[int(verdict["kept"])].append([file.unit, file.first + row, value, int(verdict["rule"])])
    sizes = Counter(map(len, members.values()))
    largest = sorted(members, key=lambda keeper: (-len(members[keeper]), keeper))[:LARGEST]
    found = clusters(files, sum(map(len, members.values())), room)
    assert found["sizes"] == [[size, sizes[size]] for size in sorted(sizes)]
    assert found["largest"] == [[keeper, len(members[keeper]), members[keeper][:MEMBERS]] for keeper in largest]
    assert [list(one) for one in members_of(files, largest[0])] == members[largest[0]]


def test_without_duplicates(tmp_path: Path) -> None:
    assert clusters([], 0) == {"sizes": [], "largest": []}
