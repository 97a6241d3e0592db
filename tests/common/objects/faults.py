"""A proxy before a server that does to answers what networks and stores do: a share of them fails in a given way."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Literal

Mode = Literal["none", "500", "503", "reset", "truncation", "stall", "corruption", "expired", "replace", "slow"]
MODES: tuple[Mode, ...] = ("500", "503", "reset", "truncation", "stall", "corruption", "expired", "slow")
_EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
_SLOW_BYTES_PER_S = 2**21


class Faults:
    """What the proxy does, and has done.

    Attributes:
        mode: of the faults.
        rate: share of the answers to requests of objects that have one.
        methods: of the requests that may have a fault; a reset write is done, and its answer lost.
        replace: called once, after so many requests as `after` says, in the mode `replace`.
        requests: first lines of requests.
        faults: answers that had a fault.
        bytes: of bodies that were given on, of objects.
    """

    def __init__(self, target: int, mode: Mode, rate: float, seed: int = 0) -> None:
        self.target = target
        self.mode: Mode = mode
        self.rate = rate
        self.methods: tuple[str, ...] = ("GET",)
        self.replace: Callable[[], None] = lambda: None
        self.after = 0
        self.requests: list[str] = []
        self.faults = 0
        self.bytes = 0
        self.port = 0
        self._random = random.Random(seed)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection."""
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while head := await _head(reader):
                if not await self._request(head, reader, writer):
                    break
        writer.close()

    async def _request(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer a request; False if the connection ends with it."""
        line = head.split(b"\r\n", 1)[0].decode()
        body = await reader.readexactly(_length(head))
        self.requests.append(line)
        if self.mode == "replace" and len(self.requests) == self.after:
            self.replace()
        is_object = line.startswith(self.methods) and "list-type" not in line
        bad = is_object and self.mode not in ("none", "replace", "slow") and self._random.random() < self.rate
        self.faults += bad
        if bad and self.mode in ("500", "503", "expired"):
            status, text = (400, _EXPIRED) if self.mode == "expired" else (int(self.mode), b"")
            writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(text), text))
            await writer.drain()
            return True
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self.target)
        server_writer.write(head + body)
        answer = await _head(server_reader)
        length = 0 if line.startswith("HEAD") else _length(answer)
        data = bytearray(await server_reader.readexactly(length))
        server_writer.close()
        if bad and self.mode == "reset":
            writer.transport.abort()
            return False
        if bad and self.mode == "corruption" and data:
            data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
        writer.write(answer)
        if bad and self.mode in ("truncation", "stall"):
            writer.write(bytes(data[: len(data) // 2]))
            await writer.drain()
            self.bytes += len(data) // 2
            if self.mode == "stall":
                await asyncio.sleep(30)
            return False
        if self.mode == "slow" and is_object:
            for at in range(0, len(data), 2**17):
                writer.write(bytes(data[at : at + 2**17]))
                await writer.drain()
                await asyncio.sleep(2**17 / _SLOW_BYTES_PER_S)
        else:
            writer.write(bytes(data))
            await writer.drain()
        if is_object:
            self.bytes += len(data)
        return True


async def _head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0


@contextmanager
def faults(target: int, mode: Mode = "none", rate: float = 0.05) -> Iterator[Faults]:
    """Start a proxy before a port of this machine, on one that the system chooses, and end it."""
    found = Faults(target, mode, rate)
    loop = asyncio.new_event_loop()
    ready = threading.Event()

    async def start() -> asyncio.Server:
        server = await asyncio.start_server(found.serve, "127.0.0.1", 0, limit=2**20)
        found.port = server.sockets[0].getsockname()[1]
        return server

    def run() -> None:
        asyncio.set_event_loop(loop)
        server = loop.run_until_complete(start())
        ready.set()
        loop.run_forever()
        server.close()
        for task in (tasks := asyncio.all_tasks(loop)):
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    ready.wait()
    try:
        yield found
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
