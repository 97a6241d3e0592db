"""OpenAI's interface: /v1/completions, streamed or not, and /v1/models."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.eval.generation.batch import Token
from pipeline.eval.generation.detokenize import Detokenizer
from pipeline.eval.generation.sampling import Sampling
from pipeline.eval.server.asking import Serving, ask, check_count, check_new_tokens, encode, log_prompts, seeds
from pipeline.eval.server.bodies import Completion
from pipeline.eval.server.refusal import Refusal
from pipeline.eval.server.worker import Event, Served, TextRequest

LEAST = -9999.0
"""Stands for a probability of 0, whose logarithm JSON cannot hold."""


def router(serving: Serving) -> APIRouter:
    """The routes below /v1."""
    routes = APIRouter(prefix="/v1")

    @routes.get("/models")
    async def models() -> dict[str, Any]:
        """The run, and the step of it that is in memory."""
        served = serving.served
        return {"object": "list", "data": [_model(name, served) for name in (served.run, served.id)]}

    @routes.get("/models/{model}")
    async def model(model: str) -> dict[str, Any]:
        """One of them."""
        _step(serving.served, model)
        return _model(model, serving.served)

    @routes.post("/completions")
    async def completions(body: Completion, request: Request) -> Response:
        """Continue prompts."""
        step = None if body.model is None else _step(serving.served, body.model)
        prompts = body.prompts
        check_count(serving, len(prompts) * (body.n or 1), "prompt" if (body.n or 1) == 1 else "n")
        check_new_tokens(serving, body, "max_tokens")
        ids = await encode(serving, prompts, "prompt", len(prompts) * (body.n or 1))
        log_prompts(serving, prompts)
        tokenizer = serving.served.tokenizer
        begins = [_Begin("", each, []) for each in ids]
        if body.echo:
            async with serving.encoding:
                begins = await asyncio.to_thread(_echoed, tokenizer, prompts, ids, offsets=body.logprobs is not None)
        texts = [each for each in ids for _ in range(body.n or 1)]
        wanted = [
            TextRequest(each, _sampling(body, seed))
            for each, seed in zip(texts, seeds(body.seed, len(texts)), strict=True)
        ]
        choices = [_Choice(index, body, begins[index // (body.n or 1)], tokenizer) for index in range(len(texts))]
        response = _CompletionResponse(body, choices, prompt_tokens=sum(map(len, ids)))
        # What is refused is refused with a status: the first event comes before the headers of a stream.
        events = ask(request, serving, wanted, step)
        first = await anext(events)
        if body.stream:
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            return StreamingResponse(response.stream(first, events), media_type="text/event-stream", headers=headers)
        return JSONResponse(await response.whole(first, events))

    return routes


def _model(name: str, served: Served) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(served.loaded_at), "owned_by": "pipeline"}


def _step(served: Served, name: str) -> int | None:
    """The step that a name insists on; None for the run's."""
    if name == served.run:
        return None
    if name != served.id:
        shown = name.encode("ascii", "backslashreplace").decode()[:100]
        raise Refusal(404, f"model: there is no {shown!r}; {served.run!r} and {served.id!r} are served", "model")
    return served.step


def _sampling(body: Completion, seed: int) -> Sampling:
    return Sampling(
        max_tokens=16 if body.max_tokens is None else body.max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=None if body.top_k in (None, 0, -1) else body.top_k,
        top_p=None if body.top_p in (None, 1) else body.top_p,
        min_p=body.min_p or None,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        seed=seed,
        logprobs=body.logprobs,
        prompt_logprobs=bool(body.echo) and body.logprobs is not None,
    )


@dataclass(frozen=True)
class _Begin:
    """The beginning of a choice, before its continuation."""

    text: str
    """Beginning of the answer; empty without `echo`."""
    ids: Sequence[int]
    offsets: Sequence[int]
    """Offsets of these tokens in `text`; only where they are shown."""


def _echoed(
    tokenizer: Tokenizer, prompts: Sequence[str | list[int]], ids: Sequence[list[int]], *, offsets: bool
) -> list[_Begin]:
    begins = []
    for prompt, tokens in zip(prompts, ids, strict=True):
        text = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
        counter = _Offsets(tokenizer, [])
        # The end of document that begins an empty prompt is not part of the text.
        begins.append(_Begin(text, tokens, [min(counter.next(id_), len(text)) for id_ in tokens] if offsets else []))
    return begins


