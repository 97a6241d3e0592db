"""Records of the usual formats of conversations as one: a list of messages with roles, and tools."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from pipeline.data.sources.records import UnusableRecord

ChatFormat = Literal["openai", "sharegpt", "prompt_completion", "preference"]
PREFERENCE_SIDES = ("chosen", "rejected")
"""Keys of a record of `preference`."""
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
"""Roles of messages in the format of OpenAI."""
SPEAKERS = {
    **{"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"},
    **{"observation": "tool", "tool": "tool", "function_call": "assistant"},
}
"""Role of each speaker in the format of ShareGPT."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
MOST_MESSAGES = 4096
"""Messages of a conversation: templates may look at all others for each."""


class Conversation(NamedTuple):
    """A conversation."""

    messages: list[dict[str, Any]]
    """As a template gets them."""
    tools: list[Any] | None
    trained: tuple[bool, ...]
    """For each message of the assistant, whether it may be trained on: its `weight` is not 0."""

    def is_marked_by(self, spans: Iterable[str]) -> bool:
        """True if each span of text has the content and the calls of one answer, in their order."""
        answers = [message for message in self.messages if message["role"] == "assistant"]
        found = list(spans)
        return len(found) == len(answers) and all(map(_is_in, answers, found))

    def strings(self) -> Iterator[tuple[bool, str]]:
        """All strings of it, names of keys of arguments too, and whether they are of an answer."""
        for message in self.messages:
            is_answer = message["role"] == "assistant"
            for key, value in message.items():
                if key == "role":
                    continue
                yield from ((is_answer, text) for text in _strings(value))
                if isinstance(value, list):
                    # A template may put the parts of a content together.
                    parts = (part["text"] for part in value if type(part) is dict and type(part.get("text")) is str)
                    yield is_answer, "".join(parts)
        yield from ((False, text) for text in _strings(self.tools))


def _is_in(answer: dict[str, Any], span: str) -> bool:
    """True if a span of text has all that an answer says; an answer that says nothing is in none."""
    content = answer["content"]
    parts = [part["text"] for part in content] if isinstance(content, list) else [content]
    calls = [call.get("function", call)["name"] for call in answer.get("tool_calls", ())]
    said = [text.strip() for text in (*parts, *calls) if text.strip()]
    return bool(said) and all(text in span for text in said)


def read_conversation(
    values: Mapping[str, Any], form: ChatFormat, messages_key: str, tools_key: str | None
) -> Conversation:
    """The conversation of a record.

    Args:
        values: of the record, by key.
        form: of the record, but for `preference`, see `read_pair`.
        messages_key: key of the list of messages; of `prompt_completion` unused.
        tools_key: key of the tools, if there is one.

    Raises:
        UnusableRecord: it is none.
    """
    if form == "prompt_completion":
        prompt, completion = (
            _side(values, key, role) for key, role in (("prompt", "user"), ("completion", "assistant"))
        )
        # What the assistant says in the prompt is not what is to be learned.
        raw = [{**each, "weight": 0} for each in prompt] + completion
    else:
        raw = _messages(values.get(messages_key), messages_key)
        if form == "sharegpt":
            raw = [_of_sharegpt(number, each) for number, each in enumerate(raw)]
    return _conversation(raw, None if tools_key is None else _tools(values.get(tools_key)))


def read_pair(
    values: Mapping[str, Any], prompt_key: str | None, tools_key: str | None
) -> tuple[Conversation, Conversation]:
    """The preferred and the other conversation of a record, which are the same up to their last answers.

    Args:
        values: of the record, by key.
        prompt_key: key of the prompt, if the two sides are answers alone.
        tools_key: key of the tools, if there is one.

    Raises:
        UnusableRecord: it is not such a pair.
    """
    prompt = [] if prompt_key is None else _side(values, prompt_key, "user")
    tools = None if tools_key is None else _tools(values.get(tools_key))
    sides = []
    for key in PREFERENCE_SIDES:
        answers = _messages(values.get(key), key) if prompt_key is None else _side(values, key, "assistant")
        if prompt_key is not None and answers and answers[0].get("role") != "assistant":
            raise UnusableRecord("an answer of a pair does not begin with the assistant", "leave out chat.prompt_key?")
        sides.append(_conversation(prompt + answers, tools))
    chosen, rejected = (side.messages for side in sides)
    if any(side[-1]["role"] != "assistant" for side in (chosen, rejected)):
        raise UnusableRecord("a conversation of a pair does not end with an answer")
    if chosen[:-1] != rejected[:-1]:
        raise UnusableRecord("the conversations of a pair differ before their last answers")
    if chosen[-1] == rejected[-1]:
        raise UnusableRecord("both answers of a pair are the same")
    return sides[0], sides[1]


