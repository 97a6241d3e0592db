"""The parallel axes, as data: what the processes along each one have in common, and what differs between them.

Layouts, meshes, losses, checkpoints, plans and messages read this table, so that an axis is added here and where it
computes something of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

AxisName = Literal["pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"]
Traffic = Literal["in_layers", "between_stages", "beside_layers"]


@dataclass(frozen=True)
class ParallelAxis:
    """An axis of parallelism: its degree is the key of this name in `parallel:`, and the field of `Layout`."""

    name: AxisName
    effect: str
    """Words for its effect, which `ranks 0-7` can follow."""
    data: Literal["samples", "positions", "same"] | None
    """Data of a step that its ranks have: other samples, other positions of the same samples, or the same. None where
    the axes that it divides decide."""
    weights: Literal["layers", "copies", "shards", "slices"]
    """Weights that its ranks have: those of other layers, all, flat shards that are gathered before they are
    used (FSDP), or slices that they compute with as they are."""
    traffic: Traffic
    """When it communicates: within a layer or between stages, and computing waits; or beside other layers."""
    same_losses: bool = False
    """True if its ranks compute the same losses, so that those of one of them count."""
    takes_rest: bool = False
    """Degree -1 gives it all processes that the other axes leave."""
    within: tuple[AxisName, ...] = ()
    """Axes whose processes it divides once more. Such an axis does not multiply the number of processes."""


AXES = (
    ParallelAxis("pp", "layers are cut into stages over", "same", "layers", "between_stages"),
    ParallelAxis("dp_replicate", "weights are copied over", "samples", "copies", "beside_layers", takes_rest=True),
    ParallelAxis(
        "dp_shard",
        "weights, gradients and optimizer states are sharded over",
        *("samples", "shards", "beside_layers"),
        takes_rest=True,
    ),
    # Its ranks have the gradients of different tokens, so that they can share weights as those of dp_shard do. What it
    # sends for attention is within layers; gathers of weights count as dp_shard's.
    ParallelAxis("cp", "sequences are cut over", "positions", "shards", "in_layers"),
    ParallelAxis("tp", "matrices are cut over", "same", "slices", "in_layers", same_losses=True),
    ParallelAxis("ep", "experts are dealt to", None, "slices", "in_layers", within=("dp_shard", "cp", "tp")),
)
"""Outermost first: consecutive ranks differ in the last axis that multiplies processes. Ranks of tp, which communicate
most, are therefore in one node where it has room for them, and stages of pp are farthest apart.

The order decides which rank has which weights and samples, so it never changes.
"""

EXPERT_PLACES = next(axis.within for axis in AXES if axis.name == "ep")
"""Axes whose processes experts are cut over."""


def axis_names(condition: Callable[[ParallelAxis], bool] = lambda axis: True) -> tuple[AxisName, ...]:
    """Names of the axes that multiply the number of processes and meet a condition, outermost first."""
    return tuple(axis.name for axis in AXES if not axis.within and condition(axis))
