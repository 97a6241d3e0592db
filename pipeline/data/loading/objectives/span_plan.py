"""Span corruption of windows with several documents: how much noise each gets, so that sizes are always the same.

A window has L tokens in m pieces of documents. With N noise tokens in K runs, and u = 1 or 2 tokens more for each piece
in the encoder (its mode token, if there is one, and nothing else of it), the sizes are

    encoder  E = L - N + K + (u - 1) m + c        decoder  T = N + K + m

where the m of the decoder are its end-of-document tokens and c, 0 or 1, closes the encoder's text with one. So
2 K = E + T - L - u m - c, where c makes it even, and N = T - K - m.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pipeline.data.order.permutation import IntArray


class WindowPieces(NamedTuple):
    """WindowPieces of documents in the L tokens of a window, in its order; m of them."""

    starts: IntArray
    """[m] first token."""
    ends: IntArray
    """[m] the token behind the last one."""
    text: IntArray
    """[m] tokens that may be noise: all, but for the last one of a document."""


class NoisePlan(NamedTuple):
    """Noise of a window."""

    pieces: WindowPieces
    """Of documents; neighbours may have been joined."""
    noise: IntArray
    """[m] N of each piece."""
    spans: IntArray
    """[m] K of each piece."""
    closing: int
    """c"""


@dataclass(frozen=True)
class Budget:
    """Positions that a denoiser has for each window."""

    encoder: int
    """E"""
    decoder: int
    """T"""
    mode: bool
    """Whether the encoder's text of each piece begins with a mode token."""
    prefix: bool
    """One span for each piece, at its end. Of the encoder up to E is used, and c is 1."""

    def plan(self, begins: IntArray, length: int) -> NoisePlan:
        """Noise of each piece of a window.

        A window with too many pieces for its noise is corrupted as if it had fewer: the shortest pieces are joined to
        those before them, as few as possible. In a joined piece, the end of a document inside it is text as any other.

        Args:
            begins: Tokens of the L + 1 at which documents begin, ascending; 0 is the first.
            length: L.
        """
        starts = begins[: int(np.searchsorted(begins, length))]
        whole = len(begins) > len(starts)  # the window's last token ends its document
        # More pieces than this never fit, since each takes a position of the decoder and there is at least one span.
        most = (self.encoder + self.decoder - length - 2) // (1 + self.mode)
        joined = max(0, len(starts) - most, len(starts) - (self.decoder - 2))
        by_size = None
        while True:
            kept = starts
            if joined:
                if by_size is None:
                    by_size = np.argsort(np.diff(starts, append=length)[1:], kind="stable") + 1
                kept = np.delete(starts, by_size[:joined])
            found = self._deal(_pieces(kept, length, whole), length)
            if found is not None:
                return found
            joined += 1
            assert joined < len(starts), "a window that is one piece has room for its noise: `Budget` of short windows"

    def _deal(self, pieces: WindowPieces, length: int) -> NoisePlan | None:
        """The plan for these pieces; None if they have no room for it."""
        count = len(pieces.starts)
        free = self.encoder + self.decoder - length - (1 + self.mode) * count
        closing = 1 if self.prefix else free % 2
        spans = (free - closing) // 2
        room = pieces.text // 2
        if self.prefix:
            room = np.minimum(room, 1)
            spans = min(spans, int(room.sum()))
        noise = self.decoder - spans - count
        if not 1 <= spans <= noise:
            return None
        if count == 1:  # what follows, in short
            text = int(pieces.text[0])
            fits = spans <= room[0] and noise + spans <= text
            return NoisePlan(pieces, np.array([noise]), np.array([spans]), closing) if fits else None
        if spans > room.sum():
            return None
        by_piece = _largest(pieces.text, room, spans) if self.prefix else _deal(spans, room)
        more = np.where(by_piece > 0, pieces.text - 2 * by_piece, 0)
        if noise - spans > more.sum():
            return None
        return NoisePlan(pieces, by_piece + _deal(noise - spans, more), by_piece, closing)


def _pieces(starts: IntArray, length: int, whole: bool) -> WindowPieces:
    ends = np.concatenate((starts[1:], (length,)))
    text = ends - starts - 1
    text[-1] += not whole
    return WindowPieces(starts, ends, text)


def _deal(count: int, weights: IntArray) -> IntArray:
    """`count` things in proportion to weights, at most as many as these each; the largest remainders get one more."""
    total = int(weights.sum())
    if total == 0:
        return np.zeros_like(weights)
    dealt, rest = divmod(count * weights, total)
    left = count - int(dealt.sum())
    if left:
        dealt[(-rest).argsort(kind="stable")[:left]] += 1
    return dealt


def _largest(sizes: IntArray, room: IntArray, count: int) -> IntArray:
    """One thing for each of the `count` largest that have room."""
    result = np.zeros_like(sizes)
    result[np.argsort(np.where(room > 0, -sizes, 1), kind="stable")[:count]] = 1
    return result
