"""How stages talk: plain lines, and a bar where there is a terminal."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_FULL = (errno.ENOSPC, errno.EDQUOT)


def say(console: Console, text: str) -> None:
    """A line as it is: no markup, no colours for numbers, no breaks that would cut paths and messages apart."""
    try:
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    except OSError as error:
        if error.errno not in _FULL:  # of a log file, which is no reason to end a run
            raise


def alarm(label: str, message: str) -> None:
    """What is wrong, to the error output, with a word before it that stands out."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(label, style="bold red", end=" ")
    console.print(message, markup=False)


@contextmanager
def progress(console: Console, label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar; yields a function that advances it by a number of units."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=total)
        yield lambda units: bar.advance(task, units)
