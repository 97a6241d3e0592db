"""Objectives: from the tokens of an instance to the named arrays of a training sample."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pipeline.data.hashing import key as hash_key
from pipeline.data.permutation import IntArray

FloatArray = npt.NDArray[np.float32]


def sample_key(seed: int, index: int) -> int:
    """64 bits for a sample: all randomness of an objective comes from it, so that it resumes and reshards exactly.

    Args:
        seed: Seed of the run.
        index: Global index of the sample.
    """
    return hash_key("sample", seed, index)


class Objective(Protocol):
    """What a model is asked to predict in an instance."""

    @property
    def masks(self) -> bool:
        """Whether a target can have weight 0."""
        ...

    def weight(self, bounds: IntArray, key: int) -> FloatArray:
        """Loss weights [L]; 0 where a target does not count. Known without the tokens.

        Args:
            bounds: [L + 1], from `Instances.bounds`.
            key: The sample's `sample_key`.
        """
        ...

    def arrays(self, ids: IntArray, bounds: IntArray, key: int) -> dict[str, npt.NDArray[Any]]:
        """A sample's arrays by name: tokens [L], targets [L], weight [L], bounds [L], and an objective's own.

        Args:
            ids: [L + 1], from `Instances.read`.
            bounds: [L + 1], from `Instances.read`.
            key: The sample's `sample_key`.
        """
        ...


class Causal:
    """Predict each token from those before it; an `Objective`.

    Args:
        mask_document_start: Give the first token of each document weight 0: nothing of its document comes before it.
    """

    def __init__(self, *, mask_document_start: bool = False) -> None:
        self.masks = mask_document_start

    def weight(self, bounds: IntArray, key: int) -> FloatArray:
        """Loss weights [L]: 1, or 0 for a masked first token of a document."""
        if not self.masks:
            return np.ones(len(bounds) - 1, np.float32)
        weight: FloatArray = (bounds[1:] != np.arange(1, len(bounds))).astype(np.float32)
        return weight

    def arrays(self, ids: IntArray, bounds: IntArray, key: int) -> dict[str, npt.NDArray[Any]]:
        """tokens, targets, weight and bounds, each [L]; target q is the token after token q."""
        return {"tokens": ids[:-1], "targets": ids[1:], "weight": self.weight(bounds, key), "bounds": bounds[:-1]}
