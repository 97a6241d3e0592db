"""Tells ranks that no launcher watches when one of them dies while they start, which may else take minutes to notice.

Each rank keeps a connection to rank 0 from when it has arrived. The kernel closes it when the process dies, however
busy, slow or suspended the others are, and a machine that is gone does not answer keep-alives: nobody who lives is
taken for dead. Rank 0 tells the others who has gone. A rank that has not ended in time by itself is ended here.
"""

from __future__ import annotations

import errno
import os
import resource
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pipeline.common.console import echo
from pipeline.common.errors import EXIT_OTHER, RankFailed
from pipeline.common.process_identity import node_name
from pipeline.train.distributed.rank import STORE, Processes, record_error

PATIENCE = 10.0
"""Seconds that a rank has to end by itself, with a better message, when another one has gone."""
_CONNECT = 10.0
"""Seconds to connect to rank 0. Where that fails, a firewall say, this rank is not watched."""
_NAMING = 10.0
"""Seconds that a connection has to show the token; then it is closed."""
_STRANGERS = 16
"""Connections without a name beside those of the ranks. Further ones are closed at once."""
_RESERVE = 512
"""Open files of rank 0 that are not for connections of ranks."""
_KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
_LONGEST = 512
"""Bytes of a line."""
_KEY = "peers"
_BYE, _WELCOME = b"bye\n", b"welcome\n"
_LOOPBACK = "127.0.0.1"


def is_watched(environment: Mapping[str, str]) -> bool:
    """True if a launcher on this machine, ours or torchrun, ends all ranks when one dies."""
    return STORE in environment or "TORCHELASTIC_RUN_ID" in environment


def watch(processes: Processes, store: Any, address: str) -> Peers | None:
    """The connections of this rank, or None where there can be none: a dead rank is then noticed later."""
    try:
        return Peers(processes, store, address)
    except (OSError, RuntimeError):
        if processes.rank == 0:
            with suppress(RuntimeError):
                store.set(_KEY, "")  # or the others would wait for it
        return None


@dataclass
class _Connection:
    """A connection to another rank."""

    name: str
    """Name that the rank gives itself; "" as long as it has not given it."""
    text: bytes = b""
    """The line that has not come to its end."""


