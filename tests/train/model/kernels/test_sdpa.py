"""torch's attention, in tiles on a CPU, against a mask that is counted out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.config.model import ModelConfig
from pipeline.config.train import RecomputeConfig
from pipeline.train.model.context import Context
from pipeline.train.model.decoder import Decoder
from pipeline.train.model.decoder_spec import decoder_spec
from pipeline.train.model.kernels import capped, sdpa, tiles
from pipeline.train.model.kernels.attention_mask import AttentionMask, Terms
from pipeline.train.model.kernels.sdpa import Sdpa, attend_once, lower_right, masked_attention
from pipeline.train.model.part_spec import Reach
from pipeline.train.model.recompute import Recompute
from pipeline.train.model.states import KVCache, Places
from pipeline.train.parallel.compile import compile_layers
from tests.train.model.kernels.cases import BOTH, CPU, SOME, TERMS, Case, all_cases, cases, differences, reference
from tests.train.runs import exact, train, weights_hash

PLAIN = Terms(0.3)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that sequences that are quickly counted out have tiles of every kind."""
    monkeypatch.setattr(tiles, "ALONE", 6)
    monkeypatch.setattr(tiles, "BLOCK", 9)
    monkeypatch.setattr(capped, "_SCORES_AT_ONCE", 7)


@settings(max_examples=150)
@given(case=cases())
def test_any_attention_is_that_of_its_mask(case: Case) -> None:
    assert max(differences(case, Sdpa(), case.draw(torch.float64)).values()) < 1e-12


@pytest.mark.slow
@settings(max_examples=150)
@given(case=all_cases())
def test_to_both_sides_and_across(case: Case) -> None:
    for kernel in (Sdpa(), Sdpa(on_gpu=True)):
        assert max(differences(case, kernel, case.draw(torch.float64)).values()) < 1e-12


@pytest.mark.slow
@settings(max_examples=150)
@given(case=cases() | all_cases(), terms=st.sampled_from(TERMS), on_gpu=st.booleans())
def test_all_terms(case: Case, terms: dict[str, Any], on_gpu: bool) -> None:
    """Sinks, soft caps and values of another size; as on a GPU too, where a mask is in memory."""
    case = replace(case, **terms)
    assert max(differences(case, Sdpa(on_gpu=on_gpu), case.draw(torch.float64)).values()) < 1e-11


def test_sums_without_gradient_are_not_enough() -> None:
    """The output scaled outside of the kernel: it is right, and its gradients are not."""
    case = replace(SOME[3], sinks=True)
    q, k, v, gradient, sinks = case.draw(torch.float64)
    given = [x.requires_grad_() for x in (q, k, v, sinks)]
    expected = reference(case, *given)
    right = torch.autograd.grad(expected, given, gradient)

    copies = q.shape[2] // k.shape[2]
    heads = [x.repeat_interleave(copies if x is not q else 1, dim=2).transpose(1, 2) for x in (q, k, v)]
    out, sums = tiles._forward(*heads, 0.0, True, scale=0.3)
    naive = (out * torch.sigmoid(sums.detach() - sinks[:, None])[..., None]).transpose(1, 2)
    torch.testing.assert_close(naive, expected)
    wrong = torch.autograd.grad(naive, given, gradient)
    off = [float((one - other).norm() / other.norm()) for one, other in zip(wrong, right, strict=True)]
    assert off[0] > 0.1 and off[1] > 0.1, off
    assert max(differences(case, Sdpa(), case.draw(torch.float64)).values()) < 1e-12


