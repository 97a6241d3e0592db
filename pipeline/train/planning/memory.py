"""The memory that each process of a run needs, estimated before it starts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm

from pipeline.config import Config
from pipeline.train.distributed.layout import Layout
from pipeline.train.model.decoder_spec import DecoderSpec
from pipeline.train.model.part_spec import LayerSpec
from pipeline.train.parallel.overlap import layers_ahead
from pipeline.train.parallel.pipeline_schedules import SCHEDULES
from pipeline.train.parallel.pipeline_stages import Stage, split_stages
from pipeline.train.parallel.step_shapes import StepShape
from pipeline.train.parallel.tested import LayoutKind
from pipeline.train.planning.stage_memory import DeviceType, Ends, Layers, Shape, StageMemory, keep, read_kept
from pipeline.train.planning.traffic import ACTIVE_STAGES
from pipeline.train.torch_compat.pipeline_stage import schedule_actions


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one process at the peak of a step."""

    pp_rank: int
    """Coordinate on the pp axis; processes with the same one need the same."""
    count: int
    """Parameters of its stages, after the cut by tp and before that by dp_shard."""
    parameters: int
    """Master weights: its fp32 shards, padding included."""
    moments: int
    """States of the optimizer, and the moving average if there is one."""
    gradients: int
    """Sharded ones, and whole ones where they add up before they are sharded."""
    unsharded: int
    """Copies of parameters for forward and backward, and buffers of their collectives."""
    activations: int
    """Kept for backward."""
    working: int
    """Temporary tensors of the layer or head at work, logits included, and the batches of the step."""
    when: str
    """Time of the peak within the step."""
    teacher: int = 0
    """Weights and logits of a teacher."""

    @property
    def total(self) -> int:
        """Bytes in all."""
        model = self.parameters + self.moments + self.gradients + self.unsharded + self.activations + self.working
        return model + self.teacher


def memory(
    config: Config,
    layout: Layout,
    spec: DecoderSpec,
    shape: StepShape,
    device_type: DeviceType = "cuda",
    over_mean: float = 1.0,
) -> list[RankMemory]:
    """Memory that a process needs at the peak of a step of `shape`, by pp rank.

    It is what tensors take, as `torch.cuda.max_memory_allocated` counts; torch's allocator reserves more, and CUDA,
    NCCL and cuBLAS have memory of their own. Compiled layers are counted as if they were not, and what is moved to the
    memory of the host (`train.recompute.offload`) as if it stayed.

    Args:
        config: The run file.
        layout: Its degrees, one that `rules` allows. This process must be no rank of a run.
        spec: The model.
        shape: Of the step.
        device_type: Whose kernels.
        over_mean: With ep, rows that the experts of a process get in each layer, over the mean of all processes.
    """
    stages = split_stages(spec, layout.pp, config.parallel.pipeline, shape.stream)
    # Of several micro-batches two are run.
    rows = over_mean if layout.ep > 1 else 1.0
    stream = shape.stream
    predicted = None if stream.predicted == stream.decoder else stream.predicted
    piece = Shape(shape.micro_batch_size, stream.length, min(2, shape.micro_batches), rows, predicted, stream.encoder)
    measured = _measure_stages(config, layout, spec, stages, piece, device_type)
    orders = _orders(config, layout, shape.micro_batches)
    ranks = []
    for rank in range(layout.pp):
        mine = {stage.index: measured[_piece(stage, spec)] for stage in stages if stage.rank == rank}
        ranks.append(_peak(rank, mine, orders[rank], shape.micro_batches))
    return ranks


def _ends(stage: Stage) -> Ends:
    part = stage.part
    return {(True, True): "whole", (True, False): "first", (False, False): "middle", (False, True): "last"}[
        part.first, part.last
    ]  # type: ignore[return-value]


