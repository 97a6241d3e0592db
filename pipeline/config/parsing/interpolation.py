"""`${...}` in the values of a run file: other keys, variables of the environment, folders of Python.

Nothing else is understood, so that a run file can be read in bounded time and memory: every key is resolved once, and
depth and size of what comes out have limits.
"""

from __future__ import annotations

import copy
import os
import re
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.common.redaction import is_secret_variable, masked
from pipeline.config.parsing.document import MAX_DEPTH, MAX_VALUES, PLACEHOLDER, Place
from pipeline.config.parsing.schema import KeyPath, dotted

MAX_CHARACTERS = 2**22
"""Size of all values that were resolved; references to references can make billions out of a few lines."""

_OPEN = re.compile(r"(\\*)\$\{")
_PLAIN = re.compile(r"[^\\$]+|\\+|\$")
"""Backslashes are taken together: whether there is a `${` behind them decides what they mean."""
_IN_ARGUMENT = re.compile(r"""[^\\$"',}]+|.""", re.DOTALL)
_NAME = re.compile(r"\s*([A-Za-z_][\w.]*)\s*:")
_UNREADABLE = "not readable; write ${key.path}, ${oc.env:NAME} or ${sysconfig:NAME}, and \\${ for a plain ${"


class InterpolationError(Exception):
    """A value cannot be resolved; the message says why."""


@dataclass(frozen=True)
class _Expression:
    """`${...}`: a resolver with arguments, or without a name the path of a key. Arguments are pieces of text."""

    name: str | None
    arguments: tuple[_Pieces, ...]


_Pieces = tuple["str | _Expression", ...]


def parse_text(text: str) -> _Pieces:
    """Cut a value into plain text and expressions.

    Raises:
        InterpolationError: an expression is not readable.
    """
    pieces, end = _pieces(text, 0, "", 0)
    assert end == len(text)
    return pieces


def is_plain(text: str) -> bool:
    """True if there is nothing to resolve in a value: no `${`, or each with a backslash before it."""
    return all(len(found[1]) % 2 for found in _OPEN.finditer(text))


def escaped(value: Any) -> Any:
    """Text with a backslash before every `${`, and those before that doubled: interpolation gives it back."""
    if isinstance(value, dict):
        return {key: escaped(below) for key, below in value.items()}
    if isinstance(value, list):
        return [escaped(below) for below in value]
    return _OPEN.sub(lambda found: 2 * found[1] + "\\${", value) if isinstance(value, str) else value


