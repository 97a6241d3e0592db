"""What kernels for packed documents are given: computed from as documented, it is the attention of the mask."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn

from pipeline.train.model.kernels import packed, packed_sinks
from pipeline.train.model.kernels.packed import FLASH_MODULES, Flash, Varlen
from pipeline.train.model.kernels.packed_sinks import PackedArguments
from pipeline.train.model.kernels.packing import pack
from pipeline.train.model.kernels.te import TransformerEngine
from pipeline.train.model.part_spec import Reach
from tests.train.model.kernels.cases import BOTH, SOME, Case, all_cases, cases, differences


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Tensor,
    keys: Tensor,
    window: tuple[int, int],
    scale: float,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """As flash-attn documents it, one document after the other: distances are counted from the last key."""
    outs, sums = [], []
    for place in range(len(queries) - 1):
        some = q[int(queries[place]) : int(queries[place + 1])]
        mine = [x[int(keys[place]) : int(keys[place + 1])] for x in (k, v)]
        k_all, v_all = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in mine)
        at = torch.arange(len(some))[:, None] + len(k_all) - len(some)
        key = torch.arange(len(k_all))
        hidden = torch.zeros(len(some), len(k_all), dtype=torch.bool)
        if window[0] >= 0:
            hidden = hidden | (key < at - window[0])
        if window[1] >= 0:
            hidden = hidden | (key > at + window[1])
        scores = torch.einsum("qhe,khe->hqk", some, k_all) * scale
        scores = (cap * torch.tanh(scores / cap) if cap else scores).masked_fill(hidden, -torch.inf)
        outs.append(torch.einsum("hqk,khe->qhe", scores.softmax(-1), v_all))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(sums, dim=1)


def forward(q: Tensor, k: Tensor, v: Tensor, packed: PackedArguments) -> tuple[Tensor, Tensor]:
    """A kernel's forward pass: output [M, H, V] and sums [H, M]."""
    window = (packed.back, packed.ahead)
    return packed_attention(q, k, v, packed.queries_N, packed.keys_N, window, packed.scale, packed.soft_cap)


def backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, packed: PackedArguments
) -> tuple[Tensor, ...]:
    """A kernel's backward pass, of the weights that follow from the sums which it is given."""
    gradients = [torch.zeros_like(x) for x in (q, k, v)]
    copies = q.shape[1] // k.shape[1]
    for place in range(len(packed.queries_N) - 1):
        mine = slice(int(packed.queries_N[place]), int(packed.queries_N[place + 1]))
        theirs = slice(int(packed.keys_N[place]), int(packed.keys_N[place + 1]))
        some, k_all, v_all = q[mine], *(x[theirs].repeat_interleave(copies, dim=1) for x in (k, v))
        distance = torch.arange(len(some))[:, None] + len(k_all) - len(some) - torch.arange(len(k_all))
        hidden = (distance > packed.back) & (packed.back >= 0) | (-distance > packed.ahead) & (packed.ahead >= 0)
        scores = torch.einsum("qhe,khe->hqk", some, k_all) * packed.scale
        tanh = torch.tanh(scores / packed.soft_cap) if packed.soft_cap else torch.zeros_like(scores)
        scores = packed.soft_cap * tanh if packed.soft_cap else scores
        weights = (scores - sums[:, mine, None]).exp().masked_fill(hidden, 0)
        of_out = torch.einsum("qhv,khv->hqk", gradient[mine], v_all)
        rows = (gradient[mine] * out[mine]).sum(-1).T
        of_scores = weights * (of_out - rows[..., None]) * (1 - tanh**2) * packed.scale
        gradients[0][mine] = torch.einsum("hqk,khe->qhe", of_scores, k_all)
        for found, each, by in ((gradients[1], of_scores, some), (gradients[2], weights, gradient[mine])):
            found[theirs] += torch.einsum("hqk,qhe->khe", each, by).unflatten(1, (k.shape[1], copies)).sum(2)
    return tuple(gradients)


