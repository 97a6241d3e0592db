"""The application: routes, and what every error looks like."""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException

from pipeline import __version__
from pipeline.common.errors import UserError
from pipeline.config.eval import ServeConfig
from pipeline.eval.server import chat_api, megatron_api, openai_api
from pipeline.eval.server.asking import Serving
from pipeline.eval.server.bodies import problem
from pipeline.eval.server.guard import HAS_KEY, Guard
from pipeline.eval.server.keys import Keys
from pipeline.eval.server.page import page
from pipeline.eval.server.refusal import Refusal


def create_app(
    serving: Serving, settings: ServeConfig, *, keys: Keys | None = None, hosts: frozenset[str] | None = None
) -> FastAPI:
    """The application over a model in memory.

    Args:
        serving: what it answers from.
        settings: the `serve:` section.
        keys: of which requests need one; None if they need none.
        hosts: names that the Host header may have; None for any.
    """
    # The pages of FastAPI that show the schema load scripts from elsewhere.
    app = FastAPI(
        title="pipeline serve",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        responses={"4XX": {"description": "Refused; the message names the field"}, 503: {"description": "Failed"}},
    )
    app.add_middleware(
        Guard,
        keys=keys,
        hosts=hosts,
        max_body_bytes=settings.max_body_bytes,
        max_open=max_open(settings),
        log=serving.log,
    )
    app.include_router(openai_api.router(serving))
    app.include_router(chat_api.router(serving))
    app.include_router(megatron_api.router(serving))

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        html, headers = page()
        return HTMLResponse(html, headers=headers)

    @app.get("/health")
    async def health(request: Request) -> JSONResponse:
        """The model that is served, and whether it works; without the key of the server only whether it works."""
        found = _health(serving)
        if not request.scope[HAS_KEY]:
            found = {"status": found["status"]}
        return JSONResponse(found, status_code=503 if found["status"] == "dead" else 200)

    @app.exception_handler(Refusal)
    async def refused(request: Request, error: Refusal) -> Response:
        return _response(request, error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        message, field = problem(list(error.errors()))
        return _response(request, Refusal(422, message, field))

    @app.exception_handler(UserError)
    async def unusable(request: Request, error: UserError) -> Response:
        # Of the tokenizer, for this text: it panicked when it decoded ids of the prompt, say.
        return _response(request, Refusal(422, str(error)))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        message = str(error.detail)
        if error.status_code == 404:
            routes = "/v1/completions, /v1/chat/completions, /v1/models, /api and /health"
            message = f"there is no such route; the routes are {routes}"
        elif error.status_code == 400:  # of the body: whatever JSON made of it
            return _response(request, Refusal(422, "the body is not JSON"))
        return _response(request, Refusal(error.status_code, message), error.headers)

    return app


def max_open(settings: ServeConfig) -> int:
    """Requests at once: those that wait or are answered, and some that are sent, refused or read to the end."""
    return settings.queue + settings.slots + 64


def _response(request: Request, refusal: Refusal, headers: Any = None) -> Response:
    return JSONResponse(
        refusal.body(request.url.path), status_code=refusal.status, headers={**(headers or {}), **refusal.headers}
    )


def _health(serving: Serving) -> dict[str, Any]:
    served, worker = serving.served, serving.worker
    return {
        "status": "dead" if worker.dead else "failing" if worker.error else "ok",
        "error": worker.dead or worker.error,
        "run": served.run,
        "step": served.step,
        "tokens": served.tokens,
        "weights": None if served.folder is None else {"folder": served.folder, "fingerprint": served.fingerprint},
        "loaded_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(served.loaded_at)),
        "waiting": worker.waiting,
        "running": worker.running,
        "slots": worker.slots,
        "queue": worker.queue,
        "chat": served.chat is not None,
        "max_length": worker.max_length,
        "max_prompt_tokens": worker.max_length - 1,
        "watch": None if serving.watch is None else {"error": serving.watch.error},
    }
