"""uvicorn's server on a socket that is bound already, which ends with exit code 0 when it is told to."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
import threading
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial

import uvicorn

from pipeline.common.signals import stop_signals
from pipeline.eval.server.connection import HEAD_SECONDS, limited

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
"""Names of this machine in a Host header, for one that only this machine reaches."""


class StoppableServer(uvicorn.Server):
    """A server until SIGTERM, SIGHUP or SIGINT.

    Args:
        app: ASGI application.
        listening: bound socket.
        connections: at once.
        tls: certificate and key for TLS; None for plain HTTP.
    """

    def __init__(
        self, app: object, listening: socket.socket, connections: int, tls: ssl.SSLContext | None = None
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,  # type: ignore[arg-type]
                http=limited(connections),
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=15,
            )
        )
        self.config.load()
        self.config.ssl = tls
        self._socket = listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen. A handshake of TLS, before which no connection is counted, has the time of headers."""
        if self.config.ssl is not None:
            loop = asyncio.get_running_loop()
            loop.create_server = partial(  # type: ignore[method-assign]
                loop.create_server, ssl_handshake_timeout=HEAD_SECONDS
            )
        await super().startup(sockets)

    @property
    def listening(self) -> list[socket.socket]:
        """For `run`."""
        return [self._socket]

    @property
    def url(self) -> str:
        """URL of the server; of a unix socket its path."""
        if self._socket.family == socket.AF_UNIX:
            return f"unix:{self._socket.getsockname()}"
        host, port = self._socket.getsockname()[:2]
        scheme = "http" if self.config.ssl is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handlers of signals as uvicorn's, but without raising them again: a requested end is not a failure."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        ends = (set(stop_signals()) | {signal.SIGINT}) - {signal.SIGUSR2}
        before = {number: signal.signal(number, self.handle_exit) for number in ends}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