class FlashPackage(ModuleType):
    """Stands in for a version of flash-attn, with the arguments that it documents."""

    def __init__(self, version: int) -> None:
        super().__init__(FLASH_MODULES[version])
        self.version = version
        self.__path__: list[str] = []

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[Any, Any],
        deterministic: bool,
        softcap: float = 0.0,
    ) -> Any:
        check(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        assert deterministic
        unlimited = None if self.version == 4 else -1
        window = tuple(-1 if x == unlimited else x for x in window_size)
        assert all(isinstance(x, int) for x in window)
        assert (window[0] == -1) == (window[1] == -1) or causal
        if causal:
            assert window[1] == 0 or window == (-1, -1)
            window = (window[0], 0)
        out, _ = packed_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, window, softmax_scale, softcap)
        return (out, None) if self.version == 4 else out


def check(q: Tensor, k: Tensor, queries: Tensor, keys: Tensor, most_queries: int, most_keys: int) -> None:
    """What holds for every such kernel."""
    for x, cumulative, most in ((q, queries, most_queries), (k, keys, most_keys)):
        assert cumulative.dtype == torch.int32 and cumulative.is_contiguous() and len(cumulative) > 1
        assert cumulative[0] == 0 and cumulative[-1] == len(x)
        assert cumulative.diff().min() >= 0 and cumulative.diff().max() <= most <= 2 * len(x)


def packable(case: Case) -> bool:
    """What is not refused: see `pack`."""
    mask = case.sight()
    return not case.prefixed and (mask.reach == Reach(None, None) or mask.end == mask.keys)


PACKED = (cases() | all_cases()).filter(packable)
VALUES = st.sampled_from([None, 5, 13])


@pytest.mark.slow
@settings(max_examples=100)
@given(case=PACKED, value=VALUES, cap=st.none() | st.just(0.7))
def test_flash(case: Case, value: int | None, cap: float | None) -> None:
    case = replace(case, value=value, soft_cap=cap)
    for version in FLASH_MODULES:
        with pytest.MonkeyPatch.context() as patch:
            module = FlashPackage(version)
            if "." in module.__name__:
                patch.setitem(sys.modules, module.__name__.split(".")[0], ModuleType("flash_attn"))
            patch.setitem(sys.modules, module.__name__, module)
            kernel = Flash(version, deterministic=True)
        assert max(differences(case, kernel, case.draw(torch.float64)).values()) < 1e-12


@settings(max_examples=100)
@given(case=PACKED, cap=st.none() | st.just(0.7), kernel=st.sampled_from(["varlen", "flash 2", "flash 3"]))
def test_sinks_from_both_passes(case: Case, cap: float | None, kernel: str) -> None:
    """Computed as a kernel computes them, the passes give the sinks' output and gradients."""
    case = replace(case, sinks=True, soft_cap=None if kernel == "varlen" else cap)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(packed_sinks.PASSES, kernel, (forward, backward))
        built: Any = Varlen()
        if kernel != "varlen":
            patch.setattr(packed, "flash_function", lambda _: None)
            built = Flash(int(kernel[-1]), deterministic=True)
        assert max(differences(case, built, case.draw(torch.float64)).values()) < 1e-12


@pytest.mark.parametrize("back", [-1, 5])
def test_passes_are_called_as_torch_wants_it(back: int) -> None:
    """Its own checks and shapes, on tensors without data, and what the kernel beneath is given."""
    q, k, v = (torch.empty(12, heads, 8, dtype=torch.bfloat16, device="meta") for heads in (4, 2, 2))
    places = torch.tensor([0, 7, 12], dtype=torch.int32, device="meta")
    packed = PackedArguments(places, places, 12, 12, 0.3, 0.0, back, 0, False)
    with FakeTensorMode(allow_non_fake_inputs=True):
        out, sums = packed_sinks._varlen(q, k, v, packed)
        assert out.shape == q.shape and sums.shape == (4, 12)
        found = packed_sinks._varlen_backward(out, q, k, v, out, sums, packed)
    assert [x.shape for x in found] == [x.shape for x in (q, k, v)]


def test_windows_to_both_sides_of_pieces_are_not_packed() -> None:
    with pytest.raises(AssertionError, match="to its end"):
        pack(Case(((40,),), True, 6, 10, 20, ahead=5).sight())
    with pytest.raises(AssertionError, match="prefixes"):
        pack(Case(((40,),), True, None, 0, 40, prefixed=True).sight())


