"""Table of a curation on the console, and warnings about rules that found everything or nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from pipeline.common.console import Console, say, warn
from pipeline.common.format import counted, percent
from pipeline.data.curate.passes.finish import SourceCuration

_MANY = 10**6
"""Documents from which on a comparison that finds nothing is suspect."""


def print_summary(console: Console, sources: Sequence[SourceCuration], mode: str) -> None:
    """Print the counts of every source, the removed documents by rule, and warnings.

    Args:
        console: where to.
        sources: that are finished.
        mode: `data.curate.mode`.
    """
    table = Table("source", "records", "rejected", "documents", "kept", "share", title="curate")
    for column in table.columns[1:]:
        column.justify = "right"
    for each in sources:
        counts = [f"{count:,}" for count in (each.rows, each.rejected, each.documents, each.kept)]
        table.add_row(each.name, *counts, percent(each.kept / max(each.documents, 1), 1))
    console.print(table)
    for each in sources:
        for rule, count in each.removed.items():
            if count:
                share = percent(count / max(each.documents, 1), 2)
                say(console, f"{each.name}: {count:,} ({share}) removed by {rule}")
        if each.paragraphs:
            say(console, f"{each.name}: {counted(each.paragraphs, 'paragraph')} of kept documents stay in other ones")
        if each.lines:
            say(console, f"{each.name}: {counted(each.lines, 'line')} removed from kept documents as repeated ones")
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
        state = "wrote" if each.is_new else "nothing to do: these decisions were active before:"
        say(console, f"{each.name}: {state} {each.curation.decisions}")
    if mode == "observe" and sources:
        say(console, "data.curate.mode is observe: preprocess keeps all documents; set it to apply to leave these out")


def _warnings(source: SourceCuration) -> Iterator[str]:
    if source.documents and not source.kept:
        most = max(source.removed, key=lambda rule: source.removed[rule])
        yield f"{source.name}: no document is kept; {most} alone removes {source.removed[most]:,} of them"
    for rule, count in source.removed.items():
        if rule.startswith("duplicates.") and not count and source.kept >= _MANY:
            yield f"{source.name}: {rule} found nothing in {source.documents:,} documents; is this the right text?"
