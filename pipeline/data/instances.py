"""Instances: what a position of a lap is made of. Here: windows of equal length over a source's circular text.

A source is the circular concatenation of its documents, T tokens, each document closed by the end-of-document token.
With sequence length L, lap e has n = T // L windows; window p is the L + 1 tokens from (phase(e) + p * L) mod T, of
which the last L are targets. phase(e) is a keyed hash mod L and phase(0) is 0, so each lap cuts documents at other
places. Position j of a lap is window pi(j), with pi a bijection of [0, n) keyed by seed, source and lap.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pipeline.data.hashing import key
from pipeline.data.permutation import IntArray, Permutation
from pipeline.errors import UserError

_BLOCK = 1024


class TokenSource(Protocol):
    """What windows need of a dataset. Offsets count tokens from the start of the dataset."""

    @property
    def tokens(self) -> int:
        """Tokens in all."""
        ...

    def read(self, start: int, count: int) -> npt.NDArray[Any]:
        """Token ids [count] from offset `start`, which lie within the dataset."""
        ...

    def document_at(self, token: int) -> int:
        """The document that the token at this offset belongs to."""
        ...

    def document_start(self, document: int) -> int:
        """Offset of a document's first token; of the document after the last one, the number of tokens."""
        ...

    def document_starts(self, start: int, count: int) -> IntArray:
        """Offsets of the documents that start within [start, start + count)."""
        ...


class Span(NamedTuple):
    """A piece of a document."""

    document: int
    """Number of the document in its dataset."""
    start: int
    """First token of the piece, counted from the document's first token."""
    length: int
    """Tokens of the piece."""


class Instances(Protocol):
    """Samples of one source. A position is a place in the source's lap, in [0, count)."""

    @property
    def count(self) -> int:
        """Instances in a lap."""
        ...

    @property
    def tokens(self) -> int:
        """Tokens of a lap."""
        ...

    def at(self, lap: int, position: int) -> list[Span]:
        """The pieces of documents that the instance is made of, in its order; L + 1 tokens in all."""
        ...

    def containing(self, lap: int, document: int) -> IntArray:
        """The positions at which tokens of `document` are targets, in the document's order."""
        ...

    def bounds(self, lap: int, position: int) -> IntArray:
        """For each of the L + 1 tokens the index in the instance at which its document begins there."""
        ...

    def read(self, lap: int, position: int) -> tuple[IntArray, IntArray]:
        """Token ids [L + 1] and bounds [L + 1]."""
        ...


class Windows:
    """Windows of L + 1 tokens over the circular text of one source; an `Instances`.

    Args:
        dataset: The source's documents.
        sequence_length: L.
        seed: Seed of the run.
        source: Name of the source.

    Raises:
        UserError: The source has fewer than L tokens.
    """

    def __init__(self, dataset: TokenSource, sequence_length: int, seed: int, source: str) -> None:
        assert sequence_length >= 1
        self.tokens = dataset.tokens
        self.count = self.tokens // sequence_length
        if self.count == 0:
            raise UserError(
                f"source {source!r} has {self.tokens:,} tokens to train on, fewer than one window of "
                f"train.sequence_length {sequence_length:,}: lower train.sequence_length, give the source more "
                "documents, or leave it out of data.sources"
            )
        self._dataset = dataset
        self._length = sequence_length
        self._seed = seed
        self._source = source
        # A source's positions are asked for one after the other, and permuting many costs little more than one.
        self._permutation = lru_cache(maxsize=4)(self._permutation_of)
        self._block = lru_cache(maxsize=4)(self._block_of)

    def phase(self, lap: int) -> int:
        """Offset of the lap's first window, in [0, L)."""
        return key("phase", self._seed, self._source, lap) % self._length if lap else 0

    def window(self, lap: int, position: int) -> int:
        """Number of the window at a position of the lap, in [0, count)."""
        assert 0 <= position < self.count, (position, self.count)
        return int(self._block(lap, position // _BLOCK)[position % _BLOCK])

    def at(self, lap: int, position: int) -> list[Span]:
        """The pieces of documents in the window, L + 1 tokens in all."""
        spans = []
        for start, count in self._stretches(lap, position):
            document, offset = self._dataset.document_at(start), start
            while offset < start + count:
                end = min(self._dataset.document_start(document + 1), start + count)
                if end > offset:
                    spans.append(Span(document, offset - self._dataset.document_start(document), end - offset))
                document, offset = document + 1, end
        return spans

    def containing(self, lap: int, document: int) -> IntArray:
        """Positions of the lap's windows that have targets in `document`, in the document's order.

        Empty if the document has no tokens or all of them are among the T - n * L that this lap leaves unseen.
        """
        first, end = self._dataset.document_start(document), self._dataset.document_start(document + 1)
        if first == end:
            return np.empty(0, np.int64)
        # Targets counted from the first one of the lap; the document may wrap around the end of the lap.
        begin = (first - self.phase(lap) - 1) % self.tokens
        windows = []
        for low, high in ((begin, min(begin + end - first, self.tokens)), (0, begin + end - first - self.tokens)):
            if low < high:
                windows.append(np.arange(low // self._length, min((high - 1) // self._length + 1, self.count)))
        numbers = np.concatenate(windows)
        _, index = np.unique(numbers, return_index=True)  # a document may begin and end in one window
        return self._permutation(lap).inverse(numbers[np.sort(index)])

    def bounds(self, lap: int, position: int) -> IntArray:
        """For each of the L + 1 tokens the index in the window at which its document begins there."""
        begins, filled = [np.zeros(1, np.int64)], 0
        for start, count in self._stretches(lap, position):
            begins.append(self._dataset.document_starts(start, count) - (start - filled))
            filled += count
        edges = np.concatenate([*begins, [filled]])
        return np.repeat(edges[:-1], edges[1:] - edges[:-1])

    def read(self, lap: int, position: int) -> tuple[IntArray, IntArray]:
        """Token ids [L + 1] and bounds [L + 1] of the window."""
        stretches = [self._dataset.read(start, count) for start, count in self._stretches(lap, position)]
        return np.concatenate(stretches).astype(np.int64, copy=False), self.bounds(lap, position)

    def _stretches(self, lap: int, position: int) -> Iterator[tuple[int, int]]:
        """The window as (start, count) of tokens that lie together in the dataset: two where the text wraps around."""
        start = (self.phase(lap) + self.window(lap, position) * self._length) % self.tokens
        remaining = self._length + 1
        while remaining:
            count = min(remaining, self.tokens - start)
            yield start, count
            start, remaining = 0, remaining - count

    def _permutation_of(self, lap: int) -> Permutation:
        return Permutation(self.count, key("permutation", self._seed, self._source, lap))

    def _block_of(self, lap: int, block: int) -> IntArray:
        positions = np.arange(block * _BLOCK, min((block + 1) * _BLOCK, self.count))
        return self._permutation(lap).forward(positions)
