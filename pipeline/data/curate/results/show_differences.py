"""Differences of two decisions as tables and lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import orjson
from rich.console import Console
from rich.table import Table

from pipeline.common.console import echo, print_table, say
from pipeline.common.format import counted, percent
from pipeline.data.curate.passes.excerpts import ReadTexts
from pipeline.data.curate.report.build import Excerpt, Key
from pipeline.data.curate.results.differences import KEPT, Changed, Differences, all_changed
from pipeline.data.curate.verdicts import Curation

_SHOWN = 200


def show_differences(
    console: Console, first: Curation, second: Curation, found: Differences, names: tuple[str, str]
) -> None:
    """Print how many documents each rule removes under both, and how many documents one keeps and the other does not.

    Args:
        console: where to.
        first: decisions.
        second: others.
        found: their differences.
        names: of both, for the head of the table.
    """
    source = first.about["source"]
    table = Table("", *names, "change", title=source)
    for column in table.columns[1:]:
        column.justify = "right"
    bounds = [{rule["name"]: rule["bound"] for rule in each.about["rules"]} for each in (first, second)]
    for rule in (KEPT, *dict.fromkeys([*first.rules, *second.rules])):
        counts = [found.removed(side, rule) for side in (0, 1)]
        changed = [_bound(each.get(rule)) for each in bounds]
        bound = f" ({changed[0]} -> {changed[1]})" if changed[0] != changed[1] else ""
        if any(counts) or bound:
            table.add_row(rule + bound, f"{counts[0]:,}", f"{counts[1]:,}", f"{counts[1] - counts[0]:+,}")
    print_table(console, table)
    share = percent(found.changed / max(found.documents, 1), 2)
    say(
        console,
        f"{source}: {counted(found.changed, 'document')} of {found.documents:,} ({share}) change: "
        f"{found.count(True, False):,} kept by {names[0]} alone, {found.count(False, True):,} by {names[1]} alone",
    )


def show_examples(console: Console, curation: Curation, differences: Differences, read_texts: ReadTexts | None) -> None:
    """Print documents that change, with their beginnings as far as they can be read, and the number of the others."""
    found: Sequence[Changed] = differences.examples
    texts: Mapping[Key, Excerpt] = {}
    if read_texts is not None:
        texts = read_texts(curation.folder, [(each.unit, each.row) for each in found])
    for each in found:
        excerpt = texts.get((each.unit, each.row))
        where = f"unit {each.unit} row {each.row}" if excerpt is None else excerpt.place
        begin = "" if excerpt is None else f": {' '.join(excerpt.text.split())[:_SHOWN]}"
        say(console, f"  {each.first} -> {each.second}  {where}{begin}")
    if more := differences.changed - len(found):
        say(console, f"  and {more:,} more; --list prints all of them")


def list_changed(first: Curation, second: Curation) -> None:
    """Print all documents that change as JSON Lines."""
    for each in all_changed(first, second):
        line = {"source": first.about["source"], **each._asdict()}
        echo(orjson.dumps(line).decode())


def _bound(bound: float | None) -> str:
    return "off" if bound is None else f"{bound:g}"
