"""Connected components: the root of each is its least member, so they are a function of the set of edges."""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

Places = npt.NDArray[np.uint32]


class Components(Protocol):
    """Components of vertices 0, 1, 2 ..."""

    def add(self, one: Places, other: Places) -> None:
        """Add edges."""

    def roots(self) -> Places:
        """Least member of the component of each vertex; it ends the object."""


def make_components(engine: Literal["numba", "python"], vertices: int) -> Components:
    """Components without edges; 4 bytes for each vertex. `python` is NumPy."""
    if engine == "numba":
        from pipeline.data.curate.duplicates.components.compiled import NumbaComponents

        return NumbaComponents(vertices)
    return NumpyComponents(vertices)


class NumpyComponents:
    """Components by hooking: of each edge the greater root goes below the least root that it meets."""

    def __init__(self, vertices: int) -> None:
        self._parent = np.arange(vertices, dtype=np.uint32)

    def add(self, one: Places, other: Places) -> None:
        while len(one):
            one, other = self._find(one), self._find(other)
            apart = one != other
            one, other = one[apart], other[apart]
            # Each component that has an edge here is hooked or hooks another: half of them go each time.
            np.minimum.at(self._parent, np.maximum(one, other), np.minimum(one, other))

    def _find(self, places: Places) -> Places:
        start = places
        while True:
            above = self._parent[places]
            if np.array_equal(above, places):
                self._parent[start] = np.minimum(self._parent[start], places)
                return places
            places = above

    def roots(self) -> Places:
        while True:
            above = self._parent[self._parent]
            if np.array_equal(above, self._parent):
                return above
            self._parent = above
