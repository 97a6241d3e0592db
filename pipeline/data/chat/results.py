"""Results and errors of rendering a chat template, without the library that does it."""

from __future__ import annotations

from typing import NamedTuple

DATE_FUNCTION = "strftime_now"
"""Function of templates that formats the date of today."""


class RenderedChat(NamedTuple):
    """Text of a conversation."""

    text: str
    spans: tuple[tuple[int, int], ...]
    """Characters [first, end) of the text inside of `{% generation %}`, in its order, not touching each other."""


class Used(NamedTuple):
    """Names and marks that a template uses."""

    has_markers: bool
    """It marks what the assistant says with `{% generation %}`."""
    variables: frozenset[str]
    """Names that it does not set itself, such as `bos_token`, `tools` or `strftime_now`."""


class BadTemplate(Exception):
    """A template cannot be compiled."""


class CannotRender(Exception):
    """A template refuses a conversation, or fails on it."""
