"""Answers in OpenAI's form: what the routes of completions and of conversations share."""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, ClassVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from pipeline.eval.server.asking import Serving, ask
from pipeline.eval.server.refusal import Refusal
from pipeline.eval.server.worker import Event, Served, TextRequest

LEAST = -9999.0
"""Stands for a probability of 0, whose logarithm JSON cannot hold."""


class AnswerChoice(ABC):
    """One text of an answer, part by part as it is generated."""

    @abstractmethod
    def part(self, event: Event) -> dict[str, Any]:
        """The part of a choice that an event adds, as a stream sends it."""

    @abstractmethod
    def is_shown(self, part: dict[str, Any]) -> bool:
        """True if a stream sends the part: it has a text, a token or an end."""

    @abstractmethod
    def joined(self, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The whole choice of all its parts."""


class OpenAIResponse:
    """An answer, whole or as server-sent events.

    Args:
        choices: Its texts.
        prompt_tokens: Of all prompts.
        streams: Send events.
        counts: End them with one that counts tokens.
    """

    path: ClassVar[str]
    """Route."""
    prefix: ClassVar[str]
    """Beginning of the id."""
    kind: ClassVar[str]
    """`object` of a whole answer."""
    chunk_kind: ClassVar[str]
    """`object` of an event."""

    def __init__(self, choices: Sequence[AnswerChoice], prompt_tokens: int, *, streams: bool, counts: bool) -> None:
        self._choices, self._prompt_tokens = choices, prompt_tokens
        self._streams, self._counts = streams, counts
        self._id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._new_tokens = 0

    async def answer(
        self, request: Request, serving: Serving, wanted: Sequence[TextRequest], step: int | None
    ) -> Response:
        """Generate the texts, and answer.

        Args:
            request: Of the client.
            serving: State of the server.
            wanted: The text of each choice.
            step: Of the run, if the request insists on one.
        """
        # What is refused is refused with a status: the first event comes before the headers of a stream.
        events = ask(request, serving, wanted, step)
        first = await anext(events)
        if self._streams:
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            return StreamingResponse(self._stream(first, events), media_type="text/event-stream", headers=headers)
        return JSONResponse(await self._whole(first, events))

    async def _whole(self, first: Event, events: AsyncGenerator[Event, None]) -> dict[str, Any]:
        parts: list[list[dict[str, Any]]] = [[] for _ in self._choices]
        async for event in _from(first, events):
            parts[event.index].append(self._part(event))
        choices = [choice.joined(found) for choice, found in zip(self._choices, parts, strict=True)]
        return {**self._head(first, self.kind), "choices": choices, "usage": self._usage()}

    async def _stream(self, first: Event, events: AsyncGenerator[Event, None]) -> AsyncIterator[bytes]:
        usage = {"usage": None} if self._counts else {}
        try:
            async for event in _from(first, events):
                part = self._part(event)
                if self._choices[event.index].is_shown(part):
                    yield _sse({**self._head(event, self.chunk_kind), "choices": [part], **usage})
            if self._counts:
                yield _sse({**self._head(first, self.chunk_kind), "choices": [], "usage": self._usage()})
            yield b"data: [DONE]\n\n"
        except Refusal as refusal:  # the status is sent already
            yield _sse(refusal.body(self.path))

    def _part(self, event: Event) -> dict[str, Any]:
        self._new_tokens += len(event.piece.tokens)
        return self._choices[event.index].part(event)

    def _head(self, event: Event, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": event.served.id}

    def _usage(self) -> dict[str, int]:
        total = self._prompt_tokens + self._new_tokens
        return {"prompt_tokens": self._prompt_tokens, "completion_tokens": self._new_tokens, "total_tokens": total}


def step_of(served: Served, name: str | None) -> int | None:
    """The step of the run that a model's name insists on; None for the run's name, or for no name.

    Raises:
        Refusal: Another model is served.
    """
    if name is None or name == served.run:
        return None
    if name != served.id:
        shown = name.encode("ascii", "backslashreplace").decode()[:100]
        raise Refusal(404, f"model: there is no {shown!r}; {served.run!r} and {served.id!r} are served", "model")
    return served.step


async def _from(first: Event, events: AsyncGenerator[Event, None]) -> AsyncIterator[Event]:
    async with aclosing(events):
        yield first
        async for event in events:
            yield event


def _sse(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"
