"""A mixture of experts: router, experts, and perhaps an mlp that every token goes through (Shazeer et al. 2017).

Nothing is dropped: an expert gets as many rows as tokens chose it. With tensor parallelism no expert is cut; a rank
routes its own positions, those of its piece of the residual stream, or a share of what it has whole.

Shapes: B samples, S positions, D width, T tokens, N rows of tokens for experts, E experts that are here, F hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from pipeline.train.model.context import LayerContext
from pipeline.train.model.kernels.grouped import grouped_products, rows_of_groups
from pipeline.train.model.mlps.dense.module import Mlp
from pipeline.train.model.mlps.experts.dispatch import AllHere, DispatchOrder, Exchange, Sizes
from pipeline.train.model.mlps.experts.router import Choice, Router
from pipeline.train.model.mlps.experts.routing import Routed, Routing
from pipeline.train.model.mlps.experts.spec import ExpertsSpec
from pipeline.train.model.recompute import Recompute
from pipeline.train.torch_compat.compiler import vary_length
from pipeline.train.torch_compat.core import own_part


class Chosen(NamedTuple):
    """Choices of a pass, and the way of its rows."""

    ids_TK: Tensor
    order: DispatchOrder
    sizes: Sizes
    counts_E: Tensor
    """How often this process's tokens chose each expert."""
    counts_BE: Tensor
    """Of all tokens of the samples, as far as the balance loss needs them."""


class PositionShare(Protocol):
    """Cut of a residual stream that every rank has whole, over ranks that each route a share of its positions."""

    def take(self, x_BSD: Tensor) -> Tensor:
        """This rank's positions."""

    def give(self, x_BSD: Tensor) -> Tensor:
        """Positions of all ranks, from this rank's."""


class Experts(nn.Module):
    """Router, experts and shared mlp.

    Attributes:
        exchange: Way of rows to the processes that have their experts.
        share: With tensor parallelism where the residual stream is whole on every rank.
        compiled_route: What a training pass calls in place of `route`, if it is compiled.
    """

    def __init__(self, spec: ExpertsSpec) -> None:
        super().__init__()
        self.spec = spec
        self.router = Router(spec.router, spec.dim)
        self.experts = ExpertStacks(spec)
        if spec.shared is not None:
            self.shared = Mlp(spec.shared)
        if spec.shared_gate:
            self.shared_gate = nn.Linear(spec.dim, 1, bias=False)
        self.exchange: Exchange = AllHere()
        self.share: PositionShare | None = None

    def forward(self, x_BSD: Tensor, context: LayerContext) -> Tensor:
        """[B, S, D] -> [B, S, D], of local tensors; notes in `context.routed` what was chosen."""
        routing, chosen = context.routing, context.chosen
        mine_BSD = x_BSD if self.share is None else self.share.take(x_BSD)
        real = len(mine_BSD) if routing is None else routing.real
        x_TD = mine_BSD[:real].flatten(0, 1)
        # A repetition takes the same: it may round otherwise, and waits for the host no second time.
        before = chosen[0] if chosen else None
        choice: Choice = self.router(x_TD, None if before is None else before.ids_TK)
        way = before or self._way(choice.ids_TK, real, routing)
        if chosen is not None and before is None:
            chosen.append(way)
        order, sizes = way.order, way.sizes
        sent = self.exchange.send(order.rows(x_TD), order.gates(choice.gates_TK), sizes)
        shared_BSD = self._shared(x_BSD)  # while rows are on their way
        rows_ND = self.experts(*self.exchange.arrived(sent, sizes), sizes.ends_E)
        out_TD = order.summed(self.exchange.send_back(rows_ND, sizes))
        balance = z = choice.logits_TE.new_zeros(())
        if routing is not None:
            balance, z = routing.losses(choice, self.router, way.counts_BE)
            out_TD = routing.attached(out_TD, balance, z)
        if context.routed is not None:
            context.routed.append(Routed(way.counts_E, balance.detach(), z.detach(), sizes.rows, choice.ids_TK))
        out_BSD = out_TD.view(real, *mine_BSD.shape[1:])
        if real < len(mine_BSD):
            out_BSD = torch.cat((out_BSD, torch.zeros_like(mine_BSD[real:])))
        if self.share is not None:
            out_BSD = self.share.give(out_BSD)
        return out_BSD if shared_BSD is None else out_BSD + shared_BSD

    def _way(self, ids_TK: Tensor, samples: int, routing: Routing | None) -> Chosen:
        """The way of rows for what was chosen, for which a process with other experts' rows has to be asked."""
        order = DispatchOrder.of(ids_TK, samples, self.spec.router.count)
        counts_E = order.counts_BE.sum(0)
        sizes = self.exchange.sizes(counts_E, ids_TK.numel())
        counts_BE = order.counts_BE if routing is None else routing.counts_of_samples(order.counts_BE)
        return Chosen(ids_TK, order, sizes, counts_E, counts_BE)

    def _shared(self, x_BSD: Tensor) -> Tensor | None:
        if self.spec.shared is None:
            return None
        out_BSD: Tensor = self.shared(x_BSD)
        return out_BSD * torch.sigmoid(self.shared_gate(x_BSD)) if self.spec.shared_gate else out_BSD


