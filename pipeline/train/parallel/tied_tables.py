"""Tables that several stages of a pipeline use and have a copy each of: a tied embedding, relative positions of a side.

Copies have equal values and gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from pipeline.train.model.decoder import Decoder
from pipeline.train.model.decoder_spec import DecoderSpec
from pipeline.train.parallel.pipeline_stages import Stage, tied_tables


class TiedTables:
    """The tables of a model that several of its stages have."""

    def __init__(
        self, spec: DecoderSpec, stages: Sequence[Stage], parts: Mapping[int, Decoder], mesh: DeviceMesh
    ) -> None:
        """Finds the copies.

        Args:
            spec: Of the model.
            stages: All of the pipeline, first to last; more than one.
            parts: By index of the stage, those of this process.
            mesh: The axis of the pipeline.
        """
        own = mesh.get_local_rank()
        self._tables = [
            _Table(
                [parts[stage.index].get_parameter(name) for stage in holders if stage.index in parts],
                sorted({stage.rank for stage in holders}),
                own,
                mesh.get_group(),
            )
            for name, holders in tied_tables(spec, stages).items()
        ]
        self.counted_elsewhere: list[Tensor] = [
            parts[stage.index].get_parameter(name)
            for name, (_, *others) in tied_tables(spec, stages).items()
            for stage in others
            if stage.index in parts
        ]
        """Copies here besides the first stage's: a norm over the model's gradients must not count them."""

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """All copies get the sum of their gradients, with the same bits. Once a step, after all backward passes.

        Every process of the pipeline may call this; those without a copy do nothing.
        """
        for table in self._tables:
            table.sum_gradients()


class _Table:
    """Copies of a table in this process, and the ranks that have some."""

    def __init__(self, copies: Sequence[Tensor], ranks: Sequence[int], own: int, group: dist.ProcessGroup) -> None:
        self._copies = copies
        self._ranks = ranks
        self._own = own
        self._group = group

    def sum_gradients(self) -> None:
        """See `TiedTables`."""
        mine = [_local_gradient(copy) for copy in self._copies]
        if not mine or mine[0].numel() == 0:
            return
        for other in mine[1:]:
            mine[0].add_(other)
        peers = [rank for rank in self._ranks if rank != self._own]
        theirs = {rank: torch.empty_like(mine[0]) for rank in peers}
        if peers:
            # In one batch: over NCCL, two ranks that each begin with a send of their own would wait for one another.
            sends = [dist.P2POp(dist.isend, mine[0], group=self._group, group_peer=rank) for rank in peers]
            receives = [dist.P2POp(dist.irecv, theirs[rank], group=self._group, group_peer=rank) for rank in peers]
            for work in dist.batch_isend_irecv(sends + receives):
                work.wait()
        # In one order on all, so that they get the same bits.
        first, *others = [mine[0] if rank == self._own else theirs[rank] for rank in self._ranks]
        total = first.clone()
        for other in others:
            total.add_(other)
        for gradient in mine:
            gradient.copy_(total)


def _local_gradient(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None, "tables are shared after the backward passes"
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
