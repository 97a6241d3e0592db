"""Units of a folder's frozen plan, read again by whoever has the folder alone."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.common import storage
from pipeline.data.datasets.files import PLAN_FILE
from pipeline.data.datasets.manifest import PLAN_KEYS
from pipeline.data.sources.formats import planned_reader
from pipeline.data.sources.globs import File
from pipeline.data.sources.reader import Reader
from pipeline.data.sources.records import ANY_EXPANSION, MAX_RECORD_BYTES, Piece, Unit


class PlannedUnits:
    """Files and units of a plan. Nothing is read before it is needed.

    Args:
        folder: that has the plan.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / PLAN_FILE

    @cached_property
    def plan(self) -> Any:
        """The plan, as JSON."""
        return storage.get_json(self._path, *PLAN_KEYS)

    @cached_property
    def reader(self) -> Reader:
        """Reader of the files for records that were sound when they were read before; raises as `open_reader`."""
        return self.open_reader(max_expansion=ANY_EXPANSION, verify=False, salvage=True, max_zstd_window=2**31)

    def open_reader(self, **limits: Any) -> Reader:
        """The reader that the plan was made with, with other limits.

        Raises:
            UserError: the format is not installed, or in another version.
        """
        settings = self.plan["settings"]
        longest = settings.get("data.preprocess.max_record_bytes", MAX_RECORD_BYTES)
        return planned_reader(self._path, settings, max_record_bytes=longest, **limits)

    def file(self, number: int) -> File:
        """A file by its number in the plan."""
        name, path, size = self.plan["files"][number]
        return File(name, path, size, 0)

    def unit(self, number: int) -> Unit:
        """A unit as the plan cuts it."""
        pieces = tuple(Piece(self.file(file), start, end) for file, start, end in self.plan["units"][number])
        return Unit(number, self.plan["settings"]["name"], pieces)
