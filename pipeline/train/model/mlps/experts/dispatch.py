"""Rows of tokens in the order of their experts, and back.

Shapes: T tokens, D width, K experts of each, N = T K rows, E experts, B samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class DispatchOrder:
    """Rows of tokens, one for each of their experts, in the order of the experts."""

    order_N: Tensor
    """Row -> place in [T, K], flat."""
    inverse_N: Tensor
    """The reverse."""
    counts_BE: Tensor
    """int64, how often the tokens of a sample chose an expert."""
    top_k: int

    @classmethod
    def of(cls, ids_TK: Tensor, samples: int, experts: int) -> DispatchOrder:
        """The order for choices of tokens of some samples, which have equally many."""
        choices, top_k = ids_TK.numel(), ids_TK.shape[1]
        sorted_N, order_N = torch.sort(ids_TK.flatten(), stable=True)
        inverse_N = torch.empty_like(order_N).scatter_(0, order_N, torch.arange(choices, device=order_N.device))
        # Rows of an expert are in the order of the tokens, so these are ascending; bincount would wait for the host.
        samples_N = torch.div(order_N, max(1, choices // max(1, samples)), rounding_mode="floor")
        keys = torch.arange(experts * samples + 1, device=order_N.device)
        ends = torch.searchsorted(sorted_N * samples + samples_N, keys)
        counts_BE = ends.diff().view(experts, samples).T.contiguous()
        return cls(order_N, inverse_N, counts_BE, top_k)

    def rows(self, x_TD: Tensor) -> Tensor:
        """The rows [N, D] of tokens."""
        return cast(Tensor, _Dispatched.apply(x_TD, self, True))  # type: ignore[no-untyped-call]

    def gates(self, gates_TK: Tensor) -> Tensor:
        """Weights of the rows [N]."""
        return permuted(gates_TK.flatten(), self.order_N, self.inverse_N)

    def summed(self, rows_ND: Tensor) -> Tensor:
        """The sum over the rows of each token [T, D], added in fp32."""
        return cast(Tensor, _Dispatched.apply(rows_ND, self, False))  # type: ignore[no-untyped-call]


class Sizes(Protocol):
    """Numbers of rows of an exchange, with which its repetition sends the same."""

    @property
    def ends_E(self) -> Tensor:
        """int32, of the experts that this process has: rows up to the end of each."""

    @property
    def rows(self) -> int:
        """Rows for the experts that this process has."""


class Exchange(Protocol):
    """Way of rows to the processes that have their experts."""

    def sizes(self, counts_E: Tensor, rows: int) -> Sizes:
        """Sizes of an exchange, from how many rows each expert gets from here; every process calls this."""

    def send(self, rows_ND: Tensor, gates_N: Tensor, sizes: Sizes) -> Any:
        """Send rows and their weights to the processes that have their experts; `arrived` gives what comes in turn."""

    def arrived(self, sent: Any, sizes: Sizes) -> tuple[Tensor, Tensor]:
        """Rows and weights that are here, in the order of this process's experts."""

    def send_back(self, rows_ND: Tensor, sizes: Sizes) -> Tensor:
        """The reverse of both for rows: their results, in the order in which they were sent."""


@dataclass(frozen=True)
class _OwnSizes:
    ends_E: Tensor
    rows: int


class AllHere:
    """The exchange where each process has all experts: nothing is sent."""

    def sizes(self, counts_E: Tensor, rows: int) -> Sizes:
        """See `Exchange`."""
        return _OwnSizes(counts_E.cumsum(0).int(), rows)

    def send(self, rows_ND: Tensor, gates_N: Tensor, sizes: Sizes) -> Any:
        """See `Exchange`."""
        return rows_ND, gates_N

    def arrived(self, sent: Any, sizes: Sizes) -> tuple[Tensor, Tensor]:
        """See `Exchange`."""
        rows_ND, gates_N = sent
        return rows_ND, gates_N

    def send_back(self, rows_ND: Tensor, sizes: Sizes) -> Tensor:
        """See `Exchange`."""
        return rows_ND


def permuted(x: Tensor, order_N: Tensor, inverse_N: Tensor) -> Tensor:
    """x[order], whose gradient is gathered by the inverse: no sums whose order is left to chance."""
    return cast(Tensor, _Permuted.apply(x, order_N, inverse_N))  # type: ignore[no-untyped-call]


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order_N: Tensor, inverse_N: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_N)
        return x.index_select(0, order_N)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (inverse_N,) = ctx.saved_tensors
        return gradients[0].index_select(0, inverse_N), None, None


class _Dispatched(torch.autograd.Function):
    """Rows of tokens, or the sums of each token's rows: one is the gradient of the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: DispatchOrder, to_rows: bool) -> Tensor:
        ctx.order, ctx.to_rows = order, to_rows
        return _of_tokens(x, order) if to_rows else _sum(x, order)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        back = _sum if ctx.to_rows else _of_tokens
        return back(gradients[0], ctx.order), None, None


def _of_tokens(x_TD: Tensor, order: DispatchOrder) -> Tensor:
    return x_TD.index_select(0, torch.div(order.order_N, order.top_k, rounding_mode="floor"))


def _sum(rows_ND: Tensor, order: DispatchOrder) -> Tensor:
    tokens = len(rows_ND) // order.top_k
    if rows_ND.dtype == torch.float32 and rows_ND.device.type == "cpu" and tokens:
        # The same bits in a sixth of the time: rows are added as they are gathered. In bf16 it rounds in between.
        return F.embedding_bag(order.inverse_N.view(tokens, order.top_k), rows_ND, mode="sum")
    by_token_TKD = rows_ND.index_select(0, order.inverse_N).view(tokens, order.top_k, rows_ND.shape[1])
    wide = torch.promote_types(rows_ND.dtype, torch.float32)
    return by_token_TKD.sum(1, dtype=wide).to(rows_ND.dtype)
