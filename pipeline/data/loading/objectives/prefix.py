"""Prefix language modelling: each token behind a prefix of its document, which is seen in both directions."""

from __future__ import annotations

import numpy as np

from pipeline.data.loading.objectives.base import Arranged, FloatArray, KeyOf, PackRow, PackSizes
from pipeline.data.loading.objectives.causal import Causal
from pipeline.data.loading.objectives.draws import below, stream
from pipeline.data.loading.objectives.making import Making
from pipeline.data.order.permutation import IntArray


class Prefix(Causal):
    """Predict what follows a prefix of each document of a window; an `Objective` of one stack of layers.

    Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", 3.2.1.
    Inputs and targets are those of causal prediction. The window has pieces of documents; of a piece of n tokens, from
    0 to n - 1 are the prefix, each number as likely as the others. The prefix sees itself in both directions. A target
    counts if it is behind the prefix of its piece, so each piece has at least one. An empty prefix leaves causal
    prediction, in which the first token of a document is a target from the end of the one before it.

    Args:
        mask_document_start: Give the first token of each document weight 0, also where its prefix is empty.
    """

    arranges = True
    chooses = True

    def fixed_valid(self, length: int) -> int | None:
        """None: prefixes are drawn."""

    def valid(self, begins: IntArray, splits: IntArray, length: int, key_of: KeyOf) -> IntArray:
        """Targets behind the prefixes of each window, [R]."""
        counts = np.empty(len(splits) - 1, np.int64)
        for row in range(len(counts)):
            mine = begins[splits[row] : splits[row + 1]]
            mine = mine[: int(np.searchsorted(mine, length + 1))]
            first, ends = self._firsts(mine, length, key_of(row))
            counts[row] = (ends - first).sum()
        return counts

    def arrange(self, ids: IntArray, begins: IntArray, key: int) -> Arranged:
        """Causal prediction with prefixes."""
        length = len(ids) - 1
        first, _ = self._firsts(begins, length, key)
        weight: FloatArray = np.ones(length, np.float32)
        behind = _cuts(begins, length, key)
        tokens = np.arange(1, length + 1)
        piece = np.repeat(np.arange(len(begins)), np.diff(begins, append=length + 1))
        weight[tokens < first[piece[1:]]] = 0
        inside = begins[: int(np.searchsorted(begins, length))]
        return Arranged(ids[:-1], ids[1:], weight, inside, tokens, prefix=behind[piece[:-1]])

    def valid_packs(self, packs: PackSizes, key_of: KeyOf) -> IntArray:
        """Targets behind the prefixes of each pack, [R]."""
        counts = packs.targets.copy()
        for row in range(len(counts)):
            mine = slice(*packs.splits[row : row + 2])
            lost = below(stream(key_of(row), 0, mine.stop - mine.start), packs.tokens[mine])
            if self._mask_document_start:
                lost[(lost == 0) & ~packs.continues[mine]] = 1
            counts[row] -= lost.sum()
        return counts

    def arrange_pack(self, pack: PackRow, key: int) -> Arranged:
        """Causal prediction with a prefix of each chunk: what precedes it, and from 0 to n - 1 of its n tokens."""
        sizes = pack.behind - pack.begins
        cuts = pack.begins + below(stream(key, 0, len(sizes)), sizes)
        arranged = super().arrange_pack(pack, key)
        chunk = np.repeat(np.arange(len(sizes)), sizes)
        arranged.weight[: pack.size][np.arange(pack.size) < cuts[chunk]] = 0
        prefix = np.full(len(pack.targets), pack.size)
        prefix[: pack.size] = cuts[chunk] + 1
        return arranged._replace(prefix=prefix)

    def _firsts(self, begins: IntArray, length: int, key: int) -> tuple[IntArray, IntArray]:
        """By piece the first token that is a target, and the one behind the last."""
        first = np.maximum(_cuts(begins, length, key), 1)
        if self._mask_document_start:
            first = np.maximum(first, begins + 1)
        return first, np.append(begins[1:], length + 1)


def _cuts(begins: IntArray, length: int, key: int) -> IntArray:
    """By piece the token behind its prefix.

    Args:
        begins: Of the pieces of L + 1 tokens, ascending; 0 is the first.
        length: L.
        key: The sample's.
    """
    sizes = np.diff(begins, append=length + 1)
    return begins + below(stream(key, 0, len(begins)), sizes)


def make_prefix(making: Making) -> Prefix:
    """The objective of a run file, see `Making`."""
    return Prefix(mask_document_start=making.config.train.loss.mask_document_start)
