"""Conversations of pairs in rows of a batch: which target is of which, and what a reference model gives them.

A document of a dataset of pairs is two conversations, the preferred one first. Each is predicted from its own tokens
alone: the end-of-document token before its first one is a document of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.data.loading.objectives.base import BoolArray
from pipeline.data.order.locate_packs import LocatedPacks
from pipeline.data.order.permutation import IntArray
from pipeline.data.tokenization.chat_encoding import SECOND

Scores = npt.NDArray[np.float64]
"""[D, 2] log-probabilities of the trained targets of each conversation of documents: preferred, other."""
References = Mapping[str, Scores]
"""Those that the reference model gives the documents of each source's training split."""


class PairRows(NamedTuple):
    """Conversations of the targets of some rows. P pairs."""

    conversation: IntArray
    """[rows * L] 2 p for a target of the preferred conversation of pair p, 2 p + 1 for one of the other, and 2 P for
    targets of no pair."""
    reference: Scores
    """[P, 2]"""


def second_begins(mask: npt.NDArray[np.uint8]) -> IntArray:
    """Positions at which documents begin inside of pairs: that of an end-of-document token, and the one behind it.

    Args:
        mask: [rows * L] of the targets of rows, see `target_mask`.
    """
    seconds = np.flatnonzero(mask == SECOND)
    return np.sort(np.concatenate([seconds, seconds + 1]))


def second_begin(mask: npt.NDArray[np.uint8]) -> int:
    """Place in the mask of a pair, see `target_mask`, at which its second conversation begins."""
    return int(np.argmax(mask == SECOND))


class StepPairs:
    """Pairs of the rows of a step.

    Args:
        references: log-probabilities of each source by the reference model.
        names: of the journal's sources.
    """

    def __init__(self, references: References, names: Sequence[str]) -> None:
        self._references, self._names = references, names

    def of(
        self,
        located: LocatedPacks,
        which: IntArray,
        place: IntArray,
        masked: BoolArray | None,
        mask: npt.NDArray[np.uint8],
    ) -> PairRows:
        """The pairs of some rows that count.

        Args:
            located: the step.
            which: [C] chunks of the rows.
            place: [C] row of each.
            masked: of all chunks of the step, whether skips have them; None: they have none.
            mask: [rows, L] of the targets, see `target_mask`.
        """
        if masked is not None:
            kept = ~masked[which]
            which, place = which[kept], place[kept]
        chunks, flat = located.chunks, mask.ravel()
        firsts, conversation = place * mask.shape[1] + located.offsets[which], np.full(mask.size, 2 * len(which))
        for number, (first, count) in enumerate(zip(firsts.tolist(), chunks.tokens[which].tolist(), strict=True)):
            border = first + second_begin(flat[first : first + count])
            conversation[first:border] = 2 * number
            conversation[border : first + count] = 2 * number + 1
        sources, documents = located.sources[chunks.row[which]].tolist(), chunks.document[which].tolist()
        found = [self._references[self._names[source]][n] for source, n in zip(sources, documents, strict=True)]
        return PairRows(conversation, np.array(found, np.float64).reshape(-1, 2))
