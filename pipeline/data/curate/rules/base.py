"""Rules: bounds of what was measured of a document. They read the table of measures, never the text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class DocumentRule(ABC):
    """A rule that removes documents by their measures.

    Attributes:
        name: of its preset and its bound, like `gopher_quality.min_words`.
        key: of the bound in the run file.
        bound: its value.
        keeps: `min` keeps values from the bound on, `max` values up to it.
        about: what the value is, for reports: `words`, `share of lines that begin with a bullet`.
    """

    name: str
    key: str
    bound: float
    keeps: Literal["min", "max"]
    about: str

    @abstractmethod
    def values(self, table: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Values of documents, of shape (documents,). Equal on every machine: counts, or one division of two."""

    def fires(self, table: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Tell which documents it removes."""
        values = self.values(table)
        return values < self.bound if self.keeps == "min" else values > self.bound


@dataclass(frozen=True)
class Ratio(DocumentRule):
    """A rule over one column of counts, or over the ratio of two; 0 / 0 is 0.

    Attributes:
        numerator: column.
        denominator: column; empty for the count itself.
    """

    numerator: str = ""
    denominator: str = ""

    def values(self, table: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        count = table[self.numerator].astype(np.float64)
        return count / np.maximum(table[self.denominator], 1) if self.denominator else count
