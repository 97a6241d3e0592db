"""Models with recurrences train on tested combinations as on one process, also where a state goes over a cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.train.distributed.process_group import destroy
from pipeline.train.parallel.parallelize import parallelize
from pipeline.train.parallel.setup import Setup
from pipeline.train.parallel.tested import OVERLAPPED, TESTED, WITHIN_LAYERS, Combination
from pipeline.train.planning.fake import fake_mesh
from tests import tiers
from tests.train.distributed.ranks import Ranks
from tests.train.parallel import layouts
from tests.train.planning.steps import case_config, of_case

pytestmark = pytest.mark.parallel


COVERING = ()
"""Rows without a mark."""
GUARD = ("reshard-cp2-all_gather", "tp2", "reshard-cp2-ulysses", "fsdp2-keep-tp2")
"""Those of guard tests. The rest are slow."""


ROWS = (*TESTED, *WITHIN_LAYERS, *OVERLAPPED)


@pytest.mark.parametrize(("row", "family"), layouts.in_turn(ROWS, layouts.RECURRENT_FAMILIES, COVERING, GUARD))
def test_a_layout_computes_what_one_process_does(
    families: Path, processes: Callable[[int], Ranks], row: Combination, family: str
) -> None:
    assert layouts.compare(families, family, row, processes(row.layout.world_size)) == []


BESIDE = {
    "pp2-zbv-keep-cp2-ulysses": "slow",
    "fsdp2-keep-tp2": "slow",
    **dict.fromkeys(("tp2", "tp2-no_sp", "fsdp2-reshard", "pp2-1f1b", "pp2-interleaved_1f1b", "pp2-dualpipev"), "slow"),
    **dict.fromkeys(
        ("reshard-cp2-all_gather", "reshard-cp2-ulysses", "reshard-cp4-all_gather", "reshard-cp2-all_gather-tp2"),
        "slow",
    ),
    **dict.fromkeys(("tp2-selective", "fsdp2-reshard-full", "fsdp2-reshard-compiled", "pp2-zbv-full"), "slow"),
    **dict.fromkeys(("reshard-cp2-all_gather-tp2",), "slow"),
}
"""Rows with all kinds of layers in one model, and their tier."""


def beside_cases() -> Iterator[Any]:
    rows = {row.name: row for row in ROWS}
    for name, tier in BESIDE.items():
        row = replace(rows[name], depth=6)
        yield pytest.param(row, id=name, marks=[*layouts.trains(row.kind.schedule or ""), getattr(pytest.mark, tier)])


@pytest.mark.parametrize("row", list(beside_cases()))
def test_all_kinds_of_layers_beside_each_other(
    families: Path, processes: Callable[[int], Ranks], row: Combination
) -> None:
    assert layouts.compare(families, "every", row, processes(row.layout.world_size)) == []


@pytest.mark.slow
@pytest.mark.parametrize("family", tiers.first(1, ["delta", "mamba"], rest="slow"))
def test_a_run_goes_on_from_layout_to_layout(families: Path, processes: Callable[[int], Ranks], family: str) -> None:
    """Each step is made on another layout, with the weights and moments of the one before."""
    chain: list[tuple[int, dict[str, Any]]] = [
        (layouts.SEED_STEP, {}),
        (3, {"dp_shard": 2, "cp": 2}),
        (4, {"tp": 2}),
        (5, {"pp": 2}),
        (6, {"cp": 2, "cp_method": "ulysses"}),
        (7, {}),
    ]
    assert layouts.compare_chain(families, family, chain, processes) == []


@pytest.mark.parametrize(("method", "pieces"), [("all_gather", 8), ("ulysses", 4)])
def test_short_texts_are_filled_up_to_pieces_that_a_convolution_needs(method: str, pieces: int) -> None:
    destroy()  # what other tests have left in this process
    config = case_config("mamba, cp2", parallel={"cp": 4, "cp_method": method})
    layout, spec, _ = of_case(config)
    with fake_mesh(layout, 0) as mesh:
        multiple = parallelize(config, Setup(torch.device("meta"), mesh, spec)).sequence_multiple
    assert multiple % pieces == 0 and multiple // pieces >= 3  # of four taps
