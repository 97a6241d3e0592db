"""A step of one process on fake tensors: the code that trains runs, and what memory it would take is booked.

Nothing is computed and nothing is taken, so that a layer of any size needs no more than some thousand operations
of Python. Layers are equal by specification, or repeat in a pattern: a few of them are run, and those of a whole model
follow from the difference that a period more of them makes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from pipeline.config import Config
from pipeline.config.parallel import PipelineConfig
from pipeline.config.train import TrainConfig
from pipeline.data.loading.batch import Batch, StepData
from pipeline.train.distributed.axes import AXES
from pipeline.train.distributed.layout import Layout
from pipeline.train.loop.step import Stepper
from pipeline.train.model.decoder_spec import DecoderSpec
from pipeline.train.model.kernels.attention_mask import AttentionMask, Kernel, Terms
from pipeline.train.model.kernels.choice import spec_uses
from pipeline.train.model.kernels.sdpa import Mask, Sdpa, Unmasked
from pipeline.train.model.kernels.tiles import Tiles
from pipeline.train.model.loss import TokenLosses
from pipeline.train.model.mlps.experts.router import Router
from pipeline.train.optim.optimizers import Optimizers
from pipeline.train.parallel.experts import AllToAll, mixtures
from pipeline.train.parallel.footprint import COMPUTE_BYTES, GRADIENT_BYTES
from pipeline.train.parallel.mesh import EXPERT_SHARDS, Mesh
from pipeline.train.parallel.parallelize import ParallelModel, parallelize
from pipeline.train.parallel.setup import Setup
from pipeline.train.planning.exchange import BalancedExchange
from pipeline.train.planning.fake import fake_mesh
from pipeline.train.planning.ledger import MemoryLedger, Passes
from pipeline.train.planning.stage_memory import KINDS, DeviceType, Ends, Layers, MemoryKind, Shape, StageMemory
from pipeline.train.torch_compat.core import local_shard

_PIPELINES: Mapping[Ends, tuple[int, int]] = {"whole": (1, 0), "first": (2, 0), "middle": (3, 1), "last": (2, 1)}
"""The shortest pipeline that has such a stage, and the rank of it."""
_CPU = torch.device("cpu")
_SLICED = tuple(axis.name for axis in AXES if axis.weights == "slices")


def measure(
    config: Config,
    layout: Layout,
    spec: DecoderSpec,
    shape: Shape,
    ends: Ends,
    pieces: Sequence[Layers],
    device_type: DeviceType,
) -> list[StageMemory]:
    """Run a step of a stage on fake tensors, once for each of some layers.

    Stages of a pipeline are run in the shortest one that has such a stage, in the order forward, backward (1F1B).

    Args:
        config: The run file.
        layout: Of the run; all of it but the degree of the pipeline is taken.
        spec: The model.
        shape: Micro-batches of the run.
        ends: Which stage.
        pieces: Layers of the stage.
        device_type: Whose kernels; the fake tensors are those of a CPU.
    """
    pp, rank = _PIPELINES[ends]
    fake = replace(layout, pp=pp)
    with fake_mesh(fake, rank * (fake.world_size // pp), experts=bool(spec.expert_layers)) as mesh:
        return [_measure(config, mesh, spec, shape, ends, layers, device_type) for layers in pieces]


def _measure(
    config: Config,
    mesh: Mesh,
    spec: DecoderSpec,
    shape: Shape,
    ends: Ends,
    layers: Layers,
    device_type: DeviceType,
) -> StageMemory:
    pp, rank = _PIPELINES[ends]
    start, count = layers
    pieces = [count if place == rank else 1 for place in range(pp)]
    mine, other = islice(cycle(spec.layers), start, start + count), spec.layers[:1]
    small = replace(spec, layers=(*other * rank, *mine, *other * (pp - 1 - rank)))
    pipeline = PipelineConfig(schedule="1f1b", layers_per_stage=pieces) if pp > 1 else PipelineConfig()
    parallel = config.parallel.model_copy(update={**mesh.layout.settings, "pipeline": pipeline})
    config = config.model_copy(update={"parallel": parallel, "train": _plain(config.train)})
    # In this order alone: sharded on meta before there are fake tensors, and given memory among them.
    model = parallelize(config, Setup(torch.device("meta"), mesh, small))
    ledger = MemoryLedger()
    if device_type == "cuda":
        _use_gpu_kernels(model)
    for part in model.parts.values():
        part.kernel = _kernel(config, spec, device_type)
        for mixture in mixtures(part):
            if isinstance(mixture.exchange, AllToAll):
                mixture.exchange = BalancedExchange(mixture.exchange.group, shape.over_mean)
    with FakeTensorMode(allow_non_fake_inputs=True), ledger:
        model.whole.to_empty(device=_CPU)
        optimizers = Optimizers(config, model)
        stepper = Stepper(config, Setup(_CPU, mesh, small), model, optimizers, sources=["data"])
        batches = partial(_batches, shape, len(spec.mtp), pairs=config.train.preference is not None)
        first, second = (pp, pp) if pp > 1 else (1, min(2, shape.micro_batches))
        return _Recording(model, optimizers, stepper, ledger, mesh.layout).run(batches, first, second)


def _plain(train: TrainConfig) -> TrainConfig:
    """Settings without what is not known before, as what a compiler makes of a layer, or is done now and then."""
    metrics = train.metrics.model_copy(update={"layers_every_steps": None})
    # Products in fp8 keep what those in bf16 keep; the packages that compute them need not be here.
    precision = train.precision.model_copy(update={"fp8": None})
    return train.model_copy(update={"compile": False, "precision": precision, "metrics": metrics})


def _batches(shape: Shape, depth: int, count: int, *, pairs: bool) -> list[Batch]:
    size, ahead = (shape.samples, shape.length), (shape.samples, depth, shape.length)
    predicted = shape.predicted
    return [
        Batch(
            tokens=torch.empty(size, dtype=torch.int64),
            targets=torch.empty(size, dtype=torch.int64),
            weight=torch.empty(size),
            starts=torch.empty(shape.samples, dtype=torch.int32),
            sources=torch.empty(shape.samples, dtype=torch.int64),
            extras={},
            samples=torch.empty(shape.samples, dtype=torch.int64),
            ahead_targets=torch.empty(ahead, dtype=torch.int64) if depth else None,
            ahead_weight=torch.empty(ahead) if depth else None,
            predicted=None if predicted is None else torch.empty(shape.samples, predicted, dtype=torch.int64),
            encoder=shape.encoder,
            conversation=torch.empty(size, dtype=torch.int64) if pairs else None,
            reference=torch.empty(shape.samples, 2, dtype=torch.float64) if pairs else None,
        )
        for _ in range(count)
    ]


class _Recording:
    """A step, and the parts that it has."""

    def __init__(
        self, model: ParallelModel, optimizers: Optimizers, stepper: Stepper, ledger: MemoryLedger, layout: Layout
    ) -> None:
        self._model, self._optimizers, self._stepper, self._ledger = model, optimizers, stepper, ledger
        self._layout = layout
        self._passes = Passes()
        self._layers = len(model.whole.layers)
        self._in_flight = 0
        self._in_backward = False
        self._kept_at = 0

    def run(self, batches: Callable[[int], list[Batch]], first: int, second: int) -> StageMemory:
        """The second step; the first one makes states and shapes. Each has its number of micro-batches."""
        valid_ahead = (1,) * len(self._model.spec.mtp)
        self._stepper.step(StepData(0, batches(first), 1, valid_ahead=valid_ahead), 1.0)
        self._attach()
        ledger, passes = self._ledger, self._passes
        ledger.begin()
        parameters = [parameter for _, parameter in self._model.named_parameters()]
        runner = self._stepper.runner
        train = runner.train

        def watched(*args: Any, **kwargs: Any) -> None:
            train(*args, **kwargs)
            self._turn()
            passes.until = ledger.time
            ledger.mark("optimizer")

        runner.train = watched  # type: ignore[method-assign]
        mine = batches(second)
        self._stepper.step(StepData(1, mine, 1, valid_ahead=valid_ahead), 1.0)
        return self._sum_up(parameters, len(mine))

    def _sum_up(self, parameters: list[nn.Parameter], micro_batches: int) -> StageMemory:
        ledger = self._ledger
        known: dict[MemoryKind, set[Any]] = {
            "parameters": ledger.find(parameters),
            "moments": ledger.find(self._states()),
        }
        shards = {local_shard(parameter).numel() for parameter in parameters}
        wholes = {_whole_numel(parameter) for parameter in parameters}
        sizes = {GRADIENT_BYTES * numel for numel in shards | wholes}
        sizes |= {width * numel for numel in wholes for width in COMPUTE_BYTES.values()}
        points: dict[tuple[str, MemoryKind], float] = {}
        peaks: dict[str, float] = {}
        marks = iter(ledger.marks)
        now, following = next(marks), next(marks, None)
        levels = list(ledger.levels(known, self._passes, sizes))
        kept = [level.get("activations", 0) for at, level in levels if at <= self._passes.ends[0]][-1]
        for at, level in levels:
            while following is not None and at >= following.time:
                now, following = following, next(marks, None)
            if at < now.time:
                continue
            own = {kind: float(level.get(kind, 0)) for kind in KINDS}
            own["activations"] -= now.others * kept
            own["batches"] /= micro_batches
            for label in self._names(now.label):
                if sum(own.values()) > peaks.get(label, -1.0):
                    peaks[label] = sum(own.values())
                    points |= {(label, kind): value for kind, value in own.items()}
        return StageMemory(points, kept, sum(_numel(parameter, self._layout) for parameter in parameters))

    def _states(self) -> list[Tensor]:
        states = [
            value
            for optimizer in self._optimizers.all()
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
        return states + (list(self._stepper.ema.averages.values()) if self._stepper.ema else [])

    def _names(self, label: str) -> list[str]:
        """Names of a part of the step that hold in stages of any number of layers."""
        what, _, index = label.partition(" of layer ")
        if not index:
            return [label]
        first, last = int(index), self._layers - 1 - int(index)
        places = ["the first layer"] * (first == 0) + ["the second layer"] * (first == 1)
        places += ["the last layer"] * (last == 0) + ["the last layer but one"] * (last == 1)
        return [f"{what} of {place}" for place in places]

    def _attach(self) -> None:
        part = self._model.whole
        part.register_forward_pre_hook(self._forward_begins)
        part.register_forward_hook(self._forward_ends)
        for place, block in enumerate(part.layers.values()):
            block.register_forward_pre_hook(self._enters(place))
            block.register_forward_hook(self._leaves(place))

    def _turn(self) -> None:
        """The backward pass of a micro-batch, if one was under way, has ended."""
        if self._in_backward:
            self._in_flight -= 1
        self._in_backward = False

    def _mark(self, label: str) -> None:
        self._ledger.mark(label, self._in_flight - 1)

    def _forward_begins(self, *_: Any) -> None:
        self._turn()
        self._in_flight += 1
        self._passes.starts.append(self._ledger.time + 1)
        self._mark("forward of the embedding")

    def _forward_ends(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self._passes.ends.append(self._ledger.time)
        total = output.total if isinstance(output, TokenLosses) else output
        cast(Tensor, total).register_hook(self._backward_begins)  # type: ignore[no-untyped-call]

    def _backward_begins(self, _: Tensor) -> None:
        self._turn()
        self._in_backward = True
        self._passes.turns.append(self._ledger.time)
        self._mark("backward of the head" if self._model.whole.part.last else self._backward_of(self._layers - 1))

    def _enters(self, place: int) -> Callable[..., None]:
        def enter(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
            self._mark(f"forward of layer {place}")
            if place == 0 and inputs[0].requires_grad:
                inputs[0].register_hook(lambda _: self._mark("backward of the embedding"))

        return enter

    def _leaves(self, place: int) -> Callable[..., None]:
        def leave(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            output.register_hook(lambda _: self._mark(self._backward_of(place)))  # type: ignore[no-untyped-call]
            if place == self._layers - 1:
                self._mark("forward of the head")

        return leave

    def _backward_of(self, place: int) -> str:
        return f"backward of layer {place}" if self._layers else "backward of the embedding"


def _whole_numel(parameter: Tensor) -> int:
    """Elements that this rank has while they are not sharded."""
    assert isinstance(parameter, DTensor)
    names = parameter.device_mesh.mesh_dim_names or ()
    cut = 1
    for name, placement, size in zip(names, parameter.placements, parameter.device_mesh.shape, strict=True):
        if name in _SLICED and not placement.is_replicate():
            cut *= size
    return parameter.numel() // cut


def _numel(parameter: Tensor, layout: Layout) -> int:
    """Elements on this rank if dp_shard were 1; of experts all elements divided by tp, whatever ep is."""
    assert isinstance(parameter, DTensor)
    of_experts = EXPERT_SHARDS in (parameter.device_mesh.mesh_dim_names or ())
    return parameter.numel() // layout.tp if of_experts else _whole_numel(parameter)


def _use_gpu_kernels(model: ParallelModel) -> None:
    """Use one operation where a GPU has one and a CPU several, which keep more for backward.

    Those are RMSNorm and the product of a router. Attention is one operation on both, see `_kernel`.
    """
    for module in model.whole.modules():
        if isinstance(module, nn.RMSNorm):
            module.forward = partial(_fused_norm, module)  # type: ignore[method-assign]
        elif isinstance(module, Router):
            module.wide_products = True


def _kernel(config: Config, spec: DecoderSpec, device_type: DeviceType) -> Kernel:
    """The attention kernel, as far as memory goes; on a GPU one of torch's own where none is named.

    A kernel keeps queries, keys, values, its output and an fp32 number of each query and head; where it needs a mask,
    that too, in the type of the queries.
    """
    train = config.train
    masks = train.attention.backend == "sdpa" or train.precision.compute == "fp32"
    if any(use.soft_cap is not None for use in spec_uses(spec)):  # which no kernel with masks in memory takes
        masks = False
    return _Masked(on_gpu=True) if device_type == "cuda" and masks else _Fused()


class _Masked(Sdpa):
    """`Sdpa` on a GPU with flash kernels, whose pieces without documents need no mask."""

    def prepare(self, mask: AttentionMask) -> Mask | Tiles:
        self._flash = True
        if mask.full:
            return Unmasked()
        return None if mask.causal else mask.mask()

    def __call__(
        self,
        q_BCHE: Tensor,
        k_BTKE: Tensor,
        v_BTKV: Tensor,
        prepared: Mask | Tiles,
        terms: Terms,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        # Causality with one more key takes no memory either, and cannot be made of fake tensors.
        with_sinks = prepared is None and sinks_H is not None
        return super().__call__(q_BCHE, k_BTKE, v_BTKV, Unmasked() if with_sinks else prepared, terms, sinks_H)


class _Fused(Sdpa):
    """A kernel that needs no mask for what is not seen, on fake tensors, which say nothing of documents."""

    def prepare(self, mask: AttentionMask) -> Mask | Tiles:
        if mask.causal:
            return None
        if mask.full:
            return Unmasked()
        low_1C, high_1C = torch.empty(2, 1, mask.queries, dtype=torch.int64)
        return Tiles(low_1C, high_1C, torch.empty(2, 7, dtype=torch.int64))


def _fused_norm(module: nn.RMSNorm, x: Tensor) -> Tensor:
    out: Tensor = _FusedNorm.apply(x, module.weight)  # type: ignore[no-untyped-call]
    return out


class _FusedNorm(torch.autograd.Function):
    """The memory of RMSNorm on a GPU, without its numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x[..., :1].float())
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), gradients[0].sum(dim=tuple(range(x.ndim - 1))).to(weight.dtype)
