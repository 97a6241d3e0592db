"""Models with recurrences train on tested combinations as on one process, also where a state goes over a cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipeline.train.parallel.parallelize import parallelize
from pipeline.train.parallel.setup import Setup
from pipeline.train.parallel.tested import OVERLAPPED, TESTED, WITHIN_LAYERS, Combination
from pipeline.train.planning.fake import fake_mesh
from tests.train.distributed.ranks import Ranks
from tests.train.parallel import layouts
from tests.train.planning.steps import case_config, of_case

pytestmark = pytest.mark.parallel


COVERING = ("tp2", "reshard-cp2-all_gather")
"""Rows without a mark."""
GUARD = (
    *("fsdp2-reshard", "tp2-no_sp", "pp2-1f1b", "pp2-zbv", "reshard-cp2-ulysses", "reshard-cp2-all_gather-tp2"),
    *("tp2-selective", "fsdp2-reshard-full", "fsdp2-keep-tp2", "pp2-zbv-keep-cp2-all_gather"),
    *("tp4", "reshard-cp4-all_gather"),
)
"""Those of guard tests. The rest are slow."""


ROWS = (*TESTED, *WITHIN_LAYERS, *OVERLAPPED)


@pytest.mark.parametrize(("row", "family"), layouts.in_turn(ROWS, layouts.RECURRENT_FAMILIES, COVERING, GUARD))
def test_a_layout_computes_what_one_process_does(
    families: Path, processes: Callable[[int], Ranks], row: Combination, family: str
) -> None:
    assert layouts.compare(families, family, row, processes(row.layout.world_size)) == []


@pytest.mark.parametrize(("method", "pieces"), [("all_gather", 8), ("ulysses", 4)])
def test_short_texts_are_filled_up_to_pieces_that_a_convolution_needs(method: str, pieces: int) -> None:
    config = case_config("mamba, cp2", parallel={"cp": 4, "cp_method": method})
    layout, spec, _ = of_case(config)
    with fake_mesh(layout, 0) as mesh:
        multiple = parallelize(config, Setup(torch.device("meta"), mesh, spec)).sequence_multiple
    assert multiple % pieces == 0 and multiple // pieces >= 3  # of four taps
