"""What the preprocess stage says: a progress bar on a terminal, plain lines elsewhere, and tables."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from pipeline.common.console import say
from pipeline.data.sources.damage import DAMAGED_FILE, in_words
from pipeline.data.work.receipts import TRAIN

if TYPE_CHECKING:
    from pipeline.config.base import Share
    from pipeline.data.preprocess.stage import PreprocessReport

WIDE = 120
"""Columns of a terminal that the whole progress bar fits into; a narrower one gets less."""
LINE_EVERY_S = 10.0
"""Off a terminal, a line of progress each so many seconds."""
NOTHING_TO_DO = "nothing to do: all sources are datasets that were made before"


def size(count: float) -> str:
    """A number of bytes for people, in powers of 1,000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def counted(count: int, noun: str) -> str:
    """`1 unit`, `2 units`, `3 batches`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}{'es' if noun.endswith('ch') else 's'}"


class ProgressLine:
    """Progress of the units of a run. A context manager."""

    def __init__(
        self, console: Console, total_bytes: int, units: int, done_before: int, what: str = "tokenizing"
    ) -> None:
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
        say(console, f"{what} {counted(units, 'unit')}, {size(total_bytes)}{before}")

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

    def unit_done(self, tokens: int) -> None:
        """A unit is done, and gave so many tokens."""
        self._done_units += 1
        self._tokens += tokens
        if self._bar is not None:
            self._bar.update(self._task, units=self._units_text)

    def __enter__(self) -> ProgressLine:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def print_report(console: Console, report: PreprocessReport, splits: Mapping[str, Share]) -> None:
    """Print the counts of every dataset, the rejected records by reason, and what was written if no unit was missing.

    Args:
        console: where to.
        report: of the stage.
        splits: what the run file asks for.
    """
    table = Table("source", "split", "documents", "tokens", "text", "bytes/token", "rejected", title="preprocess")
    has_damage = any(source.damaged for source in report.sources)
    if has_damage:
        table.add_column("unread")
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
                f"{sum(source.rejected.values()):,}" if name == TRAIN else "",
                *([size(source.lost) if name == TRAIN else ""] if has_damage else []),
            )
    if report.sources:
        console.print(table)
    for name, evidence in {name: e for source in report.sources for name, e in source.condemned.items()}.items():
        say(console, f"{name} is not used any more ({evidence}); what it had written was made again")
    for source in report.sources:
        for name, wanted in splits.items():
            if wanted.share and not source.splits[name].documents:
                documents = counted(source.splits["train"].documents, "document")
                say(
                    console,
                    f"{source.name}: none of {documents} went to {name} (data.splits.{name} is {wanted}); nothing to "
                    "evaluate on",
                )
        if source.damaged:
            say(console, f"{source.name}: {in_words(source.damaged, source.bytes)}, see {source.folder / DAMAGED_FILE}")
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
