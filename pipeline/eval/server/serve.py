"""`pipeline serve`: from a run to a server that listens, and to its end."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pipeline.common.console import Console, say, verbatim
from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.eval.server.app import create_app, max_open
from pipeline.eval.server.asking import Serving
from pipeline.eval.server.keys import Keys, MadeKey, choose_keys
from pipeline.eval.server.listening import bound, bound_unix, is_of_this_machine, tls_context
from pipeline.eval.server.private_link import PrivateLink
from pipeline.eval.server.stoppable import LOOPBACK_NAMES, StoppableServer
from pipeline.eval.server.watch import CheckpointWatcher, load_served
from pipeline.eval.server.worker import Worker
from pipeline.train.checkpoint.exported import WEIGHTS_OPTION, WeightsOf

_GRACE_SECONDS = 10.0
"""So long the texts that are being continued when the server is told to end may go on."""
_FLUSH_SECONDS = 5.0
"""So long clients may read answers afterwards."""
_IDLE = 256
"""Connections without an open request."""


@dataclass(frozen=True)
class Access:
    """The way to a server, and its keys: options of the command alone, which no file of a run can set."""

    key_file: Path | None = None
    """Has the API keys."""
    no_key: bool = False
    """Answer everybody who reaches the server without asking for a key."""
    socket: Path | None = None
    """Unix socket of mode 600 to listen on instead of a port."""
    certificate: Path | None = None
    """For TLS, with the certificates of its issuers."""
    ssl_key: Path | None = None
    """Private key of the certificate."""

    def keys(self) -> Keys | None:
        """Keys that requests may have; None if they need none. Only this user can open a socket, so none is made."""
        if self.no_key and self.key_file is not None:
            raise UserError("use either --no-key or --api-key-file")
        if self.no_key:
            return None
        return choose_keys(self.key_file, makes_one=self.socket is None)


def serve(
    config: Config, which: WeightsOf, access: Access, console: Console, chat_template: Path | None = None
) -> None:
    """Answer requests with a model until SIGTERM, SIGHUP or SIGINT.

    Args:
        config: resolved config; the `serve:` section and `eval.weights` count.
        which: checkpoint or folder of the weights; None for the latest checkpoint.
        access: how the server is reached.
        console: gets the log.
        chat_template: file of a template to take in place of the model's own.

    Raises:
        UserError: the port is taken, other machines would reach it without a key, or as `load_for_inference`.
    """
    with opened(config, which, access, access.keys(), console, chat_template) as server:
        server.run(server.listening)


@contextmanager
def opened(
    config: Config,
    which: WeightsOf,
    access: Access,
    keys: Keys | None,
    console: Console,
    chat_template: Path | None = None,
) -> Generator[Server, None, None]:
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

    tls = tls_context(access.certificate, access.ssl_key)
    if access.socket is None:
        place = bound(settings.host, settings.port, "serve.port", has_keys=keys is not None)
    else:
        place = bound_unix(access.socket)
    with place as listening:
        screen = Console(stderr=True)
        if screen.is_terminal:  # where somebody waits; scripts read the address from the first line
            say(screen, f"loading the model of {which if isinstance(which, Path) else config.run.dir}")
        served = load_served(config, which, chat_template)
        worker = Worker(
            served,
            slots=settings.slots,
            max_length=settings.max_length or config.max_sequence_length,
            queue=settings.queue,
            report=log,
        )
        watch = CheckpointWatcher(config, worker, log, chat_template) if settings.watch else None
        serving = Serving(worker, settings, log, watch)
        is_local = is_of_this_machine(listening)
        if not is_local and tls is None:
            log(
                "warning: other machines can connect, and keys and texts cross the network unencrypted; give "
                "--ssl-certificate, or use 127.0.0.1 and `ssh -L`"
            )
        # Also through a socket, which `ssh -L` makes a port of somebody's machine.
        hosts = LOOPBACK_NAMES | {settings.host.lower()} if is_local else None
        link = PrivateLink(console)
        app = create_app(serving, settings, keys=keys, hosts=hosts)
        key = keys.key if isinstance(keys, MadeKey) else None
        server = Server(app, serving, listening, tls, partial(_announce, console, link, served.title, key))
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
            link.remove()
            log("ended")


def _announce(console: Console, link: PrivateLink, what: str, key: str | None, url: str) -> None:
    """Print where a server listens. The page takes the key out of the link, whose end no browser sends."""
    with suppress(OSError):  # as in its log
        for line in [f"{what} on {url}"] if key is None else link.lines(what, url, f"{url}/#key={key}"):
            verbatim(console, line)  # on a terminal it has the key, which `say` would mask


class Server(StoppableServer):
    """The server of a model, which ends after the texts that are being continued.

    Args:
        app: ASGI application.
        serving: what it answers from.
        listening: bound socket.
        tls: certificate and key; None for plain HTTP.
        announce: says where it is, from the URL.
    """

    def __init__(
        self,
        app: object,
        serving: Serving,
        listening: socket.socket,
        tls: ssl.SSLContext | None,
        announce: Callable[[str], None],
    ) -> None:
        super().__init__(app, listening, max_open(serving.settings) + _IDLE, tls)
        self._serving, self._announce = serving, announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Say where it is: now, since a signal is answered as it should be from here on."""
        await super().startup(sockets)
        self._announce(self.url)

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
