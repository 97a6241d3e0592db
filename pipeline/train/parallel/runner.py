"""Forward and backward of a step's micro-batches, with a pipeline and without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from pipeline.config import Config
from pipeline.data.loading.batch import Batch
from pipeline.train.host.trace_spans import span
from pipeline.train.model.context import Context
from pipeline.train.model.decoder import Decoder
from pipeline.train.parallel.overlap import Reduction, reduction
from pipeline.train.parallel.parallelize import COMPUTE_DTYPE, ParallelModel
from pipeline.train.parallel.setup import Setup
from pipeline.train.parallel.teacher import Teacher


class Runner(Protocol):
    """Runs the parts of a model that this process has on micro-batches, together with the other processes."""

    def train(
        self, batches: Sequence[Batch], contexts: Sequence[Context], objective: Callable[[Any, Batch], Tensor]
    ) -> None:
        """Forward and backward of all; gradients add up in the parameters.

        Args:
            batches: This rank's micro-batches, on the device, all of one shape.
            contexts: One for each.
            objective: What the head gives, `TokenLosses` or logits [B, S, V], and batch -> scalar to minimize. Called
                where the last layer is.
        """

    def evaluate(
        self, batches: Sequence[Batch], contexts: Sequence[Context], measure: Callable[[Any, Batch], None]
    ) -> None:
        """Forward of all; `measure` gets what the head gives where the last layer is."""


class WholeRunner:
    """A runner without a pipeline: one micro-batch after the other.

    Args:
        model: Sharded by `fully_shard`.
        reduction: When gradients are added up over shards. Replicas add theirs up once a step.
        teacher: Passes before the model in training.
    """

    def __init__(self, model: Decoder, reduction: Reduction, teacher: Teacher | None = None) -> None:
        self._model = model
        self._reduction = reduction
        self._teacher = teacher

    def train(
        self, batches: Sequence[Batch], contexts: Sequence[Context], objective: Callable[[Any, Batch], Tensor]
    ) -> None:
        """See `Runner`."""
        model = cast(FSDPModule, self._model)
        for number, (batch, context) in enumerate(zip(batches, contexts, strict=True)):
            is_last = number == len(batches) - 1
            # FSDP reads both in backward. Shards add up in each backward pass, replicas (HSDP) in the last one alone.
            model.set_requires_gradient_sync(is_last or self._reduction == "each")
            model.set_requires_all_reduce(is_last)  # after the other, which sets both
            taught = self._taught(batch, context)
            with span("forward"):
                total = objective(self._model(batch.tokens, taught), batch)
            with span("backward"):
                total.backward()  # type: ignore[no-untyped-call]
                del total

    def _taught(self, batch: Batch, context: Context) -> Context:
        if self._teacher is None:
            return context
        with span("teacher"):
            return self._teacher.teach(batch, context)

    @torch.no_grad()
    def evaluate(
        self, batches: Sequence[Batch], contexts: Sequence[Context], measure: Callable[[Any, Batch], None]
    ) -> None:
        """See `Runner`."""
        for batch, context in zip(batches, contexts, strict=True):
            measure(self._model(batch.tokens, context), batch)


def build_runner(config: Config, setup: Setup, model: ParallelModel, teacher: Teacher | None = None) -> Runner:
    """The runner of a layout, with the teacher that training has, if it has one."""
    mesh, parallel = setup.mesh, config.parallel
    if mesh.size("pp") == 1:
        return WholeRunner(model.whole, reduction(parallel, mesh.layout), teacher)
    assert teacher is None, "rules refuse pp"
    # It imports torch's pipelining, and that the compiler.
    from pipeline.train.parallel.pipeline_parallel import PipelineRunner

    return PipelineRunner(
        [model.stages[index] for index in model.parts],
        list(model.parts.values()),
        mesh.role("pp"),
        parallel.pipeline,
        reduction=reduction(parallel, mesh.layout),
        device=setup.device,
        dtype=COMPUTE_DTYPE[config.train.precision.compute],
        sequence_shards=mesh.size("tp") if parallel.sequence_parallel else 1,
    )
