"""Rows of a micro-batch as their objectives arrange them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pipeline.data.loading.objectives.base import Arranged
from pipeline.data.loading.stream_shape import StreamShape
from pipeline.data.order.windows import bounds_of


def stack(rows: list[Arranged], size: int, shape: StreamShape) -> dict[str, Any]:
    """Fields of a `Batch` of `size` rows, padded with rows of weight 0.

    Args:
        rows: At most `size`, with the weights that are to count.
        size: B.
        shape: Of each row; S = shape.length.
    """
    length, count = shape.length, len(rows)
    tokens, targets = (np.zeros((size, length), np.int64) for _ in range(2))
    weight = np.zeros((size, length), np.float32)
    sides = [0, shape.encoder] if shape.encoder else [0]
    begins = [*(row.begins for row in rows), *[np.array(sides)] * (size - count)]
    for place, row in enumerate(rows):
        tokens[place], targets[place], weight[place] = row.tokens, row.targets, row.weight
    fields: dict[str, Any] = {
        "tokens": torch.from_numpy(tokens),
        "targets": torch.from_numpy(targets),
        "weight": torch.from_numpy(weight),
        "starts": torch.from_numpy(_flat(begins, length)),
        "encoder": shape.encoder,
    }
    if any(row.predicted is not None for row in rows) or (not rows and shape.predicted < shape.decoder):
        predicted = np.tile(np.arange(shape.predicted), (size, 1))
        for place, row in enumerate(rows):
            assert row.predicted is not None, "rows of one shape predict as many positions"
            predicted[place] = row.predicted
        fields["predicted"] = torch.from_numpy(predicted)
    if any(row.prefix is not None for row in rows):
        prefix = np.zeros((size, length), np.int64)
        for place, row in enumerate(rows):
            # A document without a prefix has one that ends where it begins.
            prefix[place] = bounds_of(row.begins, length) if row.prefix is None else row.prefix
        fields["prefix"] = torch.from_numpy(prefix)
    return fields


def _flat(begins: list[Any], length: int) -> npt.NDArray[np.int32]:
    """Positions in a batch of what lies in its rows."""
    rows = np.repeat(np.arange(len(begins)) * length, [len(each) for each in begins])
    return (np.concatenate(begins) + rows).astype(np.int32)
