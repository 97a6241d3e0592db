"""Losses by source and by held-out set of several runs, at the tokens that all of them have come to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from pipeline.common.page.html import Table
from pipeline.common.page.words import NONE, count, figure
from pipeline.eval.report.gather import RunFacts
from pipeline.eval.report.series import Validation

_STEPS = 100
"""Steps whose mean is the training loss."""


def compared_table(runs: Sequence[RunFacts]) -> tuple[Table, str]:
    """A row for each loss that a run has, a column for each run, and a note. No rows where there is nothing to compare.

    Args:
        runs: two or more.
    """
    ends = [each.columns.tokens[-1] if len(each.columns) else math.nan for each in runs]
    known = [end for end in ends if math.isfinite(end)]
    if len(known) < 2:
        return Table(("loss", *(each.name for each in runs)), (), 1), ""
    until = min(known)
    columns = [dict(_losses(each, until)) for each in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = tuple((name, *_cells([column.get(name, math.nan) for column in columns])) for name in names)
    note = (
        f"At {count(until)} tokens, the most that all runs have come to. Training: the mean of the last {_STEPS} steps "
        "until there. Validation: the last one until there. In brackets: the difference to the "
        "first run; compare validation only where the held-out data are the same."
    )
    return Table(("loss", *(each.name for each in runs)), rows, 1), note


def _losses(facts: RunFacts, until: float) -> Iterator[tuple[str, float]]:
    columns = facts.columns
    tokens = np.asarray(columns.tokens)
    end = int(np.searchsorted(np.where(np.isfinite(tokens), tokens, -np.inf), until, side="right"))
    steps = slice(max(0, end - _STEPS), end)
    yield "training", _mean(columns.column("loss")[steps])
    for name in columns.loss_by_source:
        yield f"training: {name}", _mean(columns.source(name)[steps])
    newest = columns.step[end - 1] if end else 0
    looks = [each for each in columns.validations if each.step <= newest]
    yield "validation", next((each.loss for each in reversed(looks) if math.isfinite(each.loss)), math.nan)
    yield from _newest("validation", looks)
    yield from _newest("set", [each for each in columns.set_validations if each.step <= newest])


def _newest(what: str, looks: Sequence[Validation]) -> Iterator[tuple[str, float]]:
    """The last loss of each source, or of each set: not every look has all of them."""
    found: dict[str, float] = {}
    for look in looks:
        found |= {name: loss for name, loss in look.by_source.items() if math.isfinite(loss)}
    yield from ((f"{what}: {name}", loss) for name, loss in found.items())


def _mean(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else math.nan


def _cells(values: Sequence[float]) -> Iterator[str]:
    first = values[0]
    for place, value in enumerate(values):
        if not math.isfinite(value):
            yield NONE
        elif place and math.isfinite(first):
            yield f"{figure(value)} ({value - first:+.4f})"
        else:
            yield figure(value)
