"""torch's attention, in tiles on a CPU, against a mask that is counted out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch.nn.attention.bias import CausalBias, causal_lower_right

from pipeline.config.model import ModelConfig
from pipeline.config.train import RecomputeConfig
from pipeline.train.model.config import decoder_spec
from pipeline.train.model.context import Context
from pipeline.train.model.decoder import Decoder
from pipeline.train.model.kernels import sdpa, tiles
from pipeline.train.model.kernels.attention_mask import AttentionMask
from pipeline.train.model.kernels.sdpa import Sdpa, lower_right, masked_attention
from pipeline.train.model.recompute import Recompute
from pipeline.train.parallel.compile import compile_layers
from tests.train.model.kernels.cases import CPU, SOME, Case, cases, differences
from tests.train.runs import exact, train, weights_hash


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that sequences that are quickly counted out have tiles of every kind."""
    monkeypatch.setattr(tiles, "ALONE", 6)
    monkeypatch.setattr(tiles, "BLOCK", 9)


@settings(max_examples=150, deadline=None)
@given(case=cases())
def test_any_attention_is_that_of_its_mask(case: Case) -> None:
    assert max(differences(case, Sdpa(), case.draw(torch.float64)).values()) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", SOME)
def test_in_every_precision(case: Case, dtype: torch.dtype) -> None:
    limit = 1e-5 if dtype == torch.float32 else 3e-2
    assert max(differences(case, Sdpa(), case.draw(dtype)).values()) < limit


@settings(max_examples=40, deadline=None)
@given(case=cases())
def test_masks_as_on_a_gpu(case: Case) -> None:
    """Dense ones, with keys repeated."""
    assert max(differences(case, Sdpa(on_gpu=True), case.draw(torch.float64)).values()) < 1e-12


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each call of torch's kernel, whether it got keys that several heads share."""
    calls, theirs = [], F.scaled_dot_product_attention

    def spy(*tensors: torch.Tensor, **how: Any) -> torch.Tensor:
        calls.append(how["enable_gqa"])
        return theirs(*tensors, **how)

    monkeypatch.setattr(sdpa, "F", SimpleNamespace(scaled_dot_product_attention=spy))
    return calls


def test_the_last_queries_alone(shared: list[bool]) -> None:
    """On a GPU: no memory for causality, and keys are repeated where flash kernels do not take them shared."""
    case, kernel = Case(((40,), (40,)), False, None, 10, 40), Sdpa(on_gpu=True)
    causality = kernel.prepare(case.sight())
    assert isinstance(causality, CausalBias) and causality.numel() == 0
    half = torch.bfloat16
    for dtype, flash, takes in ((torch.float32, True, False), (half, True, True), (half, False, False)):
        q, k, v, _ = case.draw(dtype)
        found = masked_attention(q, k, v, causality, 0.3, True, flash)
        assert shared.pop() == takes
        expected = masked_attention(q, k, v, causal_lower_right(30, 40), 0.3, on_gpu=False)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("dtype", "flash"), [(torch.float32, True), (torch.bfloat16, False), (torch.bfloat16, True)])
def test_keys_are_repeated_without_a_mask_too(shared: list[bool], dtype: torch.dtype, flash: bool) -> None:
    """Where no kernel but the one that keeps all scores takes them shared."""
    q, k, v, _ = SOME[3].draw(dtype)
    found = masked_attention(q, k, v, None, 0.3, True, flash)
    assert shared.pop() == (flash and dtype != torch.float32)
    expected = masked_attention(q, k, v, None, 0.3, on_gpu=False)
    torch.testing.assert_close(found, expected)


def test_causality_goes_through_the_compiler() -> None:
    torch._dynamo.reset()
    case = Case(((40,), (40,)), False, None, 10, 40)
    q, k, v, _ = case.draw(torch.float32)
    kernel = Sdpa(on_gpu=True)
    compiled = torch.compile(kernel.__call__, fullgraph=True, dynamic=False, backend="eager")
    causality = kernel.prepare(case.sight())
    assert torch.equal(compiled(q, k, v, causality, 0.3), kernel(q, k, v, causality, 0.3))


def test_without_documents_and_windows_nothing_stands_between() -> None:
    """The bits of torch's own kernel, and nothing prepared."""
    case = SOME[3]
    q, k, v, _ = case.draw(torch.float32)
    kernel = Sdpa()
    assert kernel.prepare(case.sight()) is None
    assert kernel.prepare(AttentionMask.of(2, (0, 40), 40, CPU)) is None, "a window as long as the sequence"
    theirs = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True)
    assert torch.equal(kernel(q, k, v, None, 8**-0.5), theirs.transpose(1, 2))


