"""All that is measured on a checkpoint beside the held-out loss."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console

from pipeline.config import Config
from pipeline.eval.engine import Engine
from pipeline.eval.harness import harness_is_made, run_harness
from pipeline.eval.tasks import run_tasks, tasks_are_made


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
    if engine.config.eval.tasks:
        run_tasks(engine, console, keep=keep, beat=beat)
    if engine.config.eval.harness is not None:
        run_harness(engine, console, keep=keep, beat=beat)


def benchmarks_are_made(config: Config, step: int) -> bool:
    """Whether there is nothing left to do for `run_benchmarks` at a step."""
    return tasks_are_made(config, step) and harness_is_made(config, step)
