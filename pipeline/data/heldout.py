"""A held-out split, read front to back: each token is a target exactly once, in windows that do not overlap."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pipeline.data.batch import Batch
from pipeline.data.dataset import Dataset


class HeldOut:
    """Windows over a split. Window p has the targets [p * L, (p + 1) * L).

    The input before the first target is the end-of-document token; the last window is padded with masked targets.
    """

    def __init__(self, dataset: Dataset, sequence_length: int) -> None:
        self.dataset = dataset
        self._length = sequence_length
        self._end_of_document = dataset.manifest.tokenizer.end_of_document

    def __len__(self) -> int:
        return (self.dataset.tokens + self._length - 1) // self._length

    def spread(self, count: int) -> list[int]:
        """At most `count` windows at equal distances: the same ones whenever the split is the same."""
        return [i * len(self) // count for i in range(count)] if count < len(self) else list(range(len(self)))

    def batch(self, windows: Sequence[int]) -> Batch:
        """The windows as one batch [len(windows), L]."""
        length = self._length
        tokens = np.zeros((len(windows), length + 1), dtype=np.int64)
        weight = np.zeros((len(windows), length), dtype=np.float32)
        starts = []
        for row, window in enumerate(windows):
            start = window * length - 1
            stop = min(start + length + 1, self.dataset.tokens)
            skip = 1 if start < 0 else 0  # the end-of-document token that stands before the first document
            if skip:
                tokens[row, 0] = self._end_of_document
            tokens[row, skip : stop - start] = self.dataset.read(start + skip, stop - start - skip)
            weight[row, : stop - start - 1] = 1
            begins = self.dataset.document_starts(start + skip, stop - start - skip) - start
            starts.append(row * length + np.union1d(0, begins[begins < length]))
        return Batch(
            tokens=torch.from_numpy(tokens[:, :-1]),
            targets=torch.from_numpy(tokens[:, 1:]),
            weight=torch.from_numpy(weight),
            starts=torch.from_numpy(np.concatenate(starts).astype(np.int32)),
            sources=torch.zeros(len(windows), dtype=torch.int64),
            extras={},
        )
