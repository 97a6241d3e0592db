"""A chat template of Jinja: the text of a conversation, and the spans of it that are marked as trained.

The environment is that of transformers (`utils/chat_template_utils.py`, Apache-2.0): an immutable sandbox with
`{% generation %}`, loop controls, `raise_exception`, `strftime_now` and a `tojson` that escapes nothing; but the date
is given, and what would make the text depend on chance is left out. jinja2 is imported here and nowhere else in the
data pipeline; `renderer` runs it in a process of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from types import GeneratorType
from typing import Any

from jinja2 import TemplateError, Undefined, nodes, pass_eval_context
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as LoopControls
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipeline.data.chat.results import DATE_FUNCTION, BadTemplate, CannotRender, RenderedChat, Used

_LEFT_OUT = {"filters": ("random", "pprint"), "globals": ("lipsum", "cycler", "joiner")}
"""Filters and functions of Jinja that draw by chance or make any amount of text. No template uses them."""


class _Generation(Extension):
    """`{% generation %}`: notes where the text of its body is."""

    tags = {"generation"}  # noqa: RUF012 -- the base class declares it so

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self.total = 0
        """Characters that were written."""
        self.found: list[tuple[int, str]] = []

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("note"), [], [], body).set_lineno(line)

    @pass_eval_context
    def note(self, context: Any, caller: Callable[[], str]) -> str:
        """The body of a marker."""
        text = caller()
        self.found.append((self.total, text))
        return text


class ChatEnvironment:
    """A compiled template.

    Args:
        source: the template.
        date: that `strftime_now` formats, `YYYY-MM-DD`.

    Raises:
        BadTemplate: it is not one.
    """

    def __init__(self, source: str, date: str | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControls], finalize=_plain
        )
        for kind, names in _LEFT_OUT.items():
            for name in names:
                getattr(environment, kind).pop(name, None)
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        if date is not None:
            day = datetime.fromisoformat(date)
            environment.globals[DATE_FUNCTION] = day.strftime
        self._tracker: Any = environment.extensions[_Generation.identifier]
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
            self.used = Used(_marks(tree), frozenset(find_undeclared_variables(tree)))
        except (TemplateError, RecursionError, MemoryError, ValueError, SyntaxError) as error:
            line = getattr(error, "lineno", None)
            raise BadTemplate((f"line {line}: " if line else "") + f"{error or type(error).__name__}") from None

    def render(self, variables: dict[str, Any]) -> RenderedChat:
        """The text of a conversation.

        Args:
            variables: `messages`, `tools`, `bos_token` and the like.

        Raises:
            CannotRender: the template raises an error.
        """
        tracker, blocks = self._tracker, []
        tracker.total, tracker.found = 0, []
        try:
            for block in self._template.generate(**variables):
                blocks.append(block)
                tracker.total += len(block)
        except RecursionError:
            raise CannotRender("it calls itself too often") from None
        except MemoryError:
            raise
        except Exception as error:  # a template can raise whatever Python's values raise
            raise CannotRender(f"{type(error).__name__}: {error}"[:300]) from None
        text = "".join(blocks)
        spans: list[tuple[int, int]] = []
        for start, part in tracker.found:
            # Text that a macro or a filter holds back is written later, at a place that nobody knows.
            if text[start : start + len(part)] != part or (spans and start < spans[-1][1]):
                raise CannotRender("a generation block is inside of a macro or filter, so its place is not known")
            if spans and spans[-1][1] == start:
                spans[-1] = (spans[-1][0], start + len(part))
            elif part:
                spans.append((start, start + len(part)))
        return RenderedChat(text, tuple(spans))


def _marks(tree: nodes.Template) -> bool:
    return any(
        isinstance(each.call.node, nodes.ExtensionAttribute) and each.call.node.identifier == _Generation.identifier
        for each in tree.find_all(nodes.CallBlock)
    )


def _plain(value: Any) -> Any:
    """Refuse values whose text has an address in memory, which is another one each time."""
    if isinstance(value, GeneratorType) or (callable(value) and not isinstance(value, Undefined)):
        raise TemplateError(f"a template cannot print a {type(value).__name__}")
    return value


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)
