"""Connected components by compiled union-find."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.common.imports import njit


@njit
def _find(parent: Any, place: Any) -> Any:
    while parent[place] != place:
        parent[place] = parent[parent[place]]
        place = parent[place]
    return place


@njit
def _add(parent: Any, one: Any, other: Any) -> None:
    for edge in range(len(one)):
        low, high = _find(parent, one[edge]), _find(parent, other[edge])
        if low < high:
            parent[high] = low
        elif high < low:
            parent[low] = high


@njit
def _flatten(parent: Any) -> None:
    # A parent is never greater, so it has been flattened before.
    for place in range(len(parent)):
        parent[place] = parent[parent[place]]


class NumbaComponents:
    """Components by union-find with path halving."""

    def __init__(self, vertices: int) -> None:
        self._parent = np.arange(vertices, dtype=np.uint32)

    def add(self, one: npt.NDArray[np.uint32], other: npt.NDArray[np.uint32]) -> None:
        """Add edges."""
        _add(self._parent, one, other)

    def roots(self) -> npt.NDArray[np.uint32]:
        """Least member of the component of each vertex; it ends the object."""
        _flatten(self._parent)
        return self._parent
