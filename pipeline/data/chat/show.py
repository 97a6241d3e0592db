"""A conversation on a terminal or in a file, with what is trained on marked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.text import Text

OPEN, CLOSE = "[[", "]]"
_STYLE = "green"


def print_trained(console: Console, pieces: Iterable[tuple[str, bool]]) -> None:
    """Print a text, with its trained parts in colour on a terminal that has any, else in double brackets.

    Args:
        console: where to.
        pieces: printable text, and whether it is trained on, of each part.
    """
    text = Text()
    for part, is_trained in pieces:
        if is_trained and console.color_system is None:
            text.append(f"{OPEN}{part}{CLOSE}")
        else:
            text.append(part, _STYLE if is_trained else "")
    console.print(text, soft_wrap=True)


def pieces_of(text: str, spans: Iterable[tuple[int, int]]) -> Iterator[tuple[str, bool]]:
    """A text in parts, by the spans [first, end) that are trained on."""
    done = 0
    for start, end in spans:
        if start >= len(text):
            break
        yield text[done:start], False
        yield text[start:end], True
        done = end
    yield text[done:], False