class _Offsets:
    """Offsets of tokens in a text: behind all characters that are complete before them."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int], first: int = 0) -> None:
        self._detokenizer, self._length = Detokenizer(tokenizer, before), first

    def next(self, token: int) -> int:
        """The offset of the next token."""
        offset = self._length
        self._length += len(self._detokenizer.add(token))
        return offset


class _Choice:
    """One text of an answer, part by part as it is generated."""

    def __init__(self, index: int, body: Completion, begin: _Begin, tokenizer: Tokenizer) -> None:
        self._index, self._begin = index, begin
        self._offsets = None if body.logprobs is None else _Offsets(tokenizer, begin.ids, len(begin.text))
        self._length = 0
        self._begun = False

    def part(self, event: Event) -> dict[str, Any]:
        """The part of a choice that an event adds."""
        text, tokens = event.piece.text, event.piece.tokens
        offsets = [] if self._offsets is None else [self._offsets.next(token.id) for token in tokens]
        if not self._begun:
            self._begun, text = True, self._begin.text + text
            tokens, offsets = (*event.prompt, *tokens), [*self._begin.offsets, *offsets]
        self._length += len(text)
        if event.piece.finish:  # a stop string may have cut off where the last tokens would be
            offsets = [min(offset, self._length) for offset in offsets]
        return {
            "index": self._index,
            "text": text,
            "logprobs": None if self._offsets is None else _logprobs(tokens, offsets),
            "finish_reason": event.piece.finish,
        }


def _logprobs(tokens: Sequence[Token], offsets: list[int]) -> dict[str, list[Any]]:
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [None if token.logprob is None else max(token.logprob, LEAST) for token in tokens],
        "top_logprobs": [_top(token) for token in tokens],
        "text_offset": offsets,
    }


def _top(token: Token) -> dict[str, float] | None:
    """The most probable tokens and the one taken, by text; of those with equal texts the most probable one."""
    if token.logprob is None:
        return None
    found: dict[str, float] = {}
    for _, text, logprob in token.top:
        found.setdefault(text, max(logprob, LEAST))
    if token.top:
        found.setdefault(token.text, max(token.logprob, LEAST))
    return found


@dataclass
class _CompletionResponse:
    body: Completion
    choices: list[_Choice]
    prompt_tokens: int
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))
    new_tokens: int = 0

    async def whole(self, first: Event, events: AsyncGenerator[Event, None]) -> dict[str, Any]:
        """All in one."""
        found: list[dict[str, Any] | None] = [None] * len(self.choices)
        async for event in _from(first, events):
            part = self._part(event)
            before = found[event.index]
            if before is None:
                found[event.index] = part
                continue
            before["text"] += part["text"]
            before["finish_reason"] = part["finish_reason"]
            for name, values in (part["logprobs"] or {}).items():
                before["logprobs"][name] += values
        for choice in found:
            if choice is not None and choice["logprobs"]:
                length = len(choice["text"])
                choice["logprobs"]["text_offset"] = [min(each, length) for each in choice["logprobs"]["text_offset"]]
        return {**self._head(first), "choices": found, "usage": self._usage()}

    async def stream(self, first: Event, events: AsyncGenerator[Event, None]) -> AsyncIterator[bytes]:
        """Server-sent events."""
        counted = self.body.stream_options is not None and self.body.stream_options.include_usage
        usage = {"usage": None} if counted else {}
        try:
            async for event in _from(first, events):
                part = self._part(event)
                if part["text"] or part["finish_reason"] or (part["logprobs"] or {}).get("tokens"):
                    yield _sse({**self._head(event), "choices": [part], **usage})
            if counted:
                yield _sse({**self._head(first), "choices": [], "usage": self._usage()})
            yield b"data: [DONE]\n\n"
        except Refusal as refusal:  # the status is sent already
            yield _sse(refusal.body("/v1/completions"))

    def _part(self, event: Event) -> dict[str, Any]:
        self.new_tokens += len(event.piece.tokens)
        return self.choices[event.index].part(event)

    def _head(self, event: Event) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": event.served.id}

    def _usage(self) -> dict[str, int]:
        total = self.prompt_tokens + self.new_tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.new_tokens, "total_tokens": total}


async def _from(first: Event, events: AsyncGenerator[Event, None]) -> AsyncIterator[Event]:
    async with aclosing(events):
        yield first
        async for event in events:
            yield event


def _sse(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"
