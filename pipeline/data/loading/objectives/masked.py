"""Masked language modelling: predict some tokens of the text from all that is around them."""

from __future__ import annotations

import numpy as np

from pipeline.common.errors import UserError
from pipeline.data.loading.objectives.base import Arranged, KeyOf, PackRow, PackSizes, begins_before
from pipeline.data.loading.objectives.draws import U64Array, below, draws_at, fraction, stream, tag_mask, tagged
from pipeline.data.loading.objectives.making import Making
from pipeline.data.loading.objectives.words import WordTable
from pipeline.data.loading.stream_shape import StreamShape, rounded
from pipeline.data.order.permutation import IntArray

_WHICH, _HOW, _RANDOM = range(3)
"""Streams of draws: which positions are masked, what each then has as its input, and which random id."""


class Masked:
    """Predict k masked tokens of the first L of a window; an `Objective`.

    Devlin et al. 2019, "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding". Inputs and
    targets are the same tokens, but for masked inputs, and masked positions alone have weight. The end-of-document
    token, and whatever else a document ends with, is never masked; of the n other tokens exactly k = round(rate n) are,
    rounded half to even. They are those with the smallest draws. So k follows from where documents begin, and the head
    scores a number of positions that is always the same: K = round(rate L), filled up with positions of weight 0.

    A masked token becomes the mask token, a random one, or stays as it is, by a draw of its own. It always counts.

    With whole words, words take the place of tokens in the order of draws until k tokens are masked. Of the last one
    the first tokens are, as many as k leaves room for: so at most one word of a window is masked in part.

    Args:
        rate: Share of the tokens that are masked.
        mask_token: Id of the mask token.
        ordinary: Ids that random ones are drawn from.
        random_share: Share of the masked tokens that become a random one.
        keep_share: Share of the masked tokens that stay.
        words: Which tokens make words together; None: tokens are masked one by one.
    """

    arranges = True
    chooses = True
    shifts = False

    def __init__(
        self,
        rate: float,
        mask_token: int,
        ordinary: IntArray,
        *,
        random_share: float = 0.1,
        keep_share: float = 0.1,
        words: WordTable | None = None,
    ) -> None:
        self._rate = rate
        self._mask_token = mask_token
        self._ordinary = ordinary
        self._kept = fraction(keep_share)
        self._kept_or_random = fraction(keep_share + random_share)
        self._words = words
        self.reads = words is not None

    def takes(self, length: int) -> bool:
        """Those of which a token is masked."""
        return rounded(self._rate * length) >= 1

    def shape(self, length: int) -> StreamShape:
        """As many positions as the window has targets."""
        return StreamShape(length, 0, length, rounded(self._rate * length))

    def fixed_valid(self, length: int) -> int | None:
        """None: ends of documents make it fewer."""

    def valid(self, begins: IntArray, splits: IntArray, length: int, key_of: KeyOf) -> IntArray:
        """Masked tokens of each window, [R]."""
        maskable = length - begins_before(begins, splits, length + 1)
        masked: IntArray = np.rint(self._rate * maskable).astype(np.int64)
        return masked

    def arrange(self, ids: IntArray, begins: IntArray, key: int) -> Arranged:
        """The first L tokens, of which some are masked."""
        ends = begins[1:] - 1
        return self._arranged(ids[:-1], begins, ends, ends, 0, key)

    def valid_packs(self, packs: PackSizes, key_of: KeyOf) -> IntArray:
        """Masked tokens of each pack, [R]."""
        masked: IntArray = np.rint(self._rate * (packs.targets - packs.sums(packs.ends))).astype(np.int64)
        return masked

    def arrange_pack(self, pack: PackRow, key: int) -> Arranged:
        """The targets as inputs, of which some are masked. Padding is not."""
        ends = (pack.behind - 1)[pack.ends]
        never = np.append(ends, np.arange(pack.size, len(pack.targets)))
        return self._arranged(pack.targets, pack.starts, ends, never, 1, key)

    def _arranged(
        self, targets: IntArray, begins: IntArray, ends: IntArray, never: IntArray, first: int, key: int
    ) -> Arranged:
        """Tokens of which some are masked.

        Args:
            targets: All, [L].
            begins: Positions at which documents begin.
            ends: Positions at which documents end.
            never: Positions that are not masked.
            first: Token of the window, see `Arranged.raw`, that the first target is.
            key: The sample's.
        """
        length = len(targets)
        count, scored = rounded(self._rate * (length - len(never))), rounded(self._rate * length)
        if self._words is None:
            order = tagged(stream(key, _WHICH, length))
        else:
            order = _by_words(self._words.firsts(targets, begins, ends), length, key)
        order[never] |= ~tag_mask(length)
        # The smallest ones in any order, the masked ones before those that only fill up.
        order.partition([max(count, 1) - 1, max(scored, 1) - 1])
        chosen = (order[:scored] & tag_mask(length)).astype(np.int64)
        masked = chosen[:count]
        tokens, weight = targets.copy(), np.zeros(length, np.float32)
        weight[masked] = 1
        how = draws_at(key, _HOW, masked) >> np.uint64(11)
        tokens[masked[how >= self._kept_or_random]] = self._mask_token
        random = masked[(how >= self._kept) & (how < self._kept_or_random)]
        tokens[random] = self._ordinary[below(draws_at(key, _RANDOM, random), len(self._ordinary))]
        chosen.sort()
        inside = begins[: int(np.searchsorted(begins, length))]
        return Arranged(tokens, targets, weight, inside, np.arange(first, first + length), chosen)


def _by_words(firsts: IntArray, length: int, key: int) -> U64Array:
    """Keyed order of positions as `tagged` has it, in which the tokens of each word stand together.

    Args:
        firsts: Positions at which words begin, ascending; 0 is the first.
        length: Positions.
        key: The sample's.
    """
    order = tagged(draws_at(key, _WHICH, firsts))
    order.sort()
    words = (order & tag_mask(len(firsts))).astype(np.int64)
    sizes = np.diff(firsts, append=length)
    place = np.empty(len(firsts), np.int64)
    place[words] = np.cumsum(sizes[words]) - sizes[words]
    positions = np.arange(length)
    places = np.repeat(place - firsts, sizes) + positions
    shift = np.uint64(int(tag_mask(length)).bit_length())
    return (places.astype(np.uint64) << shift) | positions.astype(np.uint64)


def make_masked(making: Making) -> Masked:
    """The objective of a run file, see `Making`."""
    objective = making.use.objective
    result = Masked(
        objective.share,
        making.special("mask_token", objective.mask_token, "one"),
        making.ordinary,
        random_share=objective.random_share,
        keep_share=objective.keep_share,
        words=making.words,
    )
    if not result.takes(making.use.length):
        raise UserError(
            f"{making.use.key}.rate: {objective.share:g} of a window of {making.use.length:,} tokens is less than half "
            "a token, so nothing would be predicted: raise it, or the sequence_length"
        )
    return result
