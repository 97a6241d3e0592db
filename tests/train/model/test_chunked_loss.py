"""The loss in chunks: against the closed form in fp64, and what it holds in memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.train.model.decoder_spec import decoder_spec
from pipeline.train.model.head import Head
from pipeline.train.model.loss import Criterion, TokenLosses
from tests.train.models import DIM, FAMILIES, VOCAB

SAMPLES, POSITIONS = 3, 21


def head(**keys: Any) -> Head:
    torch.manual_seed(0)
    return Head(replace(decoder_spec(FAMILIES["llama"].config, VOCAB, 64), **keys))


def criterion(chunk_tokens: int | None, z_loss: float = 0.0) -> Criterion:
    torch.manual_seed(1)
    targets = torch.randint(0, VOCAB, (SAMPLES, POSITIONS))
    weight = torch.rand(SAMPLES, POSITIONS).masked_fill(torch.rand(SAMPLES, POSITIONS) < 0.2, 0)
    return Criterion(targets, weight, z_loss, chunk_tokens=chunk_tokens)


def stream(dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(2)
    return torch.randn(SAMPLES, POSITIONS, DIM).to(dtype).requires_grad_()


def closed_form(module: Head, x: Tensor, weight: Tensor, wanted: Criterion) -> tuple[Tensor, Tensor]:
    """Total and cross entropy in fp64, over the vocabulary without its padding."""
    logits = x.double() * module.spec.logit_scale @ weight.double()[:VOCAB].T
    cap = module.spec.logit_soft_cap
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    log_z = logits.logsumexp(-1)
    loss = log_z - logits.gather(-1, wanted.targets_BS[..., None])[..., 0]
    return ((loss + wanted.z_loss * log_z**2) * wanted.weight_BS.double()).sum(), loss


@pytest.mark.parametrize("chunk_tokens", [None, 1, 10, 21, SAMPLES * POSITIONS - 1, SAMPLES * POSITIONS, 10**6])
@pytest.mark.parametrize(
    ("keys", "z_loss"),
    [({}, 0.0), ({}, 0.1), ({"logit_soft_cap": 2.0, "logit_scale": 0.5}, 0.1)],
    ids=["plain", "z-loss", "soft cap"],
)
def test_equals_the_closed_form(keys: dict[str, Any], z_loss: float, chunk_tokens: int | None) -> None:
    module, x, wanted = head(**keys), stream(), criterion(chunk_tokens, z_loss)
    result = module(x, module.weight, wanted)
    (3.0 * result.total).backward()
    exact_x, exact_weight = x.detach().requires_grad_(), module.weight.detach().requires_grad_()
    total, loss = closed_form(module, exact_x, exact_weight, wanted)
    (3.0 * total).backward()
    torch.testing.assert_close(result.total, total.float())
    torch.testing.assert_close(result.loss_BS, loss.float())
    assert result.total.dtype == result.loss_BS.dtype == torch.float32 and not result.loss_BS.requires_grad
    torch.testing.assert_close(x.grad, exact_x.grad)
    torch.testing.assert_close(module.weight.grad, exact_weight.grad)
    assert not module.weight.grad[VOCAB:].any()


def test_a_gradient_in_bf16_is_summed_in_fp32() -> None:
    """As one product over all tokens is: with chunks of one token, sums in bf16 would lose most of it."""
    module = head().to(torch.bfloat16)
    # The error of sums in bf16 grows with their length: so many terms tell it from that of results rounded once.
    times = 32
    results = {}
    for size in (None, 1):
        x = stream(torch.bfloat16).detach().repeat(times, 1, 1).requires_grad_()
        wanted = criterion(size)
        targets, weight = (each.repeat(times, 1) for each in (wanted.targets_BS, wanted.weight_BS))
        module.weight.grad = None
        total = module(x, module.weight, replace(wanted, targets_BS=targets, weight_BS=weight)).total
        total.backward()
        assert x.grad is not None and module.weight.grad is not None and x.grad.dtype == torch.bfloat16
        results[size] = x.grad, module.weight.grad
    for whole, chunked in zip(results[None], results[1], strict=True):
        error = (chunked - whole).float().norm() / whole.float().norm()
        assert error < 2 * torch.finfo(torch.bfloat16).eps, error


def test_backward_may_come_twice() -> None:
    module, x = head(), stream()
    total = module(x, module.weight, criterion(10)).total
    first = torch.autograd.grad(total, (x, module.weight), retain_graph=True)
    (again,) = torch.autograd.grad(total, (module.weight,))
    assert torch.equal(first[1], again)


def test_a_tied_table_gets_the_sum_of_both_gradients() -> None:
    table = torch.randn(100, DIM, requires_grad=True)
    module, wanted = head(tie_embeddings=True), criterion(10)
    tokens = torch.randint(0, VOCAB, (SAMPLES, POSITIONS))
    grads = []
    for size in (None, 10):
        total = module(table[tokens], table, replace(wanted, chunk_tokens=size)).total
        grads.append(torch.autograd.grad(total, table)[0])
    torch.testing.assert_close(grads[0], grads[1])


class Largest(TorchDispatchMode):
    """The most elements that a tensor over the vocabulary has had."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            # All but the weight, transposed.
            if isinstance(tensor, Tensor) and tensor.shape[-1:] == (100,) and tensor.shape != (DIM, 100):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("training", [True, False])
def test_no_more_logits_than_those_of_a_chunk(training: bool) -> None:
    module, x = head(), stream()
    with Largest() as seen, torch.set_grad_enabled(training):
        result: TokenLosses = module(x, module.weight, criterion(10))
        if training:
            result.total.backward()
    assert seen.elements == 10 * 100
    assert result.total.requires_grad == training
