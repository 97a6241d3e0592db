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


def padded(row: Arranged, shape: StreamShape, whole: StreamShape) -> Arranged:
    """A shorter window in the shape of a whole one: padding is a document without weight, on each side.

    Args:
        row: Of `shape`.
        shape: Its sizes.
        whole: Those that it is to have.
    """
    first, end = shape.encoder, whole.encoder + shape.decoder
    tokens, targets = (np.zeros(whole.length, np.int64) for _ in range(2))
    weight, raw = np.zeros(whole.length, np.float32), np.full(whole.length, -1)
    for new, old in ((tokens, row.tokens), (targets, row.targets), (weight, row.weight), (raw, row.raw)):
        new[:first], new[whole.encoder : end] = old[:first], old[first:]
    sides = [row.begins[row.begins < first], row.begins[row.begins >= first] + whole.encoder - first]
    begins = [*([*sides[0], first] if whole.encoder else []), *sides[1], end]
    predicted = None
    if row.predicted is not None:
        others = np.setdiff1d(np.arange(whole.length), row.predicted)
        predicted = np.sort(np.append(row.predicted, others[: whole.predicted - len(row.predicted)]))
    prefix = None
    if row.prefix is not None:
        prefix = np.append(row.prefix, np.full(whole.length - end, end))
    return Arranged(tokens, targets, weight, np.array(begins, np.int64), raw, predicted, prefix)


def _flat(begins: list[Any], length: int) -> npt.NDArray[np.int32]:
    """Positions in a batch of what lies in its rows."""
    rows = np.repeat(np.arange(len(begins)) * length, [len(each) for each in begins])
    return (np.concatenate(begins) + rows).astype(np.int32)
