"""Tables of pages in Markdown, and their places in a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

_END = "<!-- end -->"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def with_tables(text: str, tables: Mapping[str, str]) -> str:
    """A page with its tables replaced.

    Args:
        text: as it is now.
        tables: by the name of their place.
    """
    for name, content in tables.items():
        begin = f"<!-- {name}: written by `make docs` -->"
        before, marker, rest = text.partition(begin)
        _, end, after = rest.partition(_END)
        assert marker and end, f"the page has no lines {begin} and {_END}"
        text = f"{before}{begin}\n\n{content.rstrip()}\n\n{end}{after}"
    return text
