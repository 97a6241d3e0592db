"""Parts of a page: its frame, its colours, tables. Nothing in the file is fetched or runs, but for a script of ours."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources

from markupsafe import Markup

from pipeline import __version__
from pipeline.common.page.render import macro, render
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


def document(title: str, body: Iterable[str], more_css: str = "", script: str = "") -> bytes:
    """The whole file.

    Args:
        title: of the page.
        body: HTML, in pieces of whole elements.
        more_css: rules behind those of all pages.
        script: our own, at the end of the page; the page's policy allows this one and no other.
    """
    text = render(
        "document.html",
        title=title,
        body=Markup("\n".join(body)),
        css=Markup(_style() + more_css),
        script=Markup(script),
        script_hash="sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        version=__version__,
    )
    return text.encode("utf-8", "replace")


def tile(fact: Fact) -> Markup:
    """An item of a `<dl class=tiles>`."""
    return macro("tile", fact)


def table(figures: Table) -> Markup:
    """A table that scrolls by itself where it is too wide."""
    return macro("table", figures)


def section(title: str, figures: Table, words: str = "") -> Markup:
    """A table with its title, and words on it."""
    return macro("section", title, figures, Markup(prose(words)))


def anchor(address: str, text: str) -> Markup:
    """A link to another page; both are text of others."""
    return Markup("<a href='{}'>{}</a>").format(clean(address), clean(text))


def _style() -> str:
    def variables(colours: dict[str, str]) -> str:
        return "".join(f"--{name}:{colour};" for name, colour in colours.items())

    css = resources.files("pipeline.common.page").joinpath("page.css").read_text(encoding="utf-8")
    return (
        f":root{{{variables(LIGHT)}}}@media screen and (prefers-color-scheme:dark){{:root{{{variables(DARK)}}}}}\n{css}"
    )
