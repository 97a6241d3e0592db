"""Decisions of a finished curation, read: verdicts and removed lines by unit and row."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.common.hashing import file_hash
from pipeline.data.curate.duplicates.lines import LINE
from pipeline.data.curate.files import CURATION_FILE, EDITED, REJECTED, VERDICT, decisions_folder, verdicts_file

CURATION_KEYS = (
    "source",
    "scope",
    "sources",
    "measure_hash",
    "decide_hash",
    "mode",
    "settings",
    "rules",
    "rows",
    "documents",
    "rejected",
    "kept",
    "removed",
    "verdicts",
)
LINES_SUFFIX = ".lines"
"""Of a file of removed lines beside verdicts: `LINE` records."""
STATISTICS_SUFFIX = ".statistics"
"""Of a chunk, for the report, as JSON: too much for a receipt, which others read often."""
_AGAIN = "run `pipeline curate RUN.yaml` with the run file that it was made with: it makes damaged files again"


class Verdict(NamedTuple):
    """Verdict about a row."""

    rule: str | None
    """Name of the rule that removed it; None if it is kept, or was no document."""
    value: float
    """Of that rule."""
    kept: int
    """Document (`scope.document`) that it is a duplicate of; else `NOBODY`."""
    is_rejected: bool
    is_edited: bool


@dataclass(frozen=True)
class Curation:
    """Decisions about a source.

    Attributes:
        folder: of the curation of the source.
        about: content of `curation.json`.
    """

    folder: Path
    about: dict[str, Any]

    @property
    def decisions(self) -> Path:
        """Folder of the decisions."""
        return decisions_folder(self.folder, self.about["decide_hash"])

    @cached_property
    def rules(self) -> list[str]:
        """Names of the rules; the number of a rule in verdicts is its place + 1."""
        return [rule["name"] for rule in self.about["rules"]]

    @cached_property
    def chunks(self) -> dict[int, int]:
        """Chunks of each unit."""
        found: dict[int, int] = {}
        for name in self.about["verdicts"]:
            if name.endswith(".verdicts"):
                unit = int(Path(name).stem.split("-")[0])
                found[unit] = found.get(unit, 0) + 1
        return found

    def read(self, unit: int) -> UnitVerdicts:
        """Verdicts of a unit, checked.

        Raises:
            UserError: a file is missing or damaged.
        """
        chunks = [self._read(unit, chunk) for chunk in range(self.chunks.get(unit, 0))]
        return UnitVerdicts(self.rules, [verdicts for verdicts, _ in chunks], [lines for _, lines in chunks])

    def _read(self, unit: int, chunk: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        path = verdicts_file(self.decisions, unit, chunk)
        lines = path.with_suffix(LINES_SUFFIX)
        has_lines = self._name(lines) in self.about["verdicts"]
        return self._array(path, VERDICT), self._array(lines, LINE) if has_lines else np.zeros(0, LINE)

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self.decisions))

    def _array(self, path: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        wanted = self.about["verdicts"].get(self._name(path))
        try:
            found = f"{file_hash(path):016x}"
        except FileNotFoundError:
            raise UserError(f"{path} is missing; {_AGAIN}") from None
        if found != wanted:
            raise UserError(f"{path} is damaged (hash {found} instead of {wanted}, from pass 'decide'); {_AGAIN}")
        return np.memmap(path, dtype, "r") if path.stat().st_size else np.zeros(0, dtype)


class UnitVerdicts:
    """Verdicts of a unit.

    Args:
        rules: names.
        verdicts: of its chunks, `VERDICT` records.
        lines: removed lines of its chunks, `LINE` records.
    """

    def __init__(self, rules: list[str], verdicts: list[npt.NDArray[Any]], lines: list[npt.NDArray[Any]]) -> None:
        self._rules = rules
        self._verdicts = verdicts
        self._lines = lines
        self._starts = [0]
        for each in verdicts:
            self._starts.append(self._starts[-1] + len(each))

    @property
    def rows(self) -> int:
        """Rows of the unit."""
        return self._starts[-1]

    def __iter__(self) -> Iterator[npt.NDArray[Any]]:
        """The records of its chunks, chunk after chunk."""
        return iter(self._verdicts)

    def record(self, row: int) -> Any:
        """The `VERDICT` record of a row."""
        chunk, place = self._place(row)
        return self._verdicts[chunk][place]

    def verdict(self, row: int) -> Verdict:
        """Verdict about a row."""
        record = self.record(row)
        rule, flags = int(record["rule"]), int(record["flags"])
        name = self._rules[rule - 1] if rule else None
        return Verdict(name, float(record["value"]), int(record["kept"]), bool(flags & REJECTED), bool(flags & EDITED))

    def lines(self, row: int) -> list[int]:
        """Numbers of the lines of a row's cleaned text that are removed, ascending."""
        chunk, place = self._place(row)
        lines = self._lines[chunk]
        if not len(lines):
            return []
        first, end = np.searchsorted(lines["row"], np.array([place, place + 1], np.uint32))
        return [int(line) for line in lines["line"][first:end]]

    def _place(self, row: int) -> tuple[int, int]:
        if not 0 <= row < self.rows:
            raise UserError(
                f"row {row} has no verdict: {self.rows} rows of its unit were decided about. The source has changed; "
                "run `pipeline curate` again"
            )
        chunk = bisect_right(self._starts, row) - 1
        return chunk, row - self._starts[chunk]


def read_curation(folder: Path) -> Curation:
    """The active decisions about a source.

    Args:
        folder: of its curation.

    Raises:
        UserError: there are none, or they are damaged.
    """
    return _read(folder, folder / CURATION_FILE)


def find_curation(folder: Path) -> Curation | None:
    """`read_curation`; None if there is none that can be read."""
    try:
        return read_curation(folder)
    except UserError:
        return None


def read_decisions(decisions: Path) -> Curation:
    """Decisions by their folder, active or not."""
    return _read(decisions.parent.parent, decisions / CURATION_FILE)


def _read(folder: Path, path: Path) -> Curation:
    try:
        return Curation(folder, storage.get_json(path, *CURATION_KEYS))
    except FileNotFoundError:
        raise UserError(f"{path} is missing: there are no decisions; run `pipeline curate RUN.yaml` first") from None
