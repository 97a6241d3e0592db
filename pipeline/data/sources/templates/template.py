"""Texts of documents that are put together from several values of a record."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from pipeline.config.chat import MessagesConfig, template_parts
from pipeline.data.sources.records import UnusableRecord


class RecordText(NamedTuple):
    """Text of a record."""

    text: str
    spans: tuple[tuple[int, int], ...] | None = None
    """Characters [first, end) of a conversation that are trained on, ascending. Special tokens in its text count as
    such. An empty one is where the second conversation of a pair begins."""


@dataclass(frozen=True)
class RecordTemplate(ABC):
    """Text of a record from values of several keys."""

    @property
    @abstractmethod
    def keys(self) -> tuple[str, ...]:
        """Keys whose values it needs, each once."""

    @property
    def nested(self) -> bool:
        """True if the value of its key is a list of messages."""
        return False

    @property
    def config_key(self) -> str:
        """Key of the source in the run file that names `keys`."""
        return "text_template"

    @property
    def either_keys(self) -> tuple[str, ...]:
        """Keys whose values may be text or lists."""
        return ()

    @property
    def has_calls(self) -> bool:
        """True if arguments of tool calls are kept, whose keys are those of each call alone."""
        return False

    @property
    def tools_key(self) -> str | None:
        """Key of the tools, if it reads any."""
        return None

    @property
    def masks(self) -> bool:
        """True if only some tokens are trained on."""
        return False

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Values of the run file that it is made from."""

    @abstractmethod
    def render(self, values: Mapping[str, Any]) -> RecordText:
        """The text of a record.

        Args:
            values: by key; a missing key and None mean the same.

        Raises:
            UnusableRecord: a value is missing or is not text.
        """


@dataclass(frozen=True)
class KeysTemplate(RecordTemplate):
    """Values between literal text, as in `{title}: {text}`.

    A key with a question mark, as in `{title?}`, is optional: without a value it is left out, with the literal text
    between it and the next key.
    """

    template: str

    @cached_property
    def _parts(self) -> tuple[tuple[str, str | None, bool], ...]:
        """(literal text, key after it, whether that is optional)."""
        parts = template_parts(self.template)
        return tuple((text, key and key.removesuffix("?"), bool(key and key.endswith("?"))) for text, key in parts)

    @cached_property
    def _keys(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(key for _, key, _ in self._parts if key is not None))

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys in the braces."""
        return self._keys

    def settings(self) -> dict[str, Any]:
        """The template as it is written."""
        return {"text_template": self.template}

    def render(self, values: Mapping[str, Any]) -> RecordText:
        """Strings as they are, and whole numbers in digits."""
        texts, absent = [], False
        for literal, key, optional in self._parts:
            if not absent:
                texts.append(literal)
            if key is None:
                continue
            value = values.get(key)
            absent = optional and value in (None, "")
            if absent:
                continue
            if type(value) is not str:
                if value is None:
                    raise UnusableRecord(f"no value for {key!r}", f"keys: {', '.join(map(repr, list(values)[:10]))}")
                if type(value) is not int:
                    raise UnusableRecord(f"value of {key!r} is not text", type(value).__name__)
                value = str(value)
            texts.append(value)
        return RecordText("".join(texts))


@dataclass(frozen=True)
class MessagesTemplate(RecordTemplate):
    """A list of messages, one after another, each in the form of its role.

    Attributes:
        key: of the list.
        role_key: of the role in a message.
        content_key: of the text in a message.
        roles: (role, text before the content, text after it).
    """

    key: str
    role_key: str
    content_key: str
    roles: tuple[tuple[str, str, str], ...]

    @classmethod
    def of(cls, config: MessagesConfig) -> MessagesTemplate:
        """The template of the run file."""
        roles = []
        for role, template in config.roles.items():
            (before, _), *after = template_parts(template)
            roles.append((role, before, "".join(literal for literal, _ in after)))
        return cls(config.key, config.role_key, config.content_key, tuple(roles))

    @cached_property
    def _forms(self) -> dict[str, tuple[str, str]]:
        return {role: (before, after) for role, before, after in self.roles}

    @property
    def keys(self) -> tuple[str, ...]:
        """The key of the list."""
        return (self.key,)

    @property
    def nested(self) -> bool:
        """True."""
        return True

    @property
    def config_key(self) -> str:
        """Key of the list."""
        return "messages.key"

    def settings(self) -> dict[str, Any]:
        """The section of the run file."""

        def form(before: str, after: str) -> str:
            literal = (text.replace("{", "{{").replace("}", "}}") for text in (before, after))
            return "{content}".join(literal)

        roles = {role: form(before, after) for role, before, after in self.roles}
        keys = {"key": self.key, "role_key": self.role_key, "content_key": self.content_key}
        return {"messages": {**keys, "roles": roles}}

    def render(self, values: Mapping[str, Any]) -> RecordText:
        """The messages in their order; an empty list is an empty text."""
        messages = values.get(self.key)
        if messages is None:
            raise UnusableRecord(f"no value for {self.key!r}")
        if type(messages) is not list:
            raise UnusableRecord(f"value of {self.key!r} is not a list of messages", type(messages).__name__)
        texts = []
        for number, message in enumerate(messages):
            role = message.get(self.role_key) if type(message) is dict else None
            content = message.get(self.content_key) if type(message) is dict else None
            if type(role) is not str or type(content) is not str:
                wanted = f"{self.role_key!r} and {self.content_key!r}"
                raise UnusableRecord("message without role and text", f"message {number} needs {wanted} as text")
            if role not in self._forms:
                raise UnusableRecord("role without a template", f"message {number} has the role {role[:50]!r}")
            before, after = self._forms[role]
            texts += [before, content, after]
        return RecordText("".join(texts))
