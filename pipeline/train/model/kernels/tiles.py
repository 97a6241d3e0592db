"""Attention on a CPU a tile of queries and keys after the other: to documents, within reach, with sinks and soft caps.

The tiles cover what the queries see, and little else. A long document is one; of short ones several share one; windows,
and queries with keys before them, are cut into blocks. Nothing is as large as sequence x sequence.

Sinks need no kernel of their own. With the sums of exponentials that include the sink in place of those that the kernel
gave, a softmax is scaled; and the kernel's backward pass, which computes the softmax anew from sums and output, then
gives the gradients of the scaled one. To scale its output outside would leave out that the sums depend on the scores.

Shapes: B batch, C queries, T keys, H query heads, K key and value heads, E head size, V size of a value head, N tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from pipeline.train.model.kernels import capped
from pipeline.train.model.kernels.attention_mask import AttentionMask, DocumentSpan, Terms
from pipeline.train.model.kernels.heads import equal_heads
from pipeline.train.torch_compat.compiler import vary_length

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

ALONE = 128
"""Tokens of a document that is a tile by itself; the kernel does not need a mask then."""
BLOCK = 128
"""Queries of a tile that needs one."""

MASKED, CAUSAL, FULL = range(3)
"""Kinds of tiles: each query sees its interval; as many queries as keys, each sees those up to itself; it sees all."""


@dataclass(frozen=True)
class Tiles:
    """Tiles of a mask."""

    low_BC: Tensor
    """[B or 1, C] int64: the first key that a query sees."""
    high_BC: Tensor
    """[B or 1, C] int64: the first key after those."""
    tiles_N7: Tensor
    """int64: first and last row, queries from and to, keys from and to, and the kind. A tile without rows says
    nothing."""


def tile(mask: AttentionMask) -> Tiles:
    """The tiles of a mask; its tensors are on the CPU."""
    tiles: list[tuple[int, ...]] = []
    for row, spans in enumerate(mask.spans()):
        first, last = (0, mask.samples) if mask.documents is None else (row, row + 1)
        tiles += [(first, last, *found) for found in _of_row(spans, mask)]
    # One alone would be compiled for itself.
    tiles += [(0,) * 7] * (2 - len(tiles))
    tiles_N7 = torch.tensor(tiles, dtype=torch.int64)
    vary_length(tiles_N7)
    return Tiles(*mask.interval(), tiles_N7)


def whole(samples: int, queries: int, keys: int, causal: bool) -> Tiles:
    """One tile, of equally many queries and keys if it is causal."""
    assert not causal or queries == keys
    high_1C = torch.arange(1, queries + 1)[None] if causal else torch.full((1, queries), keys)
    tile = (0, samples, 0, queries, 0, keys, CAUSAL if causal else FULL)
    return Tiles(torch.zeros_like(high_1C), high_1C, torch.tensor([tile], dtype=torch.int64))


def _kind(span: DocumentSpan, mask: AttentionMask) -> int:
    """The kind of the tile that the queries of a document could be."""
    back, ahead = mask.reach.back, mask.reach.ahead
    if mask.prefixed or (back is not None and back < span.end - 1 - span.key):
        return MASKED
    if ahead == 0:
        return CAUSAL if span.first == span.key else MASKED
    return FULL if ahead is None or ahead >= span.key_end - 1 - span.first else MASKED


def _of_row(spans: list[DocumentSpan], mask: AttentionMask) -> Iterator[tuple[int, ...]]:
    """Queries from and to, counted from the first of the piece, keys from and to, and the kind of the tile."""

    def masked(begin: int, end: int, of_begin: DocumentSpan, of_end: DocumentSpan) -> tuple[int, ...]:
        # Intervals do not descend from query to query.
        keys = _lowest(of_begin, begin, mask), _key_after(of_end, end - 1, mask)
        return begin - mask.start, end - mask.start, *keys, MASKED

    begin = end = 0  # of the tile that is being filled; none while both are equal
    opening = closing = DocumentSpan(0, 0, 0, 0)  # in which they are
    for span in spans:
        kind = _kind(span, mask)
        alone = kind != MASKED and span.end - span.first >= ALONE
        if end > begin and (alone or end - begin == BLOCK):
            yield masked(begin, end, opening, closing)
            begin = end = 0
        if alone:
            yield span.first - mask.start, span.end - mask.start, span.key, span.key_end, kind
            continue
        if end == begin:
            begin, opening = span.first, span
        while span.end - begin > BLOCK:
            yield masked(begin, begin + BLOCK, opening, span)
            begin, opening = begin + BLOCK, span
        end, closing = span.end, span
    if end > begin:
        yield masked(begin, end, opening, closing)


def _lowest(span: DocumentSpan, query: int, mask: AttentionMask) -> int:
    """The first key that a query of a document sees."""
    return span.key if mask.reach.back is None else max(span.key, query - mask.reach.back)


def _key_after(span: DocumentSpan, query: int, mask: AttentionMask) -> int:
    """The first key after those that it sees; with prefixes, after those that it may see."""
    ahead = mask.reach.ahead
    return span.key_end if ahead is None or mask.prefixed else min(span.key_end, query + ahead + 1)


def tiled_attention(
    q_BCHE: Tensor, k_BTKE: Tensor, v_BTKV: Tensor, tiles: Tiles, terms: Terms, sinks_H: Tensor | None = None
) -> Tensor:
    """Every query's sum of the values that it sees, [B, C, H, V]."""
    size = v_BTKV.shape[-1]
    if terms.soft_cap is None:
        q_BCHE, k_BTKE, v_BTKV = equal_heads(q_BCHE, k_BTKE, v_BTKV)
    out_BCHV, _ = _attend(
        q_BCHE,
        k_BTKE,
        v_BTKV,
        sinks_H,
        tiles.low_BC,
        tiles.high_BC,
        tiles.tiles_N7,
        terms.scale,
        terms.soft_cap,
    )
    return cast(Tensor, out_BCHV)[..., :size]