class Peers:
    """The connections of this rank to the others, until `over`.

    Args:
        processes: The place of this rank.
        store: Of all ranks.
        address: Where rank 0 is.

    Raises:
        OSError: rank 0 cannot be reached in this way, or has too few open files for all.
    """

    def __init__(self, processes: Processes, store: Any, address: str) -> None:
        self._rank = processes.rank
        self._most_nameless = processes.world_size + _STRANGERS
        self._over = threading.Event()
        self._connections: dict[socket.socket, _Connection] = {}
        self._nameless: dict[socket.socket, float] = {}
        """Those that have not shown the token, and since when they are there."""
        self._token = ""
        self._server: socket.socket | None = None
        self._selector = selectors.DefaultSelector()
        self._wake, woken = socket.socketpair()
        self._selector.register(woken, selectors.EVENT_READ)
        if self._rank == 0:
            _make_room(2 * processes.world_size + _RESERVE)
            self._token = secrets.token_hex(16)
            self._server = _listen(address)
            self._server.setblocking(False)
            self._selector.register(self._server, selectors.EVENT_READ)
        else:
            offer = store.get(_KEY).decode()
            if not offer:
                raise ConnectionRefusedError("rank 0 does not watch")
            port, token = offer.split()
            me = f"rank {self._rank} on {node_name()} (process {os.getpid()})"
            self._add(_connect(address, int(port), f"{token} {me}\n".encode()), "rank 0")
        threading.Thread(target=self._watch, name="peers", daemon=True).start()
        if self._server is not None:
            store.set(_KEY, f"{self._server.getsockname()[1]} {self._token}")

    def over(self) -> None:
        """Stop watching: from now on ranks may end."""
        self._over.set()
        self._send_to_all(_BYE)
        with suppress(OSError):
            self._wake.send(b".")

    def _add(self, end: socket.socket, name: str) -> None:
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE.items():
            if hasattr(socket, option):
                end.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._connections[end] = _Connection(name)
        self._selector.register(end, selectors.EVENT_READ)

    def _watch(self) -> None:
        gone = None
        while gone is None and not self._over.is_set():
            for key, _ in self._selector.select(_NAMING if self._nameless else None):
                end = key.fileobj
                if end is self._server:
                    self._accept(self._server)
                elif isinstance(end, socket.socket) and end in self._connections:
                    gone = gone or self._receive(end)
            for end, since in list(self._nameless.items()):
                if time.monotonic() - since >= _NAMING:
                    self._close(end)
        if gone is not None:
            self._send_to_all(gone.encode() + b"\n")
            if not self._over.wait(PATIENCE):
                _end(gone)

    def _accept(self, server: socket.socket) -> None:
        try:
            end = server.accept()[0]
        except (BlockingIOError, ConnectionAbortedError):
            return  # it has gone again
        except OSError:  # no more open files, say: the server would be ready again and again
            self._selector.unregister(server)
            server.close()
            return
        if len(self._nameless) >= self._most_nameless:
            end.close()
            return
        try:
            self._add(end, "")
            self._nameless[end] = time.monotonic()
        except OSError:
            self._connections.pop(end, None)
            end.close()

    def _receive(self, end: socket.socket) -> str | None:
        """Read what has come; the name of a rank that has gone."""
        peer = self._connections[end]
        try:
            come = end.recv(_LONGEST)
        except BlockingIOError:
            return None
        except OSError:  # reset, or no answer to the keep-alives
            come = b""
        *lines, peer.text = (peer.text + come).split(b"\n")
        for line in lines:
            if line + b"\n" == _BYE:
                self._close(end)
                return None
            if self._rank:
                return line.decode(errors="replace")  # whom rank 0 has found gone
            token, _, name = line.partition(b" ")
            if peer.name or not secrets.compare_digest(token, self._token.encode()):
                come = b""
                break
            peer.name = name.decode(errors="replace")
            self._nameless.pop(end, None)
            with suppress(OSError):
                end.sendall(_WELCOME)
        if come and len(peer.text) < _LONGEST:
            return None
        self._close(end)
        return peer.name or None

    def _close(self, end: socket.socket) -> None:
        self._selector.unregister(end)
        del self._connections[end]
        self._nameless.pop(end, None)
        end.close()

    def _send_to_all(self, line: bytes) -> None:
        for end in list(self._connections):
            with suppress(OSError):
                end.sendall(line)


def _make_room(files: int) -> None:
    """Raise this process's limit of open files where it is lower; OSError where that is not allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < files:
        if hard != resource.RLIM_INFINITY and hard < files:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _connect(address: str, port: int, hello: bytes) -> socket.socket:
    end = socket.create_connection((address, port), _CONNECT)
    try:
        end.sendall(hello)
        if end.recv(len(_WELCOME), socket.MSG_WAITALL) != _WELCOME:
            raise ConnectionRefusedError("rank 0 did not accept the connection")
    except OSError:
        with suppress(OSError):
            end.sendall(_BYE)  # rank 0 may only be slow
        end.close()
        raise
    return end


def _listen(address: str) -> socket.socket:
    if address == _LOOPBACK:
        return socket.create_server((address, 0), backlog=2048)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=2048)
    return socket.create_server(("", 0), backlog=2048)


def _end(gone: str) -> None:
    message = f"{gone} has ended while the ranks were starting; its log says why, unless it was killed"
    with suppress(Exception):
        record_error(RankFailed(message, EXIT_OTHER))
    with suppress(Exception):
        echo(f"error: rank {os.environ.get('RANK', '0')}: {message}", error=True, flush=True)
    os._exit(EXIT_OTHER)