class Interpolation:
    """Resolves the values of a run file, each once.

    Args:
        plain: all values, merged. They are not changed.
        places: where they were written.
    """

    def __init__(self, plain: Any, places: Mapping[KeyPath, Place]) -> None:
        self._plain = plain
        self._places = places
        self._known: dict[KeyPath, Any] = {}
        self._open: list[KeyPath] = []
        self._depth = 0
        self._characters = self._values = 0

    def resolve(self, path: KeyPath) -> Any:
        """The value of a key with everything in it resolved.

        Raises:
            InterpolationError: it is not readable, refers to what is not there or to itself, or is refused.
        """
        return copy.deepcopy(self._at(path))

    def _at(self, path: KeyPath) -> Any:
        if path in self._known:
            return self._known[path]
        if path in self._open:
            circle = " -> ".join(map(dotted, [*self._open[self._open.index(path) :], path]))
            raise InterpolationError(f"Recursive interpolation: {circle}")
        place = self._places.get(path)
        if place is not None and place.placeholder:
            raise InterpolationError(f"{dotted(path)} is {PLACEHOLDER}; fill in a value there")
        self._open.append(path)
        self._enter()
        try:
            self._known[path] = self._spend(self._value(path))
        finally:
            self._depth -= 1
            self._open.pop()
        return self._known[path]

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > 2 * MAX_DEPTH:
            raise InterpolationError(f"more than {2 * MAX_DEPTH} levels of references inside each other")

    def _spend(self, value: Any) -> Any:
        """Count what a value adds to the resolved whole. What a reference repeats counts again."""
        below = [value]
        while below:
            each = below.pop()
            self._values += 1
            if isinstance(each, str):
                self._characters += len(each)
            elif isinstance(each, (dict, list)):
                below += each.values() if isinstance(each, dict) else each
            if self._values > MAX_VALUES or self._characters > MAX_CHARACTERS:
                raise InterpolationError(
                    f"interpolation makes more than {MAX_VALUES:,} values or {MAX_CHARACTERS:,} characters of the "
                    "run file; write long values out, or put them into a separate file"
                )
        return value

    def _value(self, path: KeyPath) -> Any:
        raw = self._raw(path)
        if isinstance(raw, dict):
            return {key: self._at((*path, key)) for key in raw}
        if isinstance(raw, list):
            return [self._at((*path, index)) for index in range(len(raw))]
        return self._text(parse_text(raw)) if isinstance(raw, str) and "${" in raw else raw

    def _raw(self, path: KeyPath) -> Any:
        value = self._plain
        for part in path:
            value = value[part]
        return value

    def _text(self, pieces: _Pieces) -> Any:
        """The value of pieces: text, or where one expression is the whole value, that one's value."""
        if len(pieces) == 1 and isinstance(pieces[0], _Expression):
            return self._expression(pieces[0])
        found = []
        for piece in pieces:
            value = piece if isinstance(piece, str) else self._expression(piece)
            if isinstance(value, (dict, list)):
                raise InterpolationError("a section or list cannot stand inside a text")
            found.append(self._spend(str(value)))
        return "".join(found)

    def _expression(self, expression: _Expression) -> Any:
        self._enter()
        try:
            match expression.name:
                case None:
                    return self._reference(str(self._text(expression.arguments[0])).strip())
                case "oc.env":
                    return self._variable(expression.arguments)
                case "sysconfig":
                    return self._folder(expression.arguments)
            raise InterpolationError(
                f"Unsupported interpolation type {expression.name}: only ${{oc.env:NAME}}, ${{oc.env:NAME,default}} "
                "and ${sysconfig:NAME} are supported; write \\${ for a plain ${"
            )
        finally:
            self._depth -= 1

    def _reference(self, key: str) -> Any:
        """The value of another key; entries of lists by `.0` or `[0]`."""
        missing = InterpolationError(f"Interpolation key '{key}' not found")
        path: KeyPath = ()
        value: Any = self._plain
        resolved = False  # behind a reference to a section there are values, and no keys of the file
        for part in key.replace("[", ".").replace("]", "").split("."):
            if not resolved and isinstance(value, str) and "${" in value:
                value, resolved = self._at(path), True
            step: Any = part
            if isinstance(value, list) and part.isdecimal():
                step = int(part)
            elif not isinstance(value, dict):
                raise missing
            try:
                value = value[step]
            except (KeyError, IndexError):
                raise missing from None
            path = (*path, step)
        return value if resolved else self._at(path)

    def _variable(self, arguments: tuple[_Pieces, ...]) -> Any:
        if len(arguments) > 2:
            raise InterpolationError("oc.env takes a name and a default; put a default with commas into quotes")
        name = str(self._text(arguments[0]))
        if is_secret_variable(name):
            raise InterpolationError(
                f"the variable {name} may be a secret, judging by its name, but every value of a run file is written "
                "into the run folder, the logs and the report. Leave it in the environment, where the libraries that "
                "need it look for it; if it is not a secret, export it under another name"
            )
        if (value := os.environ.get(name)) is not None:
            if masked(value) != value:
                raise InterpolationError(
                    f"the value of the variable {name} may be a secret, or have one in it (a password or query of an "
                    "address, a key, a token), but every value of a run file is written into the run folder, the logs "
                    "and the report. Leave it in the environment, where the libraries that need it look for it"
                )
            return value
        if len(arguments) == 1:
            raise InterpolationError(f"Environment variable '{name}' not found")
        default = self._text(arguments[1])
        return None if default == "null" else str(default)

    def _folder(self, arguments: tuple[_Pieces, ...]) -> str:
        name = str(self._text(arguments[0]))
        if len(arguments) > 1 or name not in sysconfig.get_path_names():
            known = ", ".join(sysconfig.get_path_names())
            raise InterpolationError(f"sysconfig knows the paths {known}, not {name!r}")
        return sysconfig.get_path(name)


def _pieces(text: str, at: int, ends: str, depth: int) -> tuple[_Pieces, int]:
    """Pieces from `at` on, up to one of the characters in `ends` or, without any, to the end of the text.

    Returns:
        The pieces, and where the character is that ended them.
    """
    if depth > MAX_DEPTH:
        raise InterpolationError(f"more than {MAX_DEPTH} levels of ${{...}} inside each other")
    found: list[str | _Expression] = []
    plain: list[str] = []
    quote = ""
    while at < len(text) and (quote or text[at] not in ends):
        if opened := _OPEN.match(text, at):
            slashes = len(opened[1])
            plain.append("\\" * (slashes // 2))
            at = opened.end()
            if slashes % 2:
                plain.append("${")
                continue
            expression, at = _expression(text, at, depth)
            found += ["".join(plain), expression]
            plain.clear()
        elif ends and text[at] in "\"'" and quote in ("", text[at]):
            quote = "" if quote else text[at]
            at += 1
        elif ends and text[at] == "\\" and at + 1 < len(text):
            plain.append(text[at + 1])
            at += 2
        else:
            run = (_IN_ARGUMENT if ends else _PLAIN).match(text, at)
            assert run is not None
            plain.append(run[0])
            at = run.end()
    if quote or (ends and at == len(text)):
        raise InterpolationError(_UNREADABLE)
    return tuple(piece for piece in (*found, "".join(plain)) if piece != ""), at


def _expression(text: str, at: int, depth: int) -> tuple[_Expression, int]:
    """The expression behind `${`, and the place behind its end."""
    name = _NAME.match(text, at)
    at = name.end() if name else at
    arguments = []
    while True:
        start = at
        pieces, at = _pieces(text, at, ",}" if name else "}", depth + 1)
        arguments.append(_stripped(pieces))
        if not pieces and (not name or (start == at and len(arguments) == 1)):
            raise InterpolationError(_UNREADABLE)
        if text[at] == "}":
            return _Expression(name[1] if name else None, tuple(arguments)), at + 1
        at += 1


def _stripped(pieces: _Pieces) -> _Pieces:
    """Without spaces around an argument."""
    found = list(pieces)
    if found and isinstance(found[0], str):
        found[0] = found[0].lstrip()
    if found and isinstance(found[-1], str):
        found[-1] = found[-1].rstrip()
    return tuple(piece for piece in found if piece != "")
