"""Table of a curation on the console, and warnings about rules that found everything or nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Table

from pipeline.common.console import Console, detail, is_verbose, print_table, say, warn
from pipeline.common.format import counted, percent, size
from pipeline.data.curate.passes.finish import SourceCuration

_MANY = 10**6
"""Documents from which on a comparison that finds nothing is suspect."""
_NAMED = 4
"""Rules that the line of a source names, at most; its page has all."""


def print_summary(console: Console, sources: Sequence[SourceCuration], mode: str, index: Path) -> None:
    """Print the counts of every source, the rules that removed most, and warnings; one line if nothing is new.

    Args:
        console: where to.
        sources: that are finished.
        mode: `data.curate.mode`.
        index: page that links those of the sources.
    """
    if not sources:
        return
    if any(each.is_new for each in sources) or is_verbose():
        _print_counts(console, sources)
    else:
        documents, kept = sum(each.documents for each in sources), sum(each.kept for each in sources)
        say(
            console,
            f"curate: complete; {kept:,} of {counted(documents, 'document')} of {counted(len(sources), 'source')} kept",
        )
    for each in sources:
        if each.estimated is not None:
            folder, changed = each.estimated
            say(
                console,
                f"{each.name}: similarity of near duplicates is counted now, and was estimated in {folder}: "
                f"{counted(changed, 'document')} kept by only one of both; "
                f"`pipeline curate RUN.yaml --compare {folder} --list` lists them",
            )
        for warning in _warnings(each):
            warn(console, warning)
    if mode == "observe":
        say(console, "data.curate.mode is observe: preprocess keeps all documents; set it to apply to leave these out")
    say(console, f"report: {index}")


def _print_counts(console: Console, sources: Sequence[SourceCuration]) -> None:
    table = Table("source", "records", "rejected", "documents", "kept", "share", "bytes kept", "share", title="curate")
    for column in table.columns[1:]:
        column.justify = "right"
    for each in sources:
        counts = [f"{count:,}" for count in (each.rows, each.rejected, each.documents, each.kept)]
        share, share_of_bytes = each.kept / max(each.documents, 1), each.kept_bytes / max(each.bytes, 1)
        table.add_row(each.name, *counts, percent(share, 1), size(each.kept_bytes), percent(share_of_bytes, 1))
    print_table(console, table)
    for each in sources:
        removed = sorted(((count, rule) for rule, count in each.removed.items() if count), reverse=True)
        shown = removed if is_verbose() else removed[:_NAMED]
        words = [f"{rule} {count:,} ({percent(count / max(each.documents, 1), 1)})" for count, rule in shown]
        if len(removed) > len(shown):
            words.append(counted(len(removed) - len(shown), "other rule"))
        if words:
            say(console, f"{each.name}: removed first by {', '.join(words)}")
        if each.paragraphs:
            say(console, f"{each.name}: {counted(each.paragraphs, 'paragraph')} of kept documents stay in other ones")
        if each.lines:
            say(console, f"{each.name}: {counted(each.lines, 'line')} removed from kept documents as repeated ones")
        detail(console, f"{each.name}: decisions are in {each.curation.decisions}")


def _warnings(source: SourceCuration) -> Iterator[str]:
    if source.documents and not source.kept:
        most = max(source.removed, key=lambda rule: source.removed[rule])
        yield f"{source.name}: no document is kept; {most} alone removes {source.removed[most]:,} of them"
    for rule, count in source.removed.items():
        if rule.startswith("duplicates.") and not count and source.kept >= _MANY:
            yield f"{source.name}: {rule} found nothing in {source.documents:,} documents; is this the right text?"
