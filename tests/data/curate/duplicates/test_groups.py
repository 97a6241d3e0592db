"""Groups of equal hashes, and components, against plain Python."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.curate.duplicates.components.vectorized import make_components
from pipeline.data.curate.duplicates.groups import group_order, group_sizes
from pipeline.data.work.sorted_runs import bucket_range

# Hashes that agree in their upper 32 bits, and some that take turns there.
_NEAR = st.integers(0, 5).flatmap(lambda high: st.integers(0, 3).map(lambda low: high << 60 | low))
_HASHES = st.one_of(_NEAR, st.integers(0, 2**64 - 1))


@given(
    rows=st.lists(st.tuples(_HASHES, st.integers(0, 2)), max_size=40), bucket=st.integers(0, 2), has_rest=st.booleans()
)
@settings(max_examples=300)
def test_groups(rows: list[tuple[int, int]], bucket: int, has_rest: bool) -> None:
    first, end = bucket_range(bucket, 3)
    rows = [row for row in rows if first <= row[0] < end]
    hashes = np.array([row[0] for row in rows], np.uint64)
    rest = np.array([row[1] for row in rows], np.uint64) if has_rest else None
    order, begins = group_order(first, end, hashes, rest)
    expected = defaultdict(list)
    for place, row in enumerate(rows):
        expected[row if has_rest else row[0]].append(place)
    starts, sizes = group_sizes(begins)
    found = [order[start : start + size].tolist() for start, size in zip(starts, sizes, strict=True)]
    assert sorted(found) == sorted(expected.values())


def _by_search(vertices: int, edges: list[tuple[int, int]]) -> list[int]:
    """Least member of each component, by breadth-first search."""
    beside = defaultdict(list)
    for one, other in edges:
        beside[one].append(other)
        beside[other].append(one)
    roots = [-1] * vertices
    for start in range(vertices):
        queue = [start] if roots[start] < 0 else []
        while queue:
            place = queue.pop()
            if roots[place] < 0:
                roots[place] = start
                queue += beside[place]
    return roots


def _roots(engine: Literal["numba", "python"], vertices: int, edges: list[tuple[int, int]], block: int) -> Any:
    components = make_components(engine, vertices)
    array = np.array(edges, np.uint32).reshape(-1, 2)
    for start in range(0, len(array), block):
        components.add(array[start : start + block, 0].copy(), array[start : start + block, 1].copy())
    return components.roots().tolist()


@pytest.mark.parametrize("engine", ["python", "numba"])
@given(data=st.data())
@settings(max_examples=100)
def test_components(engine: Literal["numba", "python"], data: st.DataObject) -> None:
    if engine == "numba":
        pytest.importorskip("numba")
    vertices = data.draw(st.integers(1, 30))
    place = st.integers(0, vertices - 1)
    edges = data.draw(st.lists(st.tuples(place, place), max_size=60))
    block = data.draw(st.integers(1, 61))
    assert _roots(engine, vertices, edges, block) == _by_search(vertices, edges)


@pytest.mark.parametrize("engine", ["python", "numba"])
def test_components_of_paths_and_stars(engine: Literal["numba", "python"]) -> None:
    if engine == "numba":
        pytest.importorskip("numba")
    count = 20_000
    order = np.random.default_rng(0).permutation(count).tolist()
    path = list(itertools.pairwise(order))
    assert _roots(engine, count, path, 5000) == [0] * count
    assert _roots(engine, count, [(place, place + 1) for place in range(count - 1)], 2**20) == [0] * count
    star = [(count - 1, place) for place in range(1, count - 1)]
    assert _roots(engine, count, star, 777) == [0] + [1] * (count - 1)
