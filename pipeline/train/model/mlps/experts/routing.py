"""Training of routers: which tokens count, the losses that balance experts, and what a layer says of its choices.

Losses are sums over tokens with divisors that the host knows, so that no layout, number of micro-batches or padding
changes them. Only scores have gradients, and each process adds those of its own tokens.

Shapes: B samples of a micro-batch, S positions, T tokens, E experts, K of them a token goes to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

if TYPE_CHECKING:  # it imports DTensor, which the launcher does without
    from pipeline.train.model.mlps.experts.router import Choice, Router


class Routed(NamedTuple):
    """Choices of the tokens of a micro-batch in a layer, on this process; without gradients."""

    counts_E: Tensor
    """int64, how often each expert was chosen."""
    balance: Tensor
    """fp32 scalar, this process's share of the balance loss without its coefficient."""
    z: Tensor
    """fp32 scalar, the same of the z loss."""
    rows: int
    """Rows that the experts of this process got."""
    ids_TK: Tensor
    """int64, the chosen experts of each token."""


@dataclass(frozen=True)
class Routing:
    """Demands of a training step on the routers.

    Attributes:
        real: Samples of the micro-batch that are real, which are its first ones; padding goes to no expert.
        samples: Those of the global batch.
        length: Tokens of each.
        loss: Coefficient of the balance loss, see `BalanceConfig`.
        over: What the balance loss counts choices over.
        z_loss: Coefficient of the z loss.
        scale: Factor on all losses, with fp16.
        summed: Adds up over the processes that have other tokens of the same samples; None: there are none.
    """

    real: int
    samples: int
    length: int
    loss: float
    over: Literal["sequence", "batch"]
    z_loss: float
    scale: Tensor | None = None
    summed: Callable[[Tensor], Tensor] | None = None

    def counts_of_samples(self, counts_BE: Tensor) -> Tensor:
        """Choices of all tokens of the samples, from those of this process's tokens.

        Also where the loss counts for nothing, as the metrics tell it.
        """
        return counts_BE if self.summed is None or self.over != "sequence" else self.summed(counts_BE)

    def losses(self, choice: Choice, router: Router, counts_BE: Tensor) -> tuple[Tensor, Tensor]:
        """This process's share of the balance loss and of the z loss, fp32 scalars without their coefficients.

        Args:
            choice: Of this process's tokens.
            router: The one that chose.
            counts_BE: Choices of all tokens of its samples.
        """
        experts, top_k = router.spec.count, router.spec.top_k
        samples, length = max(1, self.samples), self.length
        if self.over == "sequence":
            tokens = len(choice.shares_TE) // max(1, len(counts_BE))  # of a sample; there may be none
            shares_BE = choice.shares_TE.view(len(counts_BE), tokens, experts).sum(1)
            balance = (counts_BE * shares_BE).sum() * (experts / (top_k * length * length * samples))
        else:
            # In the first step of all nothing was chosen before.
            loads_E = router.loads / router.loads.sum().clamp(min=1)
            balance = (loads_E * choice.shares_TE.sum(0)).sum() * (experts / (length * samples))
        z = choice.logits_TE.logsumexp(-1).square().sum() / (length * samples)
        return balance, z

    def attached(self, x: Tensor, balance: Tensor, z: Tensor) -> Tensor:
        """Tensor `x`, with the losses attached: the backward pass of `x` begins theirs."""
        if not self.loss and not self.z_loss:
            return x
        total = self.loss * balance + self.z_loss * z
        return cast(Tensor, _WithLoss.apply(x, total, self.scale))  # type: ignore[no-untyped-call]


class _WithLoss(torch.autograd.Function):
    """x as it is, and for a loss a gradient of 1, or of the factor on all losses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Tensor | None) -> Tensor:
        ctx.scale = scale
        ctx.like = loss.detach()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        one = torch.ones_like(ctx.like)
        return gradients[0], one if ctx.scale is None else one * ctx.scale, None
