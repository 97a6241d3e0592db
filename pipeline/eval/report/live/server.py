"""`pipeline report --live`: from runs to a server on this machine, and to its end."""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from rich.console import Console

from pipeline.common.console import say
from pipeline.common.page.words import clean
from pipeline.eval.report.live.view import LiveView
from pipeline.eval.server.guard import Guard, client
from pipeline.eval.server.listening import LOOPBACK, bound, bound_unix
from pipeline.eval.server.page import sealing
from pipeline.eval.server.private_link import PrivateLink
from pipeline.eval.server.refusal import Refusal
from pipeline.eval.server.stoppable import LOOPBACK_NAMES, StoppableServer

_CONNECTIONS = 64
_TUNNEL = 8080
"""Port of the other end of a tunnel to a unix socket."""
T = TypeVar("T")


def follow(runs: Sequence[Path], console: Console, *, port: int = 0, path: Path | None = None) -> None:
    """Serve the report on runs, and what is new in it, until SIGTERM, SIGHUP or SIGINT.

    Only this machine is served, and only who knows the address, which has a secret in it.

    Args:
        runs: run files or run folders; they may not have begun.
        console: where the address is printed.
        port: to listen on; 0 takes a free one.
        path: of a unix socket to listen on instead.

    Raises:
        UserError: a run is none or is named twice, or the port or the socket cannot be used.
    """
    view = LiveView(runs)
    with bound(LOOPBACK, port, "--port", has_keys=True) if path is None else bound_unix(path) as listening:
        server = LiveServer(view, listening, console)
        try:
            server.run(server.listening)
        finally:
            server.link.remove()


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
        self.link = PrivateLink(console)
        super().__init__(live_app(view, self._secret, self._log), listening, _CONNECTIONS)

    @property
    def address(self) -> str:
        """URL of the page; for a unix socket the one that `ssh -L` makes of it."""
        url = f"http://localhost:{_TUNNEL}" if self._is_unix else self.url
        return f"{url}/{self._secret}/"

    @property
    def _is_unix(self) -> bool:
        return self._socket.family == socket.AF_UNIX

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Say where it is: now, since a signal is answered as it should be from here on."""
        await super().startup(sockets)
        for line in self.link.lines(self._title, self.url, self.address):
            self._log(line)
        name = self._socket.getsockname()
        there = f"{_TUNNEL}:{name}" if self._is_unix else f"{name[1]}:{LOOPBACK}:{name[1]}"
        self._log(f"from another machine: ssh -L {there} {socket.gethostname()}, then open that address there")
        self._log("Ctrl-C ends it")

    def _log(self, line: str) -> None:
        with suppress(OSError):  # a log that nobody reads any more does not end the server
            say(self._console, clean(line))


def live_app(view: LiveView, secret: str, log: Callable[[str], None]) -> FastAPI:
    """The application.

    Args:
        view: what it shows.
        secret: first part of each path: other users of this machine reach the port, too.
        log: told who opens the page, and what went wrong, once.
    """
    app = FastAPI(title="pipeline report", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_middleware(
        Guard,
        keys=None,
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
    def index(given: str, request: Request) -> Response:
        check(given)
        log(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {client(request.scope)} has opened the report")
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