def _measure_stages(
    config: Config, layout: Layout, spec: DecoderSpec, stages: Sequence[Stage], shape: Shape, device_type: DeviceType
) -> Mapping[tuple[Ends, Layers], StageMemory]:
    """Memory of all different stages, by ends and layers."""
    ahead = layers_ahead(config.parallel.overlap) if LayoutKind.of(config.parallel, layout).reshard else 0
    every = config.train.recompute.every
    period = lcm(every, spec.period)
    few, more = _runs(period, ahead)
    by_ends: dict[Ends, set[Layers]] = defaultdict(set)
    found: dict[tuple[Ends, Layers], StageMemory] = {}
    for stage in stages:
        ends, layers = _piece(stage, spec)
        kinds = [spec.layers[index] for index in stage.part.layers]
        # Which layers are computed again may go with their kinds, so that a sum would not know of it.
        if every == 1 and spec.period > _LONG_PERIOD and len(kinds) > few + 2 + len(set(kinds)):
            found[ends, layers] = _sum_over_kinds(config, layout, spec, shape, ends, kinds, few, device_type)
        else:
            by_ends[ends].add(layers)
    runs: dict[Ends, dict[Layers, StageMemory]] = {}
    slope: dict[Layers, StageMemory] = {}
    # Those in the middle first: a period more is the same in all of them.
    for ends in sorted(by_ends, key=lambda ends: ends != "middle"):
        wanted: set[Layers] = set()
        for start, count in by_ends[ends]:
            wanted.add((start, few + (count - few) % period if count > more else count))
            wanted |= {(0, few), (0, more)} if count > more and not slope else set()
        runs[ends] = _run(config, layout, spec, shape, ends, sorted(wanted), device_type)
        if {(0, few), (0, more)} <= wanted:
            slope = slope or runs[ends]
        for start, count in by_ends[ends] - runs[ends].keys():
            first = few + (count - few) % period
            whole = runs[ends][start, first].plus((count - first) / period, slope[0, few], slope[0, more])
            runs[ends][start, count] = whole
    return found | {(ends, layers): one for ends, some in runs.items() for layers, one in some.items()}


def _sum_over_kinds(
    config: Config,
    layout: Layout,
    spec: DecoderSpec,
    shape: Shape,
    ends: Ends,
    layers: Sequence[LayerSpec],
    few: int,
    device_type: DeviceType,
) -> StageMemory:
    """A stage whose kinds do not repeat: its first layers and its last ones, and what each other layer makes more."""
    short = (*layers[:few], *layers[-2:])
    found = _run(config, layout, replace(spec, layers=short), shape, ends, [(0, few + 2)], device_type)[0, few + 2]
    for kind in dict.fromkeys(layers):
        equal = replace(spec, layers=(kind,))
        slope = _run(config, layout, equal, shape, ends, [(0, few), (0, few + 1)], device_type)
        missing = layers.count(kind) - short.count(kind)
        found = found.plus(missing, slope[0, few], slope[0, few + 1])
    return found


def _runs(period: int, ahead: int) -> tuple[int, int]:
    """Two numbers of layers that are run in place of many, the second one a period larger.

    They have a first layer, a second and a last one, and `ahead` between: the layers that FSDP gathers ahead of the one
    at work.
    """
    few = 3 + ahead
    return few, few + period


def _piece(stage: Stage, spec: DecoderSpec) -> tuple[Ends, Layers]:
    """Text of everything that the memory of a stage depends on besides settings."""
    layers = stage.part.layers
    return _ends(stage), (layers.start % spec.period, len(layers))


def _run(
    config: Config,
    layout: Layout,
    spec: DecoderSpec,
    shape: Shape,
    ends: Ends,
    pieces: Sequence[Layers],
    device_type: DeviceType,
) -> dict[Layers, StageMemory]:
    recompute = config.train.recompute

    def of_mode(mode: str) -> dict[Layers, StageMemory]:
        changed = recompute.model_copy(update={"mode": mode, "offload": False})
        train = config.train.model_copy(update={"recompute": changed})
        some = config.model_copy(update={"train": train})
        common = _settings(some, layout), replace(layout, pp=1), spec, shape, ends, device_type
        keys = {layers: (*common, layers) for layers in pieces}
        if len(_measured) > _MOST_MEASURED:
            _measured.clear()
        for key in keys.values():
            if key not in _measured and (kept := read_kept(key)) is not None:
                _measured[key] = kept
        if new := [layers for layers, key in keys.items() if key not in _measured]:
            # Imported late: the model, FSDP and optimizers, which nothing else of a plan needs.
            from pipeline.train.planning.activations import measure

            for layers, one in zip(new, measure(some, layout, spec, shape, ends, new, device_type), strict=True):
                _measured[keys[layers]] = one
                keep(keys[layers], one)
        return {layers: _measured[key] for layers, key in keys.items()}

    if recompute.mode != "budget":
        return of_mode(recompute.mode)
    nothing, everything = of_mode("full"), of_mode("none")
    return {each: nothing[each].plus(recompute.budget, nothing[each], everything[each]) for each in pieces}


def _settings(config: Config, layout: Layout) -> str:
    """Text of all values of the run file that the memory of a stage depends on, without the pipeline's schedule."""
    parallel = config.parallel.model_dump_json(exclude={"pipeline", *layout.settings})
    train = config.train.model_dump_json(exclude={"micro_batch_size", "compile"})
    return parallel + config.model.model_dump_json() + train


