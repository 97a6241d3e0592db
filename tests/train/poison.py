"""Data that break a step: the weights of its targets are multiplied, on the way from the loader to the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from pipeline.data.loading.batch import StepData
from pipeline.data.loading.loader import Loader

INF = float("inf")


def poison(monkeypatch: pytest.MonkeyPatch, steps: Mapping[int, float]) -> None:
    """Whatever order they come in and however often, these steps have loss weights times a factor.

    Args:
        monkeypatch: undoes it.
        steps: number, from 1 -> factor. `INF` makes loss and gradient infinite or NaN; 1000 makes a gradient norm that
            is 1000 times as large, and leaves the loss, a mean, as it is.
    """
    original = Loader._read

    def read(self: Loader, step: int, last: int | None) -> StepData:
        data = original(self, step, last)
        factor = steps.get(step + 1, 1.0)
        if factor == 1.0:
            return data
        return replace(data, micro_batches=[replace(b, weight=b.weight * factor) for b in data.micro_batches])

    monkeypatch.setattr(Loader, "_read", read)
