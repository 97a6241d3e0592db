"""Instances, the samples at the positions of an epoch. Here: windows of equal length over a source's circular text.

Packs of documents, the other kind, are in `packs`.

An epoch is a pass through a source, which a change of the sequence length or the slice may cut short; files and fields
call it `lap`. A source is the circular concatenation of its documents, T tokens, each document closed by the
end-of-document token.
With sequence length L, epoch e has n = T // L windows; window p is the L + 1 tokens from (phase(e) + p * L) mod T, of
which the last L are targets. phase(e) is a keyed hash mod L and phase(0) is 0, so each epoch cuts documents at other
places. Position j of an epoch is window pi(j), with pi a bijection of [0, n) keyed by seed, source and epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pipeline.common.errors import UserError
from pipeline.common.hashing import key
from pipeline.data.datasets.dataset import Pieces, TokenSource
from pipeline.data.order.permutation import IntArray, Permutation

_BLOCK = 1024


class Span(NamedTuple):
    """A piece of a document."""

    document: int
    """Number of the document in its dataset."""
    start: int
    """First token of the piece, counted from the document's first token."""
    length: int
    """Tokens of the piece."""


class Instances(Protocol):
    """Samples of one source. A position is a place in the source's epoch, in [0, count)."""

    packed: bool
    """True if the samples are packs of documents, False if they are windows."""

    @property
    def count(self) -> int:
        """Instances in an epoch."""

    @property
    def tokens(self) -> int:
        """Tokens of an epoch."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the token ids."""

    @property
    def folder(self) -> Path:
        """Folder of the dataset, for messages."""

    def at(self, epoch: int, position: int, ahead: int = 0) -> list[Span]:
        """The pieces of documents that the instance is made of, in its order.

        Of a window they are L + 1 tokens in all, of a pack its targets.

        Args:
            epoch: Of the instance.
            position: Of the instance.
            ahead: Tokens behind a window that are wanted besides.
        """

    def containing(self, epoch: int, document: int, *, shifts: bool = True) -> IntArray:
        """The positions at which tokens of `document` are targets, in the document's order.

        Args:
            epoch: Of the positions.
            document: Number of the document.
            shifts: Whether the last L tokens of a window are its targets, or the first L.
        """

    def places(self, epoch: IntArray, position: IntArray) -> IntArray:
        """Places of instances, as the other methods take them; arrays of one length."""

    def part_view(self, part: int, start: int, end: int) -> npt.NDArray[Any]:
        """The token ids [start, end) of a part of the dataset, which may lie in its file: nobody writes to them."""


