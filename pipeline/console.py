"""How stages talk: plain lines, and a bar where there is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def say(console: Console, text: str) -> None:
    """A line as it is: no markup, no colours for numbers, no breaks that would cut paths and messages apart."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def progress(console: Console, label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar; yields a function that advances it by a number of units."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=total)
        yield lambda units: bar.advance(task, units)