def test_soft_caps_hold_the_scores_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 200 queries and keys, never all at once; in both passes."""
    monkeypatch.setattr(capped, "_SCORES_AT_ONCE", 8 * 2 * 200)
    largest: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            largest.extend(x.numel() for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor))
            return out

    q, k, v = torch.randn(3, 1, 2, 200, 4)
    with Sizes():
        out, sums = capped.forward(q, k, v, None, True, 0.3, 2.0)
        capped.backward(out, q, k, v, out, sums, None, True, 0.3, 2.0)
    assert max(largest) == 8 * 2 * 200


@pytest.mark.parametrize("sinks", [-30.0, 0.0, 30.0])
def test_sinks_of_all_sizes(sinks: float) -> None:
    """One that takes nothing, and one that takes nearly everything."""
    for case in (replace(SOME[1], sinks=True), replace(SOME[3], sinks=True, soft_cap=2.0)):
        inputs = case.draw(torch.float64)
        inputs[4] = torch.full_like(inputs[4], sinks)
        assert max(differences(case, Sdpa(), inputs).values()) < 1e-12


@pytest.mark.parametrize("terms", [{}, *TERMS])
@pytest.mark.parametrize("case", [Case(((40,), (40,)), False, None, 39, 40), Case(((40,), (40,)), False, 7, 39, 40)])
def test_one_query_of_cached_keys(case: Case, terms: dict[str, Any]) -> None:
    """The way of generation, from a cache with values of another size."""
    case = replace(case, **terms)
    q, k, v, _, *sinks = case.draw(torch.float64)
    cache = KVCache(max_length=None)
    for begin, end in ((0, 30), (30, 40)):
        places = Places(begin, torch.arange(begin, end)[None], end)
        cached = cache.append(k[:, begin:end], v[:, begin:end], places)
    found = attend_once(q, *cached, case.sight().mask(), case.terms, *sinks)
    torch.testing.assert_close(found, reference(case, q, k, v, *sinks))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", SOME + BOTH + tuple(replace(SOME[1], **terms) for terms in TERMS))
def test_in_every_precision(case: Case, dtype: torch.dtype) -> None:
    limit = 1e-5 if dtype == torch.float32 else 3e-2
    assert max(differences(case, Sdpa(), case.draw(dtype)).values()) < limit


@settings(max_examples=40)
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
        found = masked_attention(q, k, v, causality, PLAIN, None, True, flash)
        assert shared.pop() == takes
        expected = masked_attention(q, k, v, causal_lower_right(30, 40), PLAIN, on_gpu=False)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("dtype", "flash"), [(torch.float32, True), (torch.bfloat16, False), (torch.bfloat16, True)])
def test_keys_are_repeated_without_a_mask_too(shared: list[bool], dtype: torch.dtype, flash: bool) -> None:
    """Where no kernel but the one that keeps all scores takes them shared."""
    q, k, v, _ = SOME[3].draw(dtype)
    found = masked_attention(q, k, v, None, PLAIN, None, True, flash)
    assert shared.pop() == (flash and dtype != torch.float32)
    expected = masked_attention(q, k, v, None, PLAIN, on_gpu=False)
    torch.testing.assert_close(found, expected)


@pytest.mark.usefixtures("fresh_compiler")
def test_causality_goes_through_the_compiler() -> None:
    case = Case(((40,), (40,)), False, None, 10, 40)
    q, k, v, _ = case.draw(torch.float32)
    kernel = Sdpa(on_gpu=True)
    compiled = torch.compile(kernel.__call__, fullgraph=True, dynamic=False, backend="eager")
    causality = kernel.prepare(case.sight())
    assert torch.equal(compiled(q, k, v, causality, PLAIN), kernel(q, k, v, causality, PLAIN))


def test_without_documents_and_windows_nothing_stands_between() -> None:
    """The bits of torch's own kernel, and nothing prepared."""
    case = SOME[3]
    q, k, v, _ = case.draw(torch.float32)
    kernel = Sdpa()
    assert kernel.prepare(case.sight()) is None
    assert kernel.prepare(AttentionMask.of(2, (0, 40), Reach(39), CPU)) is None, "a window as long as the sequence"
    theirs = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True)
    assert torch.equal(kernel(q, k, v, None, Terms(8**-0.5)), theirs.transpose(1, 2))


@settings(max_examples=100)
@given(case=cases() | all_cases())
def test_tiles_cover_every_query_once(case: Case) -> None:
    times = torch.zeros(len(case.rows), case.end - case.start, dtype=torch.int64)
    for first, last, begin, end, key, key_end, kind in tiles.tile(case.sight()).tiles_N7.tolist():
        times[first:last, begin:end] += 1
        assert first == last or kind != tiles.MASKED or end - begin <= 9
        assert first == last or 0 <= key < key_end <= case.sight().keys
    assert (times == 1).all()


