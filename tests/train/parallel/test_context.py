"""Attention of shares of a sequence is that of the whole, in fp64, for every number of heads, bound and window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention.bias import CausalBias

from pipeline.config.model import ModelConfig
from pipeline.config.train import RecomputeConfig
from pipeline.data.loading.batch import Batch
from pipeline.train.model.context import Context
from pipeline.train.model.decoder import Decoder
from pipeline.train.model.decoder_spec import decoder_spec
from pipeline.train.model.kernels.attention_mask import AttentionMask, Documents, Terms
from pipeline.train.model.kernels.sdpa import Sdpa
from pipeline.train.model.mixers.sequence import SequenceCut
from pipeline.train.model.part_spec import Reach
from pipeline.train.parallel.compile import compile_layers
from pipeline.train.parallel.context import ExchangedHeads, GatheredKeys, sequence_shard
from tests import tiers
from tests.train.distributed import ranks

pytestmark = pytest.mark.parallel

SAMPLES, HEAD = 2, 8
CPU, KERNEL = torch.device("cpu"), Sdpa()
STARTS = [[0, 5, 6, 19], [0, 8, 16, 31]]
"""Documents that begin within pieces, at their ends, and reach over several."""


@dataclass(frozen=True)
class Case:
    """An attention."""

    heads: int
    kv_heads: int
    documents: bool
    window: int | None
    ahead: int | None = 0
    sinks: bool = False
    value: int = HEAD


CASES = [
    Case(heads, kv, documents, window)
    for (heads, kv), documents, window in product(((4, 4), (8, 4), (8, 2), (4, 1)), (False, True), (None, 7))
]
CASES += [Case(8, 2, *others) for others in product((False, True), (None, 7), (None, 3))]
CASES += [Case(8, 2, True, window, sinks=True, value=5) for window in (None, 7)]


def bounds(length: int) -> Tensor:
    """[B, S]: the position at which each one's document begins."""
    return torch.stack(
        [torch.tensor([max(start for start in row if start <= place) for place in range(length)]) for row in STARTS]
    )


def seen(case: Case, length: int) -> Tensor:
    """[B, 1, S, S], counted out one by one."""
    first = bounds(length)
    mask = torch.zeros(SAMPLES, 1, length, length, dtype=torch.bool)
    for sample, query, key in product(range(SAMPLES), range(length), range(length)):
        mask[sample, 0, query, key] = (
            (case.ahead is None or key <= query + case.ahead)
            and (not case.documents or first[sample, key] == first[sample, query])
            and (case.window is None or key > query - case.window)
        )
    return mask


