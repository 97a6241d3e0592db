"""Prompts of a model that answers in conversations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import orjson

from pipeline.common.errors import UserError
from pipeline.data.chat.kept_template import find_template
from pipeline.data.chat.probe import PROBES, check_template
from pipeline.data.chat.renderer import ChatRenderer, chat_variables
from pipeline.data.chat.results import CannotRender
from pipeline.data.chat.template_files import any_of, read_template, turn_marks
from pipeline.data.tokenization.tokenizer import Tokenizer

_ANSWERS = [message["content"] for message in PROBES["two turns"]["messages"] if message["role"] == "assistant"]
_LONGEST = 2**24
"""Bytes of the text of a conversation at most."""


class ChatPrompts:
    """Token ids of conversations up to the next answer. Safe to use from several threads.

    Attributes:
        template: as given.
        end_tokens: ids that end an answer, besides the end of a document.
        special_ids: ids of the special tokens, which an answer leaves out.

    Args:
        template: Jinja, as in `chat_template.jinja`. A template that asks for the date gets that of today.
        tokenizer: of the model.
        place: of the template, for messages.

    Raises:
        UserError: the template cannot be used with this tokenizer.
    """

    def __init__(self, template: str, tokenizer: Tokenizer, place: str) -> None:
        self.template, self._tokenizer = template, tokenizer
        added = {each["content"]: each for each in orjson.loads(tokenizer.definition)["added_tokens"]}
        special = {token for token, each in added.items() if each["special"]}
        special |= {tokenizer.end_of_document_token, *tokenizer.special_tokens}
        self.special_ids = frozenset(added[token]["id"] for token in special if token in added)
        marks = turn_marks(template, {token: token in special for token in added})
        self._special, self._marks = any_of(special), any_of((*special, *marks))
        self._tokens = {"eos_token": tokenizer.end_of_document_token}
        self._renderer = ChatRenderer(template, date.today().isoformat(), _LONGEST)
        found = check_template(self._renderer, self._tokens, special, masks=False, place=place)
        if _ANSWERS[-1] not in found["two turns"].text:
            raise UserError(
                f"{place}: the chat template leaves out what messages say; name a template of conversations"
            )
        self.end_tokens = self._ends_of_turns(found["two turns"].text)

    def encode(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a conversation, up to where the next answer begins; see `render`."""
        return self.encode_text(self.render(messages))

    def encode_text(self, text: str) -> list[int]:
        """Ids of a text by the template, in which special tokens count as such."""
        return self._tokenizer.encode_parsed(text)[0] or [self._tokenizer.end_of_document]

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text of a conversation, up to where the next answer begins.

        Args:
            messages: `role` and `content` of each.

        Raises:
            UserError: a message holds the text of a special token, which could forge a turn, or the template refuses
                the conversation.
        """
        for number, message in enumerate(messages):
            pattern = self._special if message["role"] == "assistant" else self._marks
            if found := pattern.search(message["content"]):
                raise UserError(
                    f"message {number} has the text of the special token {found[0]!r}, which could pass for the begin "
                    "or the end of a turn; leave it out"
                )
        today = date.today().isoformat()
        if self._renderer.date != today:
            self._renderer = ChatRenderer(self.template, today, _LONGEST)
        try:
            return self._renderer.render(chat_variables(self._tokens, messages, asks=True)).text
        except CannotRender as error:
            raise UserError(f"the chat template refuses the conversation: {error}") from None

    @property
    def sampling(self) -> dict[str, Any]:
        """Settings of `Sampling` for answers."""
        return {"end_tokens": self.end_tokens, "hidden_tokens": self.special_ids}

    def close(self) -> None:
        """End the process that renders."""
        self._renderer.close()

    def _ends_of_turns(self, text: str) -> tuple[int, ...]:
        """Special tokens that follow an answer, in a conversation of two turns."""
        found = set()
        for part in re.split("|".join(map(re.escape, _ANSWERS)), text)[1:]:
            if follows := self._marks.match(part.lstrip()):
                ids = self._tokenizer.encode_parsed(follows[0])[0]
                found |= set(ids) if len(ids) == 1 else set()
        return tuple(sorted(found - {self._tokenizer.end_of_document}))


def chat_prompts(folder: Path, tokenizer: Tokenizer, file: Path | None = None) -> ChatPrompts | None:
    """Prompts by the template of a model; None if it has none.

    Args:
        folder: of the weights.
        tokenizer: of the model.
        file: a template to take instead.

    Raises:
        UserError: the template cannot be read, or not be used.
    """
    if file is not None:
        return ChatPrompts(read_template(file, "--chat-template"), tokenizer, f"--chat-template {file}")
    template = find_template(folder)
    return None if template is None else ChatPrompts(template, tokenizer, str(folder))
