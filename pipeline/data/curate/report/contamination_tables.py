"""Tables of what was found of evaluations. Their columns are those of the figures, whatever these are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.common.format import counted
from pipeline.common.page.html import Table, section
from pipeline.common.page.words import figure

_ROWS = 50
_CELL = 160


def contamination(found: Any) -> Iterator[str]:
    """Sections of the page.

    Args:
        found: an object of figures, lists of objects and lists of texts; or None.
    """
    if not isinstance(found, Mapping):
        return
    figures = {name: value for name, value in found.items() if not isinstance(value, (list, dict))}
    if figures:
        rows = tuple((_words(name), _cell(value)) for name, value in figures.items())
        yield section("Contamination", Table(("", ""), rows, 1))
    for name, value in found.items():
        title = f"Contamination: {_words(name)}"
        if isinstance(value, Mapping) and value and all(isinstance(one, Mapping) for one in value.values()):
            yield _objects(title, [{"name": key, **one} for key, one in value.items()])
        elif isinstance(value, Mapping) and value:
            yield _objects(title, [{"name": key, "value": one} for key, one in value.items()])
        elif isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
            yield _objects(title, value)
        elif isinstance(value, list) and value:
            yield _objects(title, [{"text": one} for one in value])


def _objects(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    words = [key for key in columns if any(not _is_number(row.get(key)) for row in rows)]
    columns = [*words, *(key for key in columns if key not in words)]
    cells = tuple(tuple(_cell(row.get(key)) for key in columns) for row in rows[:_ROWS])
    more = len(rows) - _ROWS
    note = f"{counted(more, 'more row')}: see report.json." if more > 0 else ""
    return section(title, Table(tuple(map(_words, columns)), cells, len(words)), note)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return figure(value) if isinstance(value, float) else f"{value:,}"
    if isinstance(value, (list, tuple)):
        text = ", ".join(map(_cell, value[:10])) + (f" and {len(value) - 10:,} more" if len(value) > 10 else "")
    else:
        text = str(value)
    return text if len(text) <= _CELL else text[: _CELL - 1] + "…"
