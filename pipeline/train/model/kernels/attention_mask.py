"""Masks of attention, and the interface of kernels that compute it.

A query sees an interval of the keys: those that its reach allows, of its document.

Shapes: B batch, S positions of the sequence, C queries of a piece of it, T keys of the piece, H query heads, K key and
value heads, E head size, V size of a value head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pipeline.train.model.part_spec import Reach

_EVERYTHING = Reach(None, None)


def mask_by_row(positions_BS: Tensor, reach: Reach, keys: int) -> Tensor:
    """`AttentionMask.mask` of rows with unequal pasts, whose queries are at `positions_BS`: bool [B, 1, S, T]."""
    assert reach.ahead == 0, "what follows is not there yet"
    k_T = torch.arange(keys, device=positions_BS.device)
    q_BS1 = positions_BS[..., None]
    mask = k_T <= q_BS1
    if reach.back is not None:
        mask = mask & (k_T >= q_BS1 - reach.back)
    return mask[:, None]


class Documents:
    """Documents of a batch, on the device and on the host.

    Args:
        bounds_BS: For every position the first one of its document.
        starts: What `Batch.starts` is, or what makes it when it is asked for. None: it is taken from the bounds, for
            which the host waits if they are on a GPU.
        prefix_BS: For every position the end of the prefix of its document: a causal query sees also the keys before
            that, so that a prefix sees itself in both directions. None: there are no prefixes.
    """

    def __init__(
        self,
        bounds_BS: Tensor,
        starts: Tensor | Callable[[], Tensor] | None = None,
        prefix_BS: Tensor | None = None,
    ) -> None:
        self.bounds_BS = bounds_BS
        self.prefix_BS = prefix_BS
        self._starts = starts

    @property
    def length(self) -> int:
        """Positions of the sequence."""
        return self.bounds_BS.shape[1]

    @cached_property
    def by_row(self) -> list[list[int]]:
        """Positions at which documents begin, by row, ascending; the first is 0."""
        rows, length = self.bounds_BS.shape
        starts = self._starts() if callable(self._starts) else self._starts
        if starts is None:
            bounds = self.bounds_BS.cpu()
            starts = (bounds == torch.arange(length)).flatten().nonzero()[:, 0]
        by_row: list[list[int]] = [[] for _ in range(rows)]
        for start in starts.tolist():
            by_row[start // length].append(start % length)
        return by_row

    @cached_property
    def numbers_BS(self) -> Tensor:
        """Number of the document of every position in its row, from 0."""
        positions_S = torch.arange(self.length, device=self.bounds_BS.device)
        return (self.bounds_BS == positions_S).cumsum(1) - 1


class DocumentSpan(NamedTuple):
    """A document, as far as queries of a piece are in it; positions of queries and of keys, from and to."""

    first: int
    end: int
    key: int
    key_end: int


@dataclass(frozen=True)
class AttentionMask:
    """The keys that a piece of the queries sees: of its document, within reach.

    The keys of the piece are the first `keys` ones of the sequence. Make it with `of`, or with `across` where keys are
    those of another sequence.
    """

    samples: int
    start: int
    """Position of the first query."""
    end: int
    """Position after the last query."""
    keys: int
    """Number of keys that the piece needs: those from the first on; up to its end if it is causal."""
    reach: Reach
    """Reach of a query, without limits that hide nothing."""
    device: torch.device
    documents: Documents | None = None
    """Of the keys."""
    query_documents: Documents | None = None
    """Of the queries, where those are another sequence: its document i sees document i of the keys."""

    @classmethod
    def of(
        cls,
        samples: int,
        piece: tuple[int, int],
        reach: Reach,
        device: torch.device,
        documents: Documents | None = None,
        length: int | None = None,
    ) -> AttentionMask:
        """The mask of a piece of a sequence that attends to itself.

        Args:
            samples: Rows of the batch.
            piece: Positions of the queries, from and to.
            reach: Of any size.
            device: Where the tensors are.
            documents: None: the sequence is one.
            length: Positions of the sequence. None: they end with the piece.
        """
        start, end = piece
        length = end if length is None else length
        prefixed = documents is not None and documents.prefix_BS is not None
        assert not prefixed or reach.ahead == 0, "a prefix is that of causal queries"
        back = None if reach.back is None or reach.back >= end - 1 else reach.back
        ahead = reach.ahead
        if ahead and ahead >= length - 1 - start:
            ahead = None
        keys = length if ahead is None or prefixed else min(length, end + ahead)
        return cls(samples, start, end, keys, Reach(back, ahead), device, documents)

    @classmethod
    def across(
        cls,
        samples: int,
        piece: tuple[int, int],
        keys: int,
        device: torch.device,
        documents: tuple[Documents, Documents] | None = None,
    ) -> AttentionMask:
        """The mask of queries that attend to another sequence, of `keys` positions.

        Args:
            samples: Rows of the batch.
            piece: Positions of the queries in theirs, from and to.
            keys: Positions of the other sequence.
            device: Where the tensors are.
            documents: Of the queries and of the keys, equally many in each row. None: queries see all keys.
        """
        of_queries, of_keys = (None, None) if documents is None else documents
        return cls(samples, *piece, keys, _EVERYTHING, device, of_keys, of_queries)

    @property
    def queries(self) -> int:
        """Queries of a sample."""
        return self.end - self.start

    @property
    def causal(self) -> bool:
        """True if a query sees all keys up to itself, and only those."""
        return self.documents is None and self.reach == Reach()

    @property
    def full(self) -> bool:
        """True if a query sees all keys."""
        return self.documents is None and self.reach == _EVERYTHING

    @property
    def prefixed(self) -> bool:
        """True if documents have prefixes."""
        return self.documents is not None and self.documents.prefix_BS is not None

    @property
    def sees_ahead(self) -> bool:
        """True if a query sees keys after itself."""
        return self.prefixed or self.reach.ahead != 0

    @property
    def bounds_BC(self) -> Tensor | None:
        """First position of the document of every query."""
        return None if self.documents is None else self.documents.bounds_BS[:, self.start : self.end]

    def interval(self) -> tuple[Tensor, Tensor]:
        """The first key that each query sees, and the first one after those, [B or 1, C] each; they do not descend."""
        q_1C = torch.arange(self.start, self.end, device=self.device)[None]
        back, ahead = self.reach.back, self.reach.ahead
        low_BC = torch.zeros_like(q_1C) if back is None else (q_1C - back).clamp(min=0)
        high_BC = torch.full_like(q_1C, self.keys) if ahead is None else (q_1C + ahead + 1).clamp(max=self.keys)
        if self.documents is None:
            return low_BC, high_BC
        place = slice(self.start, self.end)
        if self.query_documents is not None:
            numbers_BT = self.documents.numbers_BS
            numbers_BC = self.query_documents.numbers_BS[:, place].contiguous()
            ends_BC = torch.searchsorted(numbers_BT, numbers_BC, right=True)
            return torch.searchsorted(numbers_BT, numbers_BC), ends_BC
        bounds_BC = self.documents.bounds_BS[:, place].contiguous()
        low_BC = bounds_BC if back is None else torch.maximum(low_BC, bounds_BC)
        if self.documents.prefix_BS is not None:
            high_BC = torch.maximum(high_BC, self.documents.prefix_BS[:, place])
        elif ahead != 0:
            ends_BC = torch.searchsorted(self.documents.bounds_BS, bounds_BC, right=True)
            high_BC = torch.minimum(high_BC, ends_BC)
        return low_BC, high_BC

    def mask(self) -> Tensor | None:
        """The keys that are seen, bool [B or 1, 1, C, T], on the device of the piece.

        None where causality alone says the same, and a kernel needs no mask: the queries are all of the keys, or one,
        which is the last of the keys.
        """
        if self.causal and self.queries in (1, self.keys):
            return None
        return self.seen()

    def seen(self) -> Tensor:
        """Keys that are seen, as `mask` has them, and never None."""
        low_BC, high_BC = self.interval()
        k_T = torch.arange(self.keys, device=self.device)
        return ((k_T >= low_BC[..., None]) & (k_T < high_BC[..., None]))[:, None]

    def spans(self) -> list[list[DocumentSpan]]:
        """Documents by row, of which queries are in the piece. Without documents there is one row, for all of them."""
        if self.documents is None:
            return [[DocumentSpan(self.start, self.end, 0, self.keys)]]
        return [[span for span in row if span.first < span.end] for row in self.all_spans()]

    def all_spans(self) -> list[list[DocumentSpan]]:
        """All documents of the keys, by row; what is before or after the piece has no queries."""
        assert self.documents is not None
        of_keys = self.documents.by_row
        of_queries = of_keys if self.query_documents is None else self.query_documents.by_row
        length = (self.query_documents or self.documents).length
        rows = []
        for starts, key_starts in zip(of_queries, of_keys, strict=True):
            row = []
            keys = pairwise([*key_starts, self.documents.length])
            for (begin, end), (key, key_end) in zip(pairwise([*starts, length]), keys, strict=True):
                first, last = max(begin, self.start), max(self.start, min(end, self.end))
                if key < self.keys:
                    row.append(DocumentSpan(first, last, key, min(key_end, self.keys)))
            rows.append(row)
        return rows


@dataclass(frozen=True)
class Terms:
    """Terms of a softmax besides the mask."""

    scale: float
    """Factor on the products of queries and keys."""
    soft_cap: float | None = None
    """Scores become cap * tanh(scores / cap) before the mask."""


class Kernel(Protocol):
    """A way to compute attention.

    `prepare` is called once in a forward pass for each mask, outside of what is compiled, and layers share what it
    returns. Nothing in it may wait for a GPU.
    """

    def prepare(self, mask: AttentionMask) -> Any:
        """Prepare a mask for `__call__`."""

    def __call__(
        self,
        q_BCHE: Tensor,
        k_BTKE: Tensor,
        v_BTKV: Tensor,
        prepared: Any,
        terms: Terms,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Every query's sum of the values that it sees, [B, C, H, V].

        With sinks each head has a logit that takes part in the softmax and has no value.
        """


class Prepared:
    """Results of `Kernel.prepare`, of which that without documents is made once.

    It is the same for every micro-batch, so that all that are under way share one. The last few masks are kept.
    """

    _KEPT = 12
    """More than a pass has, with two pieces for each reach of the layers."""

    def __init__(self) -> None:
        self._made: dict[tuple[Kernel, AttentionMask], Any] = {}

    def __call__(self, kernel: Kernel, mask: AttentionMask) -> Any:
        """`kernel.prepare(mask)`."""
        if mask.documents is not None:
            return kernel.prepare(mask)
        key = kernel, mask
        if key not in self._made:
            for oldest in list(self._made)[: len(self._made) - self._KEPT + 1]:
                del self._made[oldest]
            self._made[key] = kernel.prepare(mask)
        return self._made[key]
