"""Divergence from a teacher in the loss: against the closed form in fp64, whole and in chunks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.train.model.loss import DeferredLogits, Distillation, TokenLosses, divergence
from tests.train.model.test_chunked_loss import POSITIONS, SAMPLES, criterion, head, stream
from tests.train.models import VOCAB

WIDTH = 24
"""Of the teacher."""


def teacher() -> DeferredLogits:
    """A stream and a head of another width, with as much padding of the vocabulary."""
    torch.manual_seed(5)
    x, weight = torch.randn(SAMPLES, POSITIONS, WIDTH), torch.randn(head().spec.vocab_padded, WIDTH)
    padding = torch.zeros(len(weight))
    padding[VOCAB:] = -torch.inf
    return DeferredLogits(x, lambda piece: F.linear(piece, weight, padding))


def closed_form(logits: Tensor, theirs: Tensor, temperature: float) -> Tensor:
    """KL(teacher || student) of each token in fp64, over the vocabulary without its padding."""
    p, q = ((each[..., :VOCAB].double() / temperature).log_softmax(-1) for each in (theirs, logits))
    return F.kl_div(q, p, reduction="none", log_target=True).sum(-1)


@pytest.mark.parametrize("chunk_tokens", [None, 1, 10, 10**6])
@pytest.mark.parametrize(
    ("weight", "temperature", "z_loss"), [(0.9, 1.0, 0.0), (0.3, 2.5, 0.1), (1.0, 0.5, 0.0)], ids=["1", "2.5", "0.5"]
)
def test_equals_the_closed_form(chunk_tokens: int | None, weight: float, temperature: float, z_loss: float) -> None:
    module, x, wanted, theirs = head(), stream(), criterion(chunk_tokens, z_loss), teacher()
    result = module(x, module.weight, replace(wanted, distillation=Distillation(theirs, weight, temperature)))
    assert isinstance(result, TokenLosses) and result.divergence_BS is not None and result.teacher_BS is not None
    (3.0 * result.total).backward()
    exact_x, exact_weight = x.detach().requires_grad_(), module.weight.detach().requires_grad_()
    logits = exact_x.double() @ exact_weight.double()[:VOCAB].T
    log_z = logits.logsumexp(-1)
    loss = log_z - logits.gather(-1, wanted.targets_BS[..., None])[..., 0]
    of_teacher = theirs.make(theirs.x_BSD)
    kl = closed_form(logits, of_teacher, temperature)
    objective = (1 - weight) * loss + z_loss * log_z**2 + weight * temperature**2 * kl
    total = (objective * wanted.weight_BS.double()).sum()
    (3.0 * total).backward()
    torch.testing.assert_close(result.total, total.float())
    torch.testing.assert_close(result.loss_BS, loss.float())
    torch.testing.assert_close(result.divergence_BS, kl.float())
    expected = -of_teacher[..., :VOCAB].double().log_softmax(-1).gather(-1, wanted.targets_BS[..., None])[..., 0]
    torch.testing.assert_close(result.teacher_BS, expected.float())
    torch.testing.assert_close(x.grad, exact_x.grad)
    torch.testing.assert_close(module.weight.grad, exact_weight.grad)
    assert not module.weight.grad[VOCAB:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_teacher_with_the_same_logits_teaches_nothing(dtype: torch.dtype) -> None:
    module, x = head().to(dtype), stream(dtype)
    module.defers = True
    same = module(x.detach(), module.weight.detach())
    module.defers = False
    for size in (None, 10):
        result = module(x, module.weight, replace(criterion(size), distillation=Distillation(same, 1.0, 2.0)))
        assert not result.divergence_BS.any() and torch.isfinite(result.teacher_BS).all()
        for gradient in torch.autograd.grad(result.total, (x, module.weight)):
            assert not gradient.any()


def test_a_logit_that_is_not_finite_is_seen() -> None:
    for bad in (torch.nan, torch.inf):
        module, x = head(), stream()
        with torch.no_grad():
            x[0, 0, 0] = bad
        result = module(x, module.weight, replace(criterion(None), distillation=Distillation(teacher(), 1.0, 1.0)))
        assert result.divergence_BS[0, 0].isnan() and result.divergence_BS[1:].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_computes_the_closed_form(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits, theirs = (torch.randn(1, 300, 32_000, device="cuda").mul(4).to(dtype) for _ in range(2))
    logits.requires_grad_()
    targets = torch.randint(0, 32_000, (1, 300), device="cuda")
    found, _ = divergence(logits, theirs, targets, 1.5)
    exact = logits.detach().double().requires_grad_()
    p, q = ((each.double() / 1.5).log_softmax(-1) for each in (theirs, exact))
    wanted = F.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(found, wanted.float(), rtol=1e-5, atol=1e-5)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    (exact_gradient,) = torch.autograd.grad(wanted.sum(), exact)
    torch.testing.assert_close(gradient, exact_gradient.to(dtype))
