"""Models whose tokens see both sides, and heads that score some positions alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from pipeline.config.model import ModelConfig
from pipeline.config.parallel import PipelineConfig
from pipeline.data.loading.batch import Batch
from pipeline.data.loading.stream_shape import StreamShape
from pipeline.train.model.context import Context
from pipeline.train.model.decoder import Decoder
from pipeline.train.model.decoder_spec import decoder_spec
from pipeline.train.model.flops import flops_per_token, num_parameters
from pipeline.train.model.loss import Criterion, TokenLosses
from pipeline.train.model.part_spec import Reach
from pipeline.train.parallel.context import sequence_shard
from pipeline.train.parallel.footprint import end_parameters, layer_sizes
from pipeline.train.parallel.pipeline_stages import split_stages

VOCAB, LENGTH = 90, 40
SHAPE: dict[str, Any] = {"direction": "both", "layers": 2, "dim": 32, "heads": 4, "kv_heads": 2, "ffn_dim": 48}
SHAPE |= {"vocab_multiple": 20}
STARTS = ([0, 11, 12, 30], [0, 25])


def model(**keys: Any) -> Decoder:
    """A small one with random weights."""
    torch.manual_seed(1)
    return Decoder(decoder_spec(ModelConfig.model_validate(SHAPE | keys), VOCAB, LENGTH))


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


BERT: dict[str, Any] = {
    "kv_heads": None,
    "norm": "layernorm",
    "norm_place": "post",
    "final_norm": False,
    "positions": "learned",
    "token_types": 2,
    "embedding_norm": True,
    "mlp": "gelu_exact",
    "bias": "all",
    "head_transform": "gelu_exact",
    "head_bias": True,
    "tie_embeddings": True,
}
MODERNBERT: dict[str, Any] = {
    "kv_heads": None,
    "norm": "layernorm",
    "norm_bias": False,
    "embedding_norm": True,
    "first_norm": False,
    "mlp": "geglu_exact",
    "head_transform": "gelu_exact",
    "head_bias": True,
}


@pytest.mark.parametrize("keys", [BERT, MODERNBERT], ids=["bert", "modernbert"])
def test_counts_are_those_of_the_model(keys: dict[str, Any]) -> None:
    spec = decoder_spec(ModelConfig.model_validate(SHAPE | keys | {"vocab_multiple": 1}), VOCAB, LENGTH)
    predicted_BK = torch.arange(10).expand(2, -1)
    with torch.device("meta"):
        decoder, zeros = Decoder(spec), torch.zeros(2, LENGTH, dtype=torch.long)
        context = Context(criterion=Criterion(zeros, zeros.float()), predicted_BK=predicted_BK.to("meta"))
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            decoder(zeros, context)
    assert num_parameters(spec) == sum(parameter.numel() for parameter in decoder.parameters())
    stream = StreamShape(LENGTH, 0, LENGTH, 10)
    flops = flops_per_token(spec, stream, causal=False)
    assert 3 * counter.get_total_flops() == pytest.approx(2 * LENGTH * flops)
    # Half of the keys is the convention of queries that see one side alone.
    assert flops == flops_per_token(spec, stream, causal=True)
    stages = split_stages(spec, 2, PipelineConfig(), stream)
    parts = [end_parameters(spec, each.part, 1) + sum(layer_sizes(spec, each.part, 1).values()) for each in stages]
    copied = VOCAB * spec.dim if spec.tie_embeddings else 0
    assert sum(parts) == num_parameters(spec) + copied


@pytest.mark.parametrize("keys", [BERT, MODERNBERT], ids=["bert", "modernbert"])
def test_the_gradient_of_a_chunked_loss_reaches_all_of_the_head(keys: dict[str, Any]) -> None:
    found = []
    for chunk in (None, 7):
        decoder = model(**keys)
        for parameter in decoder.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        decoder.load_state_dict({} if not found else found[0][0], strict=bool(found))
        weight = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(3))
        losses = decoder(tokens(), Context(criterion=Criterion(tokens().roll(3, 1), weight, chunk_tokens=chunk)))
        losses.total.backward()
        gradients = {name: parameter.grad for name, parameter in decoder.named_parameters()}
        found.append((decoder.state_dict(), gradients))
    (_, whole), (_, chunked) = found
    assert whole.keys() == chunked.keys() > {"head.dense.weight", "head.norm.weight", "head.bias"}
    for name, gradient in whole.items():
        assert gradient is not None and gradient.any(), name
        torch.testing.assert_close(chunked[name], gradient, atol=1e-5, rtol=1e-4)


class _Halves:
    """A cut in two, of which this is the first half of each row, or the second."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        return x.chunk(2, dim)[self._rank]


def test_ranks_share_the_predicted_positions() -> None:
    predicted_BK = torch.tensor([[0, 1, 2, 9, 12], [1, 3, 5, 7, 9]])
    weight = torch.zeros(2, 20).scatter(1, predicted_BK, 1.0)
    zeros = torch.zeros(2, 20, dtype=torch.int64)
    batch = Batch(zeros, zeros, weight, torch.tensor([0, 20]), torch.zeros(2), {}, predicted=predicted_BK)
    first, second = (sequence_shard(batch, _Halves(rank)) for rank in range(2))  # type: ignore[arg-type]
    assert first.predicted is not None and second.predicted is not None
    # A row with fewer is filled up by a position that does not count; so is a rank that has none.
    assert first.predicted.tolist() == [[0, 1, 2, 3, 9], [1, 3, 5, 7, 9]]
    assert second.predicted.tolist() == [[2], [0]]
    assert sum(each.weight.gather(1, each.predicted).sum() for each in (first, second)) == 10  # type: ignore[misc]


@pytest.mark.parametrize(
    "keys, said",
    [
        ({"first_norm": False, "norm_place": "post"}, "first_norm: false needs norm_place"),
        ({"first_norm": False, "residual": "parallel"}, "first_norm: false needs residual"),
        ({"head_transform": "gelu", "init": {"scheme": "mup", "mup_base_dim": 16}}, "head_transform is not known"),
        ({"head_transform": "gelu", "direction": "causal", "mtp": {"depth": 1}}, "head_transform does not go with mtp"),
    ],
)
def test_keys_that_do_not_go_together(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        ModelConfig.model_validate(SHAPE | keys)
