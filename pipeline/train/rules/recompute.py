"""Rules for recomputation and compiled layers, see `rules/layout.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.config import Config
from pipeline.config.train import RecomputeConfig
from pipeline.train.distributed.layout import Layout
from pipeline.train.model.kernels.choice import spec_uses
from pipeline.train.parallel.pipeline_schedules import WHOLE_BACKWARD
from pipeline.train.parallel.step_shapes import step_shapes
from pipeline.train.rules.base import Rule, spec_of

_WITHOUT_SPLIT = f"one of {', '.join(WHOLE_BACKWARD)} as parallel.pipeline.schedule"


def _selective(config: Config, _: Layout) -> Iterator[str]:
    recompute = config.train.recompute
    if recompute.mode != "selective":
        return
    if config.parallel.splits_backward:
        yield (
            f"train.recompute.mode=selective with schedule={config.parallel.pipeline.schedule}: what was kept is "
            f"freed before weight gradients are computed: set train.recompute.mode=full, or take {_WITHOUT_SPLIT}"
        )
    if not recompute.keep:
        yield (
            "train.recompute.keep=[] with mode=selective keeps only the input of each layer: set "
            "train.recompute.mode=full, which does the same, or name what to keep"
        )
    if set(recompute.keep) == {"attention"} and not spec_uses(spec_of(config)):
        yield (
            "train.recompute.keep=[attention] with mode=selective keeps nothing, as no layer of the model has "
            "attention: set train.recompute.keep=[matmul], or train.recompute.mode=full, which does the same"
        )


def _budget(config: Config, layout: Layout) -> Iterator[str]:
    if config.train.recompute.mode != "budget":
        return
    if layout.tp > 1:
        yield (
            f"train.recompute.mode=budget with parallel.tp={layout.tp}: the compiler cannot measure tensors that are "
            "cut over processes: set train.recompute.mode=selective, or parallel.tp=1"
        )
    if config.train.compile is not True:
        yield (
            "train.recompute.mode=budget leaves the choice to the compiler, but "
            f"train.compile={_shown(config.train.compile)}: set train.compile=true, or train.recompute.mode=selective"
        )


def _offload(config: Config, _: Layout) -> Iterator[str]:
    train = config.train
    if not train.recompute.offload:
        return
    if train.recompute.mode != "full":
        yield (
            f"train.recompute.offload=true with mode={train.recompute.mode}: only inputs of layers that are computed "
            "again are moved: set train.recompute.mode=full, or train.recompute.offload=false"
        )
    if train.compile:
        yield (
            "train.recompute.offload=true with train.compile=true: compiled layers keep their weights for backward, "
            "which would be moved too: set train.compile=false, or train.recompute.offload=false"
        )


def _compiled(config: Config, _: Layout) -> Iterator[str]:
    if config.train.compile and config.parallel.splits_backward:
        yield (
            f"train.compile=true with schedule={config.parallel.pipeline.schedule} gives wrong gradients: compiled "
            f"code has one backward pass, for inputs and weights: set train.compile=false, or take {_WITHOUT_SPLIT}"
        )


def _shown(value: bool | None) -> str:
    return "null" if value is None else str(value).lower()


def recompute_without_effect(config: Config) -> Iterator[str]:
    """Keys that are set and not looked at."""
    recompute, unset = config.train.recompute, RecomputeConfig()
    reads = {"none": "", "full": "every", "selective": "every, keep", "budget": "budget"}[recompute.mode]
    for key in ("every", "keep", "budget"):
        if key not in reads and getattr(recompute, key) != getattr(unset, key):
            yield f"train.recompute.{key} has no effect with train.recompute.mode={recompute.mode}"


_MANY_SHAPES = 4
"""Shapes of micro-batches above which compiling them is worth a warning."""


def many_shapes(config: Config, layout: Layout) -> Iterator[str]:
    """Compiling that comes again and again."""
    shapes = {(shape.micro_batch_size, shape.sequence_length) for shape in step_shapes(config, layout.dp)}
    if config.train.compile is not False and len(shapes) > _MANY_SHAPES:
        yield (
            f"train.batch_ramp, blend.phases: micro-batches have {len(shapes)} shapes, and layers are compiled for "
            "each (by default on a GPU): set train.micro_batch_size to a number that divides all batches, or "
            "train.compile=false"
        )


RECOMPUTE_RULES: Sequence[Rule] = (
    Rule(
        ("train.recompute.mode", "train.recompute.keep", "parallel.pipeline.schedule"),
        "`mode: selective` keeps something (`keep` is not empty, nor `attention` alone in a model that has none), and "
        "works with the schedules that do not split the backward pass; `full` works with all.",
        _selective,
        of_training=True,
    ),
    Rule(
        ("train.recompute.mode", "train.compile", "parallel.tp"),
        "`mode: budget` needs `compile: true`, and `tp` 1.",
        _budget,
        of_training=True,
    ),
    Rule(
        ("train.recompute.offload", "train.recompute.mode", "train.compile"),
        "`offload` works with `mode: full`, on a GPU, without `compile`.",
        _offload,
        of_training=True,
    ),
    Rule(
        ("train.compile", "parallel.pipeline.schedule"),
        "`compile` works with the schedules that do not split the backward pass.",
        _compiled,
        of_training=True,
    ),
)
"""Rules in the order in which messages list them."""
