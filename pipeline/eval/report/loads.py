"""Loads of experts by layer over the steps of a run, as they are read from the metrics."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.train.run.goodput import number

_MOST_STEPS = 256
"""Steps whose loads are kept; of more, every second one is dropped."""
_MOST_EXPERTS = 4096
"""Experts of a layer above which its loads are not read."""


class Loads:
    """Loads of each expert over the mean of its layer, in the steps that tell them."""

    def __init__(self) -> None:
        self.step = array("q")
        self.by_layer: list[dict[str, array[float]]] = []

    def add(self, step: int, loads: Any) -> None:
        """Those of a step, from `experts.load_by_layer` of its row, if they are what they should be."""
        if not isinstance(loads, dict):
            return
        found = {
            layer: array("d", map(number, values))
            for layer, values in loads.items()
            if layer.isdecimal() and isinstance(values, list) and 0 < len(values) <= _MOST_EXPERTS
        }
        if found:
            self.step.append(step)
            self.by_layer.append(found)
        if len(self.step) > _MOST_STEPS:
            del self.step[1::2]
            del self.by_layer[1::2]

    def go_back(self, step: int) -> None:
        """Steps after this one do not count."""
        keep = bisect_right(self.step, step)
        del self.step[keep:]
        del self.by_layer[keep:]

    def worst_layer(self) -> str | None:
        """The layer whose busiest expert has the highest load in the mean of steps."""
        found = {layer: most for layer in self.layers() if math.isfinite(most := self._mean_of_most(layer))}
        return max(found, key=lambda layer: found[layer], default=None)

    def layers(self) -> list[str]:
        """Those of the newest step, in order."""
        return sorted(self.by_layer[-1], key=int) if self.by_layer else []

    def of(self, layer: str) -> tuple[list[int], npt.NDArray[np.float64]]:
        """Steps, and the loads of a layer's experts in each [steps, experts]."""
        size = len(self.by_layer[-1][layer])
        places = [place for place, each in enumerate(self.by_layer) if len(each.get(layer, ())) == size]
        return [self.step[place] for place in places], np.array([self.by_layer[place][layer] for place in places])

    def _mean_of_most(self, layer: str) -> float:
        most = self.of(layer)[1].max(axis=1)
        finite = most[np.isfinite(most)]
        return float(finite.mean()) if finite.size else math.nan
