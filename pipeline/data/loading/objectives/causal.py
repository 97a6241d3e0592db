"""Causal prediction: each token from those before it."""

from __future__ import annotations

import numpy as np

from pipeline.data.loading.objectives.base import Arranged, FloatArray, KeyOf, PackRow, PackSizes, begins_before
from pipeline.data.loading.objectives.making import Making
from pipeline.data.loading.stream_shape import StreamShape
from pipeline.data.order.permutation import IntArray


class Causal:
    """Predict each token from those before it; an `Objective`.

    Args:
        mask_document_start: Give the first token of each document weight 0: nothing of its document comes before it.
    """

    arranges = False
    chooses = False
    shifts = True
    reads = False

    def __init__(self, *, mask_document_start: bool = False) -> None:
        self._mask_document_start = mask_document_start

    def takes(self, length: int) -> bool:
        """Any."""
        return length >= 1

    def shape(self, length: int) -> StreamShape:
        """As many positions as the window has targets."""
        return StreamShape(length, 0, length, length)

    def fixed_valid(self, length: int) -> int | None:
        """All, unless first tokens of documents are masked."""
        return None if self._mask_document_start else length

    def valid(self, begins: IntArray, splits: IntArray, length: int, key_of: KeyOf) -> IntArray:
        """All, but for masked first tokens of documents; [R]."""
        lost = begins_before(begins, splits, length + 1) if self._mask_document_start else 0
        return np.full(len(splits) - 1, length, np.int64) - lost

    def weight(self, begins: IntArray, length: int) -> FloatArray:
        """Loss weights [L]: 1, or 0 for a masked first token of a document."""
        weight = np.ones(length, np.float32)
        if self._mask_document_start:
            weight[begins[1:] - 1] = 0
        return weight

    def arrange(self, ids: IntArray, begins: IntArray, key: int) -> Arranged:
        """The first L tokens as inputs, the last L as targets."""
        length = len(ids) - 1
        inside = begins[: int(np.searchsorted(begins, length))]
        return Arranged(ids[:-1], ids[1:], self.weight(begins, length), inside, np.arange(1, length + 1))

    def valid_packs(self, packs: PackSizes, key_of: KeyOf) -> IntArray:
        """All but padding and masked first tokens of documents; [R]."""
        return packs.targets - packs.sums(~packs.continues) if self._mask_document_start else packs.targets

    def pack_weight(self, pack: PackRow) -> FloatArray:
        """Loss weights [L] of a pack: 0 for padding, and for a masked first token of a document."""
        weight = np.zeros(len(pack.targets), np.float32)
        weight[: pack.size] = 1
        if self._mask_document_start:
            weight[pack.begins[~pack.continues]] = 0
        return weight

    def arrange_pack(self, pack: PackRow, key: int) -> Arranged:
        """Each token from those before it in its document."""
        return self._arranged_pack(pack, pack.targets)

    def _arranged_pack(self, pack: PackRow, targets: IntArray) -> Arranged:
        raw = np.arange(1, len(targets) + 1)
        return Arranged(pack.inputs(targets), targets, self.pack_weight(pack), pack.starts, raw)


def make_causal(making: Making) -> Causal:
    """The objective of a run file, see `Making`."""
    return Causal(mask_document_start=making.config.train.loss.mask_document_start)
