from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.parallel.ranks import Ranks

MOST_CALLS = 16
"""Runs of the same processes. Each leaves the groups of its mesh behind, with their connections and threads."""


@pytest.fixture(scope="module")
def processes() -> Iterator[Callable[[int], Ranks]]:
    """So many processes, kept from one test to the next: what torch has worked out once it need not again."""
    kept: dict[int, Ranks] = {}

    def get(world: int) -> Ranks:
        if world in kept and (kept[world].calls >= MOST_CALLS or kept[world].failed):
            kept.pop(world).close()
        if world not in kept:
            kept[world] = Ranks(world, connect=False)
        return kept[world]

    yield get
    for these in kept.values():
        these.close()
