"""Look at a template before it is used: fixed conversations show whether its marks can be trained on."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pipeline.common.errors import UserError
from pipeline.data.chat.renderer import ChatRenderer, chat_variables
from pipeline.data.chat.results import DATE_FUNCTION, BadTemplate, CannotRender, RenderedChat
from pipeline.data.chat.template_files import TOKEN_NAMES

_USER = {"role": "user", "content": "How far is it?"}
_ANSWER = {"role": "assistant", "content": "Two miles."}
_CALL = {"type": "function", "function": {"name": "distance", "arguments": {"to": "town"}}}
_TOOL = {
    "type": "function",
    "function": {
        "name": "distance",
        "description": "Distance to a place.",
        "parameters": {"type": "object", "properties": {"to": {"type": "string"}}, "required": ["to"]},
    },
}
_SECOND = {"role": "assistant", "content": "As far."}
PROBES: dict[str, dict[str, Any]] = {
    "two turns": {"messages": [_USER, _ANSWER, {"role": "user", "content": "And back?"}, _SECOND]},
    "tools": {
        "messages": [
            _USER,
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "name": "distance", "content": "2"},
            _ANSWER,
        ],
        "tools": [_TOOL],
    },
    "thinking": {"messages": [_USER, {**_ANSWER, "reasoning_content": "It is near."}]},
}


def check_template(
    renderer: ChatRenderer, tokens: Mapping[str, str], special: Collection[str], *, masks: bool, place: str
) -> dict[str, RenderedChat]:
    """Compile a template, and render the fixed conversations with it.

    Args:
        renderer: of the template, with the date of the run file.
        tokens: texts of tokens by the names that templates use.
        special: texts of the tokenizer's special tokens.
        masks: what it marks is trained on; else all is.
        place: of the template in the run file, for messages.

    Returns:
        What it made of each conversation that it takes.

    Raises:
        UserError: it cannot be used.
    """
    try:
        used = renderer.used
    except BadTemplate as error:
        raise UserError(f"{place}: the chat template cannot be compiled: {error}") from None
    check_names(used.variables, tokens, has_date=renderer.date is not None, place=place)
    if masks and not used.has_markers:
        raise UserError(
            f"{place}: the chat template does not mark what the assistant says with {{% generation %}} and "
            "{% endgeneration %}, and nothing else says it for sure; write these marks into a copy of it, or train on "
            "all tokens with `train_on: all`"
        )
    found: dict[str, RenderedChat] = {}
    for name, conversation in PROBES.items():
        try:
            rendered = _render(renderer, tokens, conversation)
        except CannotRender as error:
            if name != "two turns":  # a template need not know tools
                continue
            raise UserError(f"{place}: the chat template fails on a conversation of two turns: {error}") from None
        if masks:
            _check_spans(name, rendered, conversation, special, place)
        found[name] = rendered
    return found


def _render(renderer: ChatRenderer, tokens: Mapping[str, str], conversation: Mapping[str, Any]) -> RenderedChat:
    """A conversation by a template; its contents as lists of parts if the template wants these."""
    messages, tools = conversation["messages"], conversation.get("tools")
    try:
        return renderer.render(chat_variables(tokens, messages, tools))
    except CannotRender as error:
        parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
        try:
            return renderer.render(chat_variables(tokens, parts, tools))
        except CannotRender:
            raise error from None


def check_names(variables: Collection[str], tokens: Mapping[str, str], *, has_date: bool, place: str) -> None:
    """Refuse a template that needs a date or a token that is not known."""
    if DATE_FUNCTION in variables and not has_date:
        raise UserError(
            f"{place}: the chat template asks for the date of today ({DATE_FUNCTION}), so its text would be another "
            "one each day; set chat.date, like 2026-01-01"
        )
    missing = [name for name in TOKEN_NAMES if name in variables and name not in tokens]
    if missing:
        raise UserError(
            f"{place}: the chat template uses {' and '.join(missing)}, which no tokenizer_config.json beside the "
            "tokenizer gives; add that file, or write the text of the token into a copy of the template"
        )


def _check_spans(
    name: str, rendered: RenderedChat, conversation: Mapping[str, Any], special: Collection[str], place: str
) -> None:
    turns = sum(message["role"] == "assistant" for message in conversation["messages"])
    if len(rendered.spans) < turns and name == "two turns":
        raise UserError(
            f"{place}: of {turns} answers of a conversation the chat template marks {len(rendered.spans)} with "
            "{% generation %}; mark each"
        )
    for start, end in rendered.spans:
        span = rendered.text[start:end]
        if not span.rstrip().endswith(tuple(special)):
            raise UserError(
                f"{place}: what the chat template marks as trained ends with {span[-30:]!r} ({name}), which is not "
                f"a special token of the tokenizer, so a model would never learn to stop; move {{% endgeneration %}} "
                "behind the token that ends the turn, and see that tokenizer.special_tokens has it (its special tokens "
                f"are {', '.join(sorted(special)[:10]) or 'none'})"
            )