class ExpertStacks(nn.Module):
    """The experts that this process has: w2(silu(w1 x) * w3 x), or clamped, each for its own rows.

    Attributes:
        recompute: How a training pass keeps less than everything for backward; None: it keeps everything.
        compiled: What a training pass calls in place of `compute`, if it is compiled.
    """

    def __init__(self, spec: ExpertsSpec) -> None:
        super().__init__()
        self.clamp = spec.clamp
        self.bias = spec.bias
        for stack in spec.stacks:
            shape = stack.count, stack.rows, stack.columns
            self.register_parameter(stack.name.partition(".")[2], nn.Parameter(torch.empty(shape)))
            if stack.bias:
                self.register_parameter(stack.bias_name.partition(".")[2], nn.Parameter(torch.empty(shape[:2])))
        self.recompute: Recompute | None = None
        self.compiled: Callable[..., Any] | None = None

    def forward(self, rows_ND: Tensor, gates_N: Tensor, ends_E: Tensor) -> Tensor:
        """Results of rows, times their weights, [N, D]."""
        compute = self.compute
        # Code for any number of rows is for 2 or more.
        if self.compiled is not None and self.training and torch.is_grad_enabled() and len(rows_ND) >= 2:
            compute = self.compiled
            for x in (rows_ND, gates_N):
                vary_length(x)
        out_ND: Tensor = compute(rows_ND, gates_N, ends_E)
        return out_ND

    def compute(self, rows_ND: Tensor, gates_N: Tensor, ends_E: Tensor) -> Tensor:
        """Results of rows as of `forward`, beneath what gathers the weights."""
        if self.recompute is None or not (self.training and torch.is_grad_enabled()):
            return self._compute(rows_ND, gates_N, ends_E)
        return self.recompute(lambda rows: self._compute(rows, gates_N, ends_E), rows_ND)

    def _compute(self, rows_ND: Tensor, gates_N: Tensor, ends_E: Tensor) -> Tensor:
        first_NF, third_NF = (self._products(rows_ND, name, ends_E) for name in ("1", "3"))
        if self.clamp is None:
            hidden_NF = torch.nn.functional.silu(first_NF) * third_NF
        else:
            limit, alpha = self.clamp
            first_NF, third_NF = first_NF.clamp(max=limit), third_NF.clamp(-limit, limit)
            hidden_NF = first_NF * torch.sigmoid(alpha * first_NF) * (third_NF + 1)
        # Before the last product, whose result is then not needed for the gradient of the weights.
        hidden_NF = (hidden_NF * gates_N[:, None]).to(rows_ND.dtype)
        # Also before it, as a repetition ends where nothing more is needed.
        added_ND = (self._bias("b2", ends_E, len(rows_ND)) * gates_N[:, None]).to(rows_ND.dtype) if self.bias else None
        out_ND = grouped_products(hidden_NF, own_part(self.get_parameter("w2")), ends_E)
        return out_ND if added_ND is None else out_ND + added_ND

    def _products(self, rows_ND: Tensor, number: str, ends_E: Tensor) -> Tensor:
        out_NF = grouped_products(rows_ND, own_part(self.get_parameter(f"w{number}")), ends_E)
        return out_NF + self._bias(f"b{number}", ends_E, len(rows_ND)) if self.bias else out_NF

    def _bias(self, name: str, ends_E: Tensor, rows: int) -> Tensor:
        """The bias of each row's expert."""
        return rows_of_groups(own_part(self.get_parameter(name)), ends_E, rows)
