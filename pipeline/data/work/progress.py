"""Progress of the preprocess stage: a progress bar on a terminal, plain lines elsewhere, and tables."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from pipeline.common.console import say
from pipeline.common.errors import MachineError
from pipeline.common.format import counted, percent, size
from pipeline.data.work.worker_pool import Advanced, Done, J, Lost, R, Workers

WIDE = 120
"""Columns of a terminal that the whole progress bar fits into; a narrower one gets less."""
LINE_EVERY_S = 10.0
"""Off a terminal, seconds between lines of progress."""
NOTHING_TO_DO = "nothing to do: all sources are existing datasets"


class ProgressLine:
    """Progress of the units of a run. A context manager."""

    def __init__(
        self,
        console: Console,
        total_bytes: int,
        units: int,
        done_before: int,
        what: str = "tokenizing",
        noun: str = "unit",
    ) -> None:
        self._noun = noun
        self._has_tokens = what == "tokenizing"
        self._console = console
        self._total = total_bytes
        self._units = units
        self._done_units = 0
        self._done_bytes = 0
        self._tokens = 0
        self._started = self._last_line = time.monotonic()
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = [
                TextColumn(what),
                BarColumn(bar_width=40 if console.width >= WIDE else 10),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[units]}"),
            ]
            if console.width < WIDE:
                del columns[3]
            self._bar = Progress(*columns, console=console)
            self._task = self._bar.add_task("", total=total_bytes, units=self._units_text)
        before = f"; {done_before:,} {'was' if done_before == 1 else 'were'} done before" if done_before else ""
        say(console, f"{what} {counted(units, noun)}, {size(total_bytes)}{before}")

    @property
    def _units_text(self) -> str:
        units = f"{self._done_units:,}/{counted(self._units, self._noun)}"
        if not self._has_tokens or (self._bar is not None and self._console.width < WIDE):
            return units
        return f"{units}, {self._tokens / 1e6:,.1f} M tokens"

    def advance(self, amount: int) -> None:
        """Count bytes that have been read and encoded."""
        self._done_bytes += amount
        if self._bar is not None:
            self._bar.advance(self._task, amount)
        elif time.monotonic() - self._last_line > LINE_EVERY_S:
            self._last_line = time.monotonic()
            rate = self._done_bytes / (self._last_line - self._started)
            done = percent(self._done_bytes / max(self._total, 1), 0)
            say(
                self._console,
                f"{size(self._done_bytes)} of {size(self._total)} ({done}), {size(rate)}/s, {self._units_text}",
            )

    def unit_done(self, tokens: int) -> None:
        """Count a unit that is done, and its tokens."""
        self._done_units += 1
        self._tokens += tokens
        if self._bar is not None:
            self._bar.update(self._task, units=self._units_text)

    def results(self, workers: Workers[J, R], jobs: Iterable[J], failed: str) -> Iterator[R]:
        """The results of jobs that all have to succeed, in any order.

        Args:
            workers: that run them.
            jobs: the units of this line.
            failed: the verb of the message about one that does not.

        Raises:
            MachineError: a job was given up.
        """
        for event in workers.retry(jobs):
            if isinstance(event, Advanced):
                self.advance(event.amount)
            elif isinstance(event, Done):
                self.unit_done(0)
                yield event.result
            else:
                say(self._console, str(event))
                if isinstance(event, Lost) and event.is_last:
                    raise MachineError(f"{event.job} {failed}: {event.how}")

    def __enter__(self) -> ProgressLine:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
