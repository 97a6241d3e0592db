"""Shares: what a device reaches of its stated peaks, assumed or measured on it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files

FILE = files("pipeline.train.host").joinpath("measured.json")
"""Measured shares by name of the device. `python benchmarks/gpu_evidence.py --calibrate` writes it; nobody edits it."""
UPDATE_BYTES = {"fp32": 40, "bf16": 112}
"""Bytes that a step moves per parameter, by `train.optimizer.states`: gradient for norm and clipping; weight, gradient
and moments for the update, which with moments in bf16 is not a single kernel."""
_ONE_SCALE = ("current", "delayed")
"""Recipes of fp8 whose products are those of `tensorwise`: one scale per matrix."""


@dataclass(frozen=True)
class Shares:
    """Shares of the stated peaks that plans divide by. The defaults are assumptions."""

    products: float
    """Share of the peak of a number format that large matrix products reach; measured in bf16."""
    fp8: Mapping[str, float] = field(default_factory=dict)
    """The same of fp8's own peak, by recipe; recipes that are missing reach `products`."""
    attention: float = 0.6
    """Share of the speed of matrix products that the forward pass of causal attention reaches."""
    attention_backward: float = 2.5
    """Time relative to forward: a flash kernel computes the scores again (Dao 2023), five products for two."""
    memory: float = 0.8
    """Share of the memory's bandwidth that reading and writing reach."""
    update: float = 0.8
    """The same of norm, clipping and fused AdamW with moments in fp32."""

    def fp8_products(self, recipe: str) -> float:
        """Share of fp8's peak for a value of `train.precision.fp8.recipe`."""
        return self.fp8.get("tensorwise" if recipe in _ONE_SCALE else recipe, self.products)


@dataclass(frozen=True)
class MeasuredShares:
    """An entry of the file: shares, and where they come from."""

    driver: str
    """Name of the device by its driver."""
    date: str
    """UTC, ISO 8601."""
    commit: str | None
    """Commit of the source that measured; `+` after it: with changes."""
    torch: str
    """Its version."""
    shares: Shares

    def __str__(self) -> str:
        commit = "" if self.commit is None else f", commit {self.commit}"
        return f"measured on {self.driver} on {self.date[:10]} with torch {self.torch}{commit}"


def measured(device: str) -> MeasuredShares | None:
    """The entry of a device, by the name that `pipeline plan --device` takes; None where nothing was measured."""
    entry = json.loads(FILE.read_text()).get(device)
    return None if entry is None else MeasuredShares(**{**entry, "shares": Shares(**entry["shares"])})