@settings(max_examples=100, deadline=None)
@given(case=cases())
def test_tiles_cover_every_query_once(case: Case) -> None:
    times = torch.zeros(len(case.rows), case.end - case.start, dtype=torch.int64)
    for first, last, begin, end, key, plain in tiles.tile(case.sight()).tiles_N6.tolist():
        times[first:last, begin:end] += 1
        assert first == last or plain or end - begin <= 9
        assert 0 <= key <= case.start + begin
    assert (times == 1).all()


def test_what_is_skipped() -> None:
    """No tile is larger than the longest document, or a block and its window: work is linear in the sequence."""
    documents = Case(((20,) * 50,), True, None, 0, 1000).sight()
    window = Case(((1000,),), False, 30, 0, 1000).sight()
    for sight, most in ((documents, 20 * 20 * 50), (window, 1000 * 40)):
        found = tiles.tile(sight).tiles_N6.tolist()
        assert sum((end - begin) * (end - key) for _, _, begin, end, key, _ in found) <= most


@pytest.mark.parametrize("case", SOME[:3])
def test_the_operation_is_well_formed(case: Case) -> None:
    """What torch itself checks of one: its shapes without data, its gradients, and that nothing is changed."""
    q, k, v, _ = (x.requires_grad_() for x in case.draw(torch.float32))
    made = tiles.tile(case.sight())
    torch.library.opcheck(tiles._attend, (q, k, v, made.lowest_BC, made.tiles_N6, 0.3))


def decoder(window: int | None = None) -> Decoder:
    torch.manual_seed(2)
    shape = {"layers": 2, "dim": 32, "heads": 4, "kv_heads": 2, "ffn_dim": 48, "vocab_multiple": 8}
    return Decoder(decoder_spec(ModelConfig.model_validate(shape | {"sliding_window": window}), 61, 40))


def contexts(some: list[tuple[int, ...]]) -> list[Context]:
    """Of batches of one row."""
    sights = [Case((lengths,), True, None, 0, 40).sight() for lengths in some]
    return [Context(bounds_BS=sight.bounds_BC) for sight in sights]


def test_selective_recomputation_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel runs once, and gradients have the same bits."""
    tokens, (context,) = torch.randint(61, (1, 40)), contexts([(20, 13, 7)])
    model = decoder()

    calls: list[int] = []
    forward = tiles._forward

    def counted(*tensors: Any, **how: Any) -> Any:
        calls.append(1)
        return forward(*tensors, **how)

    monkeypatch.setattr(tiles, "_forward", counted)

    def gradients() -> tuple[list[torch.Tensor], int]:
        calls.clear()
        found = torch.autograd.grad(model(tokens, context)[..., :61].sin().sum(), list(model.parameters()))
        return list(found), len(calls)

    expected, runs = gradients()
    for mode, times in (("selective", 1), ("full", 2)):
        config = RecomputeConfig.model_validate({"mode": mode})
        for index, block in enumerate(model.layers.values()):
            block.recompute = Recompute.of_layer(config, index, model.spec.layers[index])
        found, again = gradients()
        assert again == times * runs, mode
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True)), mode


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 7])
def test_compiled_layers_are_made_once_for_all_documents(window: int | None) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain, model = decoder(window), decoder(window)
    compile_layers(model, RecomputeConfig())
    tokens = torch.randint(61, (1, 40))
    for context in contexts([(20, 13, 7), (40,), (1,) * 40, (3,) * 13 + (1,)]):
        found, expected = (one(tokens, context)[..., :61] for one in (model, plain))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        pairs = [
            torch.autograd.grad(x.sin().sum(), list(m.parameters())) for x, m in ((found, model), (expected, plain))
        ]
        for ours, theirs in zip(*pairs, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.guard
def test_a_run_with_documents_resumes_and_repeats_its_bits(root: Path) -> None:
    values = ("model.document_attention=true", "train.duration=3 steps")
    once, again = (train(root, f"documents-{name}", *values) for name in ("once", "again"))
    assert exact(once) == exact(again)
    assert weights_hash(once) == weights_hash(again)


def test_compiled_code_tells_masks_from_causality() -> None:
    """The class that tells is imported in the function, which must not end the graph."""

    def attend(mask: torch.Tensor) -> torch.Tensor:
        return masked_attention(q, k, v, mask, 0.3, on_gpu=True, flash=True)

    q, k, v = torch.randn(3, 2, 8, 4, 16).bfloat16()
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    assert torch.equal(compiled(mask), attend(mask))
    assert torch.equal(compiled(lower_right(8, 8)), attend(mask))