@torch.library.custom_op("pipeline::tiled_attention", mutates_args=())
def _attend(
    q_BCHE: Tensor,
    k_BTKE: Tensor,
    v_BTKV: Tensor,
    sinks_H: Tensor | None,
    low_BC: Tensor,
    high_BC: Tensor,
    tiles_N7: Tensor,
    scale: float,
    soft_cap: float | None,
) -> tuple[Tensor, Tensor]:
    """Output [B, C, H, V], and logarithms of the sums of exponentials [B, C, H], those of the sinks among them."""
    out_BCHV, sums_BCH = _outputs(q_BCHE, v_BTKV)
    for rows, queries, keys, hidden, causal in _each(low_BC, high_BC, tiles_N7):
        assert queries.stop <= q_BCHE.shape[1] and keys.stop <= k_BTKE.shape[1], "not those of the mask"
        q, k, v = _heads_first(q_BCHE[rows, queries], k_BTKE[rows, keys], v_BTKV[rows, keys])
        if soft_cap is None:
            out, sums = _forward(q, k, v, 0.0, causal, attn_mask=_bias(hidden, q), scale=scale)
        else:
            out, sums = capped.forward(q, k, v, hidden, causal, scale, soft_cap)
        place = out_BCHV[rows, queries].transpose(1, 2)
        if sinks_H is None:
            place.copy_(out)
        else:
            joined = torch.logaddexp(sums, sinks_H[:, None].to(sums.dtype))
            torch.mul(out, (sums - joined).exp_()[..., None], out=place)
            sums = joined
        sums_BCH[rows, queries] = sums.transpose(1, 2)
    return out_BCHV, sums_BCH


