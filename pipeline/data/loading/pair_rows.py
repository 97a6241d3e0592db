"""Conversations of pairs in rows of a batch: which target is of which, and what a reference model gives them.

A document of a dataset of pairs is two conversations, the preferred one first. Each is predicted from its own tokens
alone: the end-of-document token before its first one is a document of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

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


def pair_rows(
    mask: npt.NDArray[np.uint8], firsts: IntArray, tokens: IntArray, scores: Sequence[npt.NDArray[np.float64]]
) -> PairRows:
    """The pairs of some rows.

    Args:
        mask: [rows * L] of the targets, see `target_mask`.
        firsts: [P] first target of each pair that counts.
        tokens: [P] tokens of each.
        scores: [P] of [2] each, by the reference model.
    """
    conversation = np.full(len(mask), 2 * len(firsts), np.int64)
    for number, (first, count) in enumerate(zip(firsts.tolist(), tokens.tolist(), strict=True)):
        border = first + int(np.argmax(mask[first : first + count] == SECOND))
        conversation[first:border] = 2 * number
        conversation[border : first + count] = 2 * number + 1
    return PairRows(conversation, np.array(scores, np.float64).reshape(-1, 2))
