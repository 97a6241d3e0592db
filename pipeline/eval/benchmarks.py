"""All that is measured on a checkpoint beside the held-out loss. Needs torch only where it is made."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from pipeline.common import storage
from pipeline.config import Config
from pipeline.eval.reports import report_path
from pipeline.train.checkpoint.checkpoint import Checkpoint

if TYPE_CHECKING:
    from pipeline.eval.engine import Engine


def benchmark_path(config: Config, step: int, kind: Literal["tasks", "harness"]) -> Path:
    """Where results of a checkpoint are kept: beside its report, under a name that is no report's."""
    path = report_path(config, step)
    return path.with_name(f"{kind}-{path.name}")


def kept_results(config: Config, checkpoint: Checkpoint, kind: Literal["tasks", "harness"]) -> dict[str, Any]:
    """What is kept of this very checkpoint, however it was made; nothing of a damaged file.

    Returns:
        For `tasks` what each was made with and its figures, by its name. For `harness` what the harness said, the
        latest under `""`, and those before it under `"1"` and so on, which were of other tasks or other settings.
    """
    found = {}
    with suppress(FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        value = storage.get_json(benchmark_path(config, checkpoint.step, kind))
        if kind == "tasks":
            entries = dict(value["tasks"])
        else:
            others = value.pop("others", [])
            entries = {"": value} | {str(number): each for number, each in enumerate(others, 1)}
        for name, entry in entries.items():
            if entry["made_with"]["checkpoint"] == checkpoint.fingerprint:
                found[name] = entry
    return found


def run_benchmarks(
    engine: Engine, console: Console, *, keep: bool = True, beat: Callable[[], None] = lambda: None
) -> None:
    """The tasks of `eval.tasks`, then those of `eval.harness`, each that is not made yet. Every rank calls this.

    Args:
        engine: with a checkpoint.
        console: where the tables go.
        keep: whether results are written down.
        beat: a sign of life, called after each batch.
    """
    from pipeline.eval.harness import run_harness
    from pipeline.eval.tasks import run_tasks

    if engine.config.eval.tasks:
        run_tasks(engine, console, keep=keep, beat=beat)
    if engine.config.eval.harness is not None:
        run_harness(engine, console, keep=keep, beat=beat)


def benchmarks_are_made(config: Config, step: int) -> bool:
    """Whether there is nothing left to do for `run_benchmarks` at a step."""
    from pipeline.eval.harness import harness_is_made
    from pipeline.eval.tasks import tasks_are_made

    return tasks_are_made(config, step) and harness_is_made(config, step)


def benchmarks_are_kept(config: Config, checkpoint: Checkpoint) -> bool:
    """Whether there are results of this very checkpoint of all that `eval` names. Needs no torch.

    What else they were made with is not looked at, which takes reading the tasks' files; see `benchmarks_are_made`.
    """
    kept = kept_results(config, checkpoint, "tasks") if config.eval.tasks else {}
    if any(task.title not in kept for task in config.eval.tasks):
        return False
    return config.eval.harness is None or bool(kept_results(config, checkpoint, "harness"))
