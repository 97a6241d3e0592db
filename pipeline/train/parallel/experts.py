"""Expert parallelism (Lepikhin et al. 2021): experts are dealt to the ranks of the ep axis, and tokens travel to them.

Experts are on a mesh of their own, in which dp_shard, cp and tp are one axis: ranks of all three have other tokens, so
that no expert is cut by tp, and no gradient of an expert is a part of a sum. Each rank of ep has as many experts, the
first rank the first ones; what a rank has is sharded over the rest of that axis by `fully_shard`.

Shapes: N rows that leave this rank, M rows that arrive, D width, E experts, P ranks of ep.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from pipeline.train.model.decoder import Decoder
from pipeline.train.model.mlps.experts.dispatch import Sizes, permuted
from pipeline.train.model.mlps.experts.module import Experts
from pipeline.train.torch_compat.core import all_to_all, all_to_all_rows, own_part, wait_for


def mixtures(part: nn.Module) -> Iterator[Experts]:
    """The mixtures of experts within a module."""
    return (module for module in part.modules() if isinstance(module, Experts))


def deal_experts(part: Decoder, mesh: DeviceMesh) -> None:
    """Deal the experts of a part of the model to the ranks of the ep axis, in place.

    Args:
        part: On the meta device. Its experts become DTensors on `mesh`, their names and global shapes kept.
        mesh: The ep axis, of more than one process, which divides the number of experts.
    """
    for mixture in mixtures(part):
        assert mixture.spec.router.count % mesh.size() == 0, (mixture.spec, mesh.size())
        for name, parameter in list(mixture.experts.named_parameters()):
            # src_data_rank=None: nothing is sent, each rank takes its experts of what it has (here meta tensors).
            dealt = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
            mixture.experts.register_parameter(name, nn.Parameter(dealt))
        mixture.exchange = AllToAll(mesh.get_group())


def shard_dim(parameter: nn.Parameter, mesh: DeviceMesh) -> Shard | None:
    """The dimension that `fully_shard` cuts of a stack; None: the first.

    Where shards are more than the experts of a rank it is the second, of each matrix, which torch cuts into equal parts
    alone; else some shards are empty.
    """
    shards, experts = mesh.size(mesh.ndim - 1), len(own_part(parameter))
    return Shard(1) if shards > experts and parameter.shape[1] % shards == 0 else None


@dataclass(frozen=True)
class RowCounts:
    """Numbers of rows of an `AllToAll`, see `Sizes`."""

    ends_E: Tensor
    rows: int
    go: list[int]
    come: list[int]
    order_M: Tensor
    """Places of the rows that arrive, which are in the order of ranks, in that of this rank's experts."""
    inverse_M: Tensor


@dataclass(frozen=True)
class AllToAll:
    """Exchange of rows by a collective of uneven sizes, for which the host waits once."""

    group: dist.ProcessGroup

    def sizes(self, counts_E: Tensor, rows: int) -> Sizes:
        """See `Exchange`."""
        sent_PE = counts_E.view(self.group.size(), -1)
        received_PE = all_to_all(sent_PE, self.group)
        go, come = torch.stack((sent_PE.sum(1), received_PE.sum(1))).tolist()
        ranks, own = received_PE.shape
        experts_M = torch.arange(own, device=counts_E.device).repeat(ranks)
        experts_M = experts_M.repeat_interleave(received_PE.flatten(), output_size=sum(come))
        # Stable, so that the rows of an expert stay in the order of ranks, and sums over them the same each time.
        order_M = torch.sort(experts_M, stable=True).indices
        inverse_M = torch.empty_like(order_M).scatter_(0, order_M, torch.arange(sum(come), device=order_M.device))
        return RowCounts(received_PE.sum(0).cumsum(0).int(), sum(come), go, come, order_M, inverse_M)

    def send(self, rows_ND: Tensor, gates_N: Tensor, sizes: Sizes) -> Any:
        """See `Exchange`: both in one collective."""
        return _Send.apply(rows_ND, gates_N, sizes, self.group)  # type: ignore[no-untyped-call]

    def arrived(self, sent: Any, sizes: Sizes) -> tuple[Tensor, Tensor]:
        """See `Exchange`."""
        wait_for(sent.detach())
        rows_MD, gates_M = _Unpacked.apply(sent, sizes)  # type: ignore[no-untyped-call]
        return rows_MD, gates_M

    def send_back(self, rows_ND: Tensor, sizes: Sizes) -> Tensor:
        """See `Exchange`."""
        numbers = cast(RowCounts, sizes)
        by_rank_MD = permuted(rows_ND, numbers.inverse_M, numbers.order_M)
        return cast(Tensor, _SendBack.apply(by_rank_MD, numbers, self.group))  # type: ignore[no-untyped-call]


def _packed(rows_ND: Tensor, numbers_N: Tensor) -> Tensor:
    """Rows and an fp32 number of each, whose bits are columns after them."""
    return torch.cat((rows_ND, numbers_N.float()[:, None].view(rows_ND.dtype)), dim=1)


def _unpacked(packed: Tensor) -> tuple[Tensor, Tensor]:
    columns = torch.float32.itemsize // packed.element_size()
    # Contiguous, since bytes can be read as another type only where they lie next to each other.
    return packed[:, :-columns], packed[:, -columns:].contiguous().view(torch.float32)[:, 0]


class _Send(torch.autograd.Function):
    """Rows and weights to the ranks that have their experts, packed; backward sends the gradients of both back."""

    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, gates_N: Tensor, numbers: RowCounts, group: dist.ProcessGroup) -> Tensor:
        ctx.numbers, ctx.group = numbers, group
        return all_to_all_rows(_packed(rows_ND, gates_N), numbers.come, numbers.go, group, wait=False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        numbers = ctx.numbers
        packed = all_to_all_rows(gradients[0], numbers.go, numbers.come, ctx.group)
        rows_ND, gates_N = _unpacked(packed)
        return rows_ND, gates_N, None, None


class _Unpacked(torch.autograd.Function):
    """Rows and weights of what arrived, in the order of this rank's experts."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, numbers: RowCounts) -> tuple[Tensor, Tensor]:
        ctx.numbers = numbers
        rows_MD, gates_M = _unpacked(packed)
        return rows_MD.index_select(0, numbers.order_M), gates_M.index_select(0, numbers.order_M)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _packed(*gradients).index_select(0, ctx.numbers.inverse_M), None


class _SendBack(torch.autograd.Function):
    """Results of rows to the ranks that sent them."""

    @staticmethod
    def forward(ctx: Any, rows_MD: Tensor, numbers: RowCounts, group: dist.ProcessGroup) -> Tensor:
        ctx.numbers, ctx.group = numbers, group
        return all_to_all_rows(rows_MD, numbers.go, numbers.come, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return all_to_all_rows(gradients[0], ctx.numbers.come, ctx.numbers.go, ctx.group), None, None


@dataclass(frozen=True)
class PositionsOfRanks:
    """Shares of the positions of a residual stream that all ranks of tp have whole, see `PositionShare`."""

    mesh: DeviceMesh

    def take(self, x_BSD: Tensor) -> Tensor:
        """See `PositionShare`."""
        return self._placed(x_BSD, Replicate(), Shard(1))

    def give(self, x_BSD: Tensor) -> Tensor:
        """See `PositionShare`."""
        return self._placed(x_BSD, Shard(1), Replicate())

    def _placed(self, x_BSD: Tensor, now: Placement, then: Placement) -> Tensor:
        return DTensor.from_local(x_BSD, self.mesh, [now], run_check=False).redistribute(placements=[then]).to_local()
