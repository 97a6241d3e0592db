"""Report of the preprocess stage: what it made, by source and split, as data and as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeline.common.console import detail, is_verbose, print_table, say
from pipeline.common.format import counted, percent, size
from pipeline.config.base import Share
from pipeline.data.curate.files import CURATE
from pipeline.data.datasets.files import TRAIN
from pipeline.data.sources.damage import DAMAGED_FILE, DamagedFile, in_words
from pipeline.data.tokenization.coverage import Coverage, covered
from pipeline.data.work.receipt_totals import Counts


@dataclass
class SourceReport:
    """Result of one source."""

    name: str
    folder: Path
    units: int
    records: int = 0
    splits: dict[str, Counts] = field(default_factory=dict)
    coverage: dict[str, Coverage] = field(default_factory=dict)
    """Share of the text that tokens stand for, by split."""
    rejected: dict[str, int] = field(default_factory=dict)
    """Rejected records by reason."""
    curated: dict[str, int] = field(default_factory=dict)
    """Documents that curation removed, by rule."""
    edited_bytes: int = 0
    """Bytes of text that edits of curation took out of documents that stay."""
    engines: dict[str, int] = field(default_factory=dict)
    """Links by the engine that computed their ids."""
    checked: int = 0
    """Documents whose ids were compared with those of `tokenizers`."""
    rejected_engines: dict[str, str] = field(default_factory=dict)
    """Engines that gave other ids than `tokenizers`, with the evidence: what they wrote was made again."""
    first_rejected: dict[str, str] = field(default_factory=dict)
    """By reason, file and line of the first."""
    damaged: list[DamagedFile] = field(default_factory=list)
    """Parts of its files that cannot be read."""
    bytes: int = 0
    """Size of its files on disk."""
    written: list[Path] = field(default_factory=list)
    """Datasets and files that this run finished or repaired."""
    is_first: bool = False
    """It was never finished before."""

    @property
    def lost(self) -> int:
        """Bytes on disk whose text is missing."""
        return sum(each.lost for each in self.damaged)

    def as_json(self) -> dict[str, Any]:
        """Content of `report.json`."""
        # Where nothing is curated or counted, the report is what it was before there was that.
        coverage = {name: each.as_json() for name, each in self.coverage.items() if each.round_trip is not None}
        salvaged = sum(each.salvaged for each in self.damaged)
        counted_bytes = {"salvaged_bytes": salvaged, "edited_bytes": self.edited_bytes}
        optional = {"curated": self.curated, "coverage": coverage, **counted_bytes}
        return {name: value for name, value in optional.items() if value} | {
            "checked": self.checked,
            "condemned": self.rejected_engines,
            "damaged": {"files": len({each.file.name for each in self.damaged}), "bytes": self.lost},
            "engines": self.engines,
            "records": self.records,
            "rejected": self.rejected,
            "splits": {
                name: {key: value for key, value in vars(split).items() if value is not None}
                for name, split in self.splits.items()
            },
            "units": self.units,
        }


@dataclass(frozen=True)
class PreprocessReport:
    """Results of all sources that have files."""

    sources: list[SourceReport] = field(default_factory=list)
    units_done: int = 0
    """Units tokenized by this run; the others were complete before."""
    seconds: float = 0.0

    def total(self, count: str) -> int:
        """Sum of `documents`, `tokens` or `text_bytes` over sources and splits."""
        return sum(getattr(split, count) for source in self.sources for split in source.splits.values())

    @property
    def documents(self) -> int:
        """Documents of all datasets."""
        return self.total("documents")

    @property
    def tokens(self) -> int:
        """Tokens of all datasets, end-of-document tokens included."""
        return self.total("tokens")

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes of all documents."""
        return self.total("text_bytes")

    @property
    def is_complete(self) -> bool:
        """True if there are sources, and this run had nothing to do for them."""
        return bool(self.sources) and not self.units_done and not any(source.written for source in self.sources)

    @property
    def rejected(self) -> dict[str, dict[str, int]]:
        """Rejected records by source and reason."""
        return {source.name: source.rejected for source in self.sources}


