"""OpenAI's interface: /v1/completions, streamed or not, and /v1/models."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.eval.generation.batch import Token
from pipeline.eval.generation.detokenize import Detokenizer
from pipeline.eval.server.asking import Serving, check_count, check_new_tokens, encode, log_prompts, seeds
from pipeline.eval.server.bodies import Completion
from pipeline.eval.server.openai_response import LEAST, AnswerChoice, OpenAIResponse, step_of
from pipeline.eval.server.worker import Event, Served, TextRequest


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
        step_of(serving.served, model)
        return _model(model, serving.served)

    @routes.post("/completions")
    async def completions(body: Completion, request: Request) -> Response:
        """Continue prompts."""
        step = step_of(serving.served, body.model)
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
        scored = bool(body.echo) and body.logprobs is not None
        most = 16 if body.max_tokens is None else body.max_tokens
        wanted = [
            TextRequest(each, body.sampling(seed, most, logprobs=body.logprobs, prompt_logprobs=scored))
            for each, seed in zip(texts, seeds(body.seed, len(texts)), strict=True)
        ]
        choices = [_Choice(index, body, begins[index // (body.n or 1)], tokenizer) for index in range(len(texts))]
        response = _CompletionResponse(
            choices, sum(map(len, ids)), streams=bool(body.stream), counts=body.counts_stream
        )
        return await response.answer(request, serving, wanted, step)

    return routes


def _model(name: str, served: Served) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(served.loaded_at), "owned_by": "pipeline"}


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


class _Choice(AnswerChoice):
    def __init__(self, index: int, body: Completion, begin: _Begin, tokenizer: Tokenizer) -> None:
        self._index, self._begin = index, begin
        self._offsets = None if body.logprobs is None else _Offsets(tokenizer, begin.ids, len(begin.text))
        self._length = 0
        self._begun = False

    def part(self, event: Event) -> dict[str, Any]:
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

    def is_shown(self, part: dict[str, Any]) -> bool:
        return bool(part["text"] or part["finish_reason"] or (part["logprobs"] or {}).get("tokens"))

    def joined(self, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        text = "".join(part["text"] for part in parts)
        logprobs = None
        if self._offsets is not None:
            logprobs = {name: [each for part in parts for each in part["logprobs"][name]] for name in _LOGPROBS}
            logprobs["text_offset"] = [min(each, len(text)) for each in logprobs["text_offset"]]
        return {**parts[-1], "text": text, "logprobs": logprobs}


_LOGPROBS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


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


class _CompletionResponse(OpenAIResponse):
    path, prefix, kind, chunk_kind = "/v1/completions", "cmpl", "text_completion", "text_completion"
