"""Metrics of a run as columns."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.common.errors import UserError
from pipeline.train.monitor.loggers.base import flat

_INTEGERS = ("step", "attempt")


class RunMetrics:
    """Metrics of a run, a row per step: what `metrics.jsonl` has, of a step that was trained again the last attempt.

    `metrics["loss"]` is a column, [rows]: float64, with NaN where a row does not have the value; int64 for `step` and
    `attempt`; objects, with None where a row does not have it, for texts such as `data_hash`. Values of nested objects
    have names with slashes, as in TensorBoard: `metrics["loss_by_source/web"]`.

    Attributes:
        rows: The rows as they are in the file, ascending by `step`, which is counted from 1.
    """

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.rows = list(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        if name not in self._columns:
            if not self.rows:
                raise UserError(f"the metrics have no column {name!r}: nothing is trained yet")
            near = difflib.get_close_matches(name, self._columns)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"columns: {', '.join(self._columns)}"
            raise UserError(f"the metrics have no column {name!r}; {hint}")
        return self._columns[name]

    def __repr__(self) -> str:
        steps = f"steps {self.rows[0]['step']:,} to {self.rows[-1]['step']:,}, " if self.rows else ""
        return f"RunMetrics({len(self.rows):,} rows, {steps}columns: {', '.join(self._columns)})"

    @property
    def names(self) -> list[str]:
        """Names of the columns."""
        return list(self._columns)

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """All columns by name, which `pandas.DataFrame` takes as they are."""
        return dict(self._columns)

    def series(self, name: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
        """Steps and values of the rows that have a value, [n] each: `plt.plot(*metrics.series("validation_loss"))`.

        Raises:
            UserError: There is no such column.
        """
        column = self[name]
        there = column != None if column.dtype == object else ~np.isnan(column)  # noqa: E711
        return self["step"][there], column[there]

    @cached_property
    def _columns(self) -> dict[str, npt.NDArray[Any]]:
        found: dict[str, dict[int, Any]] = {}
        for place, row in enumerate(self.rows):
            plain = {name: row[name] for name in (*_INTEGERS, "time") if name in row}
            texts = {name: value for name, value in row.items() if isinstance(value, str)}
            for name, value in (plain | flat(row) | texts).items():
                found.setdefault(name, {})[place] = value
        return {name: _column(name, values, len(self.rows)) for name, values in found.items()}


def _column(name: str, values: dict[int, Any], rows: int) -> npt.NDArray[Any]:
    if name in _INTEGERS:
        return np.array([values.get(place, 0) for place in range(rows)], np.int64)
    if any(isinstance(value, str) for value in values.values()):
        return np.array([values.get(place) for place in range(rows)], object)
    column = np.full(rows, np.nan)
    column[list(values)] = [np.nan if value is None else value for value in values.values()]
    return column
