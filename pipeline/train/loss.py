"""The training loss: a sum over tokens, divided by the valid targets of the global batch by whoever calls it.

Shapes: B batch, S positions, N = B * S tokens, V padded vocabulary, or the columns of it that this rank has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class VocabShard:
    """Which columns of the logits a rank has, and who has the others."""

    group: dist.ProcessGroup
    """Its ranks have all columns between them, each one once."""
    first: int
    """Token id of this rank's first column."""


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
