"""Models with recurrences train on tested combinations as on one process, also where a state goes over a cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.train.parallel.tested import OVERLAPPED, TESTED, WITHIN_LAYERS, Combination
from tests.train.distributed.ranks import Ranks
from tests.train.parallel import layouts

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    layouts.write(folder)
    return folder


COVERING = ("tp2", "reshard-cp2-all_gather")
"""Rows without a mark."""
GUARD = (
    *("fsdp2-reshard", "tp2-no_sp", "pp2-1f1b", "pp2-zbv", "reshard-cp2-ulysses", "reshard-cp2-all_gather-tp2"),
    *("tp2-selective", "fsdp2-reshard-full", "fsdp2-keep-tp2", "pp2-zbv-keep-cp2-all_gather"),
    *("tp4", "reshard-cp4-all_gather"),
)
"""Those of guard tests. The rest are slow."""


def cases() -> Iterator[Any]:
    """Every row with every family; quick is one of them, in turn."""
    families = list(layouts.RECURRENT_FAMILIES)
    for number, row in enumerate((*TESTED, *WITHIN_LAYERS, *OVERLAPPED)):
        for place, family in enumerate(families):
            marks = [pytest.mark.slow]
            if number % len(families) == place and row.name in (*COVERING, *GUARD):
                marks = [] if row.name in COVERING else [pytest.mark.guard]
            marks = [*layouts.trains(row.kind.schedule or ""), *marks]
            yield pytest.param(row, family, id=f"{row.name}-{family}", marks=marks)


@pytest.mark.parametrize(("row", "family"), list(cases()))
def test_a_layout_computes_what_one_process_does(
    root: Path, processes: Callable[[int], Ranks], row: Combination, family: str
) -> None:
    assert layouts.compare(root, family, row, processes(row.layout.world_size)) == []
