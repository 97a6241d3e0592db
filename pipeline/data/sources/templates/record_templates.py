"""Template of the records of a source, as its section of the run file or its plan has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.config.chat import MessagesConfig
from pipeline.config.data import InputConfig
from pipeline.config.tokenizer import TokenizerConfig
from pipeline.data.sources.templates.chat_template import CHAT, ChatTemplate
from pipeline.data.sources.templates.template import KeysTemplate, MessagesTemplate, RecordTemplate


def configured_template(source: InputConfig, tokenizer: TokenizerConfig | None = None) -> RecordTemplate | None:
    """The template of a source of the run file; None if its text has a key of its own.

    Args:
        source: of the run file.
        tokenizer: of the run file; a chat template is in its folder, and names its tokens.
    """
    messages = source.messages if source.chat is None else source.chat.as_messages
    if messages is not None:
        return MessagesTemplate.of(messages)
    if source.chat is not None:
        return ChatTemplate.of(source, tokenizer)
    return None if source.text_template is None else KeysTemplate(source.text_template)


def planned_template(settings: Mapping[str, Any]) -> RecordTemplate | None:
    """The template with these `settings()`; None if they have none."""
    if CHAT in settings:
        return ChatTemplate.of_settings(settings)
    if "messages" in settings:
        return MessagesTemplate.of(MessagesConfig.model_validate(settings["messages"]))
    return KeysTemplate(settings["text_template"]) if "text_template" in settings else None
