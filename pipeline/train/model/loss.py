"""The training loss: a weighted sum over tokens, from logits or, in pieces, from what logits are made of.

Shapes: B batch, S positions, N = B * S tokens, D width, V padded vocabulary, or the columns of it that this rank has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class VocabShard:
    """The columns of the logits that a rank has, and the ranks that have the others."""

    group: dist.ProcessGroup
    """Ranks that have all columns between them, each one once."""
    first: int
    """Token id of this rank's first column."""


@dataclass(frozen=True)
class Criterion:
    """Targets and weights of a micro-batch."""

    targets_BS: Tensor
    """int64 ids."""
    weight_BS: Tensor
    """fp32: how much each token counts in the total, the loss scale of fp16 included."""
    z_loss: float = 0.0
    shard: VocabShard | None = None
    """See `token_loss`, both."""
    chunk_tokens: int | None = None
    """Tokens whose logits exist at once; None: all of them."""

    def at(self, predicted_BK: Tensor) -> Criterion:
        """Criterion of some positions alone."""
        targets_BK, weight_BK = (x.gather(1, predicted_BK) for x in (self.targets_BS, self.weight_BS))
        return replace(self, targets_BS=targets_BK, weight_BS=weight_BK)


class TokenLosses(NamedTuple):
    """Loss outputs of a micro-batch."""

    total: Tensor
    """fp32 scalar to minimize: the sum over tokens of weight times objective, see `token_loss`."""
    loss_BS: Tensor
    """Cross entropy of every token, fp32, without a gradient."""
    of_depths: tuple[Tensor, ...] = ()
    """The same of each depth of multi-token prediction, where it is trained."""


