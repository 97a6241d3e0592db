"""`pipeline report --live`: from runs to a server on this machine, and to its end."""

from __future__ import annotations

import hmac
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, JSONResponse, Response
from rich.console import Console

from pipeline.common.console import say
from pipeline.common.errors import UserError
from pipeline.common.page.words import clean
from pipeline.eval.report.live.view import LiveView
from pipeline.eval.server.guard import Guard
from pipeline.eval.server.page import sealing
from pipeline.eval.server.refusal import Refusal
from pipeline.eval.server.stoppable import LOOPBACK_NAMES, StoppableServer

_CONNECTIONS = 64
_HOST = "127.0.0.1"
T = TypeVar("T")


def follow(runs: Sequence[Path], console: Console, *, port: int = 0) -> None:
    """Serve the report on runs, and what is new in it, until SIGTERM, SIGHUP or SIGINT.

    Only this machine is served, and only who knows the address, which has a secret in it.

    Args:
        runs: run files or run folders; they may not have begun.
        console: where the address is printed.
        port: to listen on; 0 takes a free one.

    Raises:
        UserError: a run is none or is named twice, or the port cannot be used.
    """
    view = LiveView(runs)
    listening = _bind(port)
    try:
        server = LiveServer(view, listening, console)
        server.run(server.listening)
    finally:
        listening.close()


class LiveServer(StoppableServer):
    """The server of a report that follows runs.

    Args:
        view: what it shows.
        listening: bound socket.
        console: where the address is printed.
    """

    def __init__(self, view: LiveView, listening: socket.socket, console: Console) -> None:
        self._secret = secrets.token_urlsafe(16)
        self._console, self._title = console, view.title
        super().__init__(live_app(view, self._secret, self._log), listening, _CONNECTIONS)

    @property
    def address(self) -> str:
        """URL of the page."""
        return f"{self.url}/{self._secret}/"

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Say where it is: now, since a signal is answered as it should be from here on."""
        await super().startup(sockets)
        port = self._socket.getsockname()[1]
        self._log(f"{self._title} on {self.address}")
        self._log(
            f"from another machine: ssh -L {port}:{_HOST}:{port} {socket.gethostname()}, then open that address there"
        )
        self._log("Ctrl-C ends it")

    def _log(self, line: str) -> None:
        with suppress(OSError):  # a log that nobody reads any more does not end the server
            say(self._console, clean(line))


def live_app(view: LiveView, secret: str, log: Callable[[str], None]) -> FastAPI:
    """The application.

    Args:
        view: what it shows.
        secret: first part of each path: other users of this machine reach the port, too.
        log: told what went wrong, once.
    """
    app = FastAPI(title="pipeline report", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_middleware(
        Guard,
        key=None,
        hosts=LOOPBACK_NAMES,
        max_body_bytes=0,
        max_open=_CONNECTIONS,
        log=lambda line: None,
    )
    frame = files(__package__).joinpath("live.html").read_text(encoding="utf-8")
    sealed = sealing(frame, "frame-src 'self'")
    quiet = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}

    failures: list[str] = []

    def check(given: str) -> None:
        if not hmac.compare_digest(given.encode("utf-8", "replace"), secret.encode()):
            raise Refusal(404, "there is nothing here; open the address that `pipeline report --live` has printed")

    def tried(function: Callable[[], T]) -> T:
        try:
            return function()
        except Exception as error:  # a file that nobody has thought of: the server goes on, and says it once
            words = f"{type(error).__name__}: {error}"
            if words not in failures:
                failures.append(words)
                log(f"the runs cannot be shown: {words}")
            raise Refusal(500, words) from error

    # Not async: they read files and draw, in a thread.
    @app.get("/{given}/")
    def index(given: str) -> Response:
        check(given)
        return HTMLResponse(frame, headers=sealed)

    @app.get("/{given}/newest")
    def newest(given: str, after: int = 0) -> Response:
        check(given)
        return JSONResponse(tried(lambda: view.newest(after)), headers=quiet)

    @app.get("/{given}/report")
    def report(given: str) -> Response:
        check(given)
        return HTMLResponse(tried(view.report), headers={**quiet, "Content-Security-Policy": "frame-ancestors 'self'"})

    @app.exception_handler(Refusal)
    async def refused(request: object, error: Refusal) -> Response:
        return JSONResponse(error.body(""), status_code=error.status)

    return app


def _bind(port: int) -> socket.socket:
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((_HOST, port))
        listening.listen()
    except OSError as error:
        listening.close()
        raise UserError(
            f"--port {port} cannot be used ({error.strerror}); name another, or leave it out for any free one"
        ) from None
    return listening