def _conversation(raw: list[Any], tools: list[Any] | None) -> Conversation:
    """A conversation of messages in the format of OpenAI."""
    if not raw:
        raise UnusableRecord("no messages")
    if len(raw) > MOST_MESSAGES:
        raise UnusableRecord(f"more than {MOST_MESSAGES} messages", f"{len(raw)}")
    messages, trained = [], []
    for number, each in enumerate(raw):
        message = _without_nulls(each)
        weight = message.pop("weight", 1)
        if isinstance(weight, bool) or weight not in (0, 1):
            raise UnusableRecord("message weight is not 0 or 1", f"message {number} has {weight!r:.50}")
        _check(number, message)
        messages.append(_with_reasoning(message))
        if message["role"] == "assistant":
            trained.append(weight == 1)
    return Conversation(messages, tools, tuple(trained))


def _messages(value: Any, key: str) -> list[Any]:
    if value is None:
        raise UnusableRecord(f"no value for {key!r}")
    if type(value) is not list:
        raise UnusableRecord(f"value of {key!r} is not a list of messages", type(value).__name__)
    for number, message in enumerate(value):
        if type(message) is not dict:
            raise UnusableRecord("message is not an object", f"message {number}")
    return value


def _side(values: Mapping[str, Any], key: str, role: str) -> list[Any]:
    """Prompt or completion as messages."""
    value = values.get(key)
    return [{"role": role, "content": value}] if type(value) is str else _messages(value, key)


def _of_sharegpt(number: int, message: dict[str, Any]) -> dict[str, Any]:
    speaker, value = message.get("from"), message.get("value")
    if type(speaker) is not str or speaker not in SPEAKERS:
        raise UnusableRecord("unknown speaker", f"message {number} is from {speaker!r:.60}")
    others = {key: each for key, each in message.items() if key not in ("from", "value")}
    if speaker != "function_call":
        return {"role": SPEAKERS[speaker], "content": value, **others}
    calls = _parsed(value, number)
    calls = calls if isinstance(calls, list) else [calls]
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": call} for call in calls],
        **others,
    }


def _check(number: int, message: dict[str, Any]) -> None:
    """Complete a message in the format of OpenAI, or refuse it."""
    role = message.get("role")
    if type(role) is not str or role not in ROLES:
        raise UnusableRecord("unknown role", f"message {number} has the role {role!r:.60}")
    calls = message.get("tool_calls")
    if calls is not None:
        message["tool_calls"] = [_call(number, each) for each in _messages(calls, "tool_calls")]
    content = message.setdefault("content", "" if message.get("tool_calls") else None)
    if type(content) is list:
        for part in content:
            if type(part) is not dict or part.get("type") != "text" or type(part.get("text")) is not str:
                raise UnusableRecord("content that is not text", f"message {number}")
    elif type(content) is not str:
        raise UnusableRecord("message without content", f"message {number} of {role}")


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose thoughts have all the names that templates know, as transformers gives them."""
    thoughts = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    return message if thoughts is None else {"thinking": thoughts, **message, "reasoning_content": thoughts}


def _call(number: int, call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    if type(function) is not dict or type(function.get("name")) is not str:
        raise UnusableRecord("tool call without a name", f"message {number}")
    arguments = function.get("arguments", {})
    if type(arguments) is str:
        arguments = _parsed(arguments, number)
    if type(arguments) is not dict:
        raise UnusableRecord("arguments of a tool call are not an object", f"message {number}")
    changed = {**function, "arguments": arguments}
    return {**call, "function": changed} if "function" in call else changed


def _parsed(text: Any, number: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError):
        raise UnusableRecord("arguments of a tool call are not JSON", f"message {number}") from None


def _tools(value: Any) -> list[Any] | None:
    if type(value) is str:
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError):
            raise UnusableRecord("tools are not JSON") from None
    if value is None or value == []:
        return None
    if type(value) is not list or any(type(each) is not dict for each in value):
        raise UnusableRecord("tools are not a list of objects", type(value).__name__)
    return value


def _without_nulls(value: Any, depth: int = 0) -> Any:
    """A message without keys that are null: tables have each key of some message in all of them."""
    if type(value) is dict:
        return {
            key: each if key in ("arguments", "content") and type(each) is not list else _without_nulls(each, depth + 1)
            for key, each in value.items()
            if each is not None
        }
    return [_without_nulls(each, depth + 1) for each in value] if type(value) is list and depth < 20 else value


def _strings(value: Any) -> Iterator[str]:
    """All strings in a value, at any depth."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if type(each) is str:
            yield each
        elif type(each) is dict:
            waiting += [*each.keys(), *each.values()]
        elif type(each) is list:
            waiting += each
