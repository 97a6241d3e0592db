"""Rules for overlapping communication, see `rules/layout.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.config import Config
from pipeline.config.parallel import OverlapConfig
from pipeline.train.distributed.layout import Layout
from pipeline.train.parallel.step_shapes import step_shapes
from pipeline.train.parallel.tested import LayoutKind
from pipeline.train.rules.base import Rule


def _reduce(config: Config, _: Layout) -> Iterator[str]:
    parallel = config.parallel
    if parallel.splits_backward and parallel.overlap.reduce == "each":
        yield (
            f"parallel.overlap.reduce=each with schedule={parallel.pipeline.schedule}: its backward passes have two "
            "halves, and gradients are added up after all of them: set parallel.overlap.reduce=last"
        )


def _async_tp(config: Config, layout: Layout) -> Iterator[str]:
    parallel = config.parallel
    if not parallel.overlap.async_tp:
        return
    without = "or parallel.overlap.async_tp=false"
    if layout.tp > 1 and not parallel.sequence_parallel:
        yield (
            "parallel.overlap.async_tp=true with parallel.sequence_parallel=false: only gathers and sums of pieces of "
            f"the sequence can overlap with products: set parallel.sequence_parallel=true, {without}"
        )
    if config.launch.device == "cpu":
        yield (
            "parallel.overlap.async_tp=true with launch.device=cpu sends from GPU to GPU: set launch.device=auto, "
            f"{without}"
        )
    if config.train.compile is False:
        yield (
            "parallel.overlap.async_tp=true with train.compile=false: it is the compiler that cuts products in pieces: "
            f"set train.compile=true, {without}"
        )
    elif config.train.compile is None and (config.train.recompute.offload or parallel.splits_backward):
        yield (
            "parallel.overlap.async_tp=true needs compiled layers, which do not go with train.recompute.offload and "
            f"zero-bubble schedules: take another schedule and train.recompute.offload=false, {without}"
        )


def overlap_without_effect(config: Config, layout: Layout) -> Iterator[str]:
    """Keys that are set and not looked at."""
    overlap, unset = config.parallel.overlap, OverlapConfig()
    for key in ("forward_prefetch", "backward_prefetch", "reduce"):
        if layout.shards == 1 and getattr(overlap, key) != getattr(unset, key):
            yield (
                f"parallel.overlap.{key}={getattr(overlap, key)} has no effect: weights are not sharded (dp_shard and "
                "cp are 1)"
            )
    if overlap.backward_prefetch > 1 and LayoutKind.of(config.parallel, layout).reshard is False:
        yield (
            f"parallel.overlap.backward_prefetch={overlap.backward_prefetch} has no effect without "
            "reshard_after_forward: backward has the weights that forward gathered"
        )
    single = all(shape.micro_batches == 1 for shape in step_shapes(config, layout.dp))
    if single and overlap.reduce is not None and layout.shards > 1:
        yield f"parallel.overlap.reduce={overlap.reduce} has no effect: every step is one micro-batch"
    if layout.tp == 1 and overlap.async_tp:
        yield "parallel.overlap.async_tp=true has no effect with parallel.tp=1"


OVERLAP_RULES: Sequence[Rule] = (
    Rule(
        ("parallel.overlap.reduce", "parallel.pipeline.schedule"),
        "`overlap.reduce: each` works with the schedules that do not split the backward pass.",
        _reduce,
        of_training=True,
    ),
    Rule(
        ("parallel.overlap.async_tp", "parallel.sequence_parallel", "train.compile", "launch.device"),
        "`overlap.async_tp` needs `sequence_parallel` and compiled layers, on GPUs.",
        _async_tp,
        of_training=True,
    ),
)
"""Rules in the order in which messages list them."""
