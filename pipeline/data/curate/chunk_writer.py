"""Files of a chunk while it is measured: the table, arrays beside it, and sorted runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.common import storage
from pipeline.data.curate.batch import ChunkOutput
from pipeline.data.curate.files import MEASURES
from pipeline.data.datasets.indexed import HashedFile
from pipeline.data.work.sorted_runs import RunWriter

FIXED_COLUMNS = [("state", "u1"), ("edited", "u1"), ("bytes", "<u4")]
"""First columns of every table of measures."""
DOCUMENT, BAD_RECORD, EMPTY_DOCUMENT = 0, 1, 2
"""Values of `state`: a document, a rejected record, and a document that cleaning leaves nothing of."""
_PER_ROW = frozenset({"signatures"})
"""Arrays that have a record for every row of the chunk; those of rows without one are all ones in binary."""


class ChunkWriter(ChunkOutput):
    """Output of a chunk. As a context manager it removes what is not committed.

    Args:
        folder: of the curation, which exists.
        path: of a file in it, by its name.
    """

    def __init__(self, folder: Path, path: Callable[[str], Path]) -> None:
        storage.make_below(folder, path(MEASURES).parent)
        self.counts: dict[str, list[int]] = {}
        self._path = path
        self._open = ExitStack()
        self._table = self._open.enter_context(HashedFile(path(MEASURES)))
        self._arrays: dict[str, HashedFile] = {}
        self._runs: dict[str, RunWriter] = {}
        self._before = 0
        self._places: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._rows = 0

    def begin(self, places: npt.NDArray[np.int64], rows: int) -> None:
        """Begin a block of rows.

        Args:
            places: of its documents among the rows, ascending.
            rows: of the block, rejected records too.
        """
        self._before += self._rows
        self._places, self._rows = places, rows

    def table(self, block: npt.NDArray[Any]) -> None:
        """Add the records of the block to the table of measures."""
        self._table.write(block.tobytes())

    def append(self, name: str, records: npt.NDArray[Any]) -> None:
        is_new = name not in self._arrays
        if is_new:
            self._arrays[name] = self._open.enter_context(HashedFile(self._path(name)))
        file = self._arrays[name]
        if name not in _PER_ROW:
            file.write(records.tobytes())
            return
        width = records.dtype.itemsize * int(np.prod(records.shape[1:], dtype=np.int64))
        if is_new:
            file.write(b"\xff" * (self._before * width))
        block = np.full((self._rows, width), 0xFF, np.uint8)
        block[self._places] = np.ascontiguousarray(records).view(np.uint8).reshape(len(self._places), width)
        file.write(block.tobytes())

    def add_run(self, name: str, records: npt.NDArray[Any]) -> None:
        if name not in self._runs:
            self._runs[name] = self._open.enter_context(RunWriter(self._path(name), records.dtype))
        self._runs[name].add(records)

    def count(self, name: str, counts: npt.NDArray[np.int64]) -> None:
        before = self.counts.get(name)
        values = [int(value) for value in counts]
        self.counts[name] = values if before is None else [a + b for a, b in zip(before, values, strict=True)]

    def finish(self) -> dict[str, HashedFile]:
        """Write the runs; all files by name, not yet committed."""
        files = {MEASURES: self._table, **self._arrays}
        return files | {name: run.finish() for name, run in self._runs.items()}

    def __enter__(self) -> ChunkWriter:
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)
