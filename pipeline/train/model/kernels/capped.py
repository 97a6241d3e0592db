"""Attention with soft caps (Gemma 2) by hand, in blocks of queries: torch has no kernel for it on a CPU.

Scores become cap * tanh(scores / cap) before the mask. Backward computes them again, so that both passes hold the
scores of one block.

Shapes: B batch, C queries, R queries of a block, T keys, H query heads, K key and value heads, E head size, V size of a
value head, M = H / K * R rows of the products of a key head.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_SCORES_AT_ONCE = 2**20
"""Scores of a block: 4 MiB, of which and of what follows from them most stays in a cache."""


def forward(
    q_BHCE: Tensor, k_BKTE: Tensor, v_BKTV: Tensor, hidden: Tensor | None, causal: bool, scale: float, cap: float
) -> tuple[Tensor, Tensor]:
    """Outputs [B, H, C, V], and logarithms of the sums of exponentials [B, H, C].

    Args:
        q_BHCE: Queries.
        k_BKTE: Keys; consecutive query heads share one.
        v_BKTV: Values.
        hidden: bool [B or 1, 1, C, T]: which keys a query does not see. None: see `causal`.
        causal: There are as many queries as keys, and each sees those up to itself. False: it sees all.
        scale: Factor on the products.
        cap: Bound of the scores.
    """
    samples, heads, queries, _ = q_BHCE.shape
    wide = torch.promote_types(q_BHCE.dtype, torch.float32)
    out_BHCV = q_BHCE.new_empty((samples, heads, queries, v_BKTV.shape[-1]))
    sums_BHC = q_BHCE.new_empty((samples, heads, queries), dtype=wide)
    k_BKTE, v_BKTV = k_BKTE.to(wide), v_BKTV.to(wide)
    for block, seen in _blocks(q_BHCE, k_BKTE, causal):
        tanh = _tanh(q_BHCE[:, :, block].to(wide), k_BKTE[:, :, :seen], scale / cap)
        scores = tanh.mul_(cap)
        _hide(scores, hidden, block, causal, -torch.inf)
        most = scores.amax(-1, keepdim=True)
        weights = scores.sub_(most).exp_()
        sums = weights.sum(-1, keepdim=True)
        out = _flat(weights, k_BKTE) @ v_BKTV[:, :, :seen]
        out_BHCV[:, :, block] = out.view(*sums.shape[:3], -1) / sums
        sums_BHC[:, :, block] = sums.log_().add_(most)[..., 0]
    return out_BHCV, sums_BHC


def backward(
    gradient_BHCV: Tensor,
    q_BHCE: Tensor,
    k_BKTE: Tensor,
    v_BKTV: Tensor,
    out_BHCV: Tensor,
    sums_BHC: Tensor,
    hidden: Tensor | None,
    causal: bool,
    scale: float,
    cap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, see `forward`."""
    wide = sums_BHC.dtype
    to_q = torch.empty_like(q_BHCE)
    to_k, to_v = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k_BKTE, v_BKTV))
    k_BKTE, v_BKTV = k_BKTE.to(wide), v_BKTV.to(wide)
    for block, seen in _blocks(q_BHCE, k_BKTE, causal):
        q, gradient = q_BHCE[:, :, block].to(wide), gradient_BHCV[:, :, block].to(wide)
        k, v = k_BKTE[:, :, :seen], v_BKTV[:, :, :seen]
        tanh = _tanh(q, k, scale / cap)
        weights = (tanh * cap).sub_(sums_BHC[:, :, block, None]).exp_()
        _hide(weights, hidden, block, causal, 0.0)
        of_out = _flat(gradient, k)
        to_v[:, :, :seen] += _flat(weights, k).transpose(2, 3) @ of_out
        # Of the softmax, then of the cap: 1 - tanh ** 2.
        of_scores = (of_out @ v.transpose(2, 3)).view(tanh.shape)
        of_scores -= torch.linalg.vecdot(gradient, out_BHCV[:, :, block].to(wide))[..., None]
        of_scores.mul_(weights)
        of_scores.addcmul_(of_scores * tanh, tanh, value=-1)
        of_scores = _flat(of_scores.mul_(scale), k)
        to_q[:, :, block] = (of_scores @ k).view(q.shape)
        to_k[:, :, :seen] += of_scores.transpose(2, 3) @ _flat(q, k)
    return to_q, to_k.to(q_BHCE.dtype), to_v.to(q_BHCE.dtype)


def _blocks(q_BHCE: Tensor, k_BKTE: Tensor, causal: bool) -> Iterator[tuple[slice, int]]:
    """Blocks of the queries, and how many keys are seen of each."""
    samples, heads, queries, _ = q_BHCE.shape
    keys = k_BKTE.shape[2]
    rows = max(8, _SCORES_AT_ONCE // (samples * heads * keys))
    for begin in range(0, queries, rows):
        end = min(begin + rows, queries)
        yield slice(begin, end), end if causal else keys


def _flat(x_BHRE: Tensor, k_BKTE: Tensor) -> Tensor:
    """Query heads that share a key head one below the other, [B, K, M, E]."""
    return x_BHRE.reshape(len(x_BHRE), k_BKTE.shape[1], -1, x_BHRE.shape[-1])


def _tanh(q_BHRE: Tensor, k_BKTE: Tensor, factor: float) -> Tensor:
    """Scores over the cap, in their bounds: [B, H, R, T]."""
    products_BKMT = _flat(q_BHRE * factor, k_BKTE) @ k_BKTE.transpose(2, 3)
    return products_BKMT.view(*q_BHRE.shape[:3], -1).tanh_()


def _hide(x_BHRT: Tensor, hidden: Tensor | None, block: slice, causal: bool, value: float) -> None:
    """Put a value where a query does not see a key."""
    if hidden is not None:
        x_BHRT.masked_fill_(hidden[:, :, block], value)
    elif causal:
        # Of the keys that the first query of the block sees, all see all.
        late = x_BHRT[..., block.start :]
        late.masked_fill_(torch.ones(late.shape[-2:], dtype=torch.bool, device=late.device).triu_(1), value)
