"""Models with experts train on every tested combination as on one process, choices and biases included."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.train.parallel.tested import OF_EXPERTS, Combination
from tests.train.distributed.ranks import Ranks
from tests.train.parallel import layouts

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    layouts.write(folder)
    return folder


def cases() -> Iterator[Any]:
    """Every row, with the families in turn."""
    families = list(layouts.EXPERT_FAMILIES)
    for number, row in enumerate(OF_EXPERTS):
        for place, family in enumerate(families):
            marks = layouts.trains(row.kind.schedule or "")
            if number % len(families) != place:
                marks = [*marks, pytest.mark.slow]
            yield pytest.param(row, family, id=f"{row.name}-{family}", marks=marks)


@pytest.mark.parametrize(("row", "family"), list(cases()))
def test_a_layout_computes_what_one_process_does(
    root: Path, processes: Callable[[int], Ranks], row: Combination, family: str
) -> None:
    assert layouts.compare(root, family, row, processes(row.layout.world_size)) == []
