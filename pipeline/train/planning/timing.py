"""The time of a step: closed forms from FLOPs, bytes and the fractions of its stated peaks that a device reaches.

Shares of the peaks are those of `Device.shares`, measured or assumed; all else is assumed. `assumptions` says it in
words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log2

from pipeline.common.format import percent
from pipeline.config import Config
from pipeline.config.train import Fp8Config, RecomputeConfig
from pipeline.train.distributed.layout import Layout
from pipeline.train.fp8.matrices import fp8_matrices
from pipeline.train.host.devices import Device
from pipeline.train.host.shares import UPDATE_BYTES
from pipeline.train.model.decoder_spec import DecoderSpec
from pipeline.train.model.flops import (
    Length,
    expert_flops,
    expert_orthogonal_flops,
    expert_parameters,
    extra_flops,
    head_flops,
    input_flops,
    layer_flops,
    orthogonal_flops,
    shape_of,
    side_length,
    side_share,
)
from pipeline.train.model.part_spec import LayerSpec
from pipeline.train.parallel.footprint import COMPUTE_BYTES, end_parameters, layer_sizes
from pipeline.train.parallel.overlap import Reduction, reduction
from pipeline.train.parallel.pipeline_schedules import play
from pipeline.train.parallel.pipeline_stages import Stage, split_stages
from pipeline.train.parallel.step_shapes import StepShape, run_stream
from pipeline.train.planning.traffic import (
    DIMENSIONS,
    EXPOSED,
    Dimension,
    Phase,
    Transfer,
    is_recomputed,
    stage_traffic,
)

LINK_SHARE = 0.7
"""Share of the stated bandwidth of links and network that collectives reach."""
_CALL_S, _HOP_S = 15e-6, 2e-6
"""Seconds of a collective's start, and of each rank that its ring goes through; an all-reduce takes a tree."""
_AVERAGE_BYTES = 12
"""That the moving average moves for a parameter, besides `UPDATE_BYTES`."""
_CLIP_BYTES = 8
"""Bytes, of `UPDATE_BYTES`, that clipping moves: the gradient is read and written."""
_LOGIT_BYTES = 32
"""That the loss and its gradient move for a logit."""
_ROUND_BYTES = 5
"""That rounding a number to fp8 moves: twice the bf16 one, for the scale and for the rounding, and the fp8 one."""
_EXPERT_SIDE = 512
"""Shorter side of an expert's matrix with which products of experts reach half of the speed of large ones."""
_NOT_COMPILED = 2.5
"""Passes over memory where norms and activations are not fused, relative to where they are."""


def basis(device: Device) -> str:
    """The origin of the shares of a device, in words."""
    if device.measured is None:
        return f"shares of the peaks are assumed: nothing was measured on {device.name}"
    return f"shares of the peaks are {device.measured}"


