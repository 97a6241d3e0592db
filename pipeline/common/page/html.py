"""Parts of a page: its frame, its colours, tables. Whatever text gets in, nothing in the file can run or be fetched."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources

from pipeline import __version__
from pipeline.common.page.words import clean

LIGHT = {
    "ink": "#1f2328",
    "muted": "#57606a",
    "grid": "#dfe3e8",
    "card": "#ffffff",
    "s0": "#1f6fb8",
    "s1": "#c2500a",
    "s2": "#0b7f63",
    "s3": "#a0468c",
    "s4": "#8a6a00",
    "s5": "#2f8fb5",
    "s6": "#6e7781",
    "s7": "#8c3b2f",
}
"""Colours on white. Those of lines are after Okabe and Ito, for any colour vision, at 3 to 1 or more."""
DARK = {
    "ink": "#e6e9ed",
    "muted": "#a3abb5",
    "grid": "#333a44",
    "card": "#181c22",
    "s0": "#6cb0f5",
    "s1": "#f59a5a",
    "s2": "#3fcfa5",
    "s3": "#e193cf",
    "s4": "#e0bc45",
    "s5": "#7fd6f2",
    "s6": "#a9b1bb",
    "s7": "#e08b7d",
}


@dataclass(frozen=True)
class Table:
    """Figures of a chart."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 0
    """Number of columns on the left that are words; the others are numbers."""
    last_words: bool = False
    """True if the last column is words, too."""

    def is_words(self, column: int) -> bool:
        """True if a column has words."""
        return column < self.words or (self.last_words and column == len(self.head) - 1)


@dataclass(frozen=True)
class Fact:
    """A figure and what it is."""

    label: str
    value: str
    detail: str = ""
    fraction: float | None = None
    """Fraction of the whole, for a bar."""


def escaped(text: str) -> str:
    """Text of others, in an element or in an attribute."""
    return html.escape(clean(text), quote=True)


def prose(text: str) -> str:
    """`escaped`, where what stands between backticks is code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escaped(text))


def document(title: str, body: Iterable[str], more_css: str = "") -> bytes:
    """The whole file.

    Args:
        title: of the page.
        body: HTML, in pieces of whole elements.
        more_css: rules behind those of all pages.
    """
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'\">",
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">',
        f'<meta name="generator" content="pretraining-pipeline {__version__}"><link rel="icon" href="data:,">',
        f"<title>{escaped(title)}</title><style>{_style()}{more_css}</style></head><body>",
        *body,
        "</body></html>\n",
    ]
    return "\n".join(parts).encode("utf-8", "replace")


def tile(fact: Fact) -> str:
    """An item of a `<dl class=tiles>`."""
    bar = ""
    if fact.fraction is not None:
        bar = f"<span class='bar'><span style='width:{100 * min(1.0, max(0.0, fact.fraction)):.1f}%'></span></span>"
    detail = f"<small>{escaped(fact.detail)}</small>" if fact.detail else ""
    long = " class='long'" if len(fact.value) > 9 else ""
    return f"<div><dt>{escaped(fact.label)}</dt><dd{long}>{escaped(fact.value)}{detail}{bar}</dd></div>"


def table(figures: Table) -> str:
    """A table that scrolls by itself where it is too wide."""

    def row(cells: tuple[str, ...], tag: str) -> str:
        inside = "".join(
            f"<{tag}{' class=w' if figures.is_words(place) else ''}>{escaped(cell)}</{tag}>"
            for place, cell in enumerate(cells)
        )
        return f"<tr>{inside}</tr>"

    body = "".join(row(cells, "td") for cells in figures.rows)
    return (
        "<div class='scroll' tabindex='0' role='region' aria-label='Table'>"
        f"<table><thead>{row(figures.head, 'th')}</thead><tbody>{body}</tbody></table></div>"
    )


def section(title: str, figures: Table, words: str = "") -> str:
    """A table with its title, and words on it."""
    shown = table(figures) if figures.rows else "<p class='note'>None.</p>"
    note = f"<p class='note'>{prose(words)}</p>" if words else ""
    return f"<section class='wide'><h3>{escaped(title)}</h3>{shown}{note}</section>"


def _style() -> str:
    def variables(colours: dict[str, str]) -> str:
        return "".join(f"--{name}:{colour};" for name, colour in colours.items())

    css = resources.files("pipeline.common.page").joinpath("page.css").read_text(encoding="utf-8")
    return (
        f":root{{{variables(LIGHT)}}}@media screen and (prefers-color-scheme:dark){{:root{{{variables(DARK)}}}}}\n{css}"
    )
