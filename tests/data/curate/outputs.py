"""What measurers give besides their columns, kept in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.data.curate.batch import ChunkOutput, Measurer, TextBatch


class KeptOutput(ChunkOutput):
    """Files, runs and counts of a chunk by name."""

    def __init__(self) -> None:
        self.files: dict[str, list[npt.NDArray[Any]]] = {}
        self.runs: dict[str, list[npt.NDArray[Any]]] = {}
        self.counts: dict[str, npt.NDArray[np.int64]] = {}

    def append(self, name: str, records: npt.NDArray[Any]) -> None:
        self.files.setdefault(name, []).append(records)

    def add_run(self, name: str, records: npt.NDArray[Any]) -> None:
        self.runs.setdefault(name, []).append(records)

    def count(self, name: str, counts: npt.NDArray[np.int64]) -> None:
        self.counts[name] = self.counts.get(name, np.zeros_like(counts)) + counts

    def file(self, name: str) -> npt.NDArray[Any]:
        """All records of a file."""
        return np.concatenate(self.files[name])


def measured(measurer: Measurer, batch: TextBatch) -> tuple[npt.NDArray[Any], KeptOutput]:
    """Columns of a batch, and the output."""
    table, output = np.zeros(len(batch.rows), np.dtype(measurer.columns)), KeptOutput()
    measurer.measure(batch, table, output)
    return table, output
