"""The decoder against transformers' implementations with the same random weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.train.model.decoder import Context
from tests.train.huggingface.hf_mapping import hf_tensor, twin
from tests.train.models import FAMILIES, VOCAB


def assert_close(actual: Tensor, expected: Tensor, name: str = "", tolerance: float = 1e-4) -> None:
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error < tolerance, f"{name}: {error:.1e}"


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_equal_transformers(family: str) -> None:
    theirs = FAMILIES[family].theirs()
    ours = twin(theirs, FAMILIES[family].config, VOCAB)
    tokens = torch.randint(VOCAB, (3, 40), generator=torch.Generator().manual_seed(2))
    targets = tokens.roll(-1, 1)

    expected = theirs(tokens, use_cache=False).logits
    logits = ours(tokens, Context())
    assert logits.shape == (3, 40, 100)
    assert torch.isneginf(logits[..., VOCAB:]).all()
    assert_close(logits[..., :VOCAB], expected)

    F.cross_entropy(expected.flatten(0, 1), targets.flatten()).backward()
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    seen = 0
    for name, parameter in ours.named_parameters():
        expected = hf_tensor(gradients, name, ours.spec.dim)
        if name in ("embedding.weight", "head.weight"):
            assert not parameter.grad[VOCAB:].any()
        if family == "gpt2" and name.endswith("wk.bias"):
            # Without rotation it moves all scores of a query alike: zero but for rounding.
            whole = gradients[f"transformer.h.{name.split('.')[1]}.attn.c_attn.bias"]
            assert (parameter.grad - expected).abs().max() < 1e-4 * whole.abs().max()
        else:
            assert_close(parameter.grad[: len(expected)], expected, name)
        seen += expected.numel()
    assert seen == sum(parameter.numel() for parameter in theirs.parameters())


def test_every_rope_scaling_differs_from_none_and_from_the_others() -> None:
    tokens = torch.arange(40)[None]
    plain = FAMILIES["llama-linear"].config
    logits = []
    for scaling in (
        None,
        *(FAMILIES[name].config.rope_scaling for name in ("llama-linear", "llama3-scaling", "llama-yarn")),
    ):
        config = plain.model_copy(update={"rope_scaling": scaling})
        logits.append(twin(FAMILIES["llama-linear"].theirs(), config, VOCAB)(tokens, Context()))
    for index, one in enumerate(logits):
        for other in logits[:index]:
            assert not torch.allclose(one, other, rtol=1e-3)
