"""Units of a folder's frozen plan, read again by whoever has the folder alone."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.common import storage
from pipeline.common.objects.access import RemoteAccess
from pipeline.common.objects.urls import check_endpoint
from pipeline.common.trust import refuse_untrusted
from pipeline.data.datasets.files import PLAN_FILE
from pipeline.data.datasets.manifest import PLAN_KEYS
from pipeline.data.sources.formats import planned_reader
from pipeline.data.sources.globs import File
from pipeline.data.sources.reader import Reader
from pipeline.data.sources.records import ANY_EXPANSION, MAX_RECORD_BYTES, Piece, Unit
from pipeline.data.work.frozen_plan import REMOTE, VERSIONS


def planned_file(plan: Any, number: int) -> File:
    """A file of a plan by its number."""
    name, path, size = plan["files"][number]
    return File(name, path, size, 0, plan[VERSIONS][number] if VERSIONS in plan else "")


def planned_access(plan: Any) -> RemoteAccess:
    """Settings by which the objects of a plan are read again."""
    where = plan.get(REMOTE, {})
    endpoint = where.get("endpoint")
    return RemoteAccess(
        endpoint=None if endpoint is None else check_endpoint(endpoint), anonymous=bool(where.get("anonymous"))
    )


def refuse_objects_of_others(path: Path, plan: Any) -> None:
    """Refuse to read the objects of a plan that others may have written: it would be with the user's credentials.

    Args:
        path: of the plan.
        plan: its content.

    Raises:
        UserError: others may have written it, and it has objects.
    """
    if VERSIONS in plan:
        todo = "use a copy of the dataset that only you may write to"
        refuse_untrusted(f"{path} (URLs in it)", [path], todo, sends=True)


class PlannedUnits:
    """Files and units of a plan. Nothing is read before it is needed.

    Args:
        folder: that has the plan.
        remote: settings of access to objects; by default those that the plan has.
    """

    def __init__(self, folder: Path, remote: RemoteAccess | None = None) -> None:
        self._path, self._remote = folder / PLAN_FILE, remote

    @cached_property
    def plan(self) -> Any:
        """The plan, as JSON."""
        return storage.get_json(self._path, *PLAN_KEYS)

    @cached_property
    def remote(self) -> RemoteAccess:
        """Settings of access to the objects of the plan."""
        return planned_access(self.plan) if self._remote is None else self._remote

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
        if VERSIONS in self.plan:
            limits["remote"] = self.remote
        return planned_reader(self._path, settings, max_record_bytes=longest, **limits)

    def file(self, number: int) -> File:
        """A file by its number in the plan."""
        return planned_file(self.plan, number)

    def unit(self, number: int) -> Unit:
        """A unit as the plan cuts it, to be read.

        Raises:
            UserError: as `refuse_objects_of_others`.
        """
        refuse_objects_of_others(self._path, self.plan)
        pieces = tuple(Piece(self.file(file), start, end) for file, start, end in self.plan["units"][number])
        return Unit(number, self.plan["settings"]["name"], pieces)
