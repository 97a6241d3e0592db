"""The loss of logits whose columns are spread over ranks, against torch's of the whole."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from pipeline.train.model.loss import VocabShard, token_loss
from tests.train.distributed import ranks

ROWS, LENGTH, TOKENS = 3, 5, 11


def _logits(columns: int, scale: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, S, columns], -inf from TOKENS on, and targets."""
    generator = torch.Generator().manual_seed(1)
    logits = (scale * torch.randn(ROWS, LENGTH, columns, generator=generator)).to(dtype)
    logits[..., TOKENS:] = -math.inf
    targets = torch.randint(TOKENS, (ROWS, LENGTH), generator=generator)
    targets[0, 0], targets[0, 1] = 0, TOKENS - 1
    return logits, targets


def _cut(logits: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, VocabShard]:
    rank = dist.get_rank()
    assert dist.group.WORLD is not None
    piece = logits.split(sizes, dim=-1)[rank].clone().requires_grad_()
    return piece, VocabShard(dist.group.WORLD, sum(sizes[:rank]))


def _equal_on_all(values: torch.Tensor) -> None:
    others = [torch.zeros_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(others, values.detach())
    assert all(torch.equal(other, values) for other in others)


def check_against_whole() -> None:
    cases = [
        # The last rank has nothing but padding; then the last two, and shares are uneven; then no padding at all.
        (sizes, scale, dtype, z_loss)
        for sizes in ([4, 4, 4, 4], [7, 4, 2, 3], [2, 2, 3, 4])
        for scale, dtype in ((1.0, torch.float32), (300.0, torch.float32), (3.0, torch.bfloat16))
        for z_loss in (0.0, 0.1)
    ]
    for sizes, scale, dtype, z_loss in cases:
        whole, targets = _logits(sum(sizes), scale, dtype)
        piece, shard = _cut(whole, sizes)
        loss, objective = token_loss(piece, targets, z_loss, shard)
        _equal_on_all(loss)
        _equal_on_all(objective)
        # Tokens count differently, some not at all; and the loss alone is differentiable as well as the objective.
        weight = torch.linspace(0, 2, ROWS * LENGTH).view(ROWS, LENGTH)
        (objective * weight + 0.5 * loss).sum().backward()

        exact = whole.double().requires_grad_()
        wanted = F.cross_entropy(exact.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        wanted_objective = wanted + z_loss * torch.logsumexp(exact, dim=-1).square()
        (wanted_objective * weight + 0.5 * wanted).sum().backward()
        assert exact.grad is not None and piece.grad is not None
        expected = exact.grad.split(sizes, dim=-1)[dist.get_rank()]
        assert loss.dtype == objective.dtype == torch.float32 and piece.grad.dtype == dtype
        torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(objective.double(), wanted_objective, rtol=1e-5, atol=1e-5)
        rtol, atol = (1e-2, 1e-6) if dtype == torch.bfloat16 else (1e-4, 1e-5)
        torch.testing.assert_close(piece.grad.double(), expected, rtol=rtol, atol=atol * max(1, exact.grad.abs().max()))
        # Nothing for the padding, exactly: a NaN would come from -inf - -inf.
        padding = max(0, min(piece.shape[-1], shard.first + piece.shape[-1] - TOKENS))
        assert piece.grad[..., piece.shape[-1] - padding :].eq(0).all()

        # One process, all columns: the same to rounding.
        plain_loss, plain_objective = token_loss(whole, targets, z_loss)
        torch.testing.assert_close((loss, objective), (plain_loss, plain_objective), rtol=1e-5, atol=1e-5)


def check_bad_logits() -> None:
    """What is not finite stays so, on all ranks, in the tokens that have it, wherever it is."""
    sizes = [4, 4, 4, 4]
    for bad in (math.nan, math.inf):
        for column in range(TOKENS):
            logits, targets = _logits(16, 1.0, torch.float32)
            targets[1, 2] = 0  # so that in most cases the bad logit is not the target's
            logits[1, 2, column] = bad
            piece, shard = _cut(logits, sizes)
            loss, objective = token_loss(piece, targets, 0.1, shard)
            for values in (loss, objective):
                finite = torch.isfinite(values)
                assert not finite[1, 2] and finite.sum() == finite.numel() - 1, (bad, column)
            objective.sum().backward()
            assert piece.grad is not None and not piece.grad[1, 2].isfinite().all()
    logits, targets = _logits(16, 1.0, torch.float32)
    logits[1, 2] = -math.inf
    piece, shard = _cut(logits, sizes)
    assert not token_loss(piece, targets, 0.0, shard)[0][1, 2].isfinite()
    # A target that is padding has probability zero.
    logits, targets = _logits(16, 1.0, torch.float32)
    targets[1, 2] = 15
    piece, shard = _cut(logits, sizes)
    assert token_loss(piece, targets, 0.0, shard)[0][1, 2] == math.inf


def check_backward_is_local() -> None:
    """One rank alone runs backward: it would wait for the others if there were communication in it."""
    logits, targets = _logits(16, 1.0, torch.float32)
    piece, shard = _cut(logits, [4, 4, 4, 4])
    _, objective = token_loss(piece, targets, 0.1, shard)
    if dist.get_rank() == 0:
        objective.sum().backward()
        assert piece.grad is not None and piece.grad.abs().sum() > 0
    with torch.no_grad():
        assert not token_loss(piece, targets, 0.1, shard)[1].requires_grad


def check_memory() -> None:
    """What is kept for backward is the logits as they came and vectors: no softmax, no fp32 copy."""
    logits, targets = _logits(16, 1.0, torch.bfloat16)
    piece, shard = _cut(logits, [4, 4, 4, 4])
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        token_loss(piece, targets, 0.0, shard)
    large = [tensor for tensor in kept if tensor.numel() > targets.numel()]
    assert [tensor.data_ptr() for tensor in large] == [piece.data_ptr()]


def _check() -> None:
    check_against_whole()
    check_bad_logits()
    check_backward_is_local()
    check_memory()


@pytest.mark.guard
@pytest.mark.parallel
def test_columns_on_four_ranks() -> None:
    ranks.run(4, _check)


@pytest.mark.parallel
def test_columns_on_one_rank() -> None:
    """A group of one is the whole."""
    ranks.run(1, _check_one)


def _check_one() -> None:
    logits, targets = _logits(16, 1.0, torch.float32)
    piece, shard = _cut(logits, [16])
    torch.testing.assert_close(token_loss(piece, targets, 0.1, shard), token_loss(logits, targets, 0.1))
