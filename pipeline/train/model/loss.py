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

from pipeline.train.model.preference import Preference


@dataclass(frozen=True)
class VocabShard:
    """The columns of the logits that a rank has, and the ranks that have the others."""

    group: dist.ProcessGroup
    """Ranks that have all columns between them, each one once."""
    first: int
    """Token id of this rank's first column."""


@dataclass(frozen=True)
class DeferredLogits:
    """Logits of a micro-batch that do not exist yet: a frozen teacher's, which the loss makes chunk by chunk."""

    x_BSD: Tensor
    """Input of the matrix that makes them, without a gradient."""
    make: Callable[[Tensor], Tensor]
    """Some of the input, [B, S, D] -> logits [B, S, V]."""


@dataclass(frozen=True)
class Distillation:
    """The teacher's part of a criterion: Kullback-Leibler divergence from it (Hinton et al. 2015)."""

    teacher: DeferredLogits
    weight: float
    """Share of the divergence; the cross entropy has the rest."""
    temperature: float
    """Divisor of both models' logits in the divergence, which is multiplied by its square."""

    def piece(self, piece: slice) -> Distillation:
        """Those positions alone of all rows, one after the other, that a chunk has."""
        x_1CD = self.teacher.x_BSD.flatten(0, 1)[None, piece]
        return replace(self, teacher=replace(self.teacher, x_BSD=x_1CD))


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
    distillation: Distillation | None = None
    """The teacher's part; None: targets alone count."""
    preference: Preference | None = None
    """Pairs, whose losses are minimized in place of the cross entropy of their targets. Then `weight_BS` is the weight
    of a pair, at each of its positions."""

    def at(self, predicted_BK: Tensor) -> Criterion:
        """Criterion of some positions alone."""
        assert self.distillation is None, "rules refuse a teacher for objectives that predict some positions"
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
    divergence_BS: Tensor | None = None
    """Divergence of every token from the teacher, fp32, without a gradient; None: there is no teacher."""
    teacher_BS: Tensor | None = None
    """The teacher's cross entropy of every token, likewise."""
    of_pairs: Tensor | None = None
    """[P, 2] fp64, log-probabilities of both conversations of each pair; None: there are no pairs."""


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
    if criterion.preference is not None:
        return _preference_loss(head, x_BSD, weight_VD, criterion, criterion.preference, bias_V)
    size = criterion.chunk_tokens
    if size is None or size >= criterion.targets_BS.numel():
        return _whole_loss(head, x_BSD, weight_VD, bias_V, criterion)
    total, *by_token = _ChunkedLoss.apply(x_BSD, weight_VD, bias_V, head, criterion)  # type: ignore[no-untyped-call]
    return _token_losses(total, *by_token)


def _preference_loss(
    head: Logits,
    x_BSD: Tensor,
    weight_VD: Tensor,
    criterion: Criterion,
    preference: Preference,
    bias_V: Tensor | None,
) -> TokenLosses:
    """The loss of pairs: `total` has their gradient, and its value means nothing.

    The factors of the tokens are known when the log-probabilities of whole conversations are. So in chunks, all logits
    are made twice.
    """
    size, tokens = criterion.chunk_tokens, replace(criterion, preference=None)
    if size is None or size >= criterion.targets_BS.numel():
        loss_BS, _ = token_loss(head(x_BSD, weight_VD, bias_V), criterion.targets_BS, shard=criterion.shard)
        of_pairs = preference.log_probabilities(loss_BS.detach())
        weight_BS = preference.weights(of_pairs) * criterion.weight_BS
        return TokenLosses((loss_BS * weight_BS).sum(), loss_BS.detach(), of_pairs=of_pairs)
    with torch.no_grad():
        found = criterion_loss(head, x_BSD, weight_VD, tokens, bias_V)
    of_pairs = preference.log_probabilities(found.loss_BS)
    weight_BS = preference.weights(of_pairs) * criterion.weight_BS
    losses = criterion_loss(head, x_BSD, weight_VD, replace(tokens, weight_BS=weight_BS), bias_V)
    return losses._replace(of_pairs=of_pairs)


def _token_losses(
    total: Tensor, loss_BS: Tensor, divergence_BS: Tensor | None = None, teacher_BS: Tensor | None = None
) -> TokenLosses:
    return TokenLosses(total, loss_BS, (), divergence_BS, teacher_BS)


def _whole_loss(
    head: Logits, x_BSD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, criterion: Criterion
) -> TokenLosses:
    logits_BSV = head(x_BSD, weight_VD, bias_V)
    loss_BS, objective_BS = token_loss(logits_BSV, criterion.targets_BS, criterion.z_loss, criterion.shard)
    distillation = criterion.distillation
    if distillation is None:
        return TokenLosses((objective_BS * criterion.weight_BS).sum(), loss_BS.detach())
    with torch.no_grad():
        theirs_BSV = distillation.teacher.make(distillation.teacher.x_BSD)
    share, temperature = distillation.weight, distillation.temperature
    divergence_BS, teacher_BS = divergence(logits_BSV, theirs_BSV, criterion.targets_BS, temperature, criterion.shard)
    # The z-loss stays whole.
    objective_BS = objective_BS - share * loss_BS + share * temperature**2 * divergence_BS
    total = (objective_BS * criterion.weight_BS).sum()
    return _token_losses(total, loss_BS.detach(), divergence_BS.detach(), teacher_BS)


