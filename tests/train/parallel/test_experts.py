"""Exchange of rows between processes that have some of the experts each."""

from __future__ import annotations

from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.train.model.mlps.experts.dispatch import AllHere, DispatchOrder, Exchange
from pipeline.train.parallel.experts import AllToAll
from tests.train.distributed.ranks import Ranks

pytestmark = pytest.mark.parallel

EXPERTS, WIDTH = 6, 4


def computed(exchange: Exchange, first: int, ids_TK: Tensor, x_TD: Tensor, gates_TK: Tensor) -> list[Tensor]:
    """The sum over experts of gate * (number of the expert + 1) * row, and its gradients."""
    x_TD, gates_TK = x_TD.clone().requires_grad_(), gates_TK.clone().requires_grad_()
    order = DispatchOrder.of(ids_TK, 1, EXPERTS)
    sizes = exchange.sizes(order.counts_BE.sum(0), ids_TK.numel())
    rows_ND, gates_N = exchange.arrived(exchange.send(order.rows(x_TD), order.gates(gates_TK), sizes), sizes)
    assert len(rows_ND) == sizes.rows == int(sizes.ends_E[-1])
    counts_E = torch.diff(sizes.ends_E, prepend=sizes.ends_E.new_zeros(1))
    factor_N = torch.arange(first + 1, first + 1 + len(counts_E)).repeat_interleave(counts_E)
    results_ND = (rows_ND * (gates_N * factor_N)[:, None]).to(x_TD.dtype)
    out_TD = order.summed(exchange.send_back(results_ND, sizes))
    (out_TD * torch.arange(1, WIDTH + 1)).sum().backward()  # type: ignore[no-untyped-call]
    return [out_TD.detach(), cast(Tensor, x_TD.grad), cast(Tensor, gates_TK.grad)]


def exchanged(dtype: torch.dtype, only: int | None) -> None:
    """Compare with a process that has all experts; `only`: that expert gets all rows."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    tokens = 0 if only is not None and rank == world - 1 else 5 + rank
    ids_TK = torch.stack([torch.randperm(EXPERTS, generator=generator)[:2] for _ in range(tokens)] or [torch.empty(0)])
    ids_TK = ids_TK.view(tokens, 2).long() if only is None else torch.full((tokens, 2), only)
    x_TD, gates_TK = (torch.randn(tokens, size, generator=generator) for size in (WIDTH, 2))
    group = dist.group.WORLD
    assert group is not None
    ours = computed(AllToAll(group), rank * EXPERTS // world, ids_TK, x_TD.to(dtype), gates_TK)
    expected = computed(AllHere(), 0, ids_TK, x_TD.to(dtype), gates_TK)
    for one, other in zip(ours, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("world", [2, 3])
def test_rows_go_to_the_process_of_their_expert_and_back(world: int) -> None:
    with Ranks(world, connect=True) as ranks:
        for dtype in (torch.float32, torch.bfloat16):
            for only in (None, 0, 5):
                ranks.call(exchanged, dtype, only)
