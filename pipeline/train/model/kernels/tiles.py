"""Attention on a CPU to documents and within windows, a tile of queries and keys after the other.

The tiles cover what the queries see, and little else. A long document is one; of short ones several share one; windows,
and queries with keys before them, are cut into blocks. Nothing is as large as sequence x sequence.

Shapes: B batch, C queries, T keys (of which the queries are the last), H query heads, K key and value heads, E head
size, N tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from pipeline.train.model.kernels.attention_mask import AttentionMask
from pipeline.train.parallel.torch_compat.compiler import vary_length

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

ALONE = 128
"""Tokens of a document that is a tile by itself; the kernel does not need a mask then."""
BLOCK = 128
"""Queries of a tile that needs one."""


@dataclass(frozen=True)
class Tiles:
    """Tiles of a mask."""

    lowest_BC: Tensor
    """[B or 1, C] int64: the first key that a query sees."""
    tiles_N6: Tensor
    """int64: first and last row, queries from and to, first key, and whether a query sees all keys from there to
    itself. A tile without rows says nothing."""


def tile(sight: AttentionMask) -> Tiles:
    """The tiles of a sight; its tensors are on the CPU."""
    q_C = torch.arange(sight.start, sight.end)
    lowest_BC = torch.zeros(1, sight.queries, dtype=torch.int64) if sight.documents is None else sight.bounds_BC
    assert lowest_BC is not None
    if sight.window is not None:
        lowest_BC = torch.maximum(lowest_BC, q_C - (sight.window - 1))
    rows = sight.spans()
    tiles: list[tuple[int, ...]] = []
    for row, spans in enumerate(rows):
        first, last = (0, sight.samples) if sight.documents is None else (row, row + 1)
        tiles += [
            (first, last, begin - sight.start, end - sight.start, key, int(plain))
            for begin, end, key, plain in _of_row(spans, sight.window)
        ]
    # One alone would be compiled for itself.
    tiles += [(0,) * 6] * (2 - len(tiles))
    tiles_N6 = torch.tensor(tiles, dtype=torch.int64)
    vary_length(tiles_N6)
    return Tiles(lowest_BC, tiles_N6)


def _of_row(spans: list[tuple[int, int, int]], window: int | None) -> Iterator[tuple[int, int, int, bool]]:
    """Queries from and to, first key, and whether causality alone says what is seen."""
    begin = end = key = 0  # of the tile that is being filled; none while both ends are equal
    for first, behind, document in spans:
        whole = first == document and (window is None or window >= behind - document)
        alone = whole and behind - first >= ALONE
        if end > begin and (alone or end - begin == BLOCK):
            yield begin, end, key, False
            begin = end = 0
        if alone:
            yield first, behind, document, True
            continue
        if end == begin:
            begin = end = first
            key = document if window is None else max(document, first - window + 1)
        while behind - begin > BLOCK:
            yield begin, begin + BLOCK, key, False
            begin = begin + BLOCK
            key = document if window is None else max(document, begin - window + 1)
        end = behind
    if end > begin:
        yield begin, end, key, False


def tiled_attention(q_BCHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, tiles: Tiles, scale: float) -> Tensor:
    """Every query's sum of the values that it sees, [B, C, H, E]."""
    out_BCHE, _ = _attend(q_BCHE, k_BTKE, v_BTKE, tiles.lowest_BC, tiles.tiles_N6, scale)
    return cast(Tensor, out_BCHE)