class _ChunkedLoss(torch.autograd.Function):
    """See `criterion_loss`."""

    @staticmethod
    def forward(
        ctx: Any, x_BSD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, head: Logits, criterion: Criterion
    ) -> tuple[Tensor, ...]:
        x_ND, size = x_BSD.flatten(0, 1), cast(int, criterion.chunk_tokens)
        wanted = any(ctx.needs_input_grad)
        gradient_ND = torch.empty_like(x_ND) if wanted else None
        of_head = [weight_VD] if bias_V is None else [weight_VD, bias_V]
        # In fp32, as one matrix product over all tokens sums up.
        gradients = [torch.zeros_like(x, dtype=torch.float32) for x in of_head if wanted]
        total, losses, distillation = x_BSD.new_zeros((), dtype=torch.float32), [], criterion.distillation
        for first in range(0, len(x_ND), size):
            piece = slice(first, first + size)
            part = replace(
                criterion,
                targets_BS=criterion.targets_BS.flatten()[None, piece],
                weight_BS=criterion.weight_BS.flatten()[None, piece],
                distillation=None if distillation is None else distillation.piece(piece),
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
            by_token = (result.loss_BS, result.divergence_BS, result.teacher_BS)
            losses.append([x[0] for x in by_token if x is not None])
        if gradient_ND is not None:
            in_types = [gradient.to(x.dtype) for gradient, x in zip(gradients, of_head, strict=True)]
            ctx.save_for_backward(gradient_ND.view_as(x_BSD), *in_types)
        whole = [torch.cat(pieces).view_as(criterion.targets_BS) for pieces in zip(*losses, strict=True)]
        ctx.mark_non_differentiable(*whole)
        return total, *whole

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


def divergence(
    logits_BSV: Tensor, teacher_BSV: Tensor, targets_BS: Tensor, temperature: float, shard: VocabShard | None = None
) -> tuple[Tensor, Tensor]:
    """Kullback-Leibler divergence KL(teacher || student) of every token over the whole vocabulary, in fp32.

    Args:
        logits_BSV: of the student, in any float dtype; padded vocabulary columns are -inf.
        teacher_BSV: of the teacher, likewise; no gradient comes to them.
        targets_BS: int64 ids.
        temperature: divisor of both.
        shard: as in `token_loss`; both have the same columns then.

    Returns:
        The divergence [B, S] in nats, and the teacher's cross entropy of the targets [B, S], at temperature 1 and
        without a gradient.
    """
    results = _Divergence.apply(
        logits_BSV.flatten(0, 1), teacher_BSV.flatten(0, 1), targets_BS.flatten(), temperature, shard
    )  # type: ignore[no-untyped-call]
    first, second = (cast(Tensor, result).view_as(targets_BS) for result in results)
    return first, second


class _Divergence(torch.autograd.Function):
    """See `divergence`. With a shard one all-reduce of [2, N] and one of [4 or 5, N] fp32 forward, none backward.

    With p and q for teacher and student, the divergence is the sum over columns of p (log p - log q), and its gradient
    q - p over the temperature. Both are sums and differences of columns, so that each rank computes those of its own.
    Where both have the same logits, both are exactly 0: they are computed alike.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: Tensor,
        teacher_NV: Tensor,
        targets_N: Tensor,
        temperature: float,
        shard: VocabShard | None,
    ) -> tuple[Tensor, Tensor]:
        student, teacher = logits_NV.float() / temperature, teacher_NV.float() / temperature
        tops_2N = torch.stack((student.amax(dim=-1), teacher.amax(dim=-1)))
        if shard is not None:
            dist.all_reduce(tops_2N, dist.ReduceOp.MAX, shard.group)
        student.sub_(tops_2N[0, :, None])
        teacher.sub_(tops_2N[1, :, None])
        column_N = targets_N - (0 if shard is None else shard.first)
        own_N = (column_N >= 0) & (column_N < logits_NV.shape[1])
        target_N = teacher.gather(1, column_N.masked_fill(~own_N, 0)[:, None])[:, 0].masked_fill(~own_N, 0)
        weight_NV = teacher.exp()
        sums = [weight_NV.sum(dim=-1), target_N]
        if temperature != 1:
            sums.append((teacher * temperature).exp_().sum(dim=-1))
        # Padding is -inf in both, whose difference is NaN; a NaN of the student is in its sum of exponentials.
        teacher.sub_(student).masked_fill_(weight_NV == 0, 0)
        sums = [student.exp_().sum(dim=-1), weight_NV.mul_(teacher).sum(dim=-1), *sums]
        sums_KN = torch.stack(sums)
        if shard is not None:
            dist.all_reduce(sums_KN, dist.ReduceOp.SUM, shard.group)
        of_student_N, differences_N, of_teacher_N, target_N = sums_KN[:4]
        log_sums_2N = torch.stack((of_student_N, of_teacher_N)).log()
        ctx.save_for_backward(logits_NV, teacher_NV, tops_2N + log_sums_2N)
        ctx.temperature = temperature
        loss_N = differences_N / of_teacher_N + log_sums_2N[0] - log_sums_2N[1]
        teacher_loss_N = sums_KN[-1].log() - temperature * target_N if temperature != 1 else log_sums_2N[1] - target_N
        ctx.mark_non_differentiable(teacher_loss_N)
        return loss_N, teacher_loss_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits_NV, teacher_NV, log_z_2N = ctx.saved_tensors
        gradient_NV = (logits_NV.float() / ctx.temperature).sub_(log_z_2N[0, :, None]).exp_()
        gradient_NV.sub_((teacher_NV.float() / ctx.temperature).sub_(log_z_2N[1, :, None]).exp_())
        gradient_NV.mul_(gradients[0][:, None] / ctx.temperature)
        return gradient_NV.to(logits_NV.dtype), None, None, None, None
