"""Relative positions: buckets against transformers, and a bias against explicit softmax."""

from __future__ import annotations

import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from pipeline.train.model.kernels.attention_mask import AttentionMask, Documents, Terms
from pipeline.train.model.kernels.biased import Biased
from pipeline.train.model.part_spec import Reach, RelativeSpec
from pipeline.train.model.positions.relative import buckets_of, relative_bias

CPU = torch.device("cpu")


@pytest.mark.parametrize("side", ["encoder", "decoder"])
@pytest.mark.parametrize(("buckets", "most"), [(32, 128), (8, 20), (12, 500)])
def test_buckets_are_those_of_transformers(side: str, buckets: int, most: int) -> None:
    spec = RelativeSpec(side, buckets, most, 3)  # type: ignore[arg-type]
    distance = torch.arange(-700, 700)
    wanted = T5Attention._relative_position_bucket(distance, side == "encoder", buckets, most)
    assert torch.equal(buckets_of(distance, spec), wanted)


def test_a_bias_of_rows_at_unequal_positions() -> None:
    spec, table = RelativeSpec("decoder", 8, 20, 3), torch.randn(8, 3)
    whole = relative_bias(table, torch.arange(9)[None], 9, spec)
    rows = relative_bias(table, torch.tensor([[8], [4]]), 9, spec)
    assert whole.shape == (1, 3, 9, 9) and rows.shape == (2, 3, 1, 9)
    assert torch.equal(rows[0, :, 0], whole[0, :, 8]) and torch.equal(rows[1, :, 0], whole[0, :, 4])


@pytest.mark.parametrize("reach", [Reach(), Reach(None, None), Reach(3, 0), Reach(2, 2)])
def test_outputs_and_gradients(reach: Reach) -> None:
    """Grouped heads and documents, in fp64."""
    torch.manual_seed(0)
    bounds = torch.tensor([[0, 0, 0, 3, 3, 3, 3], [0, 1, 1, 1, 1, 1, 6]])
    q, k, v = (torch.randn(2, 7, heads, 5, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    bias = torch.randn(1, 4, 7, 7, dtype=torch.float64, requires_grad=True)
    mask = AttentionMask.of(2, (0, 7), reach, CPU, Documents(bounds), 7)
    found = Biased()(q, k, v, Biased().prepare(mask), Terms(0.7), bias)
    keys, values = (x.repeat_interleave(2, 2) for x in (k, v))
    low, high = mask.interval()
    places = torch.arange(7)
    seen = ((places >= low[..., None]) & (places < high[..., None]))[:, None]
    scores = torch.einsum("bche,bthe->bhct", q, keys) * 0.7 + bias
    wanted = torch.einsum("bhct,bthe->bche", scores.masked_fill(~seen, -torch.inf).softmax(-1), values)
    torch.testing.assert_close(found, wanted)
    weights = torch.randn_like(wanted)
    for one, other in zip(
        torch.autograd.grad((found * weights).sum(), (q, k, v, bias)),
        torch.autograd.grad((wanted * weights).sum(), (q, k, v, bias)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
