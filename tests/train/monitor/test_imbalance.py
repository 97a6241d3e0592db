from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipeline.config.layers.experts import ExpertsConfig
from pipeline.config.train import BalanceConfig
from pipeline.train.model.mlps.experts.spec import RouterSpec
from pipeline.train.monitor.imbalance import Imbalance, load_limit

ROUTER = RouterSpec.of(ExpertsConfig(count=64, top_k=4, ffn_dim=8))
BIASED = replace(ROUTER, score_bias=True)


def figures(load: float = 1.0, rows: float = 1.0, layer: int = 3, **more: Any) -> dict[str, Any]:
    loads = {"load_max_over_mean": load, "load_max_layer": layer, "dead_experts": 2}
    return loads | {"rows_max_over_mean": rows} | more


def told(rows: list[dict[str, Any]], router: RouterSpec = ROUTER) -> dict[int, str]:
    """What is said at which step, from 1."""
    imbalance = Imbalance(BalanceConfig(loss=0.02, bias_rate=0.002), {3: router, 5: router})
    said = {step: imbalance.see(step, row) for step, row in enumerate(rows, start=1)}
    return {step: text for step, text in said.items() if text}


def test_a_load_that_stays_uneven_is_told_now_and_then() -> None:
    found = told([figures(load=4.0)] * 600)
    assert list(found) == [50, 550]
    for part in ("4.0 times the mean", "layer 3", "2 experts", "train.balance.loss (0.02 now)"):
        assert part in found[50]
    assert "train.balance.bias_rate (0.002 now)" in told([figures(load=4.0)] * 50, BIASED)[50]


def test_ranks_with_more_rows_are_told_with_the_keys_that_give_them_memory() -> None:
    (text,) = told([figures(load=2.0, rows=1.8, layer=5)] * 60).values()
    for part in ("1.8 times", "Layer 5", "2.0 times", "train.balance.loss", "micro_batch_size", "train.recompute.mode"):
        assert part in text


@pytest.mark.parametrize(
    "rows",
    [
        [figures(load=4.0, rows=2.0)] * 49,
        [figures(load=4.0)] * 49 + [figures()] + [figures(load=4.0)] * 49,
        [figures(load=2.9, rows=1.4)] * 100,
        [figures(load=4.0, balance_forced=True)] * 100,
    ],
    ids=["too few steps", "not in each step", "not by much", "forced"],
)
def test_what_is_not_told(rows: list[dict[str, Any]]) -> None:
    assert told(rows) == {}


def test_few_experts_are_uneven_before_they_collapse() -> None:
    few = replace(ROUTER, count=8, top_k=2)
    assert load_limit(few) == 2.5 and load_limit(ROUTER) == 3
    assert load_limit(replace(ROUTER, count=4, top_k=2)) == 1.5
    assert load_limit(replace(ROUTER, count=4, top_k=4)) == 1, "a load is never above 1 then"
