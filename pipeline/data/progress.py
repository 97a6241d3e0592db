"""What the preprocess stage says: a progress bar on a terminal, plain lines elsewhere, and tables."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from pipeline.config.root import Config
from pipeline.console import say
from pipeline.data.plan import SourceFiles

if TYPE_CHECKING:
    from pipeline.data.preprocess import PreprocessReport

WIDE = 120
"""Columns of a terminal that the whole progress bar fits into; a narrower one gets less."""
FILES_SHOWN = 3
LINE_EVERY_S = 10.0
"""Off a terminal, a line of progress each so many seconds."""


def size(count: float) -> str:
    """A number of bytes for people, in powers of 1,000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def counted(count: int, noun: str) -> str:
    """`1 unit`, `2 units`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


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
            columns = [
                TextColumn("tokenizing"),
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
        say(console, f"tokenizing {counted(units, 'unit')}, {size(total_bytes)}{before}")

    @property
    def _units_text(self) -> str:
        units = f"{self._done_units:,}/{counted(self._units, 'unit')}"
        if self._bar is not None and self._console.width < WIDE:
            return units
        return f"{units}, {self._tokens / 1e6:,.1f} M tokens"

    def advance(self, amount: int) -> None:
        """So many more bytes have been read and encoded."""
        self._done_bytes += amount
        if self._bar is not None:
            self._bar.advance(self._task, amount)
        elif time.monotonic() - self._last_line > LINE_EVERY_S:
            self._last_line = time.monotonic()
            rate = self._done_bytes / (self._last_line - self._started)
            say(
                self._console,
                f"{size(self._done_bytes)} of {size(self._total)} ({self._done_bytes / max(self._total, 1):.0%}), "
                f"{size(rate)}/s, {self._units_text}",
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


def print_dry_run(console: Console, config: Config, sources: list[tuple[SourceFiles, int]]) -> None:
    """Print what there is to do: (files of a source, number of its units)."""
    train = config.tokenizer.train
    say(console, f"output: {config.data_dir}")
    say(console, f"tokenizer: {config.tokenizer.path if train is None else f'trained, {train.vocab_size:,} entries'}")
    table = Table("source", "type", "files", "bytes", "units", title="preprocess: dry run")
    for column in table.columns[2:]:
        column.justify = "right"
    for found, units in sources:
        table.add_row(found.source.name, found.reader.type, f"{len(found.files):,}", f"{found.bytes:,}", f"{units:,}")
    console.print(table)
    for found, _ in sources:
        more = len(found.files) - FILES_SHOWN
        files = [file.path for file in found.files[:FILES_SHOWN]] + ([f"and {more:,} more"] if more > 0 else [])
        say(console, f"{found.source.name}: {', '.join(files)}")


def print_report(console: Console, report: PreprocessReport, heldout: float) -> None:
    """Print the counts of every dataset, the rejected records by reason, and what was written if no unit was missing.

    Args:
        console: where to.
        report: of the stage.
        heldout: share of documents that was to be held out.
    """
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
        if heldout and not source.splits["heldout"].documents:
            documents = counted(source.splits["train"].documents, "document")
            say(
                console,
                f"{source.name}: none of {documents} is held out (data.heldout is {heldout}); nothing to evaluate on",
            )
        if source.rejected:
            rejected = sum(source.rejected.values())
            file = source.folder / "rejected.jsonl"
            say(console, f"{source.name}: {rejected:,} of {counted(source.records, 'record')} rejected, see {file}")
        for reason, count in source.rejected.items():
            say(console, f"  {count:,} {reason}, the first is {source.first_rejected[reason]}")
    if report.sources and not report.units_done:
        written = [str(path) for source in report.sources for path in source.written]
        if written:
            say(console, f"all units were complete; wrote what was missing or damaged: {', '.join(written)}")
        else:
            say(console, "nothing to do: all units were complete")
