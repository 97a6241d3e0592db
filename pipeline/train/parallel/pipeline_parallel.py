"""Pipeline parallelism: the order in which the stages of this process work on micro-batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from pipeline.config.parallel import V_SHAPED, PipelineConfig
from pipeline.data.loading.batch import Batch
from pipeline.train.model.context import Context
from pipeline.train.model.decoder import Decoder
from pipeline.train.parallel.overlap import Reduction
from pipeline.train.parallel.pipeline_schedules import SCHEDULES
from pipeline.train.parallel.pipeline_stages import Stage
from pipeline.train.torch_compat.micro_batch_stage import MicroBatchStage

# On an error torch prints its whole table of actions; the exception says what is wrong.
logging.getLogger(PipelineScheduleSingle.__module__).setLevel(logging.CRITICAL)


class PipelineRunner:
    """Runs the stages of this process on micro-batches, together with the other processes of the pipeline.

    Shapes: B samples of a micro-batch, S positions, D width, V columns of the logits.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        parts: Sequence[Decoder],
        mesh: DeviceMesh,
        pipeline: PipelineConfig,
        *,
        reduction: Reduction,
        device: torch.device,
        dtype: torch.dtype,
        sequence_shards: int,
    ) -> None:
        """Connect the pipeline; every process of it calls this.

        Args:
            stages: Those of this process, in order.
            parts: The module of each, sharded by `fully_shard`; with a zero-bubble schedule not resharded after
                forward.
            mesh: The axis of the pipeline.
            pipeline: Schedule and number of stages.
            reduction: When gradients are added up over shards; `after` with a zero-bubble schedule.
            device: Of this process.
            dtype: Of the residual stream between stages.
            sequence_shards: Parts of the residual stream along the sequence; a stage gets and gives one of them.
        """
        count = mesh.size() * len(stages)
        assert len(stages) == pipeline.stages_per_rank == len(parts)
        self._placement = _placement(mesh.size(), count, v_shaped=pipeline.schedule in V_SHAPED)
        assert all(self._placement[stage.index] == mesh.get_local_rank() for stage in stages)
        self._rank = mesh.get_local_rank()
        self._group = mesh.get_group()
        self._parts = {stage.index: part for stage, part in zip(stages, parts, strict=True)}
        self._schedule = pipeline.schedule
        self._reduction = reduction
        self._device = device
        self._dtype = dtype
        self._sequence_shards = sequence_shards
        # torch's schedules have one number of micro-batches, and their stages one shape.
        self._schedules: dict[tuple[int, torch.Size], Any] = {}
        self._work: _Work | None = None
        # NCCL connects the whole group in its first operation, and sends between some of its ranks would wait for all.
        dist.all_reduce(torch.zeros(1, device=device), group=self._group)

    def train(
        self, batches: Sequence[Batch], contexts: Sequence[Context], objective: Callable[[Any, Batch], Tensor]
    ) -> None:
        """Forward and backward of all micro-batches; gradients add up in the parameters.

        Args:
            batches: This rank's micro-batches, on the device, all of one shape. Their number fits the schedule.
            contexts: One for each.
            objective: What the head gives, `TokenLosses` or logits [B, S, V], and batch -> fp32 scalar to minimize.
                Called where the last stage is.
        """
        shape = _common_shape(batches)
        key = len(batches), shape
        if key not in self._schedules:
            self._schedules[key] = self._build_schedule(*key)
        self._work = _Work(batches, contexts, objective)
        try:
            # The target is only there because the last stage has to have one.
            self._schedules[key].step(target=torch.empty(len(batches)), return_outputs=False)
        finally:
            self._work = None

    @torch.no_grad()
    def evaluate(
        self, batches: Sequence[Batch], contexts: Sequence[Context], measure: Callable[[Any, Batch], None]
    ) -> None:
        """Forward of all; keeps nothing of it.

        Args:
            batches: This rank's micro-batches, on the device, all of one shape; any number.
            contexts: One for each.
            measure: Gets what the head gives for each batch where the last stage is.
        """
        # Not by `schedule.eval()`, which fails for V-shaped schedules in 2.13.
        shape = self._stream_shape(_common_shape(batches))
        arrived: dict[tuple[int, int], Tensor] = {}
        receiving: dict[tuple[int, int], dist.Work] = {}
        sending: dist.Work | None = None
        for kind, stage, number in forward_order(self._placement, len(batches))[self._rank]:
            key = stage, number
            if kind == "receive":
                arrived[key] = torch.empty(shape, dtype=self._dtype, device=self._device)
                peer = self._placement[stage - 1]
                receiving[key] = _started(dist.irecv(arrived[key], group=self._group, group_src=peer))
                continue
            if key in receiving:
                receiving.pop(key).wait()
            x = batches[number].tokens if stage == 0 else arrived.pop(key)
            out = self._parts[stage](x, contexts[number])
            if stage == len(self._placement) - 1:
                measure(out, batches[number])
            elif self._placement[stage + 1] == self._rank:
                arrived[stage + 1, number] = out
            else:
                if sending is not None:  # so that what was sent is not kept for long
                    sending.wait()
                peer = self._placement[stage + 1]
                sending = _started(dist.isend(out, group=self._group, group_dst=peer))
        if sending is not None:
            sending.wait()
        # Otherwise backward frees whole weights that are kept after forward. Here there is none.
        for part in self._parts.values():
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def _build_schedule(self, micro_batches: int, shape: torch.Size) -> Any:
        """A schedule of torch for a number of micro-batches of a shape [B, S]; it is made once."""
        stages = [self._build_stage(index, part, shape) for index, part in self._parts.items()]
        # The loss is the last stage's output. A gradient is never scaled: the objective has the divisor in it, and
        # `scale_grads` would divide the gradient of a table that two stages share twice.
        options: dict[str, Any] = {"loss_fn": lambda loss, _: loss, "scale_grads": False}
        schedule: Any = get_schedule_class(SCHEDULES[self._schedule].torch_name)
        return schedule(stages[0] if issubclass(schedule, PipelineScheduleSingle) else stages, micro_batches, **options)

    def _build_stage(self, index: int, part: Decoder, shape: torch.Size) -> MicroBatchStage:
        count = len(self._placement)
        meta: dict[str, Any] = {"device": "meta", "requires_grad": True}
        stream = torch.empty(self._stream_shape(shape), dtype=self._dtype, **meta)
        tokens = torch.empty(shape, dtype=torch.int64, device="meta")
        return MicroBatchStage(
            part,
            index,
            count,
            self._device,
            self._group,
            example_input=tokens if index == 0 else stream,
            example_output=torch.empty((), dtype=torch.float32, **meta) if index == count - 1 else stream,
            reduction=self._reduction,
            tokens=self._tokens,
            compute=lambda number, x: self._compute(part, number, x),
        )

    def _stream_shape(self, shape: torch.Size) -> tuple[int, int, int]:
        """[B, S / sequence shards, D] for tokens of [B, S]."""
        samples, positions = shape
        assert positions % self._sequence_shards == 0
        return samples, positions // self._sequence_shards, next(iter(self._parts.values())).spec.dim

    def _tokens(self, number: int) -> Tensor:
        assert self._work is not None
        return self._work.batches[number].tokens

    def _compute(self, part: Decoder, number: int, x: Tensor) -> Tensor:
        """Output of a stage for a micro-batch in training: the residual stream, or the loss in the last one.

        The logits are used up here, so that no schedule keeps them.
        """
        work = self._work
        assert work is not None
        out = part(x, work.contexts[number])
        if not part.part.last:
            assert out.dtype == self._dtype, f"the residual stream is {out.dtype}"
            stream: Tensor = out.contiguous()  # gloo and NCCL send no other tensors
            return stream
        loss = work.objective(out, work.batches[number])
        assert loss.shape == () and loss.dtype == torch.float32
        return loss