def print_report(console: Console, report: PreprocessReport, splits: Mapping[str, Share]) -> None:
    """Print the counts of every dataset and the rejected records by reason; one line if all was complete.

    Args:
        console: where to.
        report: of the stage.
        splits: what the run file asks for.
    """
    if report.is_complete and not is_verbose():
        documents, sources = counted(report.documents, "document"), counted(len(report.sources), "source")
        say(console, f"preprocess: complete; {documents} of {sources}, {report.tokens:,} tokens")
        return
    table = Table("source", "split", "documents", "tokens", "text", "bytes/token", "rejected", title="preprocess")
    has_curation = any(source.curated for source in report.sources)
    if has_curation:
        table.add_column("removed")
    has_damage = any(source.damaged for source in report.sources)
    if has_damage:
        table.add_column("unread")
    has_unknown = any(each.unknown_share for source in report.sources for each in source.coverage.values())
    if has_unknown:
        table.add_column("unknown")
    has_loss = any(each.lost_share for source in report.sources for each in source.coverage.values())
    if has_loss:
        table.add_column("lost")
    has_mask = any(split.trained_tokens is not None for source in report.sources for split in source.splits.values())
    if has_mask:
        table.add_column("trained")
    for column in table.columns[2:]:
        column.justify = "right"
    for source in report.sources:
        for number, (name, split) in enumerate(source.splits.items()):
            table.add_row(
                source.name,
                name,
                f"{split.documents:,}",
                f"{split.tokens:,}",
                size(split.text_bytes),
                f"{split.text_bytes / split.tokens:.2f}" if split.tokens else "-",
                f"{sum(source.rejected.values()):,}" if not number else "",
                *([f"{sum(source.curated.values()):,}" if not number else ""] if has_curation else []),
                *([size(source.lost) if not number else ""] if has_damage else []),
                *([percent(source.coverage[name].unknown_share)] if has_unknown else []),
                *([percent(source.coverage[name].lost_share)] if has_loss else []),
                *(["-" if split.trained_tokens is None else f"{split.trained_tokens:,}"] if has_mask else []),
            )
    if report.sources:
        print_table(console, table)
    for name, evidence in {name: e for source in report.sources for name, e in source.rejected_engines.items()}.items():
        say(console, f"{name} is not used any more ({evidence}); its output was made again")
    for source in report.sources:
        if line := covered(list(source.coverage.values())).in_words:
            say(console, f"{source.name}: {line}")
        for name, wanted in splits.items():
            if TRAIN in source.splits and wanted.share and not source.splits[name].documents:
                documents = counted(source.splits["train"].documents, "document")
                say(
                    console,
                    f"{source.name}: none of {documents} went to {name} (data.splits.{name} is {wanted}); nothing to "
                    "evaluate on",
                )
        if source.damaged:
            say(console, f"{source.name}: {in_words(source.damaged, source.bytes)}, see {source.folder / DAMAGED_FILE}")
        if source.curated:
            removed = counted(sum(source.curated.values()), "document")
            say(console, f"{source.name}: {removed} removed by data.curate, see {source.folder / CURATE}")
        for rule, count in sorted(source.curated.items(), key=lambda each: -each[1]):
            detail(console, f"  {count:,} {rule}")
        if source.edited_bytes > 0:
            kept = sum(split.text_bytes for split in source.splits.values())
            share = percent(source.edited_bytes / (kept + source.edited_bytes))
            say(
                console,
                f"{source.name}: edits of data.curate took {size(source.edited_bytes)} ({share}) out of the text",
            )
        if source.rejected:
            rejected = sum(source.rejected.values())
            file = source.folder / "rejected.jsonl"
            say(console, f"{source.name}: {rejected:,} of {counted(source.records, 'record')} rejected, see {file}")
        for reason, count in source.rejected.items():
            say(console, f"  {count:,} {reason}, the first is {source.first_rejected[reason]}")
    if report.sources and not report.units_done:
        finished = [str(source.folder) for source in report.sources if source.is_first]
        repaired = [str(path) for source in report.sources if not source.is_first for path in source.written]
        if finished:
            say(console, f"wrote the datasets: {', '.join(finished)}")
        if repaired:
            say(console, f"all units were complete; wrote what was missing or damaged: {', '.join(repaired)}")
        if report.is_complete:
            say(console, "nothing to do: all units were complete")
