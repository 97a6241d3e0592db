"""The text of tokens as they come: whole characters, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_INCOMPLETE = "\ufffd"  # what a decoder puts for bytes that are not a character, or not yet
_CHARACTER = 4
"""Bytes of a character at most, and so tokens."""
_CONTEXT = 16
"""Tokens of the prompt that decide how the first new one is decoded."""


class TextTokenizer(Protocol):
    """The part of a tokenizer that generation needs."""

    @property
    def end_of_document(self) -> int:
        """Id of the token that closes a document."""

    def encode(self, text: str, /) -> list[int]:
        """Ids of a text."""

    def decode(self, ids: Sequence[int], /) -> str:
        """Text of some ids."""


class Detokenizer:
    """Text of tokens that follow others.

    New tokens are decoded together with those before them, because some tokenizers treat the first token of a text
    differently (leading spaces). What ends in an incomplete character waits for the next token.
    """

    def __init__(self, tokenizer: TextTokenizer, before: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = list(before[-_CONTEXT:])
        self._shown = len(tokenizer.decode(self._window))
        self._pending = 0

    def add(self, token: int) -> str:
        """The text that is certain with this token and was not before."""
        self._window.append(token)
        self._pending += 1
        text = self._tokenizer.decode(self._window)
        if len(text) <= self._shown:
            return ""
        if not text.endswith(_INCOMPLETE):
            new = text[self._shown :]
            self._window = self._window[-self._pending :]
            self._shown, self._pending = len(self._tokenizer.decode(self._window)), 0
            return new
        if self._pending <= 2 * _CHARACTER:
            return ""
        # Bytes that become no character: all but the last few are final, and a reader need not wait for them.
        held = len(text) - len(text.rstrip(_INCOMPLETE))
        end = max(self._shown, len(text) - min(held, _CHARACTER - 1))
        new, self._shown = text[self._shown : end], end
        return new

    def finish(self) -> str:
        """The rest of the text, which was held back."""
        return self._tokenizer.decode(self._window)[self._shown :] if self._pending else ""


class StopStrings:
    """Cuts a text that comes in pieces before the first of some strings.

    The first is the one that is complete first, and of several that end at the same character the longest: where the
    borders of the pieces are makes no difference.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._held = ""
        self.found = False
        """A string has come: the text is over."""

    def add(self, text: str) -> str:
        """The text that cannot be part of a stop string any more."""
        if not self._strings or not text:
            return text
        known, text = len(self._held), self._held + text
        ends = [
            (start + len(string), start)
            for string in self._strings
            if (start := text.find(string, max(0, known - len(string) + 1))) >= 0
        ]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)[1]]
        held = max(_overlap(text, string) for string in self._strings)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """The rest of the text, where no more comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, string: str) -> int:
    """Number of characters at the end of `text` that the string begins with, but not all of it."""
    return next((n for n in range(min(len(text), len(string) - 1), 0, -1) if text.endswith(string[:n])), 0)