def assumptions(device: Device, fp8: Fp8Config | None = None, *, experts: bool = False) -> list[str]:
    """The assumptions behind a time, in words, and the origin of measured shares.

    Args:
        device: What each process has.
        fp8: The `train.precision.fp8:` section.
        experts: The model has some.
    """
    shares = device.shares
    share = shares.products
    measured_only = (
        "those of products (in bf16, and taken for fp16, fp32 and recipes of fp8 without a figure), attention, memory "
        "bandwidth and the update of fp32 moments; all else is assumed"
    )
    in_fp8 = []
    if fp8 is not None:
        own = shares.fp8_products(fp8.scaling)
        in_fp8.append(
            f"products in fp8 reach {'the same ' if own == share else ''}{percent(own, 0)} of their own peak, and "
            "rounding "
            f"moves {_ROUND_BYTES} bytes for each number of their inputs and of the gradients of their outputs; memory "
            "is that of bf16"
        )
    of_experts = []
    if experts:
        unlike_others = "" if fp8 is None else " in bf16, which fp8 leaves them in,"
        of_experts.append(
            f"products of experts{unlike_others} reach side / (side + {_EXPERT_SIDE}) of the speed of large "
            "ones, by the shorter side of a matrix, or take as long as reading their weights; every expert gets "
            "equally many tokens, ep communication is exposed, and the host waits for nothing"
        )
    return [
        basis(device) if device.measured is None else f"{basis(device)}: {measured_only}",
        *in_fp8,
        *of_experts,
        f"large matrix products reach {percent(share, 0)} of the stated peak, attention "
        f"{percent(share * shares.attention, 0)}, "
        f"elementwise operations {percent(shares.memory, 0)} of the memory bandwidth, the update of fp32 moments "
        f"{percent(shares.update, 0)}, collectives {percent(LINK_SHARE, 0)} of that stated for links and network",
        f"a collective takes {_CALL_S * 1e6:.0f} us, and {_HOP_S * 1e6:.0f} us for each rank that its ring goes "
        "through",
        "tp, cp and pp communication is exposed; dp_shard and dp_replicate communication overlaps with computing, "
        "where there is something to compute, and does not slow it down; parallel.overlap.async_tp changes nothing "
        "here",
        f"attention's backward takes {shares.attention_backward:.3g} times its forward, and with bounds of documents "
        f"or windows kernels compute the whole square; an update moves {UPDATE_BYTES['fp32']} bytes per parameter, "
        f"with moments in bf16 {UPDATE_BYTES['bf16']}, without clipping {_CLIP_BYTES} less; what Muon sends for its "
        "matrices takes no time",
        "where train.compile is unset, layers are compiled, as on a GPU; memory is that of layers without compilation",
        "the host always has the next operation ready, which small models are too fast for; loader, saves, validation, "
        "restarts, slow and failed nodes take no time",
    ]


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of one step. The parts add up; those of computing are means over the ranks of the pipeline."""

    products: float
    """Matrix products of the model."""
    attention: float
    """Scores and their sum over values."""
    recompute: float
    """All that backward computes again."""
    elementwise: float
    """Everything that reads and writes more than it computes: norms, activations, the loss."""
    communication: Mapping[Dimension, float]
    """Seconds that computing waits for communication, by axis."""
    bubble: float
    """Waiting in the pipeline, for stages that take longer, too."""
    optimizer: float
    """Clipping and update."""
    teacher: float = 0.0
    """Forward passes of a teacher."""

    @property
    def total(self) -> float:
        """All parts."""
        parts = (self.products, self.attention, self.recompute, self.elementwise, self.bubble, self.optimizer)
        return self.teacher + sum(parts) + sum(self.communication.values())


@dataclass(frozen=True)
class StepTime:
    """The time of a step, and what it follows from."""

    seconds: StepSeconds
    bubble: float
    """Share of the pipeline's time in which ranks wait, 0 to 1."""
    traffic: list[list[Transfer]]
    """Transfers, by pp rank."""


