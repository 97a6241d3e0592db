"""Forward and backward of a step's micro-batches, with a pipeline and without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from pipeline.config.parallel import ParallelConfig
from pipeline.data.batch import Batch
from pipeline.train.model.attention import Context
from pipeline.train.model.decoder import Decoder
from pipeline.train.parallel.mesh import Mesh
from pipeline.train.parallel.parallelize import ParallelModel
from pipeline.train.parallel.pipeline import PipelineRunner


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
    """Without a pipeline: one micro-batch after the other."""

    def __init__(self, model: Decoder) -> None:
        self._model = model

    def train(
        self, batches: Sequence[Batch], contexts: Sequence[Context], objective: Callable[[Any, Batch], Tensor]
    ) -> None:
        """See `Runner`."""
        for number, (batch, context) in enumerate(zip(batches, contexts, strict=True)):
            # Replicas add their gradients up once a step; shards do so for each micro-batch, to keep gradients sharded.
            cast(FSDPModule, self._model).set_requires_all_reduce(number == len(batches) - 1)
            objective(self._model(batch.tokens, context), batch).backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def evaluate(
        self, batches: Sequence[Batch], contexts: Sequence[Context], measure: Callable[[Any, Batch], None]
    ) -> None:
        """See `Runner`."""
        for batch, context in zip(batches, contexts, strict=True):
            measure(self._model(batch.tokens, context), batch)


def build_runner(
    model: ParallelModel, mesh: Mesh, parallel: ParallelConfig, device: torch.device, dtype: torch.dtype
) -> Runner:
    """The runner of a layout.

    Args:
        dtype: Of the residual stream between stages.
    """
    if mesh.size("pp") == 1:
        return WholeRunner(model.whole)
    return PipelineRunner(
        [model.stages[index] for index in model.parts],
        list(model.parts.values()),
        mesh.role("pp"),
        parallel.pipeline,
        device=device,
        dtype=dtype,
        sequence_shards=mesh.size("tp") if parallel.sequence_parallel else 1,
    )
