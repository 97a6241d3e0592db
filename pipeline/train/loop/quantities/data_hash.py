"""Hash of the data of a step, over all ranks: equal on every layout, and in every run of the same data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.data.loading.batch import StepData
from pipeline.train.loop.quantities.quantity import Quantity, QuantityNumbers, Update
from pipeline.train.parallel.mesh import Mesh

_WORDS = 4
"""A 64-bit hash travels as words of 16 bits, whose sums over ranks fp64 holds exactly."""


class DataHash(Quantity):
    """The sum of the hashes of all samples of a step, mod 2**64."""

    def __init__(self, mesh: Mesh) -> None:
        self._counts = mesh.counts_samples
        self._hash = 0

    def begin(self, data: StepData) -> None:
        """Note the hash of this rank's samples."""
        self._hash = data.data_hash if self._counts else 0

    def parts(self) -> list[Tensor]:
        """Words of the hash."""
        words = [(self._hash >> (16 * place)) & 0xFFFF for place in range(_WORDS)]
        return [torch.tensor(words, dtype=torch.float64)]

    def finish(self, sums: Sequence[Tensor], update: Update) -> QuantityNumbers:
        """See `Quantity`."""
        return QuantityNumbers({"words": sums[0]}, _columns)


def _columns(words: Tensor) -> dict[str, Any]:
    total = sum(int(word) << (16 * place) for place, word in enumerate(words.tolist())) % 2**64
    return {"data_hash": f"{total:016x}"}
