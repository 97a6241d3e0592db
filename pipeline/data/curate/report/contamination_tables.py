"""Tables of what was found of evaluations: items that documents have, and documents that have items."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.common.format import counted, cut
from pipeline.common.page.html import Table, section
from pipeline.data.curate.scope import place

_ROWS = 50
_CELL = 200


def contamination(found: Mapping[str, Any] | None, sources: Sequence[str]) -> Iterator[str]:
    """Sections of the page.

    Args:
        found: as `TouchedItems.report` returns it; None if nothing was looked for.
        sources: of the scope, by number.
    """
    if not found:
        return
    tasks = tuple(
        (name, *(f"{counts[key]:,}" for key in ("items", "checked", "touched", "documents")))
        for name, counts in found["tasks"].items()
    )
    of_tasks = ("task", "items", "long enough", "touched", "documents")
    short = found["too_short"]["items"]
    words = f"{counted(short, 'item')} too short to be looked for." if short else ""
    yield section("Contamination by task", Table(of_tasks, tasks, 1), words)
    items = tuple(_item(item, sources) for item in found["items"][:_ROWS])
    if items:
        more = len(found["items"]) - _ROWS
        words = "Those of which the largest share of n-grams was found come first." + _more(more)
        head = ("task", "item", "first documents (unit:row)", "text", "n-grams", "found", "documents")
        yield section("Items found in documents", Table(head, items, 4), words)
    common = found["common"]
    if common["ngrams"]:
        rows = tuple((cut(each["text"], _CELL), f"{each['documents']:,}") for each in common["listed"][:_ROWS])
        words = "They are in more documents than max_documents allows, and remove nothing."
        more = common["ngrams"] - len(rows)
        yield section("Common n-grams", Table(("n-gram", "documents"), rows, 1), words + _more(more))


def _item(item: Mapping[str, Any], sources: Sequence[str]) -> tuple[str, ...]:
    words = (item["task"], item["item"], _places(item["examples"], sources), cut(item["text"], _CELL))
    return (*words, *(f"{item[key]:,}" for key in ("ngrams", "found", "documents")))


def _places(documents: Sequence[int], sources: Sequence[str]) -> str:
    found = []
    for number in documents:
        source, unit, row = place(number)
        name = f"{sources[source]} " if len(sources) > 1 and source < len(sources) else ""
        found.append(f"{name}{unit}:{row}")
    return ", ".join(found)


def _more(rows: int) -> str:
    return f" {rows:,} more are not shown." if rows > 0 else ""
