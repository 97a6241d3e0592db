"""Communication beside computation: weights that are gathered ahead, gradients that are added up early."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, cast

import torch.distributed as dist

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.config.parallel import ZERO_BUBBLE, OverlapConfig, ParallelConfig
from pipeline.train.distributed.layout import Layout
from pipeline.train.distributed.process_group import cpu_group
from pipeline.train.parallel.compile import compiles

if TYPE_CHECKING:  # the launcher imports this module, too, and needs none of them
    from torch.distributed.fsdp import FSDPModule

    from pipeline.train.model.decoder import Decoder
    from pipeline.train.parallel.setup import Setup

Reduction = Literal["each", "last", "after"]
"""Time at which gradients are added up over shards: in backward of each micro-batch, in that of the last one, or after
all of them."""


def reduction(parallel: ParallelConfig, layout: Layout) -> Reduction:
    """The time when the gradients of a layout are added up."""
    if layout.pp == 1:
        return parallel.overlap.reduce or "each"
    # Where a backward pass has two halves, `fully_shard` would add up after the first, before there are gradients.
    return "after" if parallel.pipeline.schedule in ZERO_BUBBLE else parallel.overlap.reduce or "last"


def layers_ahead(overlap: OverlapConfig) -> int:
    """Layers that have whole weights at most besides the one at work."""
    return max(1, overlap.forward_prefetch, overlap.backward_prefetch)


def set_prefetch(part: Decoder, overlap: OverlapConfig) -> None:
    """Let the layers of a part, sharded by `fully_shard`, gather the weights of those that come after them.

    In 2.11 and 2.13 torch gathers one layer ahead in backward, in the reverse of the order that forward went; in
    forward it only leaves each gather to streams of its own.
    """
    layers = [cast("FSDPModule", layer) for layer in part.layers.values()]
    whole = cast("FSDPModule", part)
    if overlap.forward_prefetch > 0:
        for module, after in _ahead(whole, layers, overlap.forward_prefetch):
            module.set_modules_to_forward_prefetch(after)
    if overlap.backward_prefetch > 1:
        for module, after in _ahead(whole, layers[::-1], overlap.backward_prefetch):
            module.set_modules_to_backward_prefetch(after)


def _ahead(first: FSDPModule, then: Sequence[FSDPModule], count: int) -> list[tuple[FSDPModule, list[FSDPModule]]]:
    """Each module with the next ones."""
    return [(module, list(then[place : place + count])) for place, module in enumerate([first, *then])]


def check_async_tp(config: Config, setup: Setup) -> None:
    """Look for what `parallel.overlap.async_tp` needs, before anything is built. Every process calls this.

    Raises:
        UserError: It is not there.
    """
    if not config.parallel.overlap.async_tp or setup.mesh.size("tp") == 1:
        return
    if setup.device.type != "cuda":
        raise UserError(
            "parallel.overlap.async_tp=true sends from GPU to GPU, but this run is on a CPU: set "
            "parallel.overlap.async_tp=false"
        )
    assert compiles(config, setup.device), "a rule"
    mesh = setup.mesh.role("tp")
    # Of all processes: one that saw nothing wrong would wait for those that end.
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname(), group=cpu_group())
    groups: list[list[int]] = [[]] * dist.get_world_size()
    dist.all_gather_object(groups, dist.get_process_group_ranks(mesh.get_group()), group=cpu_group())
    for group in groups:
        if len(machines := {hosts[rank] for rank in group}) > 1:
            raise UserError(
                f"parallel.overlap.async_tp=true with parallel.tp={mesh.size()} over the machines "
                f"{', '.join(sorted(machines))}: the processes of tp must be in one; lower parallel.tp, or set "
                "parallel.overlap.async_tp=false"
            )
