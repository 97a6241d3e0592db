"""The `chat` section of a source: conversations, their template, and what of them is trained on."""

from __future__ import annotations

import datetime
from typing import Literal

from pydantic import Field, field_validator, model_validator

from pipeline.config.base import MAX_SEQUENCE, DataPath, Section, Text


class ChatConfig(Section):
    """Conversations: text by a chat template, and the tokens of it that are trained on."""

    messages_key: Text = "messages"
    """Key or column of the list of messages. `prompt_completion` has the keys `prompt` and `completion` instead."""
    format: Literal["openai", "sharegpt", "prompt_completion"]
    """Format of a record. `openai`: messages with `role` and `content`, also with `tool_calls` and a `weight` of 0 or
    1. `sharegpt`: messages with `from` and `value`. `prompt_completion`: a text or a list of messages each, of which
    the completion is trained on. Records of another format are rejected."""
    tools_key: Text | None = None
    """Key or column of the tools: a list, or its JSON."""
    template: Literal["tokenizer"] | DataPath
    """File of a chat template (Jinja), or `tokenizer`: the one in the folder of `tokenizer.path`, `chat_template.jinja`
    or in `tokenizer_config.json`."""
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

    @model_validator(mode="after")
    def _cut_at_marks(self) -> ChatConfig:
        if self.on_long == "cut" and self.train_on == "all":
            raise ValueError("on_long: cut needs train_on: assistant or last, whose marks say where an answer ends")
        if self.on_long == "cut" and self.max_tokens is None:
            raise ValueError("on_long: cut needs max_tokens")
        return self
