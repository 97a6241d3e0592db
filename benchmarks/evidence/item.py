"""`Item`: something to be shown on a GPU, as a function with two sets of shapes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Result = dict[str, Any]
"""JSON values. Three keys are known to the runner and the page:

`checks`: what has to hold, name to bool; an item with a check that is false has failed.
`goals`: what is aimed at, name to `{"value": float, "goal": float, "met": bool}`; a goal that is missed is no failure.
`reads`: paths of other files of the repository that the result rests on, like run files; not kept in the line.
"""


@dataclass(frozen=True)
class Item:
    """One entry of the list."""

    name: str
    """Group and name, like `exact/resume`."""
    question: str
    """What it answers, in one line, for `--list` and the page."""
    function: str
    """`module:name` in this folder; imported in the process of the item alone.

    Called as `name(device, work, **shapes)` with `device` "cuda" or "cpu" and `work` an empty folder; returns a
    `Result`, or raises.
    """
    full: Mapping[str, Any]
    """Shapes on a GPU."""
    rehearsal: Mapping[str, Any]
    """Shapes on a CPU: the same keys, small values."""
    least_s: float = 30.0
    """Seconds that it takes on a GPU, seen or guessed: it is not begun with fewer left."""
    limit_s: float = 120.0
    """Seconds on a GPU after which it is ended."""

    def shapes(self, rehearse: bool) -> Mapping[str, Any]:
        """Those of a run."""
        return self.rehearsal if rehearse else self.full

    def load(self) -> Callable[..., Result]:
        """The function."""
        module, _, name = self.function.partition(":")
        function: Callable[..., Result] = getattr(importlib.import_module(f"evidence.{module}"), name)
        return function

    def run(self, work: Path, *, rehearse: bool) -> Result:
        """Measure, in this process."""
        return self.load()("cpu" if rehearse else "cuda", work, **self.shapes(rehearse))


def goal(value: float, wanted: float) -> dict[str, Any]:
    """An entry of `goals`: at least `wanted`."""
    # NumPy's numbers compare to bools of its own, which JSON does not take.
    return {"value": round(float(value), 4), "goal": wanted, "met": bool(value >= wanted)}
