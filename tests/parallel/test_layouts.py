"""Every combination of `TESTED` trains as one process does: losses, gradients, norms, weights, and the same data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.train.parallel.tested import TESTED, Combination
from tests.parallel import layouts
from tests.parallel.ranks import Ranks

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    layouts.write(folder)
    return folder


def cases() -> Iterator[Any]:
    """Every row with each family. Those of more than four processes take long, and one family of the others will do."""
    for number, row in enumerate(TESTED):
        for place, family in enumerate(("llama", "gpt2")):
            quick = row.layout.world_size <= 4 and number % 2 == place
            yield pytest.param(row, family, id=f"{row.name}-{family}", marks=[] if quick else [pytest.mark.slow])


@pytest.mark.parametrize(("row", "family"), list(cases()))
def test_a_layout_computes_what_one_process_does(
    root: Path, processes: Callable[[int], Ranks], row: Combination, family: str
) -> None:
    assert layouts.compare(root, family, row, processes(row.layout.world_size)) == []