@torch.library.custom_op("pipeline::tiled_attention_backward", mutates_args=())
def _attend_backward(
    gradient_BCHV: Tensor,
    q_BCHE: Tensor,
    k_BTKE: Tensor,
    v_BTKV: Tensor,
    sinks_H: Tensor | None,
    out_BCHV: Tensor,
    sums_BCH: Tensor,
    low_BC: Tensor,
    high_BC: Tensor,
    tiles_N7: Tensor,
    scale: float,
    soft_cap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, keys, values and sinks; without sinks the last has no elements."""
    to_q = torch.empty_like(q_BCHE, memory_format=torch.contiguous_format)
    # Tiles have keys in common.
    wide = torch.promote_types(k_BTKE.dtype, torch.float32)
    to_k, to_v = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k_BTKE, v_BTKV))
    for rows, queries, keys, hidden, causal in _each(low_BC, high_BC, tiles_N7):
        q, k, v = _heads_first(q_BCHE[rows, queries], k_BTKE[rows, keys], v_BTKV[rows, keys])
        gradient, out = _heads_first(gradient_BCHV[rows, queries], out_BCHV[rows, queries])
        sums = sums_BCH[rows, queries].transpose(1, 2)
        if soft_cap is None:
            bias = _bias(hidden, q)
            of_q, of_k, of_v = _backward(gradient, q, k, v, out, sums, 0.0, causal, attn_mask=bias, scale=scale)
        else:
            of_q, of_k, of_v = capped.backward(gradient, q, k, v, out, sums, hidden, causal, scale, soft_cap)
        to_q[rows, queries] = of_q.transpose(1, 2)
        to_k[rows, keys] += of_k.transpose(1, 2)
        to_v[rows, keys] += of_v.transpose(1, 2)
    to_sinks = q_BCHE.new_empty(0) if sinks_H is None else sink_gradient(gradient_BCHV, out_BCHV, sums_BCH, sinks_H)
    return to_q, to_k.to(k_BTKE.dtype), to_v.to(v_BTKV.dtype), to_sinks


def sink_gradient(gradient: Tensor, out: Tensor, sums: Tensor, sinks_H: Tensor) -> Tensor:
    """The gradient of the sinks, [H].

    Args:
        gradient: Of the output, [..., H, V].
        out: Output, [..., H, V].
        sums: Logarithms of the sums of exponentials, those of the sinks among them, [..., H].
        sinks_H: The sinks.
    """
    # Products of rows, in the precision of the sums, without a copy of both factors in it.
    rows = torch.linalg.vecdot(gradient.to(sums.dtype), out.to(sums.dtype))
    taken = (sinks_H.to(sums.dtype) - sums).exp_()
    to_sinks: Tensor = rows.mul_(taken).flatten(0, -2).sum(0).neg_().to(sinks_H.dtype)
    return to_sinks


def _outputs(q_BCHE: Tensor, v_BTKV: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for what the forward pass gives."""
    wide = torch.promote_types(q_BCHE.dtype, torch.float32)
    shape = q_BCHE.shape[:3]
    return q_BCHE.new_empty((*shape, v_BTKV.shape[-1])), q_BCHE.new_empty(shape, dtype=wide)


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    """[B, C, H, E] -> [B, H, C, E]; the kernel reads each head in one piece."""
    return [(x if x.stride(-1) == 1 else x.contiguous()).transpose(1, 2) for x in tensors]


class _Tile(NamedTuple):
    """Rows, queries and keys of a tile, and what is hidden in it, bool [B or 1, 1, C, T]; None: see `causal`."""

    rows: slice
    queries: slice
    keys: slice
    hidden: Tensor | None
    causal: bool


def _each(low_BC: Tensor, high_BC: Tensor, tiles_N7: Tensor) -> Iterator[_Tile]:
    for first, last, begin, end, key, key_end, kind in tiles_N7.tolist():
        if first == last:
            continue
        rows, queries, hidden = slice(first, last), slice(begin, end), None
        if kind == MASKED:
            low, high = (x[rows if len(x) > 1 else slice(None), queries, None] for x in (low_BC, high_BC))
            k_T = torch.arange(key, key_end)
            hidden = ((k_T >= high) | (k_T < low))[:, None]
        yield _Tile(rows, queries, slice(key, key_end), hidden, kind == CAUSAL)


def _bias(hidden: Tensor | None, like: Tensor) -> Tensor | None:
    """The mask as it is added to the scores."""
    if hidden is None:
        return None
    return torch.zeros(hidden.shape, dtype=like.dtype).masked_fill_(hidden, -torch.inf)


@_attend.register_fake
def _(q_BCHE: Tensor, k_BTKE: Tensor, v_BTKV: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _outputs(q_BCHE, v_BTKV)


@_attend_backward.register_fake
def _(
    gradient_BCHV: Tensor, q_BCHE: Tensor, k_BTKE: Tensor, v_BTKV: Tensor, sinks_H: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    to_q, to_k, to_v = (x.new_empty(x.shape) for x in (q_BCHE, k_BTKE, v_BTKV))
    return to_q, to_k, to_v, q_BCHE.new_empty(0) if sinks_H is None else sinks_H.new_empty(sinks_H.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, scale, soft_cap = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.numbers = scale, soft_cap
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, gradient_BCHV: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    q_BCHE, k_BTKE, v_BTKV, sinks_H, low_BC, high_BC, tiles_N7, out_BCHV, sums_BCH = ctx.saved_tensors
    to_q, to_k, to_v, to_sinks = _attend_backward(
        gradient_BCHV, q_BCHE, k_BTKE, v_BTKV, sinks_H, out_BCHV, sums_BCH, low_BC, high_BC, tiles_N7, *ctx.numbers
    )
    return to_q, to_k, to_v, None if sinks_H is None else to_sinks, None, None, None, None, None


_attend.register_autograd(_differentiate, setup_context=_keep)

OPERATION = torch.ops.pipeline.tiled_attention.default
"""Whose results selective recomputation keeps."""
