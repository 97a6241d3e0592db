"""Megatron-LM's interface: PUT /api with its body and its answer, so that its clients work unchanged."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request

from pipeline.eval.generation.batch import Token
from pipeline.eval.generation.sampling import Sampling
from pipeline.eval.server.asking import Serving, ask, check_count, check_new_tokens, encode, log_prompts, seeds
from pipeline.eval.server.bodies import Generate
from pipeline.eval.server.openai_response import LEAST
from pipeline.eval.server.refusal import Refusal
from pipeline.eval.server.worker import TextRequest


def router(serving: Serving) -> APIRouter:
    """The route /api."""
    routes = APIRouter()

    async def generate(body: Generate, request: Request) -> dict[str, Any]:
        """Continue prompts: `text` has prompt and continuation, `segments` the texts of all their tokens."""
        tokenizer = serving.served.tokenizer
        if body.stop_token not in (None, tokenizer.end_of_document):
            raise Refusal(
                422,
                f"stop_token: {body.stop_token} is not supported here; leave it out, or give "
                f"{tokenizer.end_of_document}, which closes documents",
                "stop_token",
            )
        check_count(serving, len(body.prompts), "prompts")
        check_new_tokens(serving, body, "tokens_to_generate")
        ids = await encode(serving, body.prompts, "prompts", len(body.prompts), begin=body.add_BOS)
        if not body.no_log:
            log_prompts(serving, body.prompts)
        wanted = [
            TextRequest(each, _sampling(body, seed))
            for each, seed in zip(ids, seeds(body.random_seed, len(ids)), strict=True)
        ]
        prompts: list[tuple[Token, ...]] = [()] * len(ids)
        tokens: list[list[Token]] = [[] for _ in ids]
        texts = list(body.prompts)
        async with aclosing(ask(request, serving, wanted)) as events:
            async for event in events:
                prompts[event.index] = prompts[event.index] or event.prompt
                tokens[event.index] += event.piece.tokens
                texts[event.index] += event.piece.text
        segments = {id_: tokenizer.decode([id_]) for id_ in set().union(*ids)}
        return {
            "text": texts,
            "segments": [
                [segments[id_] for id_ in prompt] + [token.text for token in new]
                for prompt, new in zip(ids, tokens, strict=True)
            ],
            "tokens": [[*prompt, *(token.id for token in new)] for prompt, new in zip(ids, tokens, strict=True)],
            # Of all tokens but the first, which nothing comes before.
            "logprobs": [
                [max(token.logprob, LEAST) for token in (*prompt, *new) if token.logprob is not None]
                for prompt, new in zip(prompts, tokens, strict=True)
            ]
            if body.logprobs
            else None,
        }

    routes.add_api_route("/api", generate, methods=["PUT"], operation_id="put_api")
    routes.add_api_route("/api", generate, methods=["POST"], operation_id="post_api")
    return routes


def _sampling(body: Generate, seed: int) -> Sampling:
    stops = [stop for stop, wanted in (("\n\n", body.stop_on_double_eol), ("\n", body.stop_on_eol)) if wanted]
    return Sampling(
        max_tokens=body.tokens_to_generate,
        temperature=body.temperature,
        top_k=body.top_k or None,
        top_p=None if body.top_p in (0, 1) else body.top_p,
        stop=tuple(stops),
        seed=seed,
        logprobs=0 if body.logprobs else None,
        prompt_logprobs=body.logprobs,
    )