def step_time(
    config: Config, layout: Layout, spec: DecoderSpec, shape: StepShape, device: Device, parameters: Sequence[int]
) -> StepTime:
    """The time of a step.

    Args:
        config: The run file.
        layout: The degrees.
        spec: The model.
        shape: Of the step.
        device: What each process has.
        parameters: By pp rank, after the cut by tp.
    """
    pipeline, micro = config.parallel.pipeline, shape.micro_batches
    stages = split_stages(spec, layout.pp, pipeline, run_stream(config))
    sent = stage_traffic(config, layout, spec, shape, stages)
    works = [
        _stage_work(config, layout, spec, shape, device, stage, transfers)
        for stage, transfers in zip(stages, sent, strict=True)
    ]
    bubble = 0.0
    if layout.pp > 1:
        costs = [work.total / 3 for work in works]
        bubble = play(pipeline.schedule, layout.pp, pipeline.stages_per_rank, micro, costs).bubble
    share = micro / layout.pp
    busy = share * sum(work.total for work in works)
    by_rank: list[list[Transfer]] = [[] for _ in range(layout.pp)]
    exposed: list[dict[Dimension, float]] = []
    for stage, transfers in zip(stages, sent, strict=True):
        by_rank[stage.rank] += transfers
    for rank, transfers in enumerate(by_rank):
        mine = [work for work, stage in zip(works, stages, strict=True) if stage.rank == rank]
        exposed.append(_exposed(transfers, mine, layout, device, micro, reduction(config.parallel, layout)))
    communication = {
        axis: share * sum(work.waiting.get(axis, 0.0) for work in works)
        for axis in DIMENSIONS
        if any(axis in work.waiting for work in works)
    }
    for axis, seconds in max(exposed, key=lambda each: sum(each.values())).items():
        communication[axis] = communication.get(axis, 0.0) + seconds
    states, shares = config.train.optimizer.states, device.shares
    update = UPDATE_BYTES[states] + (_AVERAGE_BYTES if config.train.ema else 0)
    if config.train.optimizer.clip_norm is None and config.train.precision.compute != "fp16":
        update -= _CLIP_BYTES  # with fp16 the loss scale is taken out of the gradients all the same
    # Moments in bf16 are updated by passes of several kernels.
    reached = shares.update if states == "fp32" else shares.memory
    own = -(-max(parameters) // layout.shards)
    return StepTime(
        StepSeconds(
            products=share * sum(work.products for work in works),
            attention=share * sum(work.attention for work in works),
            recompute=share * sum(work.recompute for work in works),
            elementwise=share * sum(work.elementwise for work in works),
            communication=communication,
            bubble=busy * bubble / (1 - bubble),
            optimizer=update * own / (device.memory_bandwidth * reached)
            + _muon_seconds(config, layout, spec, device, stages),
        ),
        bubble,
        by_rank,
    )


def forward_seconds(config: Config, layout: Layout, spec: DecoderSpec, shape: StepShape, device: Device) -> float:
    """Seconds of a forward pass of a whole model on one micro-batch, or of gathering its weights if that is longer."""
    (stage,) = stages = split_stages(spec, 1, config.parallel.pipeline, shape.stream)
    (sent,) = stage_traffic(config, layout, spec, shape, stages)
    overlapped = [each for each in sent if each.axis not in EXPOSED and each.phase == "forward"]
    gathers = sum(transfer_seconds(each, layout, device) for each in overlapped) / shape.micro_batches
    return max(_stage_work(config, layout, spec, shape, device, stage, sent).forward, gathers)


def rank_parameters(config: Config, layout: Layout, spec: DecoderSpec) -> list[int]:
    """Parameters by pp rank, after the cut by tp."""
    counts = [0] * layout.pp
    for stage in split_stages(spec, layout.pp, config.parallel.pipeline, run_stream(config)):
        counts[stage.rank] += sum(layer_sizes(spec, stage.part, layout.tp).values())
        counts[stage.rank] += end_parameters(spec, stage.part, layout.tp)
    return counts


def recompute_flops_per_token(recompute: RecomputeConfig, spec: DecoderSpec, length: Length) -> float:
    """FLOPs that backward does again for a token of the data, attention counted half."""
    shape = shape_of(length)
    total = sum(
        sum(_repeated(recompute, layer, length, causal=True))
        for index, layer in enumerate(spec.blocks)
        if is_recomputed(recompute, index)
    )
    return total * shape.length / shape.raw


@dataclass(frozen=True)
class _Work:
    """Seconds of one stage in a micro-batch."""

    products: float
    attention: float
    recompute: float
    elementwise: float
    waiting: dict[Dimension, float]
    forward: float
    """Seconds of all these in the forward pass."""

    @property
    def total(self) -> float:
        return self.products + self.attention + self.recompute + self.elementwise + sum(self.waiting.values())


def _stage_work(
    config: Config,
    layout: Layout,
    spec: DecoderSpec,
    shape: StepShape,
    device: Device,
    stage: Stage,
    transfers: Iterable[Transfer],
) -> _Work:
    rates, recompute, length = _Rates(config, layout, device), config.train.recompute, shape.stream
    tokens = shape.micro_batch_size * length.length / layout.cp
    products = attention = passes = again = 0.0
    fp8 = config.train.precision.fp8
    matrices = {} if fp8 is None else fp8_matrices(fp8, spec, layout.tp)
    for index, layer in stage.part.blocks(spec):
        # A mask is a table for the kernel, which then computes all of it; a scan computes whole chunks.
        causal = not config.model.document_attention and (
            layer.mixer is None or layer.mixer.sees_all(side_length(layer, length))
        )
        causal = causal and not (layer.mixer is not None and layer.mixer.recurrent)
        scores = extra_flops(layer, length, causal=causal)
        multiplied = layer_flops(layer, length, causal=causal) - scores - expert_flops(layer)
        rounded = matrices.get(index, [])
        part = side_share(layer, length)
        share = part * 2 * sum(matrix.elements for matrix in rounded) / multiplied
        products += rates.products(multiplied, share) + rates.experts(expert_flops(layer), layer, tokens)
        attention += rates.attention(scores)
        sent = layer.mixer.cp_transfer(config.parallel.cp_method, layout.tp, layout.cp) if layer.mixer else None
        repeated = 0.0 if sent is None else sent.repeated_flops
        products += rates.products(repeated)
        # A third of them is in the forward pass: inputs are rounded there and again for gradients of weights.
        passed = rates.passes(layer) * part + rates.memory(
            part * _ROUND_BYTES * sum(2 * matrix.columns + matrix.rows for matrix in rounded) / 3
        )
        passes += passed
        if is_recomputed(recompute, index):
            twice, experts_twice, scores_twice = _repeated(recompute, layer, length, causal=causal)
            again += rates.products(twice, share) + rates.experts(experts_twice, layer, tokens)
            again += rates.attention(scores_twice) + passed
            again += rates.products(repeated) if twice else 0.0
    logits = 0.0
    if stage.part.last:
        times: float = 1 + len(spec.mtp)
        times *= shape.stream.predicted_share
        products += rates.products(times * head_flops(spec) * spec.vocab_padded / spec.vocab_size)
        logits = rates.memory(times * _LOGIT_BYTES * spec.vocab_padded / layout.tp)
        # Whole on each rank of tp, which has some of the positions, or all of them.
        alone = 1 if config.parallel.sequence_parallel else layout.tp
        products += rates.products(alone * sum(map(input_flops, spec.mtp)))
    waiting: dict[Dimension, float] = {}
    early = 0.0
    for each in transfers:
        if each.axis in EXPOSED and each.phase != "update":
            seconds = transfer_seconds(each, layout, device) / shape.micro_batches
            waiting[each.axis] = waiting.get(each.axis, 0.0) + seconds
            early += seconds if each.phase == "forward" else 0.0
    return _Work(
        products=3 * tokens * products,
        attention=(1 + device.shares.attention_backward) * tokens * attention,
        recompute=tokens * again,
        elementwise=tokens * (3 * passes + logits),
        waiting=waiting,
        forward=tokens * (products + attention + passes + logits / 2) + early,
    )


def _muon_seconds(config: Config, layout: Layout, spec: DecoderSpec, device: Device, stages: Sequence[Stage]) -> float:
    """Seconds in which the pp rank with the most layers orthogonalizes matrices, each on one process of the stage.

    Experts are where their shards are, and with copies of the model each copy's are orthogonalized.
    """
    optimizer = config.train.optimizer
    if optimizer.type != "muon":
        return 0.0
    processes = layout.world_size // layout.pp
    most = 0.0
    for rank in range(layout.pp):
        layers = [layer for stage in stages if stage.rank == rank for _, layer in stage.part.blocks(spec)]
        flops = [each for layer in layers for each in orthogonal_flops(layer, optimizer.muon.steps)]
        # As many at once as there are processes, of which the slowest counts.
        alone = sum(sorted(flops, reverse=True)[::processes])
        experts = sum(expert_orthogonal_flops(each, optimizer.muon.steps, layout.places) for each in layers)
        most = max(most, alone + experts)
    return most / (device.flops["bf16"] * device.shares.products)


class _Rates:
    """Seconds of a rank for what the whole tp group computes on one token."""

    def __init__(self, config: Config, layout: Layout, device: Device) -> None:
        shares, fp8 = device.shares, config.train.precision.fp8
        self._reached = device.flops[config.train.precision.compute] * shares.products * layout.tp
        self._gain = device.flops.get("fp8", 0.0) / device.flops["bf16"]
        if fp8 is not None:
            self._gain *= shares.fp8_products(fp8.scaling) / shares.products
        self._attention, self._ep = shares.attention, layout.ep
        self._bandwidth = device.memory_bandwidth * shares.memory
        self._element = COMPUTE_BYTES[config.train.precision.compute]
        self._tp = layout.tp
        self._cut = layout.tp if config.parallel.sequence_parallel else 1
        self._factor = _NOT_COMPILED if config.train.compile is False else 1.0

    def products(self, flops: float, fp8: float = 0.0) -> float:
        """Seconds of matrix products, of which a fraction is in fp8."""
        quicker = fp8 / self._gain if fp8 else 0.0
        return flops * (1 - fp8 + quicker) / self._reached

    def experts(self, flops: float, layer: LayerSpec, tokens: float) -> float:
        """Seconds of products of experts for one of some tokens; all weights are read, however few tokens there are."""
        if not flops:
            return 0.0
        side = min(min(stack.rows, stack.columns) for stack in layer.stacks.values())
        weights = self.memory(expert_parameters(layer, self._ep) * self._element)
        return max(flops / (self._reached * side / (side + _EXPERT_SIDE)), weights / tokens)

    def attention(self, flops: float) -> float:
        return flops / (self._reached * self._attention)

    def memory(self, size: float) -> float:
        return size / self._bandwidth

    def passes(self, layer: LayerSpec) -> float:
        """Reads and writes of a layer's forward pass besides its products."""
        numbers = (2 * len(layer.norms) + 3 * len(layer.parts)) * layer.dim / self._cut  # norms and sums
        for part in layer.parts.values():
            numbers += part.elementwise_numbers(self._tp)
        return self.memory(numbers * self._element * self._factor)


def _repeated(
    recompute: RecomputeConfig, layer: LayerSpec, length: Length, *, causal: bool
) -> tuple[float, float, float]:
    """Forward FLOPs of a token that are done twice in a layer: products with matrices and with experts, attention."""
    attention, experts = extra_flops(layer, length, causal=causal), expert_flops(layer)
    products = layer_flops(layer, length, causal=causal) - attention - experts
    if recompute.mode == "budget":
        share = 1 - recompute.budget
        return share * products, share * experts, share * attention
    selective = recompute.mode == "selective"
    # Of the last product backward needs the factors and not the result, so that torch does not repeat it.
    if layer.mlp is not None and layer.stacks:
        if selective:  # router and shared mlp keep what they need
            products -= 2.0 * sum(matrix.elements for matrix in layer.mlp.matrices)
            experts -= 2.0 * layer.mlp.stacks[-1].used_elements
    elif layer.ends_in_sum:
        products -= 2.0 * list(layer.matrices.values())[-1].elements * side_share(layer, length)
    kept = recompute.keep if selective else []
    if "matmul" in kept:
        products = experts = 0.0
    return products, experts, 0.0 if "attention" in kept else attention


def _exposed(
    transfers: Sequence[Transfer], works: Sequence[_Work], layout: Layout, device: Device, micro: int, when: Reduction
) -> dict[Dimension, float]:
    """Seconds of a step in which a rank waits for weights and gradients.

    Those of experts, which have a mesh of their own, count with the others. They go beside the computation of other
    layers; at least one layer's have nothing beside them. Gradients that are sent once a step go beside the last
    backward pass, or after it.
    """
    forward = micro * sum(work.forward for work in works)
    backward = micro * sum(work.total for work in works) - forward
    last = 0.0 if when == "after" else backward / micro
    found: dict[Dimension, float] = {}
    shards: tuple[Dimension, ...] = ("dp_shard", "expert_shards")
    groups: tuple[tuple[tuple[Dimension, ...], Phase, float], ...] = (
        (shards, "forward", forward),
        (shards, "backward", backward),
        (shards, "update", last),
        (("dp_replicate",), "update", last),
        (("pp",), "update", 0.0),
    )
    for axes, phase, hidden in groups:
        these = [each for each in transfers if each.axis in axes and each.phase == phase]
        by_axis = {
            axis: sum(transfer_seconds(each, layout, device) for each in these if each.axis == axis) for axis in axes
        }
        total = sum(by_axis.values())
        if total:
            waits = max(total / max(each.calls for each in these), total - hidden)
            for axis in {each.axis: None for each in these}:
                found[axis] = found.get(axis, 0.0) + waits * (by_axis[axis] / total)
    return found


def transfer_seconds(transfer: Transfer, layout: Layout, device: Device) -> float:
    """Seconds of equal operations, one after the other."""
    if transfer.operation in ("send", "all_to_all"):
        hops = 1
    else:
        hops = 2 * ceil(log2(transfer.ranks)) if transfer.operation == "all_reduce" else transfer.ranks - 1
    bandwidth = stated_bandwidth(transfer, layout, device) * LINK_SHARE
    return transfer.calls * (_CALL_S + hops * _HOP_S) + transfer.sent / bandwidth


def stated_bandwidth(transfer: Transfer, layout: Layout, device: Device) -> float:
    """Bytes a second that a rank can send to the others of a transfer.

    Within a node that of its links. Between nodes, the ranks of a group that are in one node share their adapters: the
    rings go in parallel, each through another one. What is exchanged goes through the rank's own.
    """
    if transfer.axis == "expert_shards":
        stride = layout.ep
    else:  # shards of weights are over cp, too, whose ranks are nearer
        stride = layout.stride("cp" if transfer.axis == "dp_shard" else transfer.axis)
    if stride * transfer.ranks <= device.node_devices:
        return device.link_bandwidth
    if transfer.operation in ("send", "all_to_all"):
        return device.network_bandwidth
    return min(device.link_bandwidth, max(1, device.node_devices // stride) * device.network_bandwidth)
