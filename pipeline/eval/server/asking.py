"""From a checked body to the events of its texts: what both interfaces share."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from starlette.requests import Request

from pipeline.common.errors import UserError
from pipeline.config.eval import ServeConfig
from pipeline.eval.server.bodies import Body
from pipeline.eval.server.guard import COUNTS
from pipeline.eval.server.refusal import Refusal
from pipeline.eval.server.watch import CheckpointWatcher
from pipeline.eval.server.worker import Event, Served, TextRequest, Worker

GONE = 499
"""Status of a request whose client has left, in the log alone."""


@dataclass(frozen=True)
class Serving:
    """State that the app serves requests from."""

    worker: Worker
    settings: ServeConfig
    log: Callable[[str], None]
    watch: CheckpointWatcher | None = None
    encoding: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))
    """Limit on requests whose prompts become tokens, which takes memory and processors."""

    @property
    def served(self) -> Served:
        """The model that answers now."""
        return self.worker.served


async def encode(
    serving: Serving, prompts: Sequence[str | list[int]], field: str, texts: int, *, begin: bool = False
) -> list[list[int]]:
    """Ids of prompts.

    Args:
        serving: whose tokenizer it is.
        prompts: texts, or ids.
        field: of the body, for messages.
        texts: that the request will queue.
        begin: put the end-of-document token before each.

    Raises:
        Refusal: one is too long, or has an id that the model does not have; the queue is full.
    """
    served, most = serving.served, serving.worker.max_length - 1
    allowed = f"at most {most} are allowed (serve.max_length is {most + 1}, prompt and new tokens together)"
    names = [field] if len(prompts) == 1 else [f"{field}.{number}" for number in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        # Whatever the tokens are, they are too many: no work for the tokenizer.
        size = len(prompt.encode()) if isinstance(prompt, str) else 0
        if size > most * served.bytes_of_a_token:
            raise Refusal(422, f"{name}: has {size:,} bytes, which are too many tokens; {allowed}", field)

    def all_of_them() -> list[list[int]]:
        found: list[list[int]] = []
        for name, prompt in zip(names, prompts, strict=True):
            try:
                ids = _encode(served, prompt) if isinstance(prompt, str) else list(prompt)
            except UserError as error:
                raise Refusal(422, f"{name}: {error}", field) from None
            if begin and prompt:  # an empty one begins a document by itself
                ids = [served.tokenizer.end_of_document, *ids]
            if len(ids) > most:
                raise Refusal(422, f"{name}: has {len(ids)} tokens; {allowed}", field)
            if ids and max(ids) >= served.tokenizer.vocab_size:
                raise Refusal(
                    422,
                    f"{name}: token id {max(ids)} is not in the vocabulary of {served.tokenizer.vocab_size}",
                    field,
                )
            found.append(ids)
        return found

    async with serving.encoding:
        serving.worker.check_room(texts)
        return await asyncio.to_thread(all_of_them)


def _encode(served: Served, prompt: str) -> list[int]:
    """As `encode_prompt`, but other threads go on meanwhile: the library lets them for batches alone."""
    ids: list[int] = served.tokenizer.encode_batch([prompt])[0].tolist()
    return ids or [served.tokenizer.end_of_document]


def check_new_tokens(serving: Serving, body: Body, field: str) -> None:
    """Refuse to make more tokens than a text can have, where a request asks for them; a default is cut."""
    count = getattr(body, field) or 0
    if field in body.model_fields_set and count > serving.worker.max_length:
        raise Refusal(
            422, f"{field}: {count} is more than serve.max_length, which is {serving.worker.max_length}", field
        )


def check_count(serving: Serving, texts: int, field: str) -> None:
    """Refuse a request that would never find room in the queue."""
    if texts > serving.worker.queue:
        raise Refusal(
            422, f"{field}: {texts} texts are more than the queue holds (serve.queue is {serving.worker.queue})", field
        )


def seeds(first: int | None, count: int) -> list[int]:
    """A seed for each of a request's texts."""
    first = secrets.randbits(62) if first is None or first < 0 else first
    return [(first + number) % 2**63 for number in range(count)]


def log_prompts(serving: Serving, prompts: Sequence[str | list[int]]) -> None:
    """Write prompts into the log, if that is wanted."""
    if serving.settings.log_prompts:
        serving.log("prompts " + json.dumps(prompts))


async def ask(
    request: Request, serving: Serving, wanted: Sequence[TextRequest], step: int | None = None
) -> AsyncGenerator[Event, None]:
    """Events of a request's texts, until all have ended. A client that leaves frees its slots.

    Raises:
        Refusal: the queue is full, the model has failed, the server ends, or the client disconnected.
    """
    counts = request.scope[COUNTS]
    ticket = serving.worker.submit(wanted, step)
    counts["prompt tokens"] = sum(len(each.prompt_ids) for each in wanted)
    counts["new tokens"] = 0

    async def leave_with_client() -> None:
        with suppress(RuntimeError):  # whatever else is wrong with the connection
            while (await request.receive())["type"] != "http.disconnect":
                pass
        counts["status"] = GONE
        serving.worker.drop(ticket)
        ticket.events.put_nowait(Refusal(GONE, "the client disconnected"))

    leaving = asyncio.create_task(leave_with_client())
    left = len(wanted)
    try:
        while left:
            event = await ticket.events.get()
            if isinstance(event, Refusal):
                raise event
            counts["new tokens"] += len(event.piece.tokens)
            left -= event.piece.finish is not None
            yield event
    finally:
        leaving.cancel()
        serving.worker.drop(ticket)