class Action(NamedTuple):
    """Something that a rank does in a forward-only pass."""

    kind: Literal["forward", "receive"]
    """`forward` sends its output on, and `receive` gets the input of a later one."""
    stage: int
    micro_batch: int


def forward_order(placement: Sequence[int], micro_batches: int) -> list[list[Action]]:
    """Actions of each rank, in order, that take micro-batches through stages placed in any way on ranks.

    In every time step a rank runs its last stage that has an input, so that little is under way. A receive stands
    where the other rank sends: between two ranks, sends and receives have one order, which no backend can deadlock on.

    Args:
        placement: The rank of each stage.
        micro_batches: Their number.

    Returns:
        Actions by rank.
    """
    ranks = max(placement) + 1
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    done = [0] * len(placement)  # micro-batches that each stage has finished
    while done[-1] < micro_batches:
        before = list(done)
        for rank in range(ranks):
            for stage in reversed(range(len(placement))):
                ready = micro_batches if stage == 0 else before[stage - 1]
                if placement[stage] == rank and before[stage] < ready:
                    orders[rank].append(Action("forward", stage, before[stage]))
                    if stage + 1 < len(placement) and placement[stage + 1] != rank:
                        orders[placement[stage + 1]].append(Action("receive", stage + 1, before[stage]))
                    done[stage] += 1
                    break
    return orders


class _Work(NamedTuple):
    """Arguments of a call of `train`."""

    batches: Sequence[Batch]
    contexts: Sequence[Context]
    objective: Callable[[Any, Batch], Tensor]


def _placement(ranks: int, stages: int, *, v_shaped: bool) -> list[int]:
    """The rank of each stage: round and round, or there and back."""
    if not v_shaped:
        return [index % ranks for index in range(stages)]
    assert stages == 2 * ranks
    return [*range(ranks), *reversed(range(ranks))]


def _common_shape(batches: Sequence[Batch]) -> torch.Size:
    shapes = {batch.tokens.shape for batch in batches}
    assert len(shapes) == 1, f"micro-batches of one call have one shape, not {sorted(shapes)}"
    return shapes.pop()


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the pipeline's group"
    return work
