"""Targets of multi-token prediction: tokens some places behind the target of a position, and which of them count.

Depth d = 1, 2, ... predicts from position t of a window the token t + d + 1. That may lie behind the window: it is read
from the source's circular text, and not consumed. A target counts if its document is that of position t; of a document
it is therefore the last d + 1 positions that have none. No other rule is needed for the first tokens of documents. The
target of the next token differs: across the end of a document it counts unless `train.loss.mask_document_start` is set.

Shapes: R windows, L positions of one, N depths.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.data.loading.objectives.base import FloatArray
from pipeline.data.order.permutation import IntArray


def ahead_weight(begins: IntArray, length: int, depth: int, masked: Sequence[tuple[int, int]] = ()) -> FloatArray:
    """Weights [N, L] of the targets of a window: 1, or 0 where the target is of another document, or masked.

    Args:
        begins: Tokens of the L + 1 + N at which documents begin, ascending, and 0.
        length: L.
        depth: N.
        masked: Targets [first, end) that do not count, numbered from 0: the next tokens are those below L.
    """
    weight = np.ones((depth, length), np.float32)
    for number in range(depth):
        for begin in begins[begins > 0].tolist():
            weight[number, max(0, begin - number - 2) : begin] = 0
        for first, end in masked:
            weight[number, max(0, first - number - 1) : max(0, end - number - 1)] = 0
    return weight


def valid_ahead(begins: IntArray, splits: IntArray, length: int, depth: int) -> IntArray:
    """Targets of some windows that count, by depth [N], without making their weights.

    Args:
        begins: `begins` of each window, one after the other.
        splits: [R + 1]: those of window r are begins[splits[r] : splits[r + 1]].
        length: L.
        depth: N.
    """
    rows = len(splits) - 1
    mine = begins[splits[0] : splits[-1]]
    # A window's 0 has nothing before it.
    begin, before = mine[1:], mine[:-1]
    ends = begin > 0
    begin, before = begin[ends], before[ends]
    lost = [
        np.maximum(np.minimum(begin, length) - np.maximum(before, begin - number - 2), 0).sum()
        for number in range(depth)
    ]
    return rows * length - np.array(lost, np.int64)
