"""The traffic between the processes of a layout in a step, counted from what each part of the program sends.

Shapes: B samples of a micro-batch, S positions of the whole sequence, D width, V padded vocabulary.

Not counted are a few numbers a step that all ranks agree on (norm, loss, hashes), and the padding of shards whose first
dimension the ranks do not divide. Tokens go to experts evenly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from pipeline.config import Config
from pipeline.config.parallel import ScheduleName
from pipeline.config.train import RecomputeConfig
from pipeline.train.distributed.axes import AXES, AxisName, Traffic
from pipeline.train.distributed.layout import Layout
from pipeline.train.fp8.matrices import gathered_in_fp8
from pipeline.train.model.decoder_spec import DecoderSpec
from pipeline.train.model.flops import side_share
from pipeline.train.model.part_spec import RELATIVE, LayerPartSpec, LayerSpec
from pipeline.train.parallel.footprint import COMPUTE_BYTES, GRADIENT_BYTES, end_parameters, layer_sizes
from pipeline.train.parallel.overlap import reduction
from pipeline.train.parallel.pipeline_schedules import actions_of
from pipeline.train.parallel.pipeline_stages import Stage, tied_tables
from pipeline.train.parallel.step_shapes import StepShape
from pipeline.train.parallel.tested import LayoutKind

Dimension = Literal[AxisName, "expert_shards"]
"""What a transfer goes along: `dp_shard` is over dp_shard x cp, `expert_shards` over dp_shard x cp x tp / ep."""
Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]
Phase = Literal["forward", "backward", "again", "update"]
"""`again`: forward passes that backward repeats. `update`: once a step, in the last backward pass or after it."""


def _communicating(when: Traffic) -> tuple[AxisName, ...]:
    """Axes that communicate then, innermost first; those within others come last."""
    found = [axis for axis in reversed(AXES) if axis.traffic == when]
    return tuple(axis.name for axis in sorted(found, key=lambda axis: len(axis.within)))


IN_LAYERS: tuple[Dimension, ...] = _communicating("in_layers")
EXPOSED: tuple[Dimension, ...] = (*IN_LAYERS, *_communicating("between_stages"))
"""Computing waits for what they send in passes."""
DIMENSIONS: tuple[Dimension, ...] = (
    *EXPOSED,
    "dp_shard",
    "expert_shards",
    *(axis for axis in _communicating("beside_layers") if axis != "dp_shard"),
)
"""All, in the order of tables."""

ACTIVE_STAGES = 3
"""A rank with several stages keeps the weights of those whole that its next actions need, at most this number."""
_FP32, _INT64 = 4, 8


@dataclass(frozen=True)
class Transfer:
    """Equal operations of one rank in a step."""

    axis: Dimension
    operation: Operation
    what: str
    phase: Phase
    calls: int
    bytes: int
    """Bytes of all calls: what a gather gives, what a reduction or an exchange is given, what is sent."""
    ranks: int
    """That take part."""

    @property
    def sent(self) -> float:
        """Bytes that each rank sends.

        In a ring that is (n - 1) / n of a gather's or a reduce-scatter's, twice that of an all-reduce's; of an exchange
        it is that of the others.
        """
        if self.operation == "send":
            return self.bytes
        return (2 if self.operation == "all_reduce" else 1) * self.bytes * (self.ranks - 1) / self.ranks


def stage_traffic(
    config: Config, layout: Layout, spec: DecoderSpec, shape: StepShape, stages: Sequence[Stage]
) -> list[list[Transfer]]:
    """The transfers of a process in a step, by pipeline stage.

    Args:
        config: The run file.
        layout: The degrees.
        spec: The model.
        shape: Of the step.
        stages: All of the pipeline.
    """
    counters = [_Counter(config, layout, spec, shape, stage, stages) for stage in stages]
    return [[each for each in counter.all() if each.calls and each.bytes and each.ranks > 1] for counter in counters]


def bytes_by_axis(transfers: Iterable[Transfer]) -> dict[Dimension, int]:
    """Bytes sent, for each axis that sends any."""
    sums: dict[Dimension, float] = {}
    for transfer in transfers:
        sums[transfer.axis] = sums.get(transfer.axis, 0) + transfer.sent
    return {axis: round(sums[axis]) for axis in DIMENSIONS if axis in sums}


def is_recomputed(recompute: RecomputeConfig, layer: int) -> bool:
    """True if backward computes a layer's forward pass again, or parts of it."""
    return recompute.mode != "none" and (recompute.mode == "budget" or layer % recompute.every == 0)


