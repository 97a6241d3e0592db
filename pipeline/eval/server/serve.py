"""`pipeline serve`: from a run to a server that listens, and to its end."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console

from pipeline.common.console import say
from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.eval.server.app import create_app, max_open
from pipeline.eval.server.asking import Serving
from pipeline.eval.server.stoppable import LOOPBACK_NAMES, StoppableServer
from pipeline.eval.server.watch import CheckpointWatcher, load_served
from pipeline.eval.server.worker import Worker
from pipeline.train.checkpoint.exported import WEIGHTS_OPTION, WeightsOf

KEY_VARIABLE = "PIPELINE_API_KEY"
_LEAST_KEY = 16
_GRACE_SECONDS = 10.0
"""So long the texts that are being continued when the server is told to end may go on."""
_FLUSH_SECONDS = 5.0
"""So long clients may read answers afterwards."""
_IDLE = 256
"""Connections without an open request."""


def read_key(file: Path | None) -> str | None:
    """The API key: the content of a file, or of `PIPELINE_API_KEY`; None if there is neither.

    Raises:
        UserError: it is short, has characters that a header cannot, or others can read the file.
    """
    if file is None:
        key, place = os.environ.get(KEY_VARIABLE), KEY_VARIABLE
        if key is None:
            return None
    else:
        key, place = file.read_text(encoding="utf-8", errors="replace").strip(), f"--api-key-file {file}"
        if file.stat().st_mode & 0o077:
            raise UserError(f"{place} can be read by others on this machine; chmod 600 {file}")
    if len(key) < _LEAST_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise UserError(
            f"{place} has {len(key)} characters; a key is {_LEAST_KEY} or more letters, digits and signs, like the "
            "output of `openssl rand -hex 16`"
        )
    return key


def serve(config: Config, which: WeightsOf, key_file: Path | None, console: Console) -> None:
    """Answer requests with a model until SIGTERM, SIGHUP or SIGINT.

    Args:
        config: resolved config; the `serve:` section and `eval.weights` count.
        which: checkpoint or folder of the weights; None for the latest checkpoint.
        key_file: has the API key.
        console: gets the log.

    Raises:
        UserError: the port is taken, other machines would reach it without a key, or as `load_for_inference`.
    """
    with opened(config, which, read_key(key_file), console) as server:
        server.run(server.listening)


@contextmanager
def opened(config: Config, which: WeightsOf, key: str | None, console: Console) -> Generator[Server, None, None]:
    """A server that is bound and has its model, to be run; afterwards its threads have ended."""
    settings = config.serve
    if settings.watch and isinstance(which, Path):
        raise UserError(
            f"use either {WEIGHTS_OPTION} or --watch (serve.watch): one serves the weights of a folder, the other the "
            "newest checkpoint"
        )
    if settings.watch and which is not None:
        raise UserError("use either --step or --watch (serve.watch): one serves a fixed step, the other the newest")

    def log(line: str) -> None:
        with suppress(OSError):  # a log that nobody reads any more does not end the server
            say(console, line)

    listening = _bind(settings.host, settings.port, has_key=key is not None)
    try:
        served = load_served(config, which)
        worker = Worker(
            served,
            slots=settings.slots,
            max_length=settings.max_length or config.max_sequence_length,
            queue=settings.queue,
            report=log,
        )
        watch = CheckpointWatcher(config, worker, log) if settings.watch else None
        serving = Serving(worker, settings, log, watch)
        hosts = LOOPBACK_NAMES | {settings.host.lower()} if _is_loopback(listening) else None
        server = Server(create_app(serving, settings, key=key, hosts=hosts), serving, listening, served.title)
        worker.start()
        if watch is not None:
            watch.start()
        try:
            yield server
        finally:
            if watch is not None:
                watch.close()
            worker.close(0)
            worker.wait(60)
            log("ended")
    finally:
        listening.close()


class Server(StoppableServer):
    """The server of a model, which ends after the texts that are being continued."""

    def __init__(self, app: object, serving: Serving, listening: socket.socket, what: str) -> None:
        super().__init__(app, listening, max_open(serving.settings) + _IDLE)
        self._serving = serving
        self._what = what

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Say where it is: now, since a signal is answered as it should be from here on."""
        await super().startup(sockets)
        self._serving.log(f"{self._what} on {self.url}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let what is being continued end, for a while, and refuse the rest."""
        worker = self._serving.worker
        worker.close(_GRACE_SECONDS)
        while worker.running and not worker.dead and not self.force_exit:
            await asyncio.sleep(0.05)
        # Connections are ended from below: uvicorn cancels requests, and logs each as a failure.
        end = asyncio.get_running_loop().call_later(_FLUSH_SECONDS, self._abort)
        await super().shutdown(sockets)
        end.cancel()

    def _abort(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _bind(host: str, port: int, *, has_key: bool) -> socket.socket:
    """A socket that listens; before a model is loaded, so that a port that is taken shows at once."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise UserError(f"serve.host is {host!r}, which is not an address of this machine ({error.strerror})") from None
    family, kind, protocol, _, address = found[0]
    if not has_key and not ipaddress.ip_address(address[0]).is_loopback:
        raise UserError(
            f"serve.host is {host!r}, which other machines can reach, but there is no API key: put one into a file and "
            f"give --api-key-file, or set {KEY_VARIABLE}; or use 127.0.0.1 and `ssh -L`"
        )
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(2048)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"serve.port {port} of {host} is taken by another program; choose another one with --port, or 0 for "
                "any free one"
            ) from None
        if error.errno == errno.EACCES:
            raise UserError(f"you may not use serve.port {port}; choose one above 1023 with --port") from None
        raise UserError(f"serve.host {host!r}, port {port} cannot be used: {error.strerror}") from None
    return listening


def _is_loopback(listening: socket.socket) -> bool:
    return ipaddress.ip_address(listening.getsockname()[0]).is_loopback
