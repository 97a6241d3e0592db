"""The memory of this machine against what the processes of a run that are on it need, before a model is built."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from pipeline.common.capacity import host_memory
from pipeline.common.errors import MachineError, UserError
from pipeline.common.format import gib
from pipeline.common.process_identity import node_name
from pipeline.config import Config
from pipeline.train.distributed.layout import Layout
from pipeline.train.distributed.process_group import visible_gpus
from pipeline.train.distributed.rank import LAUNCHER, Processes, is_rank, of_environment
from pipeline.train.model.decoder_spec import DecoderSpec
from pipeline.train.parallel.footprint import MASTER_BYTES, rank_footprints
from pipeline.train.parallel.step_shapes import step_shapes
from pipeline.train.rules.layout import check_layout
from pipeline.train.rules.layout_check import planned_spec

_FEW = 16
"""Processes that are started for a try also where there are fewer cores."""


@dataclass(frozen=True)
class _MemoryPool:
    """Memory that some ranks share."""

    ranks: Sequence[int]
    name: str
    free: int
    total: int
    device_type: Literal["cpu", "cuda"]


def check_memory(config: Config, processes: int = 1) -> list[str]:
    """Compare what the processes of a training on this machine need with the memory that it has for them.

    Refused is what cannot fit: weights, moments and gradients alone are too large. Ranks of our own launcher look at
    their GPUs only, since the launcher has looked at the machine. This comes before the process group.

    Args:
        config: the run.
        processes: of the run, all on this machine; where this process is a rank, the environment tells.

    Returns:
        Warnings: what may not fit, as estimated with activations.

    Raises:
        UserError: the layout is refused, or the model does not fit.
        MachineError: the model would fit if other programs left this machine; a scheduler may start the rank again.
    """
    rank = of_environment() if is_rank() else None
    layout = check_layout(config, rank.world_size if rank else processes)
    try:
        spec = planned_spec(config)
    except UserError:
        return []  # there is no tokenizer yet, which the training says better
    places = _places(config, rank or Processes(0, processes, 0, processes))
    footprints = rank_footprints(config, layout, spec)
    for place in places:
        _refuse(place, [footprints[_pp_rank(layout, each)].states for each in place.ranks], again=rank is not None)
    if (rank is not None and rank.rank) or dist.is_initialized():
        return []  # rank 0 speaks for all; and where a group exists nothing can be estimated
    held = [footprints[_pp_rank(layout, each)].total for place in places for each in place.ranks]
    if not any(_may_be_tight(config, layout, spec, place, max(held)) for place in places):
        return []  # an estimate takes seconds
    return [line for place in places for line in _estimate(config, layout, spec, place)]


def is_meant_for_this_machine(config: Config, processes: int) -> bool:
    """True if a layout that is only checked would probably run here: all of it, and without a cluster."""
    if is_rank() or "slurm" in config.model_fields_set:
        return False
    gpus = visible_gpus() if config.launch.device != "cpu" else 0
    if config.launch.device == "cuda" and not gpus:
        return False
    return processes <= (gpus or max(_FEW, os.cpu_count() or 1))


def _places(config: Config, ranks: Processes) -> list[_MemoryPool]:
    """The memories that the ranks of this machine use, of which this process knows."""
    own = LAUNCHER in os.environ and is_rank()
    machine_ranks = range(ranks.rank - ranks.local_rank, ranks.rank - ranks.local_rank + ranks.local_world_size)
    gpus = visible_gpus()
    if config.launch.device == "cpu" or not gpus:
        found = None if own or config.launch.device == "cuda" else host_memory()
        if found is None:
            return []
        name = f"the memory of {node_name()}" + (" (limited by its cgroup)" if found.limited else "")
        return [_MemoryPool(machine_ranks, name, found.free, found.total, "cpu")]
    if ranks.local_world_size > gpus:
        return []  # which is refused in other words
    if not is_rank() and ranks.world_size > 1:
        return []  # a launcher must take no memory of GPUs: its ranks look themselves
    free, total = torch.cuda.mem_get_info(ranks.local_rank)
    return [_MemoryPool([ranks.rank], f"GPU {ranks.local_rank} of {node_name()}", free, total, "cuda")]


def _pp_rank(layout: Layout, rank: int) -> int:
    return rank // (layout.world_size // layout.pp)


def _refuse(place: _MemoryPool, states: Sequence[int], *, again: bool) -> None:
    """An error where the states of the ranks do not fit.

    Args:
        place: what they share.
        states: bytes by rank.
        again: whether a scheduler starts the rank again after a `MachineError`.
    """
    if sum(states) <= place.free:
        return
    other = "other programs use the rest; end those, or " if sum(states) <= place.total else ""
    kind = MachineError if other and again else UserError
    raise kind(
        f"the model does not fit into {place.name}: weights, moments and gradients alone need {_needs(states)}, and "
        f"{gib(place.free)} GiB of {gib(place.total)} GiB are free; {other}{_SHARDS}, set "
        "train.optimizer.states=bf16, or take a smaller model (model.layers, model.dim)"
    )


_SHARDS = "shard the model over more machines or GPUs (parallel.dp_shard, tp or pp)"


def _needs(sizes: Sequence[int]) -> str:
    """`149 GiB`, or `74.5 GiB per process x 2 processes on this machine = 149 GiB`."""
    if len(sizes) == 1:
        return f"{gib(sizes[0])} GiB"
    most = "" if min(sizes) == max(sizes) else "up to "
    return f"{most}{gib(max(sizes))} GiB per process x {len(sizes)} processes on this machine = {gib(sum(sizes))} GiB"


def _may_be_tight(config: Config, layout: Layout, spec: DecoderSpec, place: _MemoryPool, held: int) -> bool:
    """True if a generous bound does not fit."""
    most = 0
    for shape in step_shapes(config, layout.dp):
        tokens = shape.micro_batch_size * shape.stream.length * (shape.micro_batches if layout.pp > 1 else 1)
        per_token = 6 * (1 + len(spec.mtp)) * spec.vocab_padded + sum(
            part.most_numbers(shape.stream.length) for layer in spec.blocks for part in layer.parts.values()
        )
        most = max(most, MASTER_BYTES * tokens * per_token)
    return 2 * (held + most) * len(place.ranks) > place.free


def _estimate(config: Config, layout: Layout, spec: DecoderSpec, place: _MemoryPool) -> Iterator[str]:
    from pipeline.train.planning.plan import most_memory  # not where no estimate is made: every training starts here

    shape, ranks = most_memory(config, layout, spec, step_shapes(config, layout.dp), place.device_type)
    sizes = [ranks[_pp_rank(layout, each)].total for each in place.ranks]
    if sum(sizes) > place.free:
        yield (
            f"training may run out of memory: it needs about {_needs(sizes)} of {place.name} with activations "
            f"(estimated), and {gib(place.free)} GiB of {gib(place.total)} GiB are free; lower "
            f"{shape.micro_key} ({shape.micro_batch_size}), set train.recompute.mode=full, or {_SHARDS}"
        )
