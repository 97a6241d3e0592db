from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.parallel.ranks import Ranks, kept_ranks


@pytest.fixture(scope="module")
def processes() -> Iterator[Callable[[int], Ranks]]:
    """So many processes, kept from one test to the next."""
    with kept_ranks() as get:
        yield get
