"""Masks of attention, and the interface of kernels that compute it.

Shapes: B batch, S positions of the sequence, C queries of a piece of it, T keys up to the end of the piece, H query
heads, K key and value heads, E head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor


def attention_mask(
    bounds_BS: Tensor | None, window: int | None, queries: int, keys: int, device: torch.device
) -> Tensor | None:
    """Mask of the keys that a query sees, bool [B or 1, 1, S, T]: bounds[q] <= k <= q and k > q - window.

    The queries are the last of the keys. None where causality alone says the same: the kernel needs no mask then.
    """
    if bounds_BS is None and (window is None or window >= keys) and queries in (1, keys):
        return None
    q_S1 = torch.arange(keys - queries, keys, device=device)[:, None]
    k_T = torch.arange(keys, device=device)
    mask = (k_T <= q_S1)[None]
    if bounds_BS is not None:
        mask = mask & (k_T >= bounds_BS[:, :, None])
    if window is not None:
        mask = mask & (k_T > q_S1 - window)
    return mask[:, None]


def mask_by_row(positions_BS: Tensor, window: int | None, keys: int) -> Tensor:
    """`attention_mask` of rows with unequal pasts, whose queries are at `positions_BS`: bool [B, 1, S, T]."""
    k_T = torch.arange(keys, device=positions_BS.device)
    q_BS1 = positions_BS[..., None]
    mask = k_T <= q_BS1
    if window is not None:
        mask = mask & (k_T > q_BS1 - window)
    return mask[:, None]


class Documents:
    """First positions of the documents of a batch, on the device and on the host.

    Args:
        bounds_BS: For every position the first one of its document.
        starts: What `Batch.starts` is. None: it is taken from the bounds, for which the host waits if they are on a
            GPU.
    """

    def __init__(self, bounds_BS: Tensor, starts: Tensor | None = None) -> None:
        self.bounds_BS = bounds_BS
        self._starts = starts

    @cached_property
    def by_row(self) -> list[list[int]]:
        """Positions at which documents begin, by row, ascending; the first is 0."""
        rows, length = self.bounds_BS.shape
        starts = self._starts
        if starts is None:
            bounds = self.bounds_BS.cpu()
            starts = (bounds == torch.arange(length)).flatten().nonzero()[:, 0]
        by_row: list[list[int]] = [[] for _ in range(rows)]
        for start in starts.tolist():
            by_row[start // length].append(start % length)
        return by_row


@dataclass(frozen=True)
class AttentionMask:
    """The keys that a piece of the queries sees: of its document up to itself, and no more than `window` of them.

    The keys of the piece are those of the sequence up to the piece's end.
    """

    samples: int
    start: int
    """Position of the first query."""
    end: int
    """Position behind the last query, and so the number of keys."""
    window: int | None
    """Positions that a query attends to at most; None also if there are no more keys than that."""
    device: torch.device
    documents: Documents | None = None

    @classmethod
    def of(
        cls,
        samples: int,
        piece: tuple[int, int],
        window: int | None,
        device: torch.device,
        documents: Documents | None = None,
    ) -> AttentionMask:
        """The mask of a piece, given its positions from and to, and a window of any size."""
        start, end = piece
        return cls(samples, start, end, None if window is None or window >= end else window, device, documents)

    @property
    def queries(self) -> int:
        """Queries of a sample."""
        return self.end - self.start

    @property
    def causal(self) -> bool:
        """True if a query sees all keys up to itself."""
        return self.documents is None and self.window is None

    @property
    def bounds_BC(self) -> Tensor | None:
        """For every query the first position of its document."""
        return None if self.documents is None else self.documents.bounds_BS[:, self.start : self.end]

    def mask(self) -> Tensor | None:
        """`attention_mask` of the piece, on its device."""
        return attention_mask(self.bounds_BC, self.window, self.queries, self.end, self.device)

    def spans(self) -> list[list[tuple[int, int, int]]]:
        """Documents by row, of which queries are in the piece: first query, end of the queries, first key.

        Positions are those of the sequence. Without documents there is one row, for all of them.
        """
        if self.documents is None:
            return [[(self.start, self.end, 0)]]
        return [
            [
                (max(begin, self.start), min(behind, self.end), begin)
                for begin, behind in pairwise([*starts, max(self.end, starts[-1] + 1)])
                if behind > self.start and begin < self.end
            ]
            for starts in self.documents.by_row
        ]


class Kernel(Protocol):
    """A way to compute attention.

    `prepare` is called once in a forward pass for each sight, outside of what is compiled, and layers share what it
    returns. Nothing in it may wait for a GPU.
    """

    def prepare(self, sight: AttentionMask) -> Any:
        """Prepare a mask for `__call__`."""

    def __call__(self, q_BCHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, prepared: Any, scale: float) -> Tensor:
        """Every query's sum of the values that it sees, [B, C, H, E]."""


class Prepared:
    """Results of `Kernel.prepare`, of which that without documents is made once.

    It is the same for every micro-batch, so that all that are under way share one. The last few sights are kept.
    """

    _KEPT = 16

    def __init__(self) -> None:
        self._made: dict[tuple[Kernel, AttentionMask], Any] = {}

    def __call__(self, kernel: Kernel, sight: AttentionMask) -> Any:
        """`kernel.prepare(sight)`."""
        if sight.documents is not None:
            return kernel.prepare(sight)
        key = kernel, sight
        if key not in self._made:
            for oldest in list(self._made)[: len(self._made) - self._KEPT + 1]:
                del self._made[oldest]
            self._made[key] = kernel.prepare(sight)
        return self._made[key]