@torch.library.custom_op("pipeline::tiled_attention", mutates_args=())
def _attend(
    q_BCHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, lowest_BC: Tensor, tiles_N6: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [B, C, H, E], and logarithms of the sums of exponentials [B, C, H]."""
    out_BCHE, sums_BCH = _outputs(q_BCHE)
    for rows, queries, keys, mask in _each(q_BCHE, k_BTKE, lowest_BC, tiles_N6):
        q, k, v = _heads_first(q_BCHE[rows, queries], k_BTKE[rows, keys], v_BTKE[rows, keys])
        out, sums = _forward(q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale)
        out_BCHE[rows, queries] = out.transpose(1, 2)
        sums_BCH[rows, queries] = sums.transpose(1, 2)
    return out_BCHE, sums_BCH


@torch.library.custom_op("pipeline::tiled_attention_backward", mutates_args=())
def _attend_backward(
    gradient_BCHE: Tensor,
    q_BCHE: Tensor,
    k_BTKE: Tensor,
    v_BTKE: Tensor,
    out_BCHE: Tensor,
    sums_BCH: Tensor,
    lowest_BC: Tensor,
    tiles_N6: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values."""
    to_q = torch.empty_like(q_BCHE, memory_format=torch.contiguous_format)
    # Tiles have keys in common.
    wide = torch.promote_types(k_BTKE.dtype, torch.float32)
    to_k, to_v = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k_BTKE, v_BTKE))
    for rows, queries, keys, mask in _each(q_BCHE, k_BTKE, lowest_BC, tiles_N6):
        q, k, v = _heads_first(q_BCHE[rows, queries], k_BTKE[rows, keys], v_BTKE[rows, keys])
        gradient, out = _heads_first(gradient_BCHE[rows, queries], out_BCHE[rows, queries])
        sums = sums_BCH[rows, queries].transpose(1, 2)
        of_q, of_k, of_v = _backward(gradient, q, k, v, out, sums, 0.0, mask is None, attn_mask=mask, scale=scale)
        to_q[rows, queries] = of_q.transpose(1, 2)
        to_k[rows, keys] += of_k.transpose(1, 2)
        to_v[rows, keys] += of_v.transpose(1, 2)
    return to_q, to_k.to(k_BTKE.dtype), to_v.to(v_BTKE.dtype)


def _outputs(q_BCHE: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for what the forward pass gives."""
    wide = torch.promote_types(q_BCHE.dtype, torch.float32)
    return q_BCHE.new_empty(q_BCHE.shape), q_BCHE.new_empty(q_BCHE.shape[:3], dtype=wide)


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    """[B, C, H, E] -> [B, H, C, E]; the kernel reads each head in one piece."""
    return [(x if x.stride(-1) == 1 else x.contiguous()).transpose(1, 2) for x in tensors]


def _each(
    q_BCHE: Tensor, k_BTKE: Tensor, lowest_BC: Tensor, tiles_N6: Tensor
) -> Iterator[tuple[slice, slice, slice, Tensor | None]]:
    """Rows, queries and keys of each tile, and what is added to its scores, [B or 1, 1, C, T]; None: causality."""
    past = k_BTKE.shape[1] - q_BCHE.shape[1]
    for first, last, begin, end, key, plain in tiles_N6.tolist():
        if first == last:
            continue
        mask = None
        if not plain:
            lowest = lowest_BC[first:last] if len(lowest_BC) > 1 else lowest_BC
            k_T = torch.arange(key, past + end)
            q_C1 = torch.arange(past + begin, past + end)[:, None]
            hidden = (k_T > q_C1) | (k_T < lowest[:, begin:end, None])
            mask = torch.zeros(hidden.shape, dtype=q_BCHE.dtype).masked_fill_(hidden, -torch.inf)[:, None]
        yield slice(first, last), slice(begin, end), slice(key, past + end), mask


@_attend.register_fake
def _(
    q_BCHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, lowest_BC: Tensor, tiles_N6: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    return _outputs(q_BCHE)


@_attend_backward.register_fake
def _(gradient_BCHE: Tensor, q_BCHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    to_q, to_k, to_v = (x.new_empty(x.shape) for x in (q_BCHE, k_BTKE, v_BTKE))
    return to_q, to_k, to_v


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.scale = scale
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, gradient_BCHE: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    q_BCHE, k_BTKE, v_BTKE, lowest_BC, tiles_N6, out_BCHE, sums_BCH = ctx.saved_tensors
    to_q, to_k, to_v = _attend_backward(
        gradient_BCHE, q_BCHE, k_BTKE, v_BTKE, out_BCHE, sums_BCH, lowest_BC, tiles_N6, ctx.scale
    )
    return to_q, to_k, to_v, None, None, None


_attend.register_autograd(_differentiate, setup_context=_keep)

OPERATION = torch.ops.pipeline.tiled_attention.default
"""Whose results selective recomputation keeps."""