def compare(method: type[GatheredKeys] | type[ExchangedHeads], length: int) -> list[str]:
    """What this rank finds to be different."""
    rank, world = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None
    cut: SequenceCut = method(group, rank, world)
    found = []
    for case in CASES:
        draw = torch.Generator().manual_seed(5)
        sizes = ((case.heads, HEAD), (case.kv_heads, HEAD), (case.kv_heads, case.value))
        shapes = [(SAMPLES, length, heads, size) for heads, size in sizes]
        whole = [torch.randn(shape, generator=draw, dtype=torch.float64, requires_grad=True) for shape in shapes]
        factor = torch.randn(SAMPLES, length, case.heads, case.value, generator=draw, dtype=torch.float64)
        sinks = torch.randn(case.heads, generator=draw, dtype=torch.float64, requires_grad=True)
        q, k, v = (x.repeat_interleave(case.heads // x.shape[2], dim=2).transpose(1, 2) for x in whole)
        scores = (q @ k.mT * HEAD**-0.5).masked_fill(~seen(case, length), -torch.inf)
        of_sinks = sinks[:, None, None].expand(*scores.shape[:3], 1) + (0.0 if case.sinks else -torch.inf)
        expected = (torch.cat((of_sinks, scores), dim=-1).softmax(-1)[..., 1:] @ v).transpose(1, 2)
        expected.backward(factor)
        mine = [cut.shard(x.detach()).requires_grad_() for x in whole]
        documents = Documents(bounds(length)) if case.documents else None
        reach = replace(Reach.window(case.window), ahead=case.ahead)
        pieces = cut.pieces(length)
        sights = [AttentionMask.of(SAMPLES, piece, reach, CPU, documents, length) for piece in pieces]
        own = sinks.detach().requires_grad_()
        used = [cut.own_heads(own)] if case.sinks else []
        work: list[int] = []

        def core(
            q: Tensor, k: Tensor, v: Tensor, piece: int, sights: Any = sights, work: Any = work, used: Any = used
        ) -> Tensor:
            work.append(q.shape[1] * k.shape[1] * q.shape[2])
            return KERNEL(q, k, v, KERNEL.prepare(sights[piece]), Terms(HEAD**-0.5), *used)

        out = cut.attend(mine[0], mine[1], mine[2], core, [mask.keys for mask in sights])
        out.backward(cut.shard(factor))
        if case.sinks:
            assert own.grad is not None and sinks.grad is not None
            dist.all_reduce(own.grad)
            if not torch.allclose(own.grad, sinks.grad, rtol=0, atol=1e-12):
                found.append(f"rank {rank}: sinks of {case}")
        pairs = [("output", out, expected), *zip("qkv", [x.grad for x in mine], [x.grad for x in whole], strict=True)]
        for name, ours, theirs in pairs:
            assert ours is not None and theirs is not None
            if not torch.allclose(ours, cut.shard(theirs), rtol=0, atol=1e-12):
                found.append(f"rank {rank}: {name} of {case}")
        by_rank: list[Any] = [None] * world
        dist.all_gather_object(by_rank, sum(work))
        if len(set(by_rank)) > 1 and case.ahead in (0, None):
            found.append(f"unequal work {by_rank} of {case}")
    return found


@pytest.mark.parametrize("method", [GatheredKeys, ExchangedHeads])
@pytest.mark.parametrize("world", tiers.first(1, [2, 4], rest="guard"))
@pytest.mark.parametrize("pieces", tiers.first(1, [1, 16], rest="guard"))
def test_attention_of_shares_is_that_of_the_whole(
    world: int, method: type[GatheredKeys] | type[ExchangedHeads], pieces: int
) -> None:
    """Also where a rank's pieces are of one token each, of which torch's own causality has another idea."""
    length = 2 * world if pieces == 1 else 32
    assert ranks.run(world, compare, method, length) == [[]] * world


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_pieces_as_on_a_gpu_need_no_mask(compiled: bool) -> None:
    """What a GPU is told instead of a mask gives the same; and a compiler can follow it. One rank has both pieces."""
    ranks.run(1, pieces_of_one, compiled, timeout=300)


def pieces_of_one(compiled: bool) -> None:
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(3)
    shape = {"layers": 1, "dim": 32, "heads": 4, "kv_heads": 2, "ffn_dim": 48, "vocab_multiple": 8}
    model = Decoder(decoder_spec(ModelConfig.model_validate(shape), 61, 16))
    tokens = torch.randint(61, (SAMPLES, 16))
    plain = model(tokens, Context())[..., :61]
    expected = torch.autograd.grad(plain.sin().sum(), model.layers.parameters())

    cut = GatheredKeys(group, 0, 1)
    model.kernel = kernel = Sdpa(on_gpu=True)
    prepared = [kernel.prepare(AttentionMask.of(SAMPLES, piece, Reach(), CPU)) for piece in cut.pieces(16)]
    assert prepared[0] is None and isinstance(prepared[1], CausalBias)
    windows = [AttentionMask.of(2, piece, Reach.window(3), CPU) for piece in cut.pieces(16)]
    assert not any(isinstance(kernel.prepare(mask), CausalBias) for mask in windows)
    if compiled:
        compile_layers(model, RecomputeConfig())
    found = model(tokens, Context(cut=cut))[..., :61]
    assert torch.allclose(found, plain, atol=1e-5)
    gradients = torch.autograd.grad(found.sin().sum(), model.layers.parameters())
    assert all(torch.allclose(*pair, atol=1e-4) for pair in zip(gradients, expected, strict=True))


def gather_bf16() -> None:
    group = dist.group.WORLD
    assert group is not None
    for method in (GatheredKeys, ExchangedHeads):
        cut = method(group, dist.get_rank(), dist.get_world_size())
        x = [torch.randn(1, 8, 2, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        masks = [AttentionMask.of(1, piece, Reach(), CPU) for piece in cut.pieces(16)]
        prepared = [KERNEL.prepare(mask) for mask in masks]

        def core(q: Tensor, k: Tensor, v: Tensor, piece: int, prepared: Any = prepared) -> Tensor:
            return KERNEL(q, k, v, prepared[piece], Terms(HEAD**-0.5))

        out = cut.attend(*x, core, [mask.keys for mask in masks])
        assert out.dtype == torch.bfloat16
        out.sum().backward()


def test_bf16() -> None:
    ranks.run(2, gather_bf16)


def share(build: Callable[..., SequenceCut], rank: int, size: int) -> SequenceCut:
    return build(None, rank, size)


@pytest.mark.parametrize("build", [GatheredKeys, ExchangedHeads])
@pytest.mark.parametrize("size", [2, 4])
def test_shares_of_a_batch_are_all_of_it_once(build: Callable[..., SequenceCut], size: int) -> None:
    """Targets follow their inputs over every cut."""
    tokens = torch.arange(2 * 17).view(2, 17)
    batch = Batch(
        tokens[:, :-1],
        tokens[:, 1:],
        torch.rand(2, 16),
        torch.tensor([0, 3, 16], dtype=torch.int32),
        torch.tensor([0, -1]),
        {},
    )
    shares = [sequence_shard(batch, build(None, rank, size)) for rank in range(size)]
    assert all(torch.equal(each.targets, each.tokens + 1) for each in shares)
    assert all(each.tokens.shape == (2, 16 // size) and each.tokens.is_contiguous() for each in shares)
    found = torch.cat([each.tokens for each in shares], dim=1).sort(dim=1).values
    assert torch.equal(found, batch.tokens)
    for each in shares:
        place = each.tokens - torch.tensor([[0], [17]])
        assert torch.equal(each.weight, batch.weight.gather(1, place))
    assert sequence_shard(batch, None) is batch
    if build is GatheredKeys:
        assert shares[0].tokens[0, 0] == 0 and shares[0].tokens[0, -1] == 15, "one piece from either end"
