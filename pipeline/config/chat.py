"""The `chat` section of a source: conversations, their template, and what of them is trained on."""

from __future__ import annotations

import datetime
import string
from typing import Literal

from pydantic import Field, field_validator, model_validator

from pipeline.config.base import MAX_SEQUENCE, DataPath, Section, Text


def template_parts(template: str) -> list[tuple[str, str | None]]:
    """(literal text, key behind it) of the parts of a template; the key is None at the end.

    Raises:
        ValueError: it is not one.
    """
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{error}; write braces that are text as {{{{ and }}}}") from None
    result: list[tuple[str, str | None]] = []
    before = ""
    for literal, key, spec, conversion in parts:
        if key is not None and (spec or conversion or not key.removesuffix("?")):
            raise ValueError("a key stands alone in its braces, as in {title} or {title?}, without ! or :")
        before += literal  # a brace that is text ends a part, too
        if key is not None:
            result.append((before, key))
            before = ""
    return [*result, (before, None)] if before else result


def check_roles(roles: dict[str, str]) -> dict[str, str]:
    """Texts of messages by role, each of which has `{content}` once.

    Raises:
        ValueError: One has not.
    """
    for role, template in roles.items():
        if [key for _, key in template_parts(template) if key is not None] != ["content"]:
            raise ValueError(f"the text of role {role!r} needs {{content}} once, and no other key")
    return roles


class MessagesConfig(Section):
    """Conversations: a list of messages, each with a role and a content, as one text; as `chat` with `roles`."""

    key: Text = "messages"
    """Key or column of the list."""
    role_key: Text = "role"
    """Key of a message's role."""
    content_key: Text = "content"
    """Key of a message's text."""
    roles: dict[str, Text] = Field(min_length=1)
    """Text of a message by its role, with `{content}` in it. A conversation with another role is rejected."""

    @field_validator("roles")
    @classmethod
    def _templates(cls, roles: dict[str, str]) -> dict[str, str]:
        return check_roles(roles)


class ChatConfig(Section):
    """Conversations: text by a chat template, and the tokens of it that are trained on."""

    messages_key: Text = "messages"
    """Key or column of the list of messages. `prompt_completion` has the keys `prompt` and `completion` instead."""
    format: Literal["openai", "sharegpt", "prompt_completion", "preference"]
    """Format of a record. `openai`: messages with `role` and `content`, also with `tool_calls` and a `weight` of 0 or
    1. `sharegpt`: messages with `from` and `value`. `prompt_completion`: a text or a list of messages each, of which
    the completion is trained on. `preference`: two conversations, `chosen` and `rejected`, which differ in their last
    answers; for `train.preference`. Records of another format are rejected."""
    prompt_key: Text | None = None
    """Key or column of the prompt, for `format: preference` with `chosen` and `rejected` that are answers alone: a text
    or a list of messages each. Without it, both are lists that have the whole conversation."""
    tools_key: Text | None = None
    """Key or column of the tools: a list, or its JSON."""
    template: Literal["tokenizer"] | DataPath | None = None
    """File of a chat template (Jinja), or `tokenizer`: the one in the folder of `tokenizer.path`, `chat_template.jinja`
    or in `tokenizer_config.json`."""
    roles: dict[str, Text] | None = Field(default=None, min_length=1)
    """Instead of a template: the text of a message by its role, with `{content}` in it. The conversation is ordinary
    text, also where it holds special tokens, and all of it is trained on. One with another role is rejected."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Tokens to train on. `assistant`: what the template marks with `{% generation %}`. `last`: of that, the last
    answer. `all`: all tokens; the dataset is then one of ordinary text."""
    date: Text | None = Field(default=None, pattern=r"^\d{4}-\d{2}-\d{2}$")
    """Date of templates that ask for today's (`strftime_now`), like 2026-01-01. Without it they are refused."""
    special_in_content: Literal["reject", "allow"] = "reject"
    """Treatment of a conversation whose messages hold the text of a special token, which could forge a turn. `allow`:
    it becomes that token, as in the rest of the text."""
    max_tokens: int | None = Field(default=None, ge=2, le=MAX_SEQUENCE)
    """Tokens of a conversation at most, with end of document."""
    on_long: Literal["reject", "cut"] = "reject"
    """Treatment of longer conversations. `cut`: behind the last answer that fits."""

    @field_validator("date", mode="before")
    @classmethod
    def _as_text(cls, value: object) -> object:
        return value.isoformat() if isinstance(value, datetime.date) else value

    @field_validator("date")
    @classmethod
    def _is_a_day(cls, value: str | None) -> str | None:
        if value is not None:
            datetime.date.fromisoformat(value)
        return value

    @field_validator("roles")
    @classmethod
    def _texts(cls, roles: dict[str, str] | None) -> dict[str, str] | None:
        return None if roles is None else check_roles(roles)

    @model_validator(mode="after")
    def _one_mode(self) -> ChatConfig:
        if (self.template is None) == (self.roles is None):
            raise ValueError("give exactly one of template (Jinja) and roles (a text for each role)")
        if self.roles is not None:
            if self.train_on != "all" or self.format not in ("openai", "sharegpt"):
                raise ValueError("roles need train_on: all, and format: openai or sharegpt; a template can do the rest")
            others = ("tools_key", "date", "special_in_content", "max_tokens", "on_long")
            if given := [key for key in others if key in self.model_fields_set]:
                raise ValueError(f"{given[0]} is for a template, and roles have none; leave it out")
        return self

    @property
    def as_messages(self) -> MessagesConfig | None:
        """The conversations as texts by role; None with a template."""
        if self.roles is None:
            return None
        role, content = ("from", "value") if self.format == "sharegpt" else ("role", "content")
        return MessagesConfig(key=self.messages_key, role_key=role, content_key=content, roles=self.roles)

    @model_validator(mode="after")
    def _pairs(self) -> ChatConfig:
        if self.format != "preference":
            if self.prompt_key is not None:
                raise ValueError("prompt_key is for format: preference; leave it out")
        elif self.messages_key != "messages":
            raise ValueError("format: preference has the keys chosen and rejected: leave out messages_key")
        elif self.train_on != "last":
            raise ValueError("format: preference compares the last answers of two conversations: set train_on: last")
        elif self.on_long == "cut":
            raise ValueError("on_long: cut would cut the answers that format: preference compares; leave it out")
        return self

    @model_validator(mode="after")
    def _cut_at_marks(self) -> ChatConfig:
        if self.on_long == "cut" and self.train_on == "all":
            raise ValueError("on_long: cut needs train_on: assistant or last, whose marks say where an answer ends")
        if self.on_long == "cut" and self.max_tokens is None:
            raise ValueError("on_long: cut needs max_tokens")
        return self
