"""Loss weights of documents: `PREFIX.weight`, a little-endian float32 for each document of a part."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.common.hashing import CHUNK_BYTES
from pipeline.common.mapped_file import map_file
from pipeline.common.retry import retried
from pipeline.config.blend import LEAST_LOSS_WEIGHT, MOST_LOSS_WEIGHT
from pipeline.data.datasets.indexed import HashedFile

WEIGHT = np.dtype("<f4")
"""The weight of a document."""


def weights_file(prefix: Path) -> Path:
    """The file of a part that has loss weights."""
    return prefix.with_name(prefix.name + ".weight")


def write_weights(prefix: Path, weights: npt.NDArray[Any]) -> HashedFile:
    """The file of a part, written and not yet committed.

    Use it as a context manager; its `commit` gives the file its name.

    Args:
        prefix: of the part.
        weights: of its documents, in their order.
    """
    file = HashedFile(weights_file(prefix))
    try:
        file.write(weights.astype(WEIGHT).tobytes())
    except BaseException as error:
        file.__exit__(type(error), error, None)
        raise
    return file


def weights_problem(path: Path, documents: int) -> str | None:
    """The fault of a file of loss weights; None if it has a weight within the bounds for each document."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return f"{path} is missing"
    if size != documents * WEIGHT.itemsize:
        return f"{path}: {size} bytes for {documents} documents of {WEIGHT.itemsize}"
    with storage.open_regular(path) as file:
        while data := file.read(CHUNK_BYTES):
            weights = np.frombuffer(data, WEIGHT)
            good = (weights >= np.float32(LEAST_LOSS_WEIGHT)) & (weights <= np.float32(MOST_LOSS_WEIGHT))
            if not good.all():
                bounds = f"{LEAST_LOSS_WEIGHT:f} to {MOST_LOSS_WEIGHT:,.0f}"
                return f"{path}: {weights[~good][0]} is not a loss weight from {bounds}"
    return None


def part_weights(prefix: Path, documents: int, mapped: bool) -> npt.NDArray[np.float32]:
    """Weights of the documents of a part, read-only.

    Args:
        prefix: of the part.
        documents: of the part.
        mapped: map the file; else it is read as a whole.

    Raises:
        UserError: the file is missing, or has another size.
        MachineError: the file system fails again and again.
    """
    path = weights_file(prefix)
    try:
        data = retried(lambda: map_path(path) if mapped else storage.read_bytes(path), path, "opening it")
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    if len(data) != documents * WEIGHT.itemsize:
        raise UserError(f"{path}: {len(data)} bytes for {documents} documents of {WEIGHT.itemsize}")
    return np.frombuffer(data, WEIGHT)


def map_path(path: Path) -> npt.NDArray[np.uint8] | bytes:
    """The bytes of a file, mapped read-only."""
    descriptor = storage.regular_descriptor(path)
    try:
        size = os.fstat(descriptor).st_size
        return map_file(descriptor, size) if size else b""
    finally:
        os.close(descriptor)