def repeats_gathers(recompute: RecomputeConfig) -> bool:
    """True if a recomputed layer gathers its inputs again."""
    return recompute.mode in ("full", "selective")


def repeats_communication(recompute: RecomputeConfig) -> bool:
    """True if a recomputed layer repeats its sums and exchanges."""
    return repeats_gathers(recompute) and not (recompute.mode == "selective" and "communication" in recompute.keep)


class _Counter:
    """The transfers of one stage on one rank."""

    def __init__(
        self,
        config: Config,
        layout: Layout,
        spec: DecoderSpec,
        shape: StepShape,
        stage: Stage,
        stages: Sequence[Stage],
    ) -> None:
        self._parallel = config.parallel
        self._recompute = config.train.recompute
        self._chunk = config.train.loss.tokens_at_once(spec.vocab_padded // layout.tp)
        self._layout = layout
        self._spec = spec
        self._stage = stage
        self._stages = stages
        self._layers = stage.part.blocks(spec)
        self._mtp = spec.mtp if stage.part.last else ()
        self._element = COMPUTE_BYTES[config.train.precision.compute]
        self._fp8 = gathered_in_fp8(config.train.precision.fp8, spec, layout)
        self._micro = shape.micro_batches
        self._length = shape.stream
        self._tokens = shape.micro_batch_size * shape.stream.length // layout.cp
        self._predicted = shape.micro_batch_size * shape.stream.predicted // layout.cp
        self._samples = shape.micro_batch_size
        self._cut = config.parallel.sequence_parallel
        self._shards = layout.shards
        self._reshards = LayoutKind.of(config.parallel, layout).reshard or False
        self._reduction = reduction(config.parallel, layout)
        self._reductions = self._micro if self._reduction == "each" else 1
        self._end_parameters = end_parameters(spec, stage.part, layout.tp)
        mixtures = spec.expert_layers
        self._experts = [(index, mixtures[index]) for index, _ in self._layers if index in mixtures]
        self._expert_parameters = sum(part.stack_parameters(layout.ep) for _, part in self._experts)
        parts = [part for _, layer in self._layers for part in layer.parts.values()]
        self._fp32_sizes = [size for part in parts for size in part.fp32_sizes(layout.tp)]
        # Without those of experts and in fp32, which are units of their own.
        self._layer_parameters = sum(layer_sizes(spec, stage.part, layout.tp).values()) - sum(self._fp32_sizes)
        self._layer_parameters -= sum(part.stack_parameters(layout.tp) for _, part in self._experts)
        self._counts_of_samples = config.train.balance.over == "sequence"

    def all(self) -> Iterator[Transfer]:
        """Transfers of every kind, some of them without calls or bytes."""
        if self._layout.tp > 1:
            yield from self._tensor_parallel()
        if self._layout.cp > 1:
            yield from self._context_parallel()
        if self._layout.ep > 1:
            yield from self._expert_parallel()
        yield from self._pipeline()
        yield from self._sharded()
        yield from self._sharded_fp32()
        yield from self._sharded_experts()
        yield from self._replicated()

    def _tensor_parallel(self) -> Iterator[Transfer]:
        stream = self._tokens * self._spec.dim * self._element
        layers, part = [layer for _, layer in self._layers], self._stage.part
        again = [layer for index, layer in self._layers if is_recomputed(self._recompute, index)]
        inputs, outputs = ([each for layer in layers for each in of(layer)] for of in (self._inputs, self._outputs))
        gathered, summed = list[float](), list[float]()
        if repeats_gathers(self._recompute):
            gathered = [each for layer in again for each in self._inputs(layer, repeated=True)]
            # Of a layer's last operation backward needs the input alone, so that it is not repeated, and its sum
            # neither. A shared mlp is not the last: experts come after it.
            for layer in again:
                sums = self._outputs(layer, repeated=True)
                summed += sums[:-1] if layer.ends_in_sum and not layer.stacks else sums
        if not repeats_communication(self._recompute):
            again, summed = [], []
        rows: list[tuple[Operation, str, Phase, Sequence[float]]] = [
            ("all_gather", "inputs of mixer and mlp", "forward", inputs),
            ("reduce_scatter", "outputs of mixer and mlp", "forward", outputs),
            ("all_gather", "gradients of their outputs", "backward", outputs),
            ("reduce_scatter", "gradients of their inputs", "backward", inputs),
            ("all_gather", "inputs of mixer and mlp", "again", gathered),
            ("reduce_scatter", "outputs of mixers", "again", summed),
        ]
        if lookups := part.first + len(self._mtp):
            rows += [
                ("reduce_scatter", "embedding", "forward", [1.0] * lookups),
                ("all_gather", "gradient of the embedding", "backward", [1.0] * lookups),
            ]
        if part.last:
            # The head has one input of all depths of multi-token prediction.
            of_head = [self._length.decoder / self._length.length * (1 + len(self._mtp))]
            rows += [
                ("all_gather", "input of the head", "forward", of_head),
                ("reduce_scatter", "gradient of the head's input", "backward", of_head),
            ]
        for operation, what, phase, shares in rows:
            calls, size = len(shares), round(stream * sum(shares))
            if self._cut:
                yield self._in_each_micro_batch("tp", operation, what, phase, calls, size)
            elif operation == "reduce_scatter":  # without a cut there is nothing to gather, and sums stay whole
                yield self._in_each_micro_batch("tp", "all_reduce", what, phase, calls, size)
        yield from self._wide_norms("forward", layers)
        yield from self._wide_norms("backward", layers)
        yield from self._wide_norms("again", again)
        yield from self._routed("tp")
        if not self._cut:
            calls = len(self._experts)
            for what, phase in (("outputs of experts", "forward"), ("gradients of their inputs", "backward")):
                yield self._in_each_micro_batch("tp", "all_gather", what, phase, calls, calls * stream)
        if part.last:
            tokens = self._predicted * (1 + len(self._mtp))
            chunks = -(-tokens // self._chunk)
            size = tokens * _FP32
            yield self._in_each_micro_batch("tp", "all_reduce", "largest logits", "forward", chunks, size)
            yield self._in_each_micro_batch("tp", "all_reduce", "sums of the softmax", "forward", chunks, 2 * size)
        yield self._partial_gradients()

    def _inputs(self, layer: LayerSpec, *, repeated: bool = False) -> list[float]:
        """Shares of the stream that parts of a layer collect; those of the encoder come with attention to it."""
        encoder = self._length.encoder / self._length.length
        return [
            share
            for place, part in layer.parts.items()
            if not repeated or self._repeats(part)
            for share in (*[side_share(layer, self._length)] * len(part.tp_inputs), *[encoder] * (place == "cross"))
        ]

    def _outputs(self, layer: LayerSpec, *, repeated: bool = False) -> list[float]:
        """Shares of the stream that parts of a layer sum up."""
        parts = [part for part in layer.parts.values() if not repeated or self._repeats(part)]
        return [side_share(layer, self._length) for part in parts for _ in part.tp_inputs]

    def _repeats(self, part: LayerPartSpec) -> bool:
        """True if backward computes a part again from its input on, in a layer that is repeated."""
        # Of a mixture of experts, products alone are repeated where something is kept.
        return self._recompute.mode == "full" or not part.stacks

    def _routed(self, axis: Literal["tp", "cp"]) -> Iterator[Transfer]:
        """Choices of samples whose tokens the ranks of an axis share, for the balance loss."""
        if self._counts_of_samples:
            size = sum(part.router.count for _, part in self._experts) * self._samples * _INT64
            yield self._in_each_micro_batch(axis, "all_reduce", "choices", "forward", len(self._experts), size)

    def _wide_norms(self, phase: Phase, layers: Sequence[LayerSpec]) -> Iterator[Transfer]:
        """Sums of squares over the ranks of tp."""
        sums = [each for layer in layers for part in layer.parts.values() for each in part.tp_sums(self._layout.tp)]
        if sums:
            size = sum(sums) * self._tokens * _FP32
            yield self._in_each_micro_batch("tp", "all_reduce", "squares", phase, len(sums), size)

    def _in_each_micro_batch(
        self, axis: Literal["tp", "cp", "ep"], operation: Operation, what: str, phase: Phase, calls: int, size: int
    ) -> Transfer:
        ranks: int = getattr(self._layout, axis)
        return Transfer(axis, operation, what, phase, self._micro * calls, self._micro * size, ranks)

    def _partial_gradients(self) -> Transfer:
        """Gradients of parameters that are whole on all tp ranks but see some of the tokens or heads on each."""
        spec, tp, part = self._spec, self._layout.tp, self._stage.part
        sizes: list[int] = []
        for _, layer in self._layers:
            sizes += layer.norm_sizes if self._cut else []
            for each in layer.parts.values():
                sizes += each.partial_gradients(tp)
        if self._cut and part.last:
            sizes += spec.last_norm_sizes
            sizes += [size for each in self._mtp for size in each.norm_sizes]
            sizes += [matrix.elements for each in self._mtp for matrix in each.inputs]
        if part.last:  # each rank knows the part of the gradient that its own logits have
            sizes += spec.transform_sizes
        if self._cut and part.first:
            sizes += spec.first_sizes
        # Gradients are in the compute format until they are added up over micro-batches, or over ranks.
        at_once = self._reduction == "each" or (self._reduction == "last" and self._micro == 1)
        element = self._element if at_once else GRADIENT_BYTES
        times = self._reductions
        return Transfer(
            *("tp", "all_reduce", "gradients of whole parameters", "backward"),
            *(times * len(sizes), times * sum(sizes) * element, tp),
        )

    def _context_parallel(self) -> Iterator[Transfer]:
        layout, method = self._layout, self._parallel.cp_method
        for index, layer in self._layers:
            if layer.mixer is None:
                continue
            sent = layer.mixer.cp_transfer(method, layout.tp, layout.cp)
            assert sent is not None, f"{layer.mixer.label} over cp"
            exchanges = method == "ulysses" and not sent.gathers
            forward: Operation = "all_to_all" if exchanges else "all_gather"
            backward: Operation = "all_to_all" if exchanges else "reduce_scatter"
            repeats = (repeats_communication if exchanges else repeats_gathers)(self._recompute)
            numbers = self._tokens * sent.numbers + self._samples * sent.of_sample
            size = numbers * self._element + self._samples * sent.of_sample_fp32 * _FP32
            gradients = f"gradients of {sent.what}"
            yield self._in_each_micro_batch("cp", forward, sent.what, "forward", sent.calls, size)
            yield self._in_each_micro_batch("cp", backward, gradients, "backward", sent.calls, size)
            if is_recomputed(self._recompute, index) and repeats:
                yield self._in_each_micro_batch("cp", forward, sent.what, "again", sent.calls, size)
        yield from self._routed("cp")

    def _expert_parallel(self) -> Iterator[Transfer]:
        """Numbers of rows; rows, each with its fp32 weight, to their experts and back; and their gradients."""
        tokens = self._tokens // self._layout.tp
        for index, part in self._experts:
            rows = tokens * part.router.top_k
            results = rows * part.dim * self._element
            sent = results + rows * _FP32
            transfers: list[tuple[str, Phase, int]] = [
                ("numbers of rows", "forward", part.router.count * _INT64),
                ("rows for experts", "forward", sent),
                ("results of experts", "forward", results),
                ("gradients of results", "backward", results),
                ("gradients of rows", "backward", sent),
            ]
            if is_recomputed(self._recompute, index) and self._recompute.mode == "full":
                # The losses of the router, which backward needs again, come after both.
                transfers += [("rows for experts", "again", sent), ("results of experts", "again", results)]
            for what, phase, size in transfers:
                yield self._in_each_micro_batch("ep", "all_to_all", what, phase, 1, size)

    def _pipeline(self) -> Iterator[Transfer]:
        layout, index = self._layout, self._stage.index
        cut = layout.tp if self._cut else 1
        size = self._micro * self._tokens // cut * self._spec.dim * self._element
        after = self._stages[index + 1 : index + 2]
        before = self._stages[index - 1 : index] if index else []
        for peers, what, phase in (
            (after, "residual stream", "forward"),
            (before, "gradient of the residual stream", "backward"),
        ):
            if any(peer.rank != self._stage.rank for peer in peers):
                yield Transfer("pp", "send", what, phase, self._micro, size, layout.pp)  # type: ignore[arg-type]
        tables = {"embedding.weight": ("gradient of the tied embedding", self._spec.vocab_padded * self._spec.dim)}
        for side, each in self._spec.relatives.items():
            tables[f"{RELATIVE}{side}"] = "gradients of relative positions", each.buckets * each.heads
        for name, holders in tied_tables(self._spec, self._stages).items():
            others = {stage.rank for stage in holders} - {self._stage.rank}
            if others and self._stage in holders:
                what, elements = tables[name]
                size = len(others) * (elements // layout.tp // self._shards) * GRADIENT_BYTES
                yield Transfer("pp", "send", what, "update", len(others), size, layout.pp)

    def _sharded(self) -> Iterator[Transfer]:
        ends, layers = self._end_parameters, self._layer_parameters
        (forward, backward), rest = self._gathers(self._shards, self._reshards)
        # One byte each instead of two.
        gathered = layers * self._element - sum(self._fp8.get(index, 0) for index, _ in self._layers)
        for what, size, units, calls, phase in (
            ("weights of layers", forward * gathered, len(self._layers), forward, "forward"),
            ("weights of layers", backward * gathered, len(self._layers), backward, "backward"),
            ("weights of embedding and head", rest * ends * self._element, 1, rest, "forward"),
        ):
            yield Transfer("dp_shard", "all_gather", what, phase, calls * units, size, self._shards)  # type: ignore[arg-type]
        yield self._scattered("dp_shard", "gradients", len(self._layers) + (1 if ends else 0), layers + ends)

    def _sharded_fp32(self) -> Iterator[Transfer]:
        """Traffic of vectors that layers use in fp32, which stay whole once they are gathered."""
        (forward, backward), _ = self._gathers(self._shards, reshards=False)
        units, size = len(self._fp32_sizes), sum(self._fp32_sizes)
        calls = forward + backward
        yield Transfer(
            "dp_shard", "all_gather", "fp32 vectors", "forward", calls * units, calls * size * _FP32, self._shards
        )
        yield self._scattered("dp_shard", "gradients of fp32 vectors", units, size)

    def _scattered(self, axis: Literal["dp_shard", "expert_shards"], what: str, units: int, size: int) -> Transfer:
        """Reductions of gradients of some parameters."""
        ranks = self._shards if axis == "dp_shard" else self._layout.expert_shards
        times, phase = self._reductions, "backward" if self._reduction == "each" else "update"
        return Transfer(axis, "reduce_scatter", what, phase, times * units, times * size * GRADIENT_BYTES, ranks)  # type: ignore[arg-type]

    def _sharded_experts(self) -> Iterator[Transfer]:
        """Traffic of experts, which are sharded over tp, too, and with ep over fewer processes."""
        units, parameters = len(self._experts), self._expert_parameters
        shards = self._layout.expert_shards
        (forward, backward), _ = self._gathers(shards, self._reshards)
        for calls, phase in ((forward, "forward"), (backward, "backward")):
            size = calls * parameters * self._element
            yield Transfer("expert_shards", "all_gather", "weights of experts", phase, calls * units, size, shards)  # type: ignore[arg-type]
        yield self._scattered("expert_shards", "gradients of experts", units, parameters)

    def _gathers(self, shards: int, reshards: bool) -> tuple[tuple[int, int], int]:
        """Gathers of whole weights in a step: of layers in forward and in backward passes, of the rest."""
        if self._layout.pp == 1:
            return (self._micro, self._micro if reshards else 0), self._micro
        if shards == 1:
            return (0, 0), 0
        pipeline = self._parallel.pipeline
        by_stage = _gathers_in_pipeline(
            pipeline.schedule, self._layout.pp, pipeline.stages_per_rank, self._micro, reshards
        )
        return by_stage[self._stage.index]

    def _replicated(self) -> Iterator[Transfer]:
        layout, others = self._layout, self._layer_parameters + self._end_parameters
        for what, units, parameters, shards in (
            ("gradients", len(self._layers) + (1 if self._end_parameters else 0), others, self._shards),
            ("gradients of fp32 vectors", len(self._fp32_sizes), sum(self._fp32_sizes), self._shards),
            ("gradients of experts", len(self._experts), self._expert_parameters, layout.expert_shards),
        ):
            size = GRADIENT_BYTES * parameters // shards
            yield Transfer("dp_replicate", "all_reduce", what, "update", units, size, layout.dp_replicate)


@lru_cache(maxsize=64)
def _gathers_in_pipeline(
    schedule: ScheduleName, pp: int, stages_per_rank: int, micro_batches: int, reshards: bool
) -> dict[int, tuple[tuple[int, int], int]]:
    """Gathers of whole weights, by stage: of layers in forward and in backward passes, of the rest.

    Args:
        schedule: Its name in the run file.
        pp: Ranks.
        stages_per_rank: Virtual stages. With several, torch collects a stage's weights before it needs them, and gives
            back those that the rank's next actions do not need.
        micro_batches: Of a step.
        reshards: Layers give whole weights back after each forward pass. After a backward pass they keep them.
    """
    found = {}
    for order in actions_of(schedule, pp, stages_per_rank, micro_batches):
        soon = _next_stages(order) if stages_per_rank > 1 else None
        for stage in {index for index, _, _ in order}:
            found[stage] = _gathers_of(order, stage, soon, reshards)
    return found


def _gathers_of(
    order: Sequence[tuple[int, str, int]], stage: int, soon: list[frozenset[int]] | None, reshards: bool
) -> tuple[tuple[int, int], int]:
    forward = backward = rest = 0
    layers = ends = active = False
    for place, (index, kind, _) in enumerate(order):
        if soon is not None and (stage in soon[place]) != active:
            active = not active
            forward, rest = forward + (active and not layers), rest + (active and not ends)
            layers = ends = active
        if index != stage or kind == "W":
            continue
        if kind == "F":
            forward, rest = forward + (not layers), rest + (not ends)
            layers, ends = not reshards, True
        else:
            backward, layers = backward + (not layers), True
    return (forward, backward), rest


def _next_stages(order: Sequence[tuple[int, str, int]]) -> list[frozenset[int]]:
    """Stages of each action and of those after it."""
    found: list[frozenset[int]] = []
    next_stages: tuple[int, ...] = ()
    for index, _, _ in reversed(order):
        next_stages = (index, *(stage for stage in next_stages if stage != index))[:ACTIVE_STAGES]
        found.append(frozenset(next_stages))
    return found[::-1]
