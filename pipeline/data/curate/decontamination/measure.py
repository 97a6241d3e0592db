"""Contamination of documents: n-grams of items that they have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.common.errors import UserError
from pipeline.data.curate.batch import ChunkOutput, Measurer, TextBatch
from pipeline.data.curate.decontamination.index import open_index
from pipeline.data.curate.decontamination.matching import HIT, EngineName, open_matcher

HITS = "hits"
"""Name of the file of a chunk with a `HIT` for each n-gram of each document."""
CONTAMINATED = "contaminated"
"""Column of the different n-grams of items in a document: all when it is measured, the uncommon ones for rules."""

CONTAMINATION_COLUMNS = [(CONTAMINATED, "<u4")]


class ContaminationMeasurer(Measurer):
    """Different n-grams of items in each document, and which ones.

    Args:
        index_path: of the index of items.
        engine: of the search.
        expected: hash of the index in the plan; None for any.

    Raises:
        UserError: the index is damaged or another one, or the engine is missing.
    """

    def __init__(self, index_path: Path, engine: EngineName = "auto", expected: str | None = None) -> None:
        index = open_index(index_path)
        if expected is not None and index.hash != expected:
            raise UserError(f"{index_path} has changed since the curation was planned; run `pipeline curate` again")
        self._matcher = open_matcher(index, engine)

    @property
    def columns(self) -> list[tuple[str, str]]:
        """The number of n-grams."""
        return CONTAMINATION_COLUMNS

    def measure(self, batch: TextBatch, table: npt.NDArray[Any], output: ChunkOutput) -> None:
        """Find the n-grams of each document."""
        hits = self._matcher.hits(batch)
        places = np.searchsorted(batch.rows, hits["row"])
        table[CONTAMINATED] = np.bincount(places, minlength=len(batch.rows))
        output.append(HITS, hits)


def read_hits(data: npt.NDArray[np.uint8] | bytes) -> npt.NDArray[Any]:
    """Hits of a chunk, by the content of its file."""
    return np.frombuffer(data, HIT)
