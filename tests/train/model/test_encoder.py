"""Models whose tokens see both sides, and heads that score some positions alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from pipeline.config.model import ModelConfig
from pipeline.train.model.config import decoder_spec
from pipeline.train.model.context import Context
from pipeline.train.model.decoder import Decoder
from pipeline.train.model.loss import Criterion, TokenLosses
from pipeline.train.model.part_spec import Reach

VOCAB, LENGTH = 90, 40
STARTS = ([0, 11, 12, 30], [0, 25])


def model(**keys: Any) -> Decoder:
    """A small one with random weights."""
    shape = {"layers": 2, "dim": 32, "heads": 4, "kv_heads": 2, "ffn_dim": 48, "vocab_multiple": 20}
    torch.manual_seed(1)
    return Decoder(decoder_spec(ModelConfig.model_validate({"direction": "both"} | shape | keys), VOCAB, LENGTH))


def tokens() -> Tensor:
    return torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(2))


def bounds() -> Tensor:
    rows = [
        torch.cat([torch.full((end - begin,), begin) for begin, end in pairwise([*starts, LENGTH])])
        for starts in STARTS
    ]
    return torch.stack(rows)


def logits(decoder: Decoder, tokens_BS: Tensor, context: Context | None = None) -> Tensor:
    out = decoder(tokens_BS, context or Context())
    assert isinstance(out, Tensor)
    return out.detach()


def seen(decoder: Decoder, context: Context) -> Tensor:
    """Which positions a position's logits depend on, bool [B, S, S], by gradients."""
    embedded: list[Tensor] = []
    handle = decoder.embedding.register_forward_hook(
        lambda _, __, out: embedded.append(out.detach().requires_grad_()) or embedded[0]
    )
    out = decoder(tokens(), context)
    handle.remove()
    rows = []
    for position in range(LENGTH):
        (gradient,) = torch.autograd.grad(out[:, position, :VOCAB].square().sum(), embedded[0], retain_graph=True)
        rows.append(gradient.abs().sum(-1) > 0)
    return torch.stack(rows, dim=1)


@pytest.mark.parametrize("window", [None, 6, 7])
@pytest.mark.parametrize("mixer", ["attention", "mla"])
def test_a_token_sees_both_sides_within_its_window_and_document(mixer: str, window: int | None) -> None:
    keys: dict[str, Any] = {"layers": 1, "sliding_window": window}
    if mixer == "mla":
        keys |= {"mixer": mixer, "kv_heads": None}
        keys |= {"mla": {"kv_rank": 24, "nope_dim": 8, "rope_dim": 4, "value_dim": 6}}
    decoder, bounds_BS = model(**keys), bounds()
    distance = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs()
    near = distance <= (LENGTH if window is None else window // 2)
    same = bounds_BS[:, :, None] == bounds_BS[:, None]
    assert seen(decoder, Context()).equal(near.expand(2, -1, -1))
    assert seen(decoder, Context(bounds_BS)).equal(near & same)


def test_packed_documents_equal_each_alone() -> None:
    kinds = {"near": {"sliding_window": 8, "rope_theta": 100.0}, "far": {}}
    decoder = model(layers=3, pattern=["far", "near"], kinds=kinds)
    packed = logits(decoder, tokens(), Context(bounds()))
    for row, starts in enumerate(STARTS):
        for begin, end in pairwise([*starts, LENGTH]):
            alone = logits(decoder, tokens()[row : row + 1, begin:end])
            torch.testing.assert_close(packed[row, begin:end], alone[0], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("chunk", [None, 7])
def test_a_head_on_predicted_positions_equals_one_on_all(chunk: int | None) -> None:
    decoder = model(tie_embeddings=True)
    predicted = torch.stack([torch.randperm(LENGTH)[:9].sort().values for _ in range(2)])
    weight = torch.zeros(2, LENGTH).scatter(1, predicted, 0.125)
    weight[1, predicted[1, -2:]] = 0  # a row with fewer
    criterion = Criterion(tokens().roll(3, 1), weight, z_loss=1e-3, chunk_tokens=chunk)
    found = []
    for context in (Context(criterion=criterion), Context(criterion=criterion, predicted_BK=predicted)):
        decoder.zero_grad()
        losses = decoder(tokens(), context)
        assert isinstance(losses, TokenLosses)
        losses.total.backward()  # type: ignore[no-untyped-call]
        gradients = torch.cat(
            [parameter.grad.flatten() for parameter in decoder.parameters() if parameter.grad is not None]
        )
        found.append((losses, gradients))
    (whole, whole_gradients), (some, gradients) = found
    torch.testing.assert_close(some.total, whole.total)
    torch.testing.assert_close(gradients, whole_gradients, atol=1e-7, rtol=1e-4)
    marks = torch.zeros(2, LENGTH, dtype=torch.bool).scatter(1, predicted, True)
    torch.testing.assert_close(some.loss_BS, whole.loss_BS.masked_fill(~marks, 0))


def test_keys_that_flops_are_counted_for() -> None:
    for reach in (Reach(), Reach(None, None), Reach.window(8), Reach.window(8, both=True), Reach.window(99, both=True)):
        distance = torch.arange(64)[:, None] - torch.arange(64)
        area = (distance <= (64 if reach.back is None else reach.back)) & (
            -distance <= (64 if reach.ahead is None else reach.ahead)
        )
        # The convention counts half of the diagonal, as S / 2 of a causal query.
        assert abs(reach.mean_keys(64, causal=True) - area.sum().item() / 64) <= 0.75
    assert Reach(None, None).mean_keys(64, causal=True) == 64 == Reach(None, None).mean_keys(64, causal=False)
    assert Reach.window(8, both=True).mean_keys(64, causal=False) == 9


@pytest.mark.parametrize(
    "keys, said",
    [
        ({"mixer": "mamba2", "mamba2": {"heads": 4, "head_dim": 8, "state_dim": 8}}, "mixer: mamba2"),
        ({"mtp": {"depth": 1}}, "mtp"),
    ],
)
def test_what_cannot_see_both_sides_is_refused(keys: dict[str, Any], said: str) -> None:
    base = {"layers": 2, "dim": 32, "heads": None if "mixer" in keys else 4}
    ModelConfig.model_validate(base | keys)
    with pytest.raises(ValidationError, match=said):
        ModelConfig.model_validate(base | keys | {"direction": "both"})