_LONG_PERIOD = 12
"""Layers above which a pattern is not run as a whole."""
_measured: dict[tuple[str, Layout, DecoderSpec, Shape, Ends, DeviceType, Layers], StageMemory] = {}
"""Memory by all that a stage's depends on, its layers last; whoever compares layouts asks for the same
stages again and again."""
_MOST_MEASURED = 512

Order = Sequence[tuple[int, str, int]]
"""Stage, kind of pass, micro-batch."""


def _orders(config: Config, layout: Layout, micro_batches: int) -> list[Order]:
    """The passes of each pp rank in their order; empty without a pipeline, where one micro-batch follows another."""
    if layout.pp == 1:
        return [[]]
    pipeline = config.parallel.pipeline
    return list(
        schedule_actions(SCHEDULES[pipeline.schedule].torch_name, layout.pp, pipeline.stages_per_rank, micro_batches)
    )


@dataclass
class _Others:
    """The most that is kept of other micro-batches while one is at work."""

    before: float | None = None
    """Bytes while gradients are not there yet; None: they always are."""
    after: float | None = None
    """Bytes while gradients of an earlier micro-batch are there."""

    def see(self, kept: float, is_first: bool) -> None:
        """Take in another pass: the first backward one or one before it, or a later one."""
        if is_first:
            self.before = max(kept, self.before or 0.0)
        else:
            self.after = max(kept, self.after or 0.0)


def _others(order: Order, kept: Mapping[int, float]) -> Mapping[tuple[int, str], _Others]:
    """The most that is kept of other micro-batches, by stage and kind of pass."""
    most: dict[tuple[int, str], _Others] = defaultdict(_Others)
    all_kept = 0.0
    begun: set[int] = set()
    for stage, kind, _ in order:
        what = "forward" if kind == "F" else "backward"
        most[stage, what].see(all_kept if kind == "F" else all_kept - kept[stage], stage not in begun)
        if kind != "F":
            begun.add(stage)
        # Of a backward pass in two halves, the second one ends it.
        all_kept += {"F": kept[stage], "I": 0.0}.get(kind, -kept[stage])
    return most


_EARLY = ("forward", "backward of the head", "backward of the last layer")
"""Parts of the first passes of a step in which there are no gradients yet."""


def _peak(rank: int, stages: Mapping[int, StageMemory], order: Order, micro_batches: int) -> RankMemory:
    """The fullest part of a step of a rank with these stages, by index."""
    others = _others(order, {index: stage.kept for index, stage in stages.items()})
    options: list[tuple[float, str, dict[str, float]]] = []
    for index, stage in stages.items():
        for label in stage.labels:
            found = others.get((index, label.partition(" of ")[0]), _Others(after=0.0))
            for kept, has_gradients in ((found.before, not label.startswith(_EARLY)), (found.after, True)):
                if kept is not None:
                    used = _memory_at(label, index, stages, has_gradients)
                    used["activations"] += kept
                    options.append((sum(used.values()), label, used))
    if not order:
        (stage,) = stages.values()
        options = [(sum(stage.at(label).values()), label, stage.at(label)) for label in stage.labels]
    _, when, best = max(options, key=lambda option: option[0])
    best["working"] += best.pop("batches") * micro_batches
    rounded = {kind: round(value) for kind, value in best.items()}
    return RankMemory(rank, round(sum(stage.count for stage in stages.values())), **rounded, when=when)


def _memory_at(label: str, index: int, stages: Mapping[int, StageMemory], has_gradients: bool) -> dict[str, float]:
    """Memory of a rank while a stage of it is at a part of the step, and its other stages rest.

    Of those, torch keeps some gathered: which ones the order decides, at most the largest.
    """
    used = stages[index].at(label)
    resting = [stage for other, stage in stages.items() if other != index]
    if label.startswith("forward"):  # in the pipeline that was run, it may have come before any backward pass
        used["gradients"] = stages[index].gradients
    used["gradients"] *= has_gradients
    for stage in resting:
        last = stage.at("optimizer")
        used["parameters"] += last["parameters"]
        used["moments"] += last["moments"]
        if label == "optimizer":
            used["gradients"] += last["gradients"]
        else:
            used["gradients"] += stage.gradients * has_gradients
    if label != "optimizer":
        used["unsharded"] += sum(sorted((stage.unsharded for stage in resting), reverse=True)[: ACTIVE_STAGES - 1])
    return used
