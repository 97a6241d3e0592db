"""UL2: span corruption by one of several denoisers for each window."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np

from pipeline.config.objective import ObjectiveConfig
from pipeline.data.loading.objectives.base import Arranged, KeyOf
from pipeline.data.loading.objectives.draws import stream
from pipeline.data.loading.objectives.making import Making
from pipeline.data.loading.objectives.span_plan import Budget
from pipeline.data.loading.objectives.spans import Tokens, check_room, corrupt, joined, no_sentinel, span_tokens
from pipeline.data.loading.stream_shape import denoiser_shares, mixture_is_padded, mixture_sizes, stream_shape
from pipeline.data.order.permutation import IntArray

_WHICH = 1
"""Stream of draws: the denoiser. Its corruption has the streams of `spans`."""


class MixtureOfDenoisers:
    """Predict what one of several denoisers takes out of a window; an `Objective` of an encoder and a decoder.

    Tay et al. 2023, "UL2: Unifying Language Learning Paradigms". The sample's key decides which denoiser a window gets.
    Each uses all of its tokens. Denoisers differ in how many positions that takes on both sides: the model gets the
    most that any needs, and what is left is padding, a document of its own without weight.

    Args:
        objective: With the denoisers.
        tokens: That it adds.
        modes: By denoiser the id with which the encoder's text of each piece begins; None: there is none.
    """

    arranges = True
    chooses = True
    shifts = False
    reads = False

    def __init__(self, objective: ObjectiveConfig, tokens: Tokens, modes: Sequence[int | None]) -> None:
        self._denoisers = objective.mixture
        self._tokens = tokens
        self._modes = modes
        self._sizes = lru_cache(lambda length: mixture_sizes(objective.mixture, length))
        self._is_padded = lru_cache(lambda length: mixture_is_padded(objective.mixture, length))
        self.shape = lru_cache(lambda length: stream_shape(objective, length))
        shares = denoiser_shares(objective.mixture)
        # In units of 2**-53; whatever rounding leaves is the last one's.
        self._bounds = [np.uint64(2**53 * min(bound, 1)) for bound in accumulate(shares)][:-1]

    def takes(self, length: int) -> bool:
        """Those with room for the noise of each denoiser."""
        return all(sizes.fit for sizes in self._sizes(length))

    def fixed_valid(self, length: int) -> int | None:
        """Targets of a window in each denoiser, if all have the same number."""
        counts = {one.decoder for one in self._sizes(length)}
        return counts.pop() if len(counts) == 1 else None

    def valid(self, begins: IntArray, splits: IntArray, length: int, key_of: KeyOf) -> IntArray:
        """Targets of the decoder but for padding, [R]."""
        by_denoiser = [one.decoder for one in self._sizes(length)]
        return np.array([by_denoiser[self.which(key_of(row))] for row in range(len(splits) - 1)], np.int64)

    def which(self, key: int) -> int:
        """Number of the denoiser of a sample."""
        draw = stream(key, _WHICH, 1)[0] >> np.uint64(11)
        return sum(bool(draw >= bound) for bound in self._bounds)

    def arrange(self, ids: IntArray, begins: IntArray, key: int) -> Arranged:
        """The first L tokens, corrupted by the sample's denoiser."""
        length, number = len(ids) - 1, self.which(key)
        shape, denoiser = self.shape(length), self._denoisers[number]
        sizes, mode = self._sizes(length)[number], self._modes[number]
        encoder = sizes.encoder
        if denoiser.mean_span is None:
            encoder = shape.encoder - int(self._is_padded(length))
        budget = Budget(encoder, sizes.decoder, mode=mode is not None, prefix=denoiser.mean_span is None)
        sides = corrupt(ids[:-1], budget.plan(begins, length), self._tokens, key, mode)
        return joined(sides, shape, self._tokens.end)


def make_ul2(making: Making) -> MixtureOfDenoisers:
    """The objective of a run file, see `Making`."""
    objective, length = making.use.objective, making.use.length
    sizes = mixture_sizes(objective.mixture, length)
    for number, size in enumerate(sizes):
        check_room(making, f"denoisers.{number}.rate", size)
    tokens = span_tokens(making, max(size.spans for size in sizes))
    modes = [
        None if one.mode is None else no_sentinel(making, f"denoisers.{number}.mode", one.mode, tokens.sentinels)
        for number, one in enumerate(objective.mixture)
    ]
    return MixtureOfDenoisers(objective, tokens, modes)
