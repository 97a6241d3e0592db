"""Span corruption: an encoder reads a text without some spans, and a decoder predicts these."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipeline.data.loading.objectives.base import Arranged, KeyOf
from pipeline.data.loading.objectives.draws import stream
from pipeline.data.loading.objectives.span_plan import Budget, NoisePlan
from pipeline.data.loading.stream_shape import StreamShape, span_sizes
from pipeline.data.order.permutation import IntArray

_CUTS = 0
"""Stream of draws: where runs of noise and of other tokens are cut."""


class Tokens(NamedTuple):
    """Ids of the tokens that span corruption adds."""

    sentinels: IntArray
    """In the order of the spans of a piece."""
    start: int
    """With which the decoder starts each piece."""
    end: int
    """END, with which it ends, and with which padding is filled."""


class Corrupted(NamedTuple):
    """Both sides of a window."""

    encoder: IntArray
    decoder: IntArray
    """Inputs of the decoder."""
    targets: IntArray
    """Of the decoder."""
    encoder_begins: IntArray
    """Positions at which the pieces begin, the same number on both sides."""
    decoder_begins: IntArray
    raw: IntArray
    """By target of the decoder a token of the window, see `Arranged.raw`."""


class Spans:
    """Predict spans of the first L tokens of a window; an `Objective` of an encoder and a decoder.

    Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer". Each piece
    of a document is corrupted by itself. Tokens and noise alternate, tokens first, and a sentinel stands for each run
    of noise:

        encoder   tokens S0 tokens S1 tokens ...
        decoder   S0 noise S1 noise ... END

    The decoder's inputs are its targets, one place later, behind a start token. A piece without noise has END alone
    there. The last token of a document, END, is never noise. The lengths of the runs of a piece are equally likely for
    all ways to cut its noise, and its other tokens, into that many parts.

    Sizes are those of one document, whatever the window: see `Budget`. With one piece it is T5's corruption exactly.

    Args:
        rate: Share of the tokens that are noise.
        mean_span: Mean length of its runs.
        tokens: That it adds.
    """

    arranges = True
    reads = False

    def __init__(self, rate: float, mean_span: float, tokens: Tokens) -> None:
        self._rate, self._mean_span = rate, mean_span
        self._tokens = tokens

    def shape(self, length: int) -> StreamShape:
        """The same for all windows."""
        sizes = span_sizes(self._rate, self._mean_span, length)
        return StreamShape(length, sizes.encoder, sizes.decoder, sizes.decoder)

    def fixed_valid(self, length: int) -> int:
        """All targets of the decoder."""
        return self.shape(length).decoder

    def valid(self, begins: IntArray, splits: IntArray, length: int, key_of: KeyOf) -> IntArray:
        """All targets of the decoder, [R]."""
        return np.full(len(splits) - 1, self.fixed_valid(length), np.int64)

    def arrange(self, ids: IntArray, begins: IntArray, key: int) -> Arranged:
        """The first L tokens, corrupted."""
        shape = self.shape(len(ids) - 1)
        budget = Budget(shape.encoder, shape.decoder, mode=False, prefix=False)
        return joined(corrupt(ids[:-1], budget.plan(begins, len(ids) - 1), self._tokens, key), shape, self._tokens.end)


def corrupt(ids: IntArray, plan: NoisePlan, tokens: Tokens, key: int, mode: int | None = None) -> Corrupted:
    """Both sides of a window.

    Args:
        ids: [L]
        plan: Its noise.
        tokens: That are added.
        key: The sample's.
        mode: Id with which the encoder's text of each piece begins.
    """
    pieces, noise, spans, closing = plan
    count = int(spans.sum())
    several = len(spans) > 1
    with_spans = np.flatnonzero(spans) if several else np.zeros(1, np.int64)
    of_noise, of_text = noise[with_spans], pieces.text[with_spans]
    parts = spans[with_spans]
    lengths = cut(np.concatenate([of_noise, of_text - of_noise]), np.concatenate([parts, parts]), key)
    runs, gaps = lengths[:count], lengths[count:]
    # Texts of pieces with noise follow each other in `behind`; what lies between them in the window is added.
    behind = np.cumsum(gaps + runs)
    if several:
        piece = np.repeat(with_spans, parts)
        behind += np.repeat(pieces.starts[with_spans] - np.cumsum(of_text) + of_text, parts)
        number = np.arange(count) - np.repeat(np.cumsum(parts) - parts, parts)
    else:
        piece, number = np.zeros(count, np.int64), np.arange(count)
    first = behind - runs
    sentinels = tokens.sentinels[number]

    # Each run of noise leaves its first place in the encoder, for the sentinel.
    steps = np.zeros(len(ids) + 1, np.int8)
    steps[first], steps[behind] = 1, -1
    is_noise = np.cumsum(steps[:-1], dtype=np.int8).view(np.bool_)
    noisy = np.flatnonzero(is_noise)
    kept = ~is_noise
    kept[first] = True
    text = ids.copy()
    text[first] = sentinels
    encoder = text[kept]

    # Before a run the decoder has all earlier noise, its sentinels, and an end for each earlier piece.
    before = np.cumsum(runs) - runs
    at_sentinel = before + np.arange(count) + piece
    at_noise = np.arange(len(noisy)) + np.repeat(np.arange(1, count + 1) + piece, runs)
    size = len(noisy) + count + len(spans)
    targets, raw = np.full(size, tokens.end, np.int64), np.empty(size, np.int64)
    ends = np.cumsum(noise + spans + 1) - 1
    raw[ends] = pieces.ends - 1
    targets[at_sentinel], raw[at_sentinel] = sentinels, first
    targets[at_noise], raw[at_noise] = ids[noisy], noisy
    decoder_begins = np.append(0, ends[:-1] + 1)
    decoder = np.empty_like(targets)
    decoder[1:] = targets[:-1]
    decoder[decoder_begins] = tokens.start

    encoder_begins = pieces.starts
    if several:
        lost = np.cumsum(noise - spans)
        encoder_begins = pieces.starts - lost + (noise - spans)
    if mode is not None:
        encoder = np.insert(encoder, encoder_begins, mode)
        encoder_begins = encoder_begins + np.arange(len(encoder_begins))
    if closing:
        encoder = np.append(encoder, tokens.end)
    return Corrupted(encoder, decoder, targets, encoder_begins, decoder_begins, raw)


def cut(totals: IntArray, parts: IntArray, key: int) -> IntArray:
    """Lengths of parts that totals are cut into, one total after the other; each way to cut one is as likely.

    Of the places between the units of a total those with the smallest draws are cut.

    Args:
        totals: [n], each at least as much as its parts.
        parts: [n], at least 1.
        key: The sample's.
    """
    places = totals - 1
    first = np.cumsum(places) - places
    count = int(places.sum())
    order = stream(key, _CUTS, count)
    place_bits, group_bits = (max(1, int(n - 1).bit_length()) for n in (max(count, 1), len(totals)))
    groups = np.repeat(np.arange(len(totals), dtype=np.uint64), places)
    mask = np.uint64((1 << place_bits) - 1)
    # By total, then by draw; the place breaks ties and says where it was.
    order = (order >> np.uint64(group_bits)) & ~mask
    order |= np.arange(count, dtype=np.uint64)
    order |= groups << np.uint64(64 - group_bits)
    order.sort()
    cuts = parts - 1
    chosen = np.repeat(first - np.cumsum(cuts) + cuts, cuts) + np.arange(int(cuts.sum()))
    # Between units 0 and 1 of a total lies its place 0; a total before has one place less than it has units.
    where = (order[chosen] & mask).astype(np.int64) + np.repeat(np.arange(len(totals)), cuts)
    is_last = np.zeros(int(totals.sum()), np.bool_)
    is_last[where] = True
    is_last[np.cumsum(totals) - 1] = True
    return np.diff(np.flatnonzero(is_last), prepend=-1)


def joined(sides: Corrupted, shape: StreamShape, padding: int) -> Arranged:
    """Both sides as one row; what is left on both is a document of padding, without weight."""
    encoder, decoder = len(sides.encoder), len(sides.decoder)
    tokens = np.full(shape.length, padding, np.int64)
    targets, raw = tokens.copy(), np.full(shape.length, -1)
    weight = np.zeros(shape.length, np.float32)
    tokens[:encoder] = sides.encoder
    own = slice(shape.encoder, shape.encoder + decoder)
    tokens[own], targets[own], raw[own], weight[own] = sides.decoder, sides.targets, sides.raw, 1
    begins = [sides.encoder_begins, sides.decoder_begins + shape.encoder]
    if encoder < shape.encoder or decoder < shape.decoder:
        assert encoder < shape.encoder and decoder < shape.decoder, "padding is a document on both sides"
        begins = [begins[0], np.array([encoder]), begins[1], np.array([shape.encoder + decoder])]
    return Arranged(tokens, targets, weight, np.concatenate(begins), raw)
