"""What kernels for packed documents are told: computed from as documented, it is the attention of the mask."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from pipeline.train.model.kernels import packed
from pipeline.train.model.kernels.packed import FLASH_MODULES, Flash, Varlen
from pipeline.train.model.kernels.te import TransformerEngine
from tests.train.model.kernels.cases import SOME, Case, cases, differences


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, window: tuple[int, int], scale: float
) -> Tensor:
    """As flash-attn documents it, one document after the other: causality is aligned with the last key."""
    outs = []
    for place in range(len(queries) - 1):
        some = q[int(queries[place]) : int(queries[place + 1])]
        mine = [x[int(keys[place]) : int(keys[place + 1])] for x in (k, v)]
        k_all, v_all = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in mine)
        at = torch.arange(len(some))[:, None] + len(k_all) - len(some)
        key = torch.arange(len(k_all))
        hidden = key > at
        if window[0] >= 0:
            hidden = hidden | (key < at - window[0])
        scores = torch.einsum("qhe,khe->hqk", some, k_all) * scale
        outs.append(torch.einsum("hqk,khe->qhe", scores.masked_fill(hidden, -torch.inf).softmax(-1), v_all))
    return torch.cat(outs)


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
    ) -> Any:
        check(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        assert causal and deterministic
        unlimited = (None, None) if self.version == 4 else (-1, -1)
        window = (-1, 0) if window_size == unlimited else window_size
        out = packed_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, window, softmax_scale)
        return (out, None) if self.version == 4 else out


def check(q: Tensor, k: Tensor, queries: Tensor, keys: Tensor, most_queries: int, most_keys: int) -> None:
    """What holds for every such kernel."""
    for x, cumulative, most in ((q, queries, most_queries), (k, keys, most_keys)):
        assert cumulative.dtype == torch.int32 and cumulative.is_contiguous() and len(cumulative) > 1
        assert cumulative[0] == 0 and cumulative[-1] == len(x)
        assert cumulative.diff().min() >= 0 and cumulative.diff().max() <= most <= 2 * len(x)


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_flash(case: Case) -> None:
    for version in FLASH_MODULES:
        with pytest.MonkeyPatch.context() as patch:
            module = FlashPackage(version)
            if "." in module.__name__:
                patch.setitem(sys.modules, module.__name__.split(".")[0], ModuleType("flash_attn"))
            patch.setitem(sys.modules, module.__name__, module)
            kernel = Flash(version, deterministic=True)
        assert max(differences(case, kernel, case.draw(torch.float64)).values()) < 1e-12


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_varlen(case: Case) -> None:
    def grouped(q: Tensor, k: Tensor, v: Tensor, *told: Any, enable_gqa: bool = False, **how: Any) -> Tensor:
        assert enable_gqa == (q.shape[1] != k.shape[1])
        return plain(q, k, v, *told, **how)

    def plain(q: Tensor, k: Tensor, v: Tensor, *told: Any, scale: float, window_size: tuple[int, int]) -> Tensor:
        check(q, k, *told)
        assert window_size[1] == 0
        return packed_attention(q, k, v, told[0], told[1], window_size, scale)

    for stand_in in (grouped, plain):  # of 2.13 and of 2.11
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("torch.nn.attention.varlen.varlen_attn", stand_in)
            kernel = Varlen()
        assert max(differences(case, kernel, case.draw(torch.float64)).values()) < 1e-12


@pytest.mark.parametrize("case", SOME)
def test_varlen_is_called_as_torch_wants_it(case: Case) -> None:
    """Its own checks and shapes, on tensors without data."""
    kernel = Varlen()
    q, k, v, _ = (x.to("meta") for x in case.draw(torch.bfloat16))
    out = kernel(q, k, v, kernel.prepare(case.sight()), 0.3)
    assert out.shape == q.shape and varlen_attn.__module__ == "torch.nn.attention.varlen"


@settings(max_examples=30, deadline=None)
@given(case=cases())
def test_transformer_engine(case: Case) -> None:
    class DotProductAttention:
        def __init__(
            self,
            num_attention_heads: int,
            kv_channels: int,
            num_gqa_groups: int,
            attention_dropout: float,
            qkv_format: str,
            attn_mask_type: str,
            softmax_scale: float,
        ) -> None:
            assert (num_attention_heads, num_gqa_groups, kv_channels) == (*case.heads, 8)
            assert (attention_dropout, qkv_format, attn_mask_type) == (0, "thd", "padding_causal_bottom_right")
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
            return packed_attention(*qkv, cu_seqlens_q, cu_seqlens_kv, window_size, self.scale).flatten(1)

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
    assert torch.ops.torch_attn._varlen_attn.default in packed.operations()


def test_numbers_that_code_is_compiled_for_are_those_of_the_piece() -> None:
    """Not those of its documents, with which layers would be compiled anew from batch to batch."""
    rows = (((40,),), ((20, 13, 7),), ((1,) * 40,), ((3,) * 13 + (1,),))
    for start, end in ((0, 40), (10, 30)):
        made = [packed.pack(Case(row, True, None, start, end).sight()) for row in rows]
        assert {(one.longest_queries, one.longest_keys) for one in made} == {(end - start, end)}
