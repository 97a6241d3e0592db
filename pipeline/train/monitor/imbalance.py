"""Warnings of experts that stay unevenly used: before a rank with too many rows runs out of memory, or experts die."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from pipeline.config.train import BalanceConfig
from pipeline.train.model.mlps.experts.spec import RouterSpec

_STEPS = 50
"""Steps in a row in which the experts must be uneven before it is reported: routers begin so, and most even out."""
_QUIET = 500
"""Steps in which it is not reported again."""
_MOST_LOAD = 3.0
"""Tokens of the busiest expert over the mean, at most."""
_MOST_ROWS = 1.5
"""Rows of the experts of the busiest rank over the mean of ranks, at most."""


def load_limit(router: RouterSpec) -> float:
    """Load of the busiest expert over the mean from which on a layer is uneven.

    If all tokens choose the same experts, it is count / top_k, which is little where there are few experts: half way
    there from 1 counts as uneven as well.
    """
    return min(_MOST_LOAD, (1 + router.count / router.top_k) / 2)


class Imbalance:
    """Sees the figures of every step and tells of loads of experts that stay uneven, step after step.

    Args:
        config: The `train.balance:` section.
        routers: By index of the layer.
    """

    def __init__(self, config: BalanceConfig, routers: Mapping[int, RouterSpec]) -> None:
        self._config = config
        self._routers = routers
        self._loads: list[float] = []
        self._rows: list[float] = []
        self._reported_step: int | None = None

    def see(self, step: int, experts: Mapping[str, Any]) -> str | None:
        """A warning, or None.

        Args:
            step: Number of the step.
            experts: Its `experts` in metrics.jsonl.
        """
        if experts.get("balance_forced"):
            return None
        load, layer, rows = (experts[key] for key in ("load_max_over_mean", "load_max_layer", "rows_max_over_mean"))
        limit = load_limit(self._routers[layer])
        self._loads = [*self._loads, load][-_STEPS:] if load > limit else []
        self._rows = [*self._rows, rows][-_STEPS:] if rows > _MOST_ROWS else []
        uneven, unequal = (len(values) == _STEPS for values in (self._loads, self._rows))
        if not (uneven or unequal):
            return None
        if self._reported_step is not None and 0 <= step - self._reported_step < _QUIET:
            return None
        self._reported_step = step
        if unequal:
            return (
                f"the experts of one rank get {statistics.median(self._rows):.1f} times as many rows as those of the "
                f"mean rank, in each of the last {_STEPS} steps; its memory goes by them, and the others wait for it. "
                f"Layer {layer} is the most uneven one: its busiest expert gets {load:.1f} times the mean. "
                f"{self._advice(layer)}; to have more memory left, lower train.micro_batch_size or set "
                "train.recompute.mode=full"
            )
        return (
            f"the busiest expert of a layer gets {statistics.median(self._loads):.1f} times the mean, in each of the "
            f"last {_STEPS} steps; now it is layer {layer} with {load:.1f} times, and {experts['dead_experts']} "
            f"experts of a layer get no token. {self._advice(layer)}"
        )

    def _advice(self, layer: int) -> str:
        config = self._config
        loss = f"train.balance.loss ({config.loss:g} now)"
        if self._routers[layer].score_bias:
            return f"Raise train.balance.bias_rate ({config.bias_rate:g} now) or {loss}"
        return f"Raise {loss}"
