"""Models with experts train on every tested combination as on one process, choices and biases included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.train.distributed.layout import Layout
from pipeline.train.model.mlps.experts.routing import Routing
from pipeline.train.parallel.mesh import Mesh
from pipeline.train.parallel.tested import OF_EXPERTS, Combination
from tests import tiers
from tests.train.distributed.ranks import RankFailed, Ranks
from tests.train.parallel import layouts
from tests.train.runs import column

pytestmark = pytest.mark.parallel


COVERING = ("fsdp2-reshard-ep2",)
"""Rows without a mark."""
GUARD = ("tp2-no_sp-ep2", "reshard-cp2-all_gather-ep2", "fsdp2-keep-tp2-ep4")
"""Those of guard tests. The rest are slow."""


def is_possible(row: Combination, family: str) -> bool:
    """False of what a rule refuses."""
    count: int = layouts.EXPERT_FAMILIES[family]["model.experts"]["count"]
    return count % row.layout.ep == 0


CASES = layouts.in_turn(OF_EXPERTS, layouts.EXPERT_FAMILIES, COVERING, GUARD, is_possible)


@pytest.mark.parametrize(("row", "family"), CASES)
def test_a_layout_computes_what_one_process_does(
    families: Path, processes: Callable[[int], Ranks], row: Combination, family: str
) -> None:
    assert layouts.compare(families, family, row, processes(row.layout.world_size)) == []


@pytest.mark.guard
def test_losses_of_routers_have_the_scale_of_fp16(families: Path, processes: Callable[[int], Ranks]) -> None:
    norms = []
    for compute in ("fp32", "fp16"):
        run = families / f"mixtral-{compute}"
        values = [
            f"run.dir={run}",
            "train.duration=1 steps",
            "train.schedule={type: constant}",
            "train.balance.loss=10",
        ]
        ranks = processes(2)
        ranks.call(
            layouts.train,
            families / "mixtral.yaml",
            [*values, "parallel={dp_shard: 2, ep: 2}", f"train.precision.compute={compute}"],
        )
        norms += column(run, "grad_norm")
    assert norms[1] == pytest.approx(norms[0], rel=1e-2)


@pytest.mark.slow
def test_fewer_experts_than_shards_are_cut_each(families: Path, processes: Callable[[int], Ranks]) -> None:
    row = next(each for each in OF_EXPERTS if each.name == "fsdp2-reshard-tp2")
    assert layouts.compare(families, "few", row, processes(4)) == []


@pytest.mark.guard
def test_metrics_are_the_same_where_the_loss_counts_for_nothing(
    families: Path, processes: Callable[[int], Ranks]
) -> None:
    row = next(each for each in OF_EXPERTS if each.name == "tp2")
    assert layouts.compare(families, "loose", row, processes(2)) == []


def break_mesh() -> None:
    """Experts are sharded over the mesh of the other parameters, and not over tp."""
    role = Mesh.role
    Mesh.role = lambda self, name: role(self, "params" if name == "experts" else name)  # type: ignore[assignment,method-assign]


def break_divisor() -> None:
    """Losses of routers are divided by the number of micro-batches."""
    losses = Routing.losses
    Routing.losses = lambda *args: tuple(each / 2 for each in losses(*args))  # type: ignore[assignment,method-assign]


def break_counts() -> None:
    """Choices are counted by this rank's share of a sample alone."""
    Routing.counts_of_samples = lambda self, counts_BE: counts_BE  # type: ignore[method-assign]


@pytest.mark.guard
@pytest.mark.parametrize(
    ("broken", "degrees"),
    tiers.first(
        1,
        [(break_mesh, {"tp": 2}), (break_divisor, {"dp_shard": 2, "ep": 2}), (break_counts, {"cp": 2, "ep": 2})],
        rest="slow",
    ),
)
def test_what_is_known_to_go_wrong_is_seen(families: Path, broken: Callable[[], None], degrees: dict[str, int]) -> None:
    row = Combination(Layout(**degrees))
    with Ranks(row.layout.world_size, connect=False) as ranks:
        ranks.call(broken)
        try:
            found = layouts.compare(families, "mixtral", row, ranks, name=broken.__name__)
        except RankFailed as failure:
            found = [str(failure)]
    assert any("instead of" in each or "error " in each for each in found), found


@pytest.mark.slow
def test_a_run_goes_on_from_layout_to_layout(families: Path, processes: Callable[[int], Ranks]) -> None:
    """Each step is made on another layout, with the weights, moments and biases of the one before."""
    chain: list[tuple[int, dict[str, Any]]] = [
        (layouts.SEED_STEP, {}),
        (3, {"dp_shard": 2, "ep": 2}),
        (4, {"tp": 2, "ep": 2}),
        (5, {"pp": 2}),
        (6, {}),
        (7, {"cp": 2}),
    ]
    assert layouts.compare_chain(families, "deepseek", chain, processes) == []