@settings(max_examples=60)
@given(case=PACKED, value=VALUES)
def test_varlen(case: Case, value: int | None) -> None:
    case = replace(case, value=value)

    def grouped(q: Tensor, k: Tensor, v: Tensor, *places: Any, enable_gqa: bool = False, **how: Any) -> Tensor:
        assert enable_gqa == (q.shape[1] != k.shape[1])
        return plain(q, k, v, *places, **how)

    def plain(q: Tensor, k: Tensor, v: Tensor, *places: Any, scale: float, window_size: tuple[int, int]) -> Tensor:
        check(q, k, *places)
        return packed_attention(q, k, v, places[0], places[1], window_size, scale)[0]

    for stand_in in (grouped, plain):  # of 2.13 and of 2.11
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("torch.nn.attention.varlen.varlen_attn", stand_in)
            kernel = Varlen()
        assert max(differences(case, kernel, case.draw(torch.float64)).values()) < 1e-12


@pytest.mark.parametrize("case", (*SOME, *BOTH, replace(SOME[1], sinks=True)))
def test_varlen_is_called_as_torch_wants_it(case: Case) -> None:
    """Its own checks and shapes, on tensors without data."""
    kernel = Varlen()
    q, k, v, _, *sinks = (x.to("meta") for x in case.draw(torch.bfloat16))
    out = kernel(q, k, v, kernel.prepare(case.sight()), case.terms, *sinks)
    assert out.shape == q.shape and varlen_attn.__module__ == "torch.nn.attention.varlen"


@pytest.mark.slow
@settings(max_examples=60)
@given(case=PACKED, value=VALUES | st.just(16))
def test_transformer_engine(case: Case, value: int | None) -> None:
    case = replace(case, value=value)

    class DotProductAttention:
        def __init__(
            self,
            num_attention_heads: int,
            kv_channels: int | tuple[int, int],
            num_gqa_groups: int,
            attention_dropout: float,
            qkv_format: str,
            attn_mask_type: str,
            softmax_scale: float,
        ) -> None:
            assert (num_attention_heads, num_gqa_groups) == case.heads
            assert kv_channels == ({None: 8, 5: 8, 13: 13, 16: (8, 16)}[case.value])
            assert (attention_dropout, qkv_format) == (0, "thd")
            self.causal = {"padding_causal_bottom_right": True, "padding": False}[attn_mask_type]
            self.scale = softmax_scale

        def __call__(
            self,
            query_layer: Tensor,
            key_layer: Tensor,
            value_layer: Tensor,
            *,
            cu_seqlens_q: Tensor,
            cu_seqlens_kv: Tensor,
            max_seqlen_q: int,
            max_seqlen_kv: int,
            window_size: tuple[int, int],
        ) -> Tensor:
            check(query_layer, key_layer, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv)
            qkv = query_layer, key_layer, value_layer
            assert self.causal == (window_size[1] == 0)
            return packed_attention(*qkv, cu_seqlens_q, cu_seqlens_kv, window_size, self.scale)[0].flatten(1)

    module = ModuleType("transformer_engine.pytorch")
    module.DotProductAttention = DotProductAttention  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        package = ModuleType("transformer_engine")
        package.pytorch = module  # type: ignore[attr-defined]
        patch.setitem(sys.modules, "transformer_engine", package)
        patch.setitem(sys.modules, "transformer_engine.pytorch", module)
        kernel = TransformerEngine()
    assert max(differences(case, kernel, case.draw(torch.float64)).values()) < 1e-12


def test_operations_that_are_registered_are_kept() -> None:
    Varlen()
    kept = packed.operations()
    assert torch.ops.torch_attn._varlen_attn.default in kept
    assert torch.ops.pipeline.packed_attention_with_sinks.default in kept


def test_numbers_that_code_is_compiled_for_are_those_of_the_piece() -> None:
    """Not those of its documents, with which layers would be compiled anew from batch to batch."""
    rows = (((40,),), ((20, 13, 7),), ((1,) * 40,), ((3,) * 13 + (1,),))
    for start, end in ((0, 40), (10, 30)):
        made = [pack(Case(row, True, None, start, end).sight()) for row in rows]
        assert {(one.longest_queries, one.longest_keys) for one in made} == {(end - start, end)}