@pytest.mark.parametrize("ahead", [0, None])
def test_whole_documents_need_no_mask(ahead: int | None) -> None:
    found = tiles.tile(replace(SOME[0], ahead=ahead).sight()).tiles_N7[:, -1].tolist()
    whole = tiles.CAUSAL if ahead == 0 else tiles.FULL
    assert found == [whole, whole, tiles.MASKED, whole, whole], "40; 7, 1, 20, 12"


def test_what_is_skipped() -> None:
    """No tile is larger than the longest document, or a block and its window: work is linear in the sequence."""
    documents = Case(((20,) * 50,), True, None, 0, 1000).sight()
    window = Case(((1000,),), False, 30, 0, 1000).sight()
    for sight, most in ((documents, 20 * 20 * 50), (window, 1000 * 40)):
        found = tiles.tile(sight).tiles_N7.tolist()
        assert sum((end - begin) * (key_end - key) for _, _, begin, end, key, key_end, _ in found) <= most


@pytest.mark.first(2)
@pytest.mark.parametrize("case", [*SOME[:3], replace(SOME[1], sinks=True), replace(SOME[1], sinks=True, soft_cap=0.7)])
def test_the_operation_is_well_formed(case: Case) -> None:
    """What torch itself checks of one: its shapes without data, its gradients, and that nothing is changed."""
    q, k, v, _, *sinks = (x.requires_grad_() for x in case.draw(torch.float32))
    made = tiles.tile(case.sight())
    told = (made.low_BC, made.high_BC, made.tiles_N7, 0.3, case.soft_cap)
    torch.library.opcheck(tiles._attend, (q, k, v, sinks[0] if sinks else None, *told))


def decoder(window: int | None = None, cap: float | None = None, sinks: bool = False) -> Decoder:
    torch.manual_seed(2)
    shape = {"layers": 2, "dim": 32, "heads": 4, "kv_heads": 2, "ffn_dim": 48, "vocab_multiple": 8}
    terms = {"sliding_window": window, "attention_soft_cap": cap, "sinks": sinks}
    model = Decoder(decoder_spec(ModelConfig.model_validate(shape | terms), 61, 40))
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return model


def contexts(some: list[tuple[int, ...]]) -> list[Context]:
    """Of batches of one row."""
    sights = [Case((lengths,), True, None, 0, 40).sight() for lengths in some]
    return [Context(bounds_BS=sight.bounds_BC) for sight in sights]


@pytest.mark.parametrize("sinks", [False, True])
def test_selective_recomputation_keeps_it(monkeypatch: pytest.MonkeyPatch, sinks: bool) -> None:
    """The kernel runs once, and gradients have the same bits."""
    tokens, (context,) = torch.randint(61, (1, 40)), contexts([(20, 13, 7)])
    model = decoder(sinks=sinks)

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


@pytest.mark.parametrize("case", [SOME[1], SOME[3], BOTH[0], BOTH[1]])
@pytest.mark.parametrize("terms", [{"sinks": True}, {"soft_cap": 0.7, "sinks": True}])
@pytest.mark.usefixtures("fresh_compiler")
def test_terms_go_through_the_compiler(case: Case, terms: dict[str, Any]) -> None:
    """In one graph, also where tiles are made within it; outputs and gradients."""
    case = replace(case, **terms)
    kernel = Sdpa()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        return kernel(q, k, v, prepared, case.terms, sinks)

    prepared = kernel.prepare(case.sight())
    q, k, v, gradient, sinks = case.draw(torch.float32)
    given = [x.requires_grad_() for x in (q, k, v, sinks)]
    found, expected = torch.compile(attend, fullgraph=True, backend="aot_eager")(*given), attend(*given)
    assert torch.equal(found, expected)
    pairs = [torch.autograd.grad(out, given, gradient) for out in (found, expected)]
    assert all(torch.equal(*pair) for pair in zip(*pairs, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("window", "cap", "sinks"), [(None, None, False), (7, None, False), (7, 0.7, True), (None, None, True)]
)
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_layers_are_made_once_for_all_documents(window: int | None, cap: float | None, sinks: bool) -> None:
    plain, model = (decoder(window, cap, sinks) for _ in range(2))
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
        return masked_attention(q, k, v, mask, PLAIN, on_gpu=True, flash=True)

    q, k, v = torch.randn(3, 2, 8, 4, 16).bfloat16()
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    assert torch.equal(compiled(mask), attend(mask))
    assert torch.equal(compiled(lower_right(8, 8)), attend(mask))
