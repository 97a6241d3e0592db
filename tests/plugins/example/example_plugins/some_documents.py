"""An objective: causal prediction, in which a share of the documents of each window does not count."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from pipeline.config.base import Section
from pipeline.data.loading.objectives.base import Arranged, KeyOf, PackRow, PackSizes
from pipeline.data.loading.objectives.custom import CustomObjective
from pipeline.data.loading.objectives.draws import fraction, stream
from pipeline.data.order.permutation import IntArray


class SomeDocuments(CustomObjective):
    """Each token from those before it, but in documents that the sample's key leaves out."""

    packs = True
    reads = False

    class Options(Section):
        """Options of `type: example.some_documents`."""

        rate: float = Field(ge=0, le=1)
        """Share of the documents that do not count."""

    def valid(self, begins: IntArray, splits: IntArray, length: int, key_of: KeyOf) -> IntArray:
        """Targets in documents that count, by window."""
        counts = np.zeros(len(splits) - 1, np.int64)
        for row in range(len(counts)):
            weight = self._weight(begins[splits[row] : splits[row + 1]], length + 1, key_of(row))
            counts[row] = weight[1:].sum()  # the first token is an input only
        return counts

    def arrange(self, ids: IntArray, begins: IntArray, key: int) -> Arranged:
        """The first L tokens as inputs, the last L as targets."""
        length = len(ids) - 1
        weight = self._weight(begins, length + 1, key)[1:]
        return Arranged(ids[:-1], ids[1:], weight, begins[begins < length], np.arange(1, length + 1))

    def valid_packs(self, packs: PackSizes, key_of: KeyOf) -> IntArray:
        """Targets in documents that count, by pack."""
        counts = np.zeros(len(packs.targets), np.int64)
        for row in range(len(counts)):
            tokens = packs.tokens[packs.splits[row] : packs.splits[row + 1]]
            counts[row] = tokens[self._counts(len(tokens), key_of(row))].sum()
        return counts

    def arrange_pack(self, pack: PackRow, key: int) -> Arranged:
        """Each token from those before it in its document."""
        length = len(pack.targets)
        weight = np.zeros(length, np.float32)
        weight[: pack.size] = self._weight(pack.begins, pack.size, key)
        return Arranged(pack.inputs(pack.targets), pack.targets, weight, pack.starts, np.arange(1, length + 1))

    def _counts(self, documents: int, key: int) -> np.ndarray:
        """[documents] whether each one counts: a function of the key and of its number alone."""
        return (stream(key, 0, documents) >> np.uint64(11)) >= fraction(self.options.rate)

    def _weight(self, begins: IntArray, length: int, key: int) -> np.ndarray:
        """[length] weights of tokens, by the documents that begin at `begins`."""
        return np.repeat(self._counts(len(begins), key), np.diff(begins, append=length)).astype(np.float32)
