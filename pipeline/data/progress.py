"""What the preprocess stage says: a progress bar on a terminal, plain lines elsewhere, and tables."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from pipeline.data.plan import SourceFiles

if TYPE_CHECKING:
    from pipeline.data.preprocess import PreprocessReport

LINE_EVERY_S = 10.0
"""Off a terminal, a line of progress each so many seconds."""


def size(count: float) -> str:
    """A number of bytes for people, in powers of 1,000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


class ProgressLine:
    """Progress of the units of a run. A context manager."""

    def __init__(self, console: Console, total_bytes: int, units: int, done_before: int) -> None:
        self._console = console
        self._total = total_bytes
        self._units = units
        self._done_units = 0
        self._done_bytes = 0
        self._tokens = 0
        self._started = self._last_line = time.monotonic()
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("tokenizing"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[units]}"),
                console=console,
            )
            self._task = self._bar.add_task("", total=total_bytes, units=self._units_text)
        before = f"; {done_before:,} were done before" if done_before else ""
        self._say(f"tokenizing {units:,} units, {size(total_bytes)}{before}")

    @property
    def _units_text(self) -> str:
        return f"{self._done_units:,}/{self._units:,} units, {self._tokens / 1e6:,.1f} M tokens"

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    def advance(self, amount: int) -> None:
        """So many more bytes have been read and encoded."""
        self._done_bytes += amount
        if self._bar is not None:
            self._bar.advance(self._task, amount)
        elif time.monotonic() - self._last_line > LINE_EVERY_S:
            self._last_line = time.monotonic()
            rate = self._done_bytes / (self._last_line - self._started)
            self._say(
                f"{size(self._done_bytes)} of {size(self._total)} ({self._done_bytes / self._total:.0%}), "
                f"{size(rate)}/s, {self._units_text}"
            )

    def unit_done(self, receipt: dict[str, Any]) -> None:
        """A unit has its receipt."""
        self._done_units += 1
        self._tokens += sum(split["tokens"] for split in receipt["splits"].values())
        if self._bar is not None:
            self._bar.update(self._task, units=self._units_text)

    def __enter__(self) -> ProgressLine:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def print_dry_run(console: Console, sources: list[tuple[SourceFiles, int]]) -> None:
    """Print what there is to do: (files of a source, number of its units)."""
    table = Table("source", "type", "files", "bytes", "units", title="preprocess: dry run")
    for column in table.columns[2:]:
        column.justify = "right"
    for found, units in sources:
        table.add_row(found.source.name, found.reader.type, f"{len(found.files):,}", f"{found.bytes:,}", f"{units:,}")
    console.print(table)


def print_report(console: Console, report: PreprocessReport) -> None:
    """Print the counts of every dataset and the rejected records by reason."""
    table = Table("source", "split", "documents", "tokens", "text", "bytes/token", title="preprocess")
    for column in table.columns[2:]:
        column.justify = "right"
    for source in report.sources:
        for name, split in source.splits.items():
            table.add_row(
                source.name,
                name,
                f"{split.documents:,}",
                f"{split.tokens:,}",
                size(split.text_bytes),
                f"{split.text_bytes / split.tokens:.2f}" if split.tokens else "-",
            )
    if report.sources:
        console.print(table)
    for source in report.sources:
        for reason, count in source.rejected.items():
            file = source.folder / "rejected.jsonl"
            console.print(
                f"{source.name}: {count:,} of {source.records:,} records rejected: {reason} ({file})",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
    if report.sources and not report.units_done:
        console.print("nothing to do: all units were complete", highlight=False)
