"""Encoder-decoders train on tested combinations as on one process, wherever a pipeline cuts their sides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.config.parallel import ZERO_BUBBLE
from pipeline.train.parallel.tested import OVERLAPPED, TESTED, WITHIN_LAYERS, Combination
from tests.train.distributed.ranks import Ranks
from tests.train.parallel import layouts

GUARD = ("pp2-1f1b", "tp2", "fsdp2-reshard")
"""Rows of guard tests. The rest are slow."""
ROWS = [
    row
    for row in (*TESTED, *WITHIN_LAYERS, *OVERLAPPED)
    if row.layout.cp == 1 and row.layers_per_stage is None and row.depth is None
]


def possible(row: Combination, family: str) -> bool:
    return family != "t5" or row.layout.pp == 1 or row.schedule not in ZERO_BUBBLE


@pytest.mark.parallel
@pytest.mark.parametrize(("row", "family"), layouts.in_turn(ROWS, layouts.SIDED_FAMILIES, (), GUARD, possible))
def test_a_layout_computes_what_one_process_does(
    families: Path, processes: Callable[[int], Ranks], row: Combination, family: str
) -> None:
    assert layouts.compare(families, family, row, processes(row.layout.world_size)) == []
