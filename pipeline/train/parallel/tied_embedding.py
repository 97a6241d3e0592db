"""An embedding that the last stage of a pipeline uses, too, and has a copy of: as head, or for tokens ahead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from pipeline.train.model.decoder import Decoder
from pipeline.train.parallel.pipeline_stages import Stage


class TiedEmbedding:
    """The embedding's weight where first and last stage have a copy each, with equal values and gradients."""

    def __init__(self, stages: Sequence[Stage], parts: Mapping[int, Decoder], mesh: DeviceMesh) -> None:
        """Finds the copies.

        Args:
            stages: All of the pipeline, first to last; more than one.
            parts: By index of the stage, those of this process.
            mesh: The axis of the pipeline.
        """
        first, last = stages[0], stages[-1]
        self._copies: list[Tensor] = [
            parts[stage.index].embedding.weight for stage in (first, last) if stage.index in parts
        ]
        self._other = {first.rank: last.rank, last.rank: first.rank}.get(mesh.get_local_rank())
        self._group = mesh.get_group()
        self.counted_elsewhere: Tensor | None = self._copies[-1] if last.index in parts else None
        """The last stage's copy, if it is here: a norm over the model's gradients must not count it."""

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Both copies get the sum of their gradients, with the same bits. Once a step, after all backward passes.

        Every process of the pipeline may call this; those in between do nothing.
        """
        mine = [_local_gradient(copy) for copy in self._copies]
        if not mine or mine[0].numel() == 0:
            return
        if len(mine) == 2:
            mine[0].add_(mine[1])
            mine[1].copy_(mine[0])
            return
        theirs = torch.empty_like(mine[0])
        for work in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, mine[0], group=self._group, group_peer=self._other),
                dist.P2POp(dist.irecv, theirs, group=self._group, group_peer=self._other),
            ]
        ):
            work.wait()
        mine[0].add_(theirs)  # a + b has the same bits as b + a


def _local_gradient(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None, "tied embeddings are shared after the backward passes"
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
