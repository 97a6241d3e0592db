"""The least memory and time that a layout needs, whatever else it takes: cheap, to skip what cannot be chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from pipeline.config import Config
from pipeline.config.parallel import ScheduleName
from pipeline.train.distributed.layout import Layout
from pipeline.train.host.devices import Device
from pipeline.train.model.decoder_spec import DecoderSpec
from pipeline.train.model.flops import side_share
from pipeline.train.model.part_spec import LayerSpec
from pipeline.train.parallel.footprint import (
    AVERAGE_BYTES,
    COMPUTE_BYTES,
    GRADIENT_BYTES,
    MASTER_BYTES,
    MOMENT_BYTES,
    end_parameters,
    gathered_sizes,
    layer_sizes,
    moments,
    part_matrices,
)
from pipeline.train.parallel.overlap import reduction
from pipeline.train.parallel.pipeline_stages import split_stages
from pipeline.train.parallel.step_shapes import StepShape, run_stream
from pipeline.train.parallel.tested import LayoutKind
from pipeline.train.planning.timing import step_time
from pipeline.train.planning.traffic import IN_LAYERS

_SLACK = 0.99
"""Some numbers that tp sends in each micro-batch are sent once a step in a pipeline."""


def least_bytes(config: Config, layout: Layout, spec: DecoderSpec, shape: StepShape, kept: float | None = None) -> int:
    """A lower bound of the memory of the process that needs the most, for steps of `shape`.

    Each process has its shards of weights, moments and gradients when a step ends. When a backward pass begins, it
    has weights, moments, whole weights and activations; the first rank of a pipeline those of several micro-batches.
    Of activations count those that layers which are not compiled keep at least, and of the logits one chunk.

    Args:
        config: The run file.
        layout: The degrees.
        spec: The model.
        shape: Of the step.
        kept: Bytes of activations for a token and layer, where they are known from an estimate of a similar layout.
    """
    stages = split_stages(spec, layout.pp, config.parallel.pipeline, run_stream(config))
    element, averages = COMPUTE_BYTES[config.train.precision.compute], config.train.ema is not None
    weights, optimizer = MASTER_BYTES + (AVERAGE_BYTES if averages else 0), config.train.optimizer
    reshards = LayoutKind.of(config.parallel, layout).reshard
    most = 0
    for rank in range(layout.pp):
        parts = [stage.part for stage in stages if stage.rank == rank]
        indices = [index for part in parts for index in part.layers]
        layers = [size for part in parts for size in layer_sizes(spec, part, layout.tp).values()]
        ends = sum(end_parameters(spec, part, layout.tp) for part in parts)
        parameters = sum(layers) + ends
        gathered = gathered_sizes(spec, parts, layout).values()
        shard = parameters / layout.shards
        matrices = sum(part_matrices(spec, part, layout.tp) for part in parts)
        states = MOMENT_BYTES[optimizer.states] * moments(optimizer, parameters, matrices)
        held = weights * shard + states / layout.shards
        whole = 0 if element == MASTER_BYTES else max(gathered, default=0) if reshards else ends + sum(gathered)
        tokens = shape.micro_batch_size * shape.stream.length / layout.cp
        begin = held + element * whole
        # In a later micro-batch gradients are there, whole ones where they add up before they are sharded.
        if shape.micro_batches >= 2 * layout.pp:
            added_up = reduction(config.parallel, layout) == "each"
            begin += GRADIENT_BYTES * (shard if added_up else ends + sum(gathered))
        if rank == 0:
            least = element * sum(_activation(config, layout, spec.layers[index], index, shape) for index in indices)
            least = least if kept is None else max(least, kept * len(indices))
            begin += in_flight(config, layout, shape) * tokens * least
        if any(part.last for part in parts):
            chunk = min(
                tokens * shape.stream.predicted_share, config.train.loss.tokens_at_once(spec.vocab_padded // layout.tp)
            )
            begin += element * chunk * spec.vocab_padded / layout.tp
        most = max(most, int(begin), int(held + GRADIENT_BYTES * shard))
    return most


def in_flight(config: Config, layout: Layout, shape: StepShape) -> float:
    """Micro-batches whose activations the first rank of a pipeline keeps, as `SCHEDULES` says in words."""
    pp, pipeline = layout.pp, config.parallel.pipeline
    most = pp + (pp - 1) / pipeline.stages_per_rank if pipeline.schedule == "interleaved_1f1b" else pp
    return min(shape.micro_batches, most)


def _activation(config: Config, layout: Layout, layer: LayerSpec, index: int, shape: StepShape) -> float:
    """Numbers that backward needs of a token in a layer."""
    recompute, parts = config.train.recompute, layer.parts.values()
    stream = layer.dim / (layout.tp if config.parallel.sequence_parallel else 1)
    if recompute.offload or recompute.mode == "budget":
        return 0.0
    repeated = recompute.mode != "none" and index % recompute.every == 0
    if repeated and recompute.mode == "full":
        return stream
    share = side_share(layer, shape.stream)
    if not repeated:
        # Inputs and outputs of the norms besides what is within the parts.
        return share * ((2 + len(layer.norms)) * stream + sum(part.kept_numbers(layout.tp) for part in parts))
    return stream + share * sum(part.kept_results(recompute.keep, layout.tp) for part in parts)


@dataclass(frozen=True)
class MicroBatch:
    """Seconds that one micro-batch takes, forward and backward, on the ranks that share its work."""

    layer: float
    """Seconds in each layer, of computing and what it waits for; the mean, where only some are computed again. Of
    several kinds those count that take least."""
    ends: float
    """Seconds in embedding, head and loss."""


def micro_batch(config: Config, layout: Layout, spec: DecoderSpec, shape: StepShape, device: Device) -> MicroBatch:
    """The time of a micro-batch, which neither the pipeline nor data parallelism of weights decides.

    Args:
        config: The run file.
        layout: Of it, tp, cp and ep count.
        spec: The model.
        shape: Of it, micro-batch and sequence length count.
        device: What each process has.
    """
    # With places for the experts.
    alone = Layout(dp_shard=layout.ep, cp=layout.cp, tp=layout.tp, ep=layout.ep)
    one = replace(shape, batch_size=shape.micro_batch_size, ranks=1)

    def seconds(some: DecoderSpec) -> float:
        found = step_time(config, alone, some, one, device, [0]).seconds
        sent = sum(found.communication.get(axis, 0.0) for axis in IN_LAYERS)
        return found.products + found.attention + found.recompute + found.elementwise + sent

    def of_equal(kind: LayerSpec) -> MicroBatch:
        # The first layer is computed again if any is: the mean of the others is not less than what they take.
        whole, first = (seconds(replace(spec, layers=(kind,) * count)) for count in (len(spec.layers), 1))
        layer = (whole - first) / (len(spec.layers) - 1) if len(spec.layers) > 1 else first
        return MicroBatch(layer, max(0.0, first - layer))

    return min(map(of_equal, spec.different_layers), key=lambda each: each.layer)


def least_seconds(config: Config, layout: Layout, spec: DecoderSpec, shape: StepShape, cost: MicroBatch) -> float:
    """A lower bound of a step's time: computing, waiting within the pipeline, and its slowest rank.

    Args:
        config: The run file.
        layout: The degrees.
        spec: The model.
        shape: Of the step.
        cost: `micro_batch` of the same.
    """
    pp, pipeline = layout.pp, config.parallel.pipeline
    total = shape.micro_batches * (len(spec.layers) * cost.layer + cost.ends)
    if pp == 1:
        return total
    layers = [0] * pp
    stages = split_stages(spec, pp, pipeline, run_stream(config))
    for stage in stages:
        layers[stage.rank] += len(stage.part.layers)
    slowest = max(
        count * cost.layer + (cost.ends if rank == stages[-1].rank else 0.0) for rank, count in enumerate(layers)
    )
    bubble = least_bubble(pipeline.schedule, pp, pipeline.stages_per_rank, shape.micro_batches)
    return _SLACK * max(shape.micro_batches * slowest, total / pp / (1 - bubble))


@lru_cache(maxsize=4096)
def least_bubble(schedule: ScheduleName, pp: int, stages_per_rank: int, micro_batches: int) -> float:
    """Share of the time that ranks wait in a schedule with equal stages, as `SCHEDULES` says in words."""
    work = {
        "interleaved_1f1b": stages_per_rank * micro_batches,
        "interleaved_zero_bubble": 3 * stages_per_rank * micro_batches,
        "zbv": 6 * micro_batches,
        "dualpipev": 6 * micro_batches,
    }.get(schedule, micro_batches)
    return (pp - 1) / (work + pp - 1)
