"""The terminal: a progress bar or plain lines."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pipeline.common.console import say
from pipeline.common.format import duration, percent
from pipeline.train.monitor.loggers.base import Logger


class Terminal(Logger):
    """A progress bar on a terminal; elsewhere a plain line for the first step and each `every` steps."""

    def __init__(self, console: Console, first: int, total: int, every: int) -> None:
        self._console = console
        self._every = every
        self._total = total
        self._first: tuple[int, float] | None = None
        """The first step of this attempt, or since a rewind, and when it ended: it compiles, and takes longer."""
        self._progress: Progress | None = None
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("train"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._progress.add_task("train", total=total, completed=first, numbers="")
            self._progress.start()

    def write(self, row: dict[str, Any]) -> None:
        if "loss" not in row:
            if self._progress is not None and row.get("passed_over"):
                self._progress.update(self._task, completed=row["step"])
            return
        step = row["step"]
        self._first = self._first or (step, time.monotonic())
        numbers = (
            f"loss {row['loss']:.4f}  norm {row['grad_norm']:.3f}  lr {row['lr']:.2e}  "
            f"{row['tokens_per_second']:,.0f} tok/s"
        )
        if "preference_loss" in row:
            right = percent(row["preference_accuracy"], 0)
            numbers = f"preference loss {row['preference_loss']:.4f}, {right} right  {numbers}"
        if "mfu" in row:
            numbers += f"  mfu {percent(row['mfu'], 1)}"
        if "experts" in row:
            numbers += f"  load {row['experts']['load_max_over_mean']:.1f}x"
            numbers += " (forced)" if row["experts"].get("balance_forced") else ""
        if self._progress is not None:
            self._progress.update(self._task, completed=step, numbers=numbers)
        elif step in (self._first[0], self._total) or step % self._every == 0:
            left = self._left(step, *self._first)
            say(self._console, f"step {step:>{len(str(self._total))}}/{self._total}  {numbers}{left}")

    def _left(self, step: int, first: int, begin: float) -> str:
        """Time left, at the mean speed since the first step, validations and saves included."""
        if not first < step < self._total:
            return ""
        return f"  {duration((time.monotonic() - begin) / (step - first) * (self._total - step))} left"

    def rewind(self, step: int) -> None:
        self._first = None
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