Logits = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Stream [B, S, D], weight [V, D] and a bias [V] or none -> logits [B, S, V]."""


def criterion_loss(
    head: Logits, x_BSD: Tensor, weight_VD: Tensor, criterion: Criterion, bias_V: Tensor | None = None
) -> TokenLosses:
    """The loss of a micro-batch, from the residual stream after the last norm.

    In chunks, the logits of one chunk live at a time: its gradients with respect to stream and weight are computed in
    the forward pass already, where the factor of each token is known, and backward only scales them. No matrix product
    is done twice; kept are the gradients, [N, D] and [V, D] in the types of stream and weight (as in Hsu et al. 2024).

    Args:
        head: makes the logits.
        x_BSD: input of the head.
        weight_VD: its weight.
        criterion: targets and weights. With a shard all ranks of its group call this with the same shapes.
        bias_V: its bias.
    """
    size = criterion.chunk_tokens
    if size is None or size >= criterion.targets_BS.numel():
        return _whole_loss(head, x_BSD, weight_VD, bias_V, criterion)
    total, loss_BS = _ChunkedLoss.apply(x_BSD, weight_VD, bias_V, head, criterion)  # type: ignore[no-untyped-call]
    return TokenLosses(total, loss_BS)


def _whole_loss(
    head: Logits, x_BSD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, criterion: Criterion
) -> TokenLosses:
    logits_BSV = head(x_BSD, weight_VD, bias_V)
    loss_BS, objective_BS = token_loss(logits_BSV, criterion.targets_BS, criterion.z_loss, criterion.shard)
    return TokenLosses((objective_BS * criterion.weight_BS).sum(), loss_BS.detach())


class _ChunkedLoss(torch.autograd.Function):
    """See `criterion_loss`."""

    @staticmethod
    def forward(
        ctx: Any, x_BSD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, head: Logits, criterion: Criterion
    ) -> tuple[Tensor, Tensor]:
        x_ND, size = x_BSD.flatten(0, 1), cast(int, criterion.chunk_tokens)
        wanted = any(ctx.needs_input_grad)
        gradient_ND = torch.empty_like(x_ND) if wanted else None
        of_head = [weight_VD] if bias_V is None else [weight_VD, bias_V]
        # In fp32, as one matrix product over all tokens sums up.
        gradients = [torch.zeros_like(x, dtype=torch.float32) for x in of_head if wanted]
        total, losses = x_BSD.new_zeros((), dtype=torch.float32), []
        for first in range(0, len(x_ND), size):
            piece = slice(first, first + size)
            part = replace(
                criterion,
                targets_BS=criterion.targets_BS.flatten()[None, piece],
                weight_BS=criterion.weight_BS.flatten()[None, piece],
            )
            with torch.set_grad_enabled(wanted):
                inputs = [x_ND[None, piece].detach(), *(x.detach() for x in of_head)]
                if wanted:
                    inputs = [x.requires_grad_() for x in inputs]
                x_1CD, weight, *bias = inputs
                result = _whole_loss(head, x_1CD, weight, bias[0] if bias else None, part)
            if gradient_ND is not None:
                of_x, *others = torch.autograd.grad(result.total, inputs)
                gradient_ND[piece] = of_x[0]
                for of_all, of_piece in zip(gradients, others, strict=True):
                    of_all.add_(of_piece)
            total += result.total.detach()
            losses.append(result.loss_BS[0])
        if gradient_ND is not None:
            in_types = [gradient.to(x.dtype) for gradient, x in zip(gradients, of_head, strict=True)]
            ctx.save_for_backward(gradient_ND.view_as(x_BSD), *in_types)
        loss_BS = torch.cat(losses).view_as(criterion.targets_BS)
        ctx.mark_non_differentiable(loss_BS)
        return total, loss_BS

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # 1 unless somebody scales the total. Products of new tensors: a zero-bubble schedule may come twice.
        factor = gradients[0]
        found = [each * factor.to(each.dtype) for each in ctx.saved_tensors]
        return *found, *(None,) * (5 - len(found))


def token_loss(
    logits_BSV: Tensor, targets_BS: Tensor, z_loss: float = 0.0, shard: VocabShard | None = None
) -> tuple[Tensor, Tensor]:
    """Cross entropy of every token in fp32, and what is to be minimized.

    Args:
        logits_BSV: logits in any float dtype; padded vocabulary columns are -inf.
        targets_BS: int64 ids.
        z_loss: coefficient of log(Z)^2, which keeps the softmax's normalizer near 1 (PaLM, section 5).
        shard: set if the logits are some columns only. All ranks of its group call this, with the same targets, get
            the same values, and call backward with the same gradients.

    Returns:
        The cross entropy [B, S] in nats, and the objective [B, S]: the same plus the z-loss.
    """
    if shard is not None:
        results = _VocabParallelCrossEntropy.apply(logits_BSV.flatten(0, 1), targets_BS.flatten(), shard)  # type: ignore[no-untyped-call]
        loss, log_z = (cast(Tensor, result).view_as(targets_BS) for result in results)
        return loss, loss if z_loss == 0.0 else loss + z_loss * log_z.square()
    logits = logits_BSV.float()
    loss = F.cross_entropy(logits.flatten(0, 1), targets_BS.flatten(), reduction="none").view_as(targets_BS)
    if z_loss == 0.0:
        return loss, loss
    return loss, loss + z_loss * torch.logsumexp(logits, dim=-1).square()


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Cross entropy and log(Z) of every token, fp32 [N] each, from some columns of the logits (Shoeybi et al. 2019).

    Two all-reduces of [N] and [2, N] fp32 forward, none backward. Kept for backward are the logits themselves, in their
    own type, and three vectors [N]; the softmax is computed again, so that the fp32 matrix [N, V] lives only inside
    forward and inside backward.

    A NaN or +inf among the logits of a token makes its loss NaN on all ranks, whatever a maximum makes of NaN: it is in
    the sum of exponentials.
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
        maximum_N = logits_NV.amax(dim=-1).float()
        dist.all_reduce(maximum_N, dist.ReduceOp.MAX, shard.group)
        column_N = targets_N - shard.first
        own_N = (column_N >= 0) & (column_N < logits_NV.shape[1])
        column_N = column_N.masked_fill(~own_N, 0)
        target_N = logits_NV.gather(1, column_N[:, None])[:, 0].float() - maximum_N
        # A mask, and not a product: the column that stands in for a target elsewhere may be padding, -inf.
        target_N = target_N.masked_fill(~own_N, 0)
        exponential_NV = torch.sub(logits_NV, maximum_N[:, None]).exp_()  # fp32 without an fp32 copy of the logits
        sums_2N = torch.stack((exponential_NV.sum(dim=-1), target_N))
        dist.all_reduce(sums_2N, dist.ReduceOp.SUM, shard.group)
        log_sum_N, target_N = sums_2N[0].log(), sums_2N[1]
        log_z_N = log_sum_N + maximum_N
        ctx.save_for_backward(logits_NV, log_z_N, column_N, own_N)
        return log_sum_N - target_N, log_z_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        loss_N, log_z_N = gradients
        logits_NV, log_normalizer_N, column_N, own_N = ctx.saved_tensors
        gradient_NV = torch.sub(logits_NV, log_normalizer_N[:, None]).exp_()
        gradient_NV.mul_((loss_N + log_z_N)[:, None])
        gradient_NV.scatter_add_(1, column_N[:, None], loss_N.neg().masked_fill(~own_N, 0)[:, None])
        return gradient_NV.to(logits_NV.dtype), None, None
