"""Conversations of a source: records of a format, as text by a chat template."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.common.errors import UserError
from pipeline.common.objects.urls import is_url
from pipeline.data.chat.kept_template import with_tokens
from pipeline.data.chat.probe import check_template
from pipeline.data.chat.renderer import MAX_TEXT_BYTES, ChatRenderer, chat_variables, open_renderer
from pipeline.data.chat.results import BadTemplate, CannotRender
from pipeline.data.chat.template_files import (
    added_tokens_of,
    any_of,
    read_template,
    template_of_tokenizer,
    tokens_of_tokenizer,
    turn_marks,
)
from pipeline.data.sources.records import NO_TARGET, UnusableRecord
from pipeline.data.sources.templates.conversation import (
    PREFERENCE_SIDES,
    ChatFormat,
    Conversation,
    read_conversation,
    read_pair,
)
from pipeline.data.sources.templates.template import RecordTemplate, RecordText

if TYPE_CHECKING:
    from pipeline.config.data import InputConfig
    from pipeline.config.tokenizer import TokenizerConfig

CHAT, CHAT_TEMPLATE = "chat", "chat_template"
"""Keys of plans of sources of conversations: their section, and the text of the template."""
SPECIAL_IN_CONTENT = "text of a special token in a message"


@dataclass(frozen=True)
class ChatTemplate(RecordTemplate):
    """A chat template, with what it is used for.

    Attributes:
        template: its text.
        tokens: (name, text) of the tokens that it may name.
        special: texts of the special tokens of the tokenizer, which messages must not hold.
        marks: further tokens that the template names, which only answers may hold.
        prompt: key of the prompt of a pair.
        longest, cuts: `max_tokens`, and whether longer conversations are cut; that is up to who encodes them.
    """

    template: str
    format: ChatFormat
    messages_key: str
    tools: str | None
    train_on: str
    date: str | None
    rejects_special: bool
    longest: int | None
    cuts: bool
    tokens: tuple[tuple[str, str], ...]
    special: tuple[str, ...]
    marks: tuple[str, ...]
    prompt: str | None = None

    @classmethod
    def of(cls, source: InputConfig, tokenizer: TokenizerConfig | None) -> ChatTemplate:
        """The template of a source of the run file.

        Raises:
            UserError: there is no such template.
        """
        chat, place = source.chat, f"source {source.name!r}: chat.template"
        assert chat is not None and chat.template is not None and tokenizer is not None
        if tokenizer.path is not None and is_url(str(tokenizer.path)):
            raise UserError(f"{place}: tokenizer.path is a URL; chat needs a tokenizer on a disk: fetch it there")
        file = None if tokenizer.path is None else Path(tokenizer.path)
        folder = None if file is None else file if file.is_dir() else file.parent
        if chat.template != "tokenizer":
            text = read_template(Path(chat.template), place)
        elif folder is None:
            raise UserError(
                f"{place}: `tokenizer` needs tokenizer.path; a trained tokenizer has no template: give a file"
            )
        else:
            text = template_of_tokenizer(folder, place)
        special = {tokenizer.end_of_document, *tokenizer.special_tokens, *tokenizer.add_tokens}
        marks: Set[str] = frozenset()
        tokens = {"eos_token": tokenizer.end_of_document}
        if file is not None and folder is not None:
            added = added_tokens_of(folder / "tokenizer.json" if file.is_dir() else file)
            special |= {token for token, is_special in added.items() if is_special}
            marks = turn_marks(text, added) - special
            tokens |= tokens_of_tokenizer(folder)
        return cls(
            text,
            chat.format,
            chat.messages_key,
            chat.tools_key,
            chat.train_on,
            chat.date,
            chat.special_in_content == "reject",
            chat.max_tokens,
            chat.on_long == "cut",
            tuple(sorted(tokens.items())),
            tuple(sorted(special)),
            tuple(sorted(marks)),
            chat.prompt_key,
        )

    @classmethod
    def of_settings(cls, settings: Mapping[str, Any]) -> ChatTemplate:
        """The template of a plan."""
        made = dict(settings[CHAT])
        tokens, special = tuple(sorted(made.pop("tokens").items())), tuple(made.pop("special"))
        marks = tuple(made.pop("marks"))
        return cls(template=settings[CHAT_TEMPLATE], tokens=tokens, special=special, marks=marks, **made)

    def settings(self) -> dict[str, Any]:
        """The section of the run file, the tokens and the text of the template."""
        made = asdict(self) | {"tokens": dict(self.tokens)}
        made |= {"special": list(self.special), "marks": list(self.marks)}
        if self.prompt is None:
            del made["prompt"]
        return {CHAT: made, CHAT_TEMPLATE: made.pop("template")}

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the messages, and of the tools."""
        own: tuple[str, ...] = (self.messages_key,)
        if self.format == "prompt_completion":
            own = ("prompt", "completion")
        elif self.pairs:
            own = PREFERENCE_SIDES if self.prompt is None else (self.prompt, *PREFERENCE_SIDES)
        return own if self.tools is None else (*own, self.tools)

    @property
    def pairs(self) -> bool:
        """True if a record is a pair of conversations."""
        return self.format == "preference"

    @property
    def nested(self) -> bool:
        """True."""
        return True

    @property
    def config_key(self) -> str:
        """Key of the messages, or of what else decides where they are."""
        return "chat.format" if self.pairs else "chat.messages_key"

    @property
    def either_keys(self) -> tuple[str, ...]:
        """All but those of whole conversations."""
        whole: tuple[str, ...] = PREFERENCE_SIDES if self.pairs else (self.messages_key,)
        if self.format == "prompt_completion" or self.prompt is not None:
            whole = ()
        return tuple(key for key in self.keys if key not in whole)

    @property
    def has_calls(self) -> bool:
        """True."""
        return True

    @property
    def tools_key(self) -> str | None:
        """Key of the tools."""
        return self.tools

    @property
    def masks(self) -> bool:
        """True unless all tokens are trained on."""
        return self.train_on != "all"

    @cached_property
    def _special(self) -> re.Pattern[str]:
        return any_of(self.special)

    @cached_property
    def _marks(self) -> re.Pattern[str]:
        return any_of((*self.special, *self.marks))

    @property
    def _renderer(self) -> ChatRenderer:
        return open_renderer(self.template, self.date, MAX_TEXT_BYTES)

    def check(self, name: str) -> dict[str, Any]:
        """Look at the template before anything is rendered; returns what it made of some conversations.

        Args:
            name: of the source, for messages.

        Raises:
            UserError: it cannot be used.
        """
        place = f"source {name!r}: chat.template"
        return dict(check_template(self._renderer, dict(self.tokens), self.special, masks=self.masks, place=place))

    def render(self, values: Mapping[str, Any]) -> RecordText:
        """The text of a conversation, with the spans that are trained on; () if all of it is.

        Of a pair it is one text after the other, with an empty span between the spans of both.
        """
        try:
            found = self._render(values)
            found.text.encode()
        except RecursionError:
            raise UnusableRecord("nested too deeply") from None
        except UnicodeEncodeError:  # as arguments of calls may have, which are JSON within JSON
            raise UnusableRecord("lone surrogate") from None
        return found

    def _render(self, values: Mapping[str, Any]) -> RecordText:
        if not self.pairs:
            return self._rendered(read_conversation(values, self.format, self.messages_key, self.tools))
        chosen, rejected = map(self._rendered, read_pair(values, self.prompt, self.tools))
        if chosen.text == rejected.text:
            raise UnusableRecord("both answers of a pair are the same", "as the template renders them")
        border = len(chosen.text)
        moved = ((start + border, end + border) for start, end in rejected.spans or ())
        return RecordText(chosen.text + rejected.text, (*(chosen.spans or ()), (border, border), *moved))

    def _rendered(self, conversation: Conversation) -> RecordText:
        if self.rejects_special:
            self._refuse_special(conversation)
        variables = chat_variables(dict(self.tokens), conversation.messages, conversation.tools)
        try:
            text, spans = self._renderer.render(variables)
        except CannotRender as error:
            raise UnusableRecord("the chat template refuses it", str(error)) from None
        except BadTemplate as error:
            raise UserError(f"chat.template: {error}") from None
        return RecordText(text, self._trained(conversation, text, spans) if self.masks else ())

    def _refuse_special(self, conversation: Conversation) -> None:
        for is_answer, text in conversation.strings():
            if found := (self._special if is_answer else self._marks).search(text):
                raise UnusableRecord(SPECIAL_IN_CONTENT, found[0])

    def _trained(
        self, conversation: Conversation, text: str, spans: tuple[tuple[int, int], ...]
    ) -> tuple[tuple[int, int], ...]:
        """The spans that are trained on, by `train_on` and the weights of messages."""
        trained = conversation.trained
        chooses = self.train_on == "last" or not all(trained)
        if chooses and not conversation.is_marked_by(text[start:end] for start, end in spans):
            detail = f"{len(spans)} marked spans of {len(trained)} messages of the assistant"
            raise UnusableRecord("marked spans are not one for each answer", detail)
        if chooses:
            last = len(spans) - 1
            chosen = (trained[n] and (self.train_on != "last" or n == last) for n in range(len(spans)))
            spans = tuple(span for span, is_chosen in zip(spans, chosen, strict=True) if is_chosen)
        if not spans:
            raise UnusableRecord(NO_TARGET, "no answer of the assistant is marked as trained")
        return spans


def template_of_datasets(settings: Iterable[Mapping[str, Any]]) -> tuple[str | None, str | None]:
    """The chat template that some datasets were made with, and a note if they have several, which gives none.

    Args:
        settings: of the manifests.
    """
    found = {with_tokens(each[CHAT_TEMPLATE], each[CHAT]["tokens"]) for each in settings if CHAT_TEMPLATE in each}
    if len(found) > 1:
        return None, (
            f"the sources have {len(found)} different chat templates, so checkpoints get none; name one with "
            "--chat-template where it is needed"
        )
    return next(iter(found), None), None
