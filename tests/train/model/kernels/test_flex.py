"""FlexAttention against the mask; on a CPU its forward pass, which runs without a compiler there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention
from torch.utils.checkpoint import CheckpointPolicy

from pipeline.config.model import ModelConfig
from pipeline.config.train import RecomputeConfig
from pipeline.train.model.decoder_spec import decoder_spec
from pipeline.train.model.kernels.attention_mask import Terms
from pipeline.train.model.kernels.flex import OPERATION, Flex
from pipeline.train.model.recompute import Recompute, _Policy
from tests.train.model.kernels.cases import BOTH, SOME, TERMS, Case, differences

PREFIX = replace(SOME[0], prefixed=True)
MORE = (PREFIX, *(replace(SOME[5], **terms) for terms in TERMS if not terms.get("sinks")))


@pytest.mark.first(5)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("case", SOME + BOTH + MORE)
def test_outputs_are_those_of_the_mask(case: Case) -> None:
    assert max(differences(case, Flex(), case.draw(torch.float32), backward=False).values()) < 1e-5


@pytest.mark.first(6)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("case", (*SOME, *BOTH, PREFIX, *(replace(SOME[5], **terms) for terms in TERMS)))
def test_gradients_of_the_operation(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """Without a compiler, whose kernels need a GPU; the sums of exponentials have a gradient, which sinks need."""
    # Gradients on a CPU are not offered, since no compiler makes them; the operation itself has them.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    torch._dynamo.reset()  # shapes and caps that vary from call to call would be made inputs
    assert max(differences(case, Flex(), case.draw(torch.float64)).values()) < 1e-6


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_selective_recomputation_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same gradients, from one forward pass of attention."""
    # Gradients on a CPU are not offered, since no compiler makes them; the operation itself has them.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    case, kernel = SOME[1], Flex()
    q, k, v, _ = (x.requires_grad_() for x in case.draw(torch.float32))
    prepared = kernel.prepare(case.sight())

    def layer(x: torch.Tensor) -> torch.Tensor:
        return kernel(x.sin(), k, v, prepared, Terms(0.3)).cos()

    spec = decoder_spec(ModelConfig(layers=1, dim=32, heads=4, ffn_dim=48), 61, 40).layers[0]
    recompute = Recompute.of_layer(RecomputeConfig(mode="selective"), 0, spec)
    assert recompute is not None and recompute.keep is not None and OPERATION in recompute.keep
    asked: list[tuple[bool, CheckpointPolicy]] = []
    decide = _Policy.__call__

    def spy(policy: _Policy, context: Any, operation: Any, *args: Any, **how: Any) -> CheckpointPolicy:
        answer = decide(policy, context, operation, *args, **how)
        if operation is OPERATION:
            asked.append((context.is_recompute, answer))
        return answer

    monkeypatch.setattr(_Policy, "__call__", spy)
    found, expected = (torch.autograd.grad(out.sum(), (q, k, v)) for out in (recompute(layer, q), layer(q)))
    assert asked[0] == (False, CheckpointPolicy.MUST_SAVE)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