class EpochOrder:
    """Order of the instances of a source: position of an epoch -> number of the instance, and back.

    Args:
        seed: Seed of the run.
        source: Name of the source.
        count: Instances of an epoch.
    """

    def __init__(self, seed: int, source: str, count: int) -> None:
        self.count = count
        self._permutation = lru_cache(maxsize=4)(lambda epoch: epoch_permutation(seed, source, epoch, count))
        self._block = lru_cache(maxsize=4)(self._block_of)

    def numbers(self, epoch: IntArray, position: IntArray) -> IntArray:
        """Numbers of the instances at positions, in [0, count); arrays of one length."""
        epochs = set(epoch.tolist())
        if len(epochs) == 1:
            return self._numbers_of(epochs.pop(), position)
        result = np.empty(len(position), np.int64)
        for number in epochs:
            chosen = (epoch == number).nonzero()[0]
            result[chosen] = self._numbers_of(number, position[chosen])
        return result

    def number(self, epoch: int, position: int) -> int:
        """Number of the instance at a position."""
        return int(self.numbers(np.array([epoch]), np.array([position]))[0])

    def positions(self, epoch: int, numbers: IntArray) -> IntArray:
        """Positions of instances: the inverse of `numbers`."""
        return self._permutation(epoch).inverse(numbers)

    def _numbers_of(self, epoch: int, position: IntArray) -> IntArray:
        """`numbers` in one epoch; at least one position."""
        low, high = int(position.min()), int(position.max())
        assert low >= 0 and high < self.count, (low, high, self.count)
        blocks = range(low // _BLOCK, high // _BLOCK + 1)
        if len(blocks) > 2:
            return self._permutation(epoch).forward(position)
        # A source's positions are asked for one after the other, so its neighbours will be needed as well.
        found = [self._block(epoch, block) for block in blocks]
        joined = found[0] if len(found) == 1 else np.concatenate(found)
        numbers: IntArray = joined[position - blocks.start * _BLOCK]
        return numbers

    def _block_of(self, epoch: int, block: int) -> IntArray:
        return self._permutation(epoch).forward(np.arange(block * _BLOCK, min((block + 1) * _BLOCK, self.count)))


class Windows:
    """Windows of L + 1 tokens over the circular text of one source; an `Instances`.

    The place of a window is the offset in the text of its first token.

    Args:
        dataset: The source's documents.
        sequence_length: L.
        seed: Seed of the run.
        source: Name of the source.

    Raises:
        UserError: The source has fewer than L tokens.
    """

    packed = False

    def __init__(self, dataset: TokenSource, sequence_length: int, seed: int, source: str) -> None:
        assert sequence_length >= 1
        self.tokens = dataset.tokens
        self.dtype = dataset.dtype
        self.folder = dataset.folder
        self.count = self.tokens // sequence_length
        if self.count == 0:
            raise UserError(
                f"source {source!r} has {self.tokens:,} tokens to train on, fewer than one window of "
                f"train.sequence_length {sequence_length:,}: lower train.sequence_length, give the source more "
                "documents, or leave it out of data.sources"
            )
        self._dataset = dataset
        self.part_view, self.starts_in = dataset.part_view, dataset.starts_in
        self._length = sequence_length
        self._seed = seed
        self._source = source
        self._order = EpochOrder(seed, source, self.count)

    def phase(self, epoch: int) -> int:
        """Offset of the epoch's first window, in [0, L)."""
        return epoch_phase(self._seed, self._source, epoch, self._length)

    def window(self, epoch: int, position: int) -> int:
        """Number of the window at a position of the epoch, in [0, count)."""
        return self._order.number(epoch, position)

    def at(self, epoch: int, position: int, ahead: int = 0) -> list[Span]:
        """The pieces of documents in the window, L + 1 tokens in all, and in what is `ahead`."""
        spans = []
        for start, count in self._stretches(epoch, position, self._length + 1 + ahead):
            document, offset = self._dataset.document_at(start), start
            while offset < start + count:
                end = min(self._dataset.document_start(document + 1), start + count)
                if end > offset:
                    spans.append(Span(document, offset - self._dataset.document_start(document), end - offset))
                document, offset = document + 1, end
        return spans

    def containing(self, epoch: int, document: int, *, shifts: bool = True) -> IntArray:
        """Positions of the epoch's windows that have targets in `document`, see `Instances`.

        Empty if the document has no tokens or all of them are among the T - n * L that this epoch leaves unseen.
        """
        first, end = self._dataset.document_start(document), self._dataset.document_start(document + 1)
        if first == end:
            return np.empty(0, np.int64)
        # Targets counted from the first one of the epoch; the document may wrap around the end of the epoch.
        begin = (first - self.phase(epoch) - shifts) % self.tokens
        windows = []
        for low, high in ((begin, min(begin + end - first, self.tokens)), (0, begin + end - first - self.tokens)):
            if low < high:
                windows.append(np.arange(low // self._length, min((high - 1) // self._length + 1, self.count)))
        numbers = np.concatenate(windows)
        _, index = np.unique(numbers, return_index=True)  # a document may begin and end in one window
        return self._order.positions(epoch, numbers[np.sort(index)])

    def places(self, epoch: IntArray, position: IntArray) -> IntArray:
        """Offset in the text of each window's first token."""
        phases = {number: self.phase(number) for number in set(epoch.tolist())}
        phase = phases[int(epoch[0])] if len(phases) == 1 else np.array([phases[number] for number in epoch.tolist()])
        return (phase + self._order.numbers(epoch, position) * self._length) % self.tokens

    def pieces(self, places: IntArray, ahead: int = 0) -> Pieces:
        """The L + 1 tokens of windows, cut where the text begins again and where parts of the dataset end.

        Args:
            places: From `places`; `Pieces.row` is an index into them.
            ahead: Tokens behind each window that are wanted besides.
        """
        size = self._length + 1 + ahead
        counts = np.minimum(self.tokens - places, size)
        pieces = self._dataset.pieces(places, counts)
        around = (counts < size).nonzero()[0]
        # More than once only where a short text has to give tokens behind a window.
        while around.size:
            before = counts[around]
            more = np.minimum(self.tokens, size - before)
            again = self._dataset.pieces(np.zeros_like(around), more)
            again = again._replace(row=around[again.row], column=before[again.row] + again.column)
            pieces = Pieces(*(np.concatenate(each) for each in zip(pieces, again, strict=True)))
            counts[around] += more
            around = around[counts[around] < size]
        return pieces

    def fill_weights(self, part: int, start: int, out: npt.NDArray[np.float32]) -> None:
        """Copy the loss weights of a piece's documents into `out`, token by token."""
        self._dataset.fill_weights(part, start, out)

    def fill_mask(self, part: int, start: int, out: npt.NDArray[np.uint8]) -> None:
        """Copy the mask of a piece into `out`, see `target_mask`."""
        self._dataset.fill_mask(part, start, out)

    def starts(self, places: IntArray) -> tuple[IntArray, IntArray]:
        """Index into `places` and index in the window of each token that begins a document, or its window."""
        pieces = self.pieces(places)
        return distinct_starts(*begins_of(pieces, *self.starts_in(pieces)), len(places), self._length + 1)

    def ranges_of(self, documents: Sequence[tuple[int, int]]) -> IntArray:
        """Offsets [n, 2] of the stretches of text that documents [first, end) are; ascending, not touching."""
        merged: list[list[int]] = []
        for first, end in sorted(
            (self._dataset.document_start(a), self._dataset.document_start(b)) for a, b in documents
        ):
            if merged and first <= merged[-1][1]:
                merged[-1][1] = max(end, merged[-1][1])
            elif first < end:
                merged.append([first, end])
        return np.array(merged, np.int64).reshape(-1, 2)

    def targets_of(self, place: int, ranges: IntArray, ahead: int = 0) -> list[tuple[int, int]]:
        """The targets [first, end) of a window, numbered from 0, that belong to some documents.

        Args:
            place: From `places`.
            ranges: From `ranges_of`.
            ahead: Tokens behind the window that are targets besides.
        """
        found, length = [], self._length + ahead
        # Each time that the text begins again within the window.
        for begin in range(place + 1, -length, -self.tokens):
            low = int(np.searchsorted(ranges[:, 1], begin, side="right"))
            high = int(np.searchsorted(ranges[:, 0], begin + length, side="left"))
            for first, end in ranges[low:high].tolist():
                found.append((max(first - begin, 0), min(end - begin, length)))
        return found

    def fill(self, place: int, out: npt.NDArray[Any]) -> None:
        """Copy the token ids of a window into `out` [L + 1]."""
        before = self.tokens - place
        if before >= len(out):
            self._dataset.fill(place, out)
        else:
            self._dataset.fill(place, out[:before])
            self._dataset.fill(0, out[before:])

    def bounds(self, epoch: int, position: int) -> IntArray:
        """For each of the L + 1 tokens the index in the window at which its document begins there."""
        _, columns = self.starts(np.array([self._place(epoch, position)]))
        return bounds_of(columns, self._length + 1)

    def read(self, epoch: int, position: int) -> tuple[IntArray, IntArray]:
        """Token ids [L + 1] and bounds [L + 1] of the window."""
        ids = np.empty(self._length + 1, np.int64)
        self.fill(self._place(epoch, position), ids)
        return ids, self.bounds(epoch, position)

    def _place(self, epoch: int, position: int) -> int:
        return int(self.places(np.array([epoch]), np.array([position]))[0])

    def _stretches(self, epoch: int, position: int, size: int) -> Iterator[tuple[int, int]]:
        """A window as (start, count) of tokens that lie together in the dataset: several where the text wraps around.

        Args:
            epoch: Of the window.
            position: Of the window.
            size: Tokens from its first one on.
        """
        start = self._place(epoch, position)
        while size:
            count = min(size, self.tokens - start)
            yield start, count
            start, size = 0, size - count


def epoch_phase(seed: int, source: str, epoch: int, length: int) -> int:
    """Offset of the first window of an epoch of windows of L = `length` targets, in [0, L)."""
    return key("phase", seed, source, epoch) % length if epoch else 0


def epoch_permutation(seed: int, source: str, epoch: int, count: int) -> Permutation:
    """The window at each position of an epoch of `count` windows."""
    return Permutation(count, key("permutation", seed, source, epoch))


def bounds_of(starts: IntArray, size: int) -> IntArray:
    """For each of `size` tokens the last of the ascending `starts`, of which the first is 0, at or before it."""
    return np.repeat(starts, np.diff(starts, append=size))


def begins_of(pieces: Pieces, number: IntArray, token: IntArray) -> tuple[IntArray, IntArray]:
    """Documents that start in pieces, as `Instances.starts_in` has them: row, and column of their first tokens."""
    return pieces.row[number], (pieces.column - pieces.start)[number] + token


def distinct_starts(row: IntArray, column: IntArray, rows: int, size: int) -> tuple[IntArray, IntArray]:
    """Starts of documents in instances of `size` tokens, and of the instances themselves: each once, ascending."""
    flat = np.concatenate([np.arange(rows) * size, row * size + column])
    flat.sort()
    return np.divmod(flat[np.diff(flat, prepend=-1) > 0], size)
