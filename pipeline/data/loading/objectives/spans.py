"""Span corruption: an encoder reads a text without some spans, and a decoder predicts these."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pipeline.common.errors import UserError
from pipeline.data.loading.objectives.base import Arranged, KeyOf
from pipeline.data.loading.objectives.draws import stream, tag_mask
from pipeline.data.loading.objectives.making import Making, how_to_get_sentinels
from pipeline.data.loading.objectives.span_plan import Budget, NoisePlan
from pipeline.data.loading.stream_shape import SpanSizes, StreamShape, span_sizes
from pipeline.data.order.permutation import IntArray

_CUTS = 0
"""Stream of draws: where runs of noise and of other tokens are cut."""

_ZERO = np.zeros(1, np.int64)


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


class SpanCorruption:
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
    chooses = True
    shifts = False
    reads = False

    def __init__(self, rate: float, mean_span: float, tokens: Tokens) -> None:
        self._rate, self._mean_span = rate, mean_span
        self._tokens = tokens

    def takes(self, length: int) -> bool:
        """Those with room for their noise."""
        return span_sizes(self._rate, self._mean_span, length).fit

    def shape(self, length: int) -> StreamShape:
        """Shape that all windows have."""
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
    several = len(spans) > 1
    with_spans = spans.nonzero()[0] if several else _ZERO
    of_noise, of_text, parts = noise[with_spans], pieces.text[with_spans], spans[with_spans]
    lengths = cut(np.concatenate((of_noise, of_text - of_noise)), np.concatenate((parts, parts)), key)
    count = len(lengths) // 2
    runs, gaps, counter = lengths[:count], lengths[count:], np.arange(count)
    # Texts of pieces with noise follow each other in `behind`; what lies between them in the window is added.
    behind = (gaps + runs).cumsum()
    if several:
        piece = with_spans.repeat(parts)
        behind += (pieces.starts[with_spans] - of_text.cumsum() + of_text).repeat(parts)
        number = counter - (parts.cumsum() - parts).repeat(parts)
    else:
        piece, number = np.zeros(count, np.int64), counter
    first = behind - runs
    sentinels = tokens.sentinels[number]

    # Each run of noise leaves its first place in the encoder, for the sentinel.
    steps = np.zeros(len(ids) + 1, np.int8)
    steps[first], steps[behind] = 1, -1
    is_noise = steps[:-1].cumsum(dtype=np.int8).view(np.bool_)
    noisy = is_noise.nonzero()[0]
    kept = ~is_noise
    kept[first] = True
    text = ids.copy()
    text[first] = sentinels
    encoder = text[kept]

    # Before a run the decoder has all earlier noise, its sentinels, and an end for each earlier piece.
    place = counter + piece
    at_sentinel = runs.cumsum() - runs + place
    at_noise = (place + 1).repeat(runs) + np.arange(len(noisy))
    size = len(noisy) + count + len(spans)
    targets, raw, decoder = np.full(size, tokens.end), np.empty(size, np.int64), np.empty(size, np.int64)
    ends = (noise + spans + 1).cumsum() - 1
    raw[ends] = pieces.ends - 1
    targets[at_sentinel], raw[at_sentinel] = sentinels, first
    targets[at_noise], raw[at_noise] = ids[noisy], noisy
    decoder[1:] = targets[:-1]

    encoder_begins = decoder_begins = _ZERO
    if several:
        lost = noise - spans
        encoder_begins = pieces.starts - lost.cumsum() + lost
        decoder_begins = np.concatenate((_ZERO, ends[:-1] + 1))
    decoder[decoder_begins] = tokens.start
    if mode is not None:
        encoder = np.insert(encoder, encoder_begins, mode)
        encoder_begins = encoder_begins + np.arange(len(encoder_begins))
    if closing:
        encoder = np.concatenate((encoder, (tokens.end,)))
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
    behind, numbers = places.cumsum(), np.arange(len(totals))
    count = int(behind[-1])
    mask = tag_mask(max(count, 1))
    group_bits = max(1, int(len(totals) - 1).bit_length())
    # By total, then by draw; the place breaks ties and says where it was.
    order = stream(key, _CUTS, count) >> np.uint64(group_bits)
    order &= ~mask
    order |= (numbers << (64 - group_bits)).view(np.uint64).repeat(places) | np.arange(count, dtype=np.uint64)
    order.sort()
    cuts = parts - 1
    chosen = (behind - places - cuts.cumsum() + cuts).repeat(cuts)
    chosen += np.arange(len(chosen))
    is_last = np.zeros(int(totals.sum()), np.bool_)
    # Between units 0 and 1 of a total lies its place 0; a total before has one place less than it has units.
    is_last[(order[chosen] & mask).view(np.int64) + numbers.repeat(cuts)] = True
    is_last[behind + numbers] = True
    last = is_last.nonzero()[0]
    lengths = last.copy()
    lengths[1:] -= last[:-1]
    lengths[0] += 1
    return lengths


def joined(sides: Corrupted, shape: StreamShape, padding: int) -> Arranged:
    """Both sides as one row; what is left on both is a document of padding, without weight."""
    encoder, decoder = len(sides.encoder), len(sides.decoder)
    left, side = encoder < shape.encoder, shape.encoder
    assert left == (decoder < shape.decoder), "padding is a document on both sides"
    tokens, targets = (np.full(shape.length, padding) for _ in range(2))
    weight = np.zeros(shape.length, np.float32)
    raw = np.full(shape.length, -1)
    tokens[:encoder] = sides.encoder
    own = slice(side, side + decoder)
    tokens[own], targets[own], raw[own], weight[own] = sides.decoder, sides.targets, sides.raw, 1
    begins: tuple[Any, ...] = (sides.encoder_begins, sides.decoder_begins + side)
    if left:
        begins = begins[0], (encoder,), begins[1], (side + decoder,)
    return Arranged(tokens, targets, weight, np.concatenate(begins), raw)


def make_spans(making: Making) -> SpanCorruption:
    """The objective of a run file, see `Making`."""
    objective, length = making.use.objective, making.use.length
    sizes = span_sizes(objective.share, objective.mean_span, length)
    check_room(making, "rate", sizes)
    return SpanCorruption(objective.share, objective.mean_span, span_tokens(making, sizes.spans))


def check_room(making: Making, key: str, sizes: SpanSizes) -> None:
    """Refuse windows that have no room for their noise, even as a single document."""
    length = making.use.length
    if not sizes.fit:
        raise UserError(
            f"{making.use.key}.{key}: a window of {length:,} tokens would have {sizes.noise:,} tokens of noise in "
            f"{sizes.spans:,} spans with as many gaps, and the end of a document: too short; give it another rate or "
            "mean_span, or raise the sequence_length"
        )


def span_tokens(making: Making, spans: int) -> Tokens:
    """Tokens of span corruption for documents of up to `spans` spans."""
    objective, tokenizer = making.use.objective, making.tokenizer
    start, sentinels = tokenizer.end_of_document, _sentinels(making, spans)
    if objective.start_token not in (None, tokenizer.end_of_document_token):
        start = no_sentinel(making, "start_token", objective.start_token, sentinels)
    return Tokens(sentinels, start, tokenizer.end_of_document)


def no_sentinel(making: Making, key: str, token: str, sentinels: IntArray) -> int:
    """Id of a special token that stands for something else than a span."""
    number = making.special(key, token, "one")
    if number in sentinels:
        raise UserError(
            f"{making.use.key}.{key}: {token!r} is one of the {len(sentinels):,} sentinels that stand for spans, and "
            "would be taken for one: choose another token"
        )
    return number


def _sentinels(making: Making, spans: int) -> IntArray:
    key, named, special = f"{making.use.key}.sentinels", making.use.objective.sentinel_tokens, making.tokenizer
    # Not `format`: all else in a pattern stands for itself, braces too.
    names = [named.replace("{}", str(number)) for number in range(spans)] if isinstance(named, str) else named[:spans]
    have = next((number for number, name in enumerate(names) if name not in special.special_tokens), len(names))
    if isinstance(named, str) and have < spans:
        raise UserError(
            f"{key}: {named!r}: a document that fills a window of {making.use.length:,} tokens has {spans:,} spans, "
            f"and the tokenizer has {have:,} of the {spans:,} special tokens {names[0]} to {names[-1]} for them: "
            f"{how_to_get_sentinels(making.config)}; or lower the rate or the sequence_length, or raise mean_span"
        )
    if len(names) < spans:
        raise UserError(
            f"{key}: a document that fills a window of {making.use.length:,} tokens has {spans:,} spans, and here are "
            f"{len(names):,} sentinels: name {spans:,}; or lower the rate or the sequence_length, or raise mean_span"
        )
    ids = [making.special(f"sentinels.{number}", name, f"{spans:,}") for number, name in enumerate(names)]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise UserError(f"{key}.{number}: {name!r} is given twice; each span of a document needs a sentinel")
    return np.array(ids, np.int64)
