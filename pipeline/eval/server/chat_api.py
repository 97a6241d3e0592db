"""OpenAI's interface of conversations: /v1/chat/completions, streamed or not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from pipeline.common.errors import UserError
from pipeline.data.tokenization.chat_prompts import ChatPrompts
from pipeline.eval.generation.batch import Token
from pipeline.eval.server.asking import Serving, check_count, check_new_tokens, log_prompts, seeds
from pipeline.eval.server.bodies import ChatCompletion
from pipeline.eval.server.openai_response import LEAST, AnswerChoice, OpenAIResponse, step_of
from pipeline.eval.server.refusal import Refusal
from pipeline.eval.server.worker import Event, TextRequest


def router(serving: Serving) -> APIRouter:
    """The route of conversations."""
    routes = APIRouter(prefix="/v1/chat")

    @routes.post("/completions")
    async def completions(body: ChatCompletion, request: Request) -> Response:
        """Answer the last message of a conversation."""
        step = step_of(serving.served, body.model)
        texts = body.n or 1
        check_count(serving, texts, "n")
        for field in ("max_tokens", "max_completion_tokens"):
            check_new_tokens(serving, body, field)
        chat = serving.served.chat
        if chat is None:
            why = serving.served.chat_problem or "the model has no chat template"
            raise Refusal(404, f"{why}: start the server with --chat-template FILE, or use /v1/completions")
        ids = await _encode(serving, chat, body, texts)
        log_prompts(serving, [each["content"] for each in body.messages])
        most = body.max_completion_tokens or body.max_tokens or serving.worker.max_length
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        wanted = [
            TextRequest(ids, body.sampling(seed, most, logprobs=logprobs, **chat.sampling))
            for seed in seeds(body.seed, texts)
        ]
        choices = [_Choice(index, logprobs is not None) for index in range(texts)]
        response = _ChatResponse(choices, len(ids), streams=bool(body.stream), counts=body.counts_stream)
        return await response.answer(request, serving, wanted, step)

    return routes


async def _encode(serving: Serving, chat: ChatPrompts, body: ChatCompletion, texts: int) -> list[int]:
    """Ids of the conversation up to the answer."""
    most = serving.worker.max_length - 1
    allowed = f"at most {most} are allowed (serve.max_length is {most + 1}, conversation and answer together)"
    size = sum(len(each["content"].encode()) for each in body.messages)
    if size > most * serving.served.bytes_of_a_token:  # whatever the tokens are: no work for the template
        raise Refusal(422, f"messages: have {size:,} bytes, which are too many tokens; {allowed}", "messages")
    async with serving.encoding:
        serving.worker.check_room(texts)
        try:
            ids = await asyncio.to_thread(chat.encode, body.messages)
        except UserError as error:
            raise Refusal(422, f"messages: {error}", "messages") from None
    if len(ids) > most:
        raise Refusal(422, f"messages: have {len(ids)} tokens with the template; {allowed}", "messages")
    return ids


class _Choice(AnswerChoice):
    def __init__(self, index: int, scores: bool) -> None:
        self._index, self._scores = index, scores
        self._begun = False

    def part(self, event: Event) -> dict[str, Any]:
        role = {} if self._begun else {"role": "assistant"}
        self._begun = True
        return {
            "index": self._index,
            "delta": {**role, "content": event.piece.text},
            "logprobs": {"content": [_scored(token) for token in event.piece.tokens]} if self._scores else None,
            "finish_reason": event.piece.finish,
        }

    def is_shown(self, part: dict[str, Any]) -> bool:
        tokens = (part["logprobs"] or {}).get("content")
        return bool(part["delta"]["content"] or part["finish_reason"] or tokens or "role" in part["delta"])

    def joined(self, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        text = "".join(part["delta"]["content"] for part in parts)
        tokens = [each for part in parts if self._scores for each in part["logprobs"]["content"]]
        return {
            "index": self._index,
            "message": {"role": "assistant", "content": text},
            "logprobs": {"content": tokens} if self._scores else None,
            "finish_reason": parts[-1]["finish_reason"],
        }


def _scored(token: Token) -> dict[str, Any]:
    """A token with its log-probability, and the most probable ones in its place."""
    assert token.logprob is not None
    top = [_score(text, logprob) for _, text, logprob in token.top]
    return {**_score(token.text, token.logprob), "top_logprobs": top}


def _score(text: str, logprob: float) -> dict[str, Any]:
    # Bytes of a part of a character are not known from its text.
    known = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": max(logprob, LEAST), "bytes": known}


class _ChatResponse(OpenAIResponse):
    path, prefix = "/v1/chat/completions", "chatcmpl"
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
