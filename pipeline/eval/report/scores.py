"""Results of benchmarks over the steps of a run: those that are built in, and those of lm-evaluation-harness."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.common import storage
from pipeline.common.run_files import RunFiles
from pipeline.eval.reports import report_files

_COUNTS = ("nats", "passages", "truncated", "documents", "words", "bytes", "targets", "tokens", "samples", "sample_len")
"""Figures that say how much was read, not how well."""


@dataclass(frozen=True)
class ReportedScore:
    """A figure of a benchmark at a step."""

    step: int
    weights: str
    task: str
    figure: str
    value: float
    stderr: float | None

    @property
    def is_fraction(self) -> bool:
        """True for a fraction of right answers, or something else from 0 to 1 that is better the higher it is."""
        words = ("perplexity", "bits", "loss", "bpb", "nats", "error")
        return 0 <= self.value <= 1 and not any(word in self.figure for word in words)


def read_scores(run: Path) -> tuple[list[ReportedScore], list[Path]]:
    """Scores in the files of benchmarks of a run folder, by step; and the damaged files."""
    found: list[ReportedScore] = []
    damaged = []
    for kind in ("tasks", "harness"):
        for path in sorted(RunFiles(run).evaluations.glob(f"{kind}-step-*.json")):
            try:
                value = storage.read_object(path)
                step = int(value["step"])
                found += _of_tasks(step, value) if kind == "tasks" else _of_harness(step, value)
            except FileNotFoundError:
                continue
            except (ValueError, KeyError, TypeError, AttributeError):
                damaged.append(path)
    # Of two results of one task at a step, those that the harness was asked for last come first.
    once = {(each.step, each.weights, each.task, each.figure): each for each in reversed(found)}
    return sorted(once.values(), key=lambda each: (each.task, each.figure, each.weights, each.step)), damaged


def read_made_with(run: Path) -> dict[tuple[int, str], dict[str, Any]]:
    """By step and weights how each evaluation of the held-out loss was made; of sound reports."""
    found = {}
    for path in report_files(run):
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            value = storage.read_object(path)
            made_with = value["made_with"]
            found[value["step"], made_with["weights"]] = dict(made_with)
    return found


def _of_tasks(step: int, value: Any) -> Iterator[ReportedScore]:
    for task, entry in value["tasks"].items():
        yield from _scores(step, entry["made_with"]["weights"], task, entry["results"])


def _of_harness(step: int, value: Any) -> Iterator[ReportedScore]:
    for entry in [value, *value.get("others", [])]:
        for task, results in entry["results"].items():
            yield from _scores(step, entry["made_with"]["weights"], task, results)


def _scores(step: int, weights: str, task: str, results: dict[str, Any]) -> Iterator[ReportedScore]:
    """Figures of a task; the harness names them `figure,filter`, and their errors `figure_stderr,filter`."""
    for name, value in results.items():
        figure, comma, of = name.partition(",")
        if figure in _COUNTS or figure.endswith("_stderr") or not _is_number(value):
            continue
        stderr = results.get(f"{figure}_stderr{comma}{of}")
        shown = figure if of in ("", "none") else f"{figure} ({of})"
        yield ReportedScore(step, weights, task, shown.replace("_", " "), value, stderr if _is_number(stderr) else None)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
