"""Candidate layouts of a run: every way to spread it over a number of devices that is worth pricing.

What a run computes stays: model, batch, sequence lengths and data are never touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import gcd
from typing import Any

from pydantic import BaseModel

from pipeline.config import Config
from pipeline.config.parallel import ZERO_BUBBLE
from pipeline.train.distributed.axes import axis_names
from pipeline.train.distributed.layout import Layout
from pipeline.train.model.decoder_spec import DecoderSpec
from pipeline.train.parallel.step_shapes import run_stream, step_shapes
from pipeline.train.parallel.tested import LayoutKind, tested_kinds
from pipeline.train.torch_compat import pipeline_stage

Overrides = dict[str, Any]
"""Key path -> value."""

_MOST_STAGES = 64
"""Ranks of a pipeline at most."""
_MOST_VIRTUAL = 8
"""Stages on a rank at most."""
_MOST_EP = 64
"""Ranks of ep at most."""
_MOST_WINDOWS = 16
"""Windows of a micro-batch at most."""
_LEAST_TOKENS = 4096
"""Tokens of a window that a cp rank keeps at least: with fewer, attention exchanges more than it computes."""


def candidates(config: Config, spec: DecoderSpec, world_size: int, node_devices: int) -> Iterator[Overrides]:
    """Values of the keys that decide where and when things are computed, for each layout of a tested kind.

    tp stays within a node. With experts, ep is each number that divides them and the processes of their weights, within
    a node or over whole nodes. With pp, all schedules that the installed torch can train with but `gpipe` and
    `dualpipev`, which keep more than others that wait no longer; the run file's own `parallel.pipeline` is one of them.
    Recomputation is `none`, `selective` or `full` of every layer, or what the run file has.

    Args:
        config: The run file.
        spec: The model.
        world_size: Processes.
        node_devices: Devices in a node.
    """
    shapes = step_shapes(config, 1)
    batch = min(shape.batch_size for shape in shapes)
    streams = [run_stream(config), *(shape.stream for shape in shapes)]
    lengths = [side for stream in streams for side in (stream.encoder, stream.decoder) if side]
    lengths += [config.set_length(name) for name in config.heldout_sets]
    layouts = _layouts(world_size, node_devices, batch, min(lengths), len(spec.layers))
    for layout in (each for one in layouts for each in _with_experts(one, spec, node_devices)):
        # What remains of a length that tp does not divide cannot be cut.
        cut = layout.tp == 1 or all(length // layout.cp % layout.tp == 0 for length in lengths)
        if spec.expert_layers and not cut:  # ranks of tp route a share of the positions each
            continue
        for parallel in _parallel(config, layout, cut):
            if LayoutKind.of(overridden(config, parallel).parallel, layout) not in tested_kinds():
                continue
            for windows in _micro_batches(config, layout.dp):
                for recompute in _recomputations(config):
                    yield {**parallel, "train.micro_batch_size": windows, **_phases(config), **recompute}


def overridden(config: Config, overrides: Mapping[str, Any]) -> Config:
    """The config with other values, which are not validated again."""
    copy: Config = _copied(config, {tuple(key.split(".")): value for key, value in overrides.items()})
    return copy


def differences(config: Config, overrides: Mapping[str, Any]) -> Overrides:
    """The overrides that change something."""
    return {key: value for key, value in overrides.items() if _value(config, key.split(".")) != value}


def _copied(value: Any, changes: Mapping[tuple[str, ...], Any]) -> Any:
    if () in changes:
        return changes[()]
    below: dict[str, dict[tuple[str, ...], Any]] = {}
    for (first, *rest), new in changes.items():
        below.setdefault(first, {})[tuple(rest)] = new
    if isinstance(value, list):
        return [_copied(entry, below[str(i)]) if str(i) in below else entry for i, entry in enumerate(value)]
    assert isinstance(value, BaseModel)
    return value.model_copy(update={key: _copied(getattr(value, key), new) for key, new in below.items()})


def _value(value: Any, path: list[str]) -> Any:
    for key in path:
        value = value[int(key)] if isinstance(value, list) else getattr(value, key)
    return value


def _layouts(world_size: int, node_devices: int, batch: int, length: int, layers: int) -> Iterator[Layout]:
    for tp in _divisors(world_size, node_devices):
        for pp in _divisors(world_size // tp, min(layers, _MOST_STAGES)):
            for cp in _divisors(world_size // (tp * pp), max(1, length // _LEAST_TOKENS)):
                dp = world_size // (tp * pp * cp)
                if dp > batch:
                    continue  # some ranks would have nothing but padding
                for shard in _shards(dp, node_devices // (tp * cp)):
                    yield Layout(pp=pp, dp_replicate=dp // shard, dp_shard=shard, cp=cp, tp=tp)


def _with_experts(layout: Layout, spec: DecoderSpec, node_devices: int) -> Iterator[Layout]:
    """The layout with each degree of ep: within a node those that share its devices evenly, beyond it whole nodes."""
    counts = spec.expert_counts
    for ep in _divisors(gcd(layout.places, *counts), _MOST_EP) if counts else [1]:
        if node_devices % ep == 0 or ep % node_devices == 0:
            yield replace(layout, ep=ep)


def _divisors(number: int, most: int) -> list[int]:
    return [divisor for divisor in range(1, min(number, most) + 1) if number % divisor == 0]


def _shards(dp: int, of_node: int) -> list[int]:
    """Degrees over which `dp` ranks may shard weights: one, those of a node, four times as many and so on, or all."""
    found, shard = {1, dp}, of_node
    while 1 < shard < dp:
        found |= {shard} if dp % shard == 0 else set()
        shard *= 4
    return sorted(found)


def _parallel(config: Config, layout: Layout, cut: bool) -> Iterator[Overrides]:
    """All values of the `parallel:` section for a layout."""
    base: Overrides = {f"parallel.{key}": degree for key, degree in layout.settings.items()}
    given = config.parallel
    for axis in axis_names(lambda axis: axis.takes_rest):
        if getattr(given, axis) == -1:  # what the other axes leave: that is this degree
            base[f"parallel.{axis}"] = -1
            break
    if layout.tp > 1:
        base["parallel.sequence_parallel"] = cut
    sharded = layout.shards > 1
    for method in ("all_gather", "ulysses") if layout.cp > 1 else (None,):
        for schedule in _schedules(config, layout.pp):
            for reshard in (True, False) if sharded else (None,):
                default = reshard == (layout.pp == 1) and given.reshard_after_forward != reshard
                yield {
                    **base,
                    **({} if method is None else {"parallel.cp_method": method}),
                    **schedule,
                    "parallel.reshard_after_forward": None if default else reshard,
                }


def _schedules(config: Config, pp: int) -> list[Overrides]:
    def of(schedule: str, stages: int | None, layers: list[int] | None = None) -> Overrides:
        # Where compiling is left to the program, it does not compile for these; said here, it is priced so.
        compiled = {} if schedule not in ZERO_BUBBLE or config.train.compile else {"train.compile": False}
        return {
            **compiled,
            "parallel.pipeline.schedule": schedule,
            "parallel.pipeline.virtual_stages": stages,
            "parallel.pipeline.layers_per_stage": layers,
        }

    if pp == 1:
        return [of("1f1b", None)]  # the defaults
    layers, own = config.model.all_layers, config.parallel.pipeline
    found = [of("1f1b", None)]
    if 2 * pp <= layers:
        found += [of("zbv", None), of("interleaved_zero_bubble", None)] if pipeline_stage.SPLITS_BACKWARD else []
        found += [of("interleaved_1f1b", None)]
    found += [of("interleaved_1f1b", stages) for stages in (4, _MOST_VIRTUAL) if stages * pp <= layers]
    given = own.layers_per_stage or [1] * pp * own.stages_per_rank
    if len(given) == pp * own.stages_per_rank and sum(given) == (layers if own.layers_per_stage else len(given)):
        found += [of(own.schedule, own.virtual_stages, own.layers_per_stage)] if len(given) <= layers + 2 else []
    return [value for place, value in enumerate(found) if value not in found[:place]]


def _micro_batches(config: Config, dp: int) -> list[int]:
    """Powers of two that divide every rank's share of every step, and what the run file has."""
    shares = [shape.windows_per_rank for shape in step_shapes(config, dp)]
    sizes = {size for size in (1, 2, 4, 8, _MOST_WINDOWS) if not any(share % size for share in shares)}
    return sorted(sizes | ({config.train.micro_batch_size} if config.train.micro_batch_size else set()))


def _phases(config: Config) -> Overrides:
    """Overrides by which no phase has a micro-batch of its own."""
    return {
        f"blend.phases.{number}.micro_batch_size": None
        for number, phase in enumerate(config.blend.phases)
        if phase.micro_batch_size is not None
    }


def _recomputations(config: Config) -> list[Overrides]:
    mode, every = "train.recompute.mode", "train.recompute.every"
    own = config.train.recompute
    found: list[Overrides] = [{mode: "none"}, {mode: "selective", every: 1}, {mode: "full", every: 1}]
    mine: Overrides = {mode: own.mode} if own.mode in ("none", "budget") else {mode: own.mode, every: own.every}
    return found if mine in found else [*found, mine]
