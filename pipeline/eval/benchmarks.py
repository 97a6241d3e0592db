"""Benchmarks of a checkpoint beside the held-out loss. Needs torch only where it is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console

from pipeline.config import Config
from pipeline.eval.reports import kept_results
from pipeline.train.checkpoint.committed import Checkpoint

if TYPE_CHECKING:
    from pipeline.eval.engine import GenerationEngine


class Benchmarks(NamedTuple):
    """Figures of benchmarks."""

    tasks: dict[str, dict[str, Any]]
    """Figures of each task of `eval.tasks`, by its name."""
    harness: dict[str, Any] | None
    """What lm-evaluation-harness says of `eval.harness`; None where that is not set."""


def run_benchmarks(
    engine: GenerationEngine, console: Console, *, keep: bool = True, beat: Callable[[], None] = lambda: None
) -> Benchmarks:
    """The tasks of `eval.tasks`, then those of `eval.harness`, each that is not made yet. Every rank calls this.

    Args:
        engine: with weights that are kept.
        console: where the tables go.
        keep: whether results are written down.
        beat: a sign of life, called after each batch.
    """
    tasks, harness = dict[str, dict[str, Any]](), None
    from pipeline.eval.tasks.builtin import run_tasks
    from pipeline.eval.tasks.harness import run_harness

    if engine.config.eval.tasks:
        tasks = run_tasks(engine, console, keep=keep, beat=beat)
    if engine.config.eval.harness is not None:
        harness = run_harness(engine, console, keep=keep, beat=beat)
    return Benchmarks(tasks, harness)


def benchmarks_are_made(config: Config, step: int) -> bool:
    """True if there is nothing left to do for `run_benchmarks` at a step."""
    from pipeline.eval.tasks.builtin import tasks_are_made
    from pipeline.eval.tasks.harness import harness_is_made

    return tasks_are_made(config, step) and harness_is_made(config, step)


def benchmarks_are_kept(config: Config, checkpoint: Checkpoint) -> bool:
    """True if there are results of this very checkpoint of all that `eval` names. Needs no torch.

    What else they were made with is not looked at, which takes reading the tasks' files; see `benchmarks_are_made`.
    """
    kept = kept_results(config, checkpoint, "tasks") if config.eval.tasks else {}
    if any(task.title not in kept for task in config.eval.tasks):
        return False
    return config.eval.harness is None or bool(kept_results(config, checkpoint, "harness"))
