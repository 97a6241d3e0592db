"""Checks of every request: Host header, API key, number, size of the body; and its line in the log, for audits."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.eval.server.connection import PLACES_OF_OTHERS
from pipeline.eval.server.keys import Keys
from pipeline.eval.server.refusal import Refusal

OPEN = ("/", "/health")
"""Need no key: the page asks for it, and a supervisor has none."""
HAS_KEY = "pipeline has key"
"""In the scope: whether the request has the key of the server, or none is needed."""
COUNTS = "pipeline.counts"
"""In the scope: what the request has cost, for the log."""
BODY_SECONDS = 30.0
_DISCARD_SECONDS = 2.0
_HAVE_BODIES = ("POST", "PUT", "PATCH", "DELETE")


class Guard:
    """ASGI middleware.

    Args:
        app: what it guards.
        keys: of which requests need one; None if they need none.
        hosts: names that the Host header may have, so that no web page can reach a server on this machine under a
            name of its own (DNS rebinding); None for any.
        max_body_bytes: of a request; 0 for an application that takes no bodies.
        max_open: requests with a body that are open at once from one address; others have some places more.
        log: told a line for each request.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Keys | None,
        hosts: frozenset[str] | None,
        max_body_bytes: int,
        max_open: int,
        log: Callable[[str], None],
    ) -> None:
        self._app, self._keys, self._hosts, self._max, self._log = app, keys, hosts, max_body_bytes, log
        self._max_open = max_open
        self._open: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, key = time.monotonic(), 500, None
        counts: dict[str, int] = {}
        scope[COUNTS] = counts

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        address, counted = str((scope.get("client") or ("",))[0]), False
        try:
            try:
                # Before the place and the body: who has no key takes no place from those who have one.
                key = self._check(scope)
                if scope["method"] in _HAVE_BODIES:
                    self._open[address] += 1
                    counted = True
                    self._check_places(address)
                    receive = _again(await self._body(Headers(scope=scope), receive), receive)
            except Refusal as refusal:
                await refuse(refusal, scope["path"], sent)
                return
            await self._app(scope, receive, sent)
        finally:
            if counted:
                self._open[address] -= 1
                self._open += Counter()  # without those that have none
            # The path as it can stand in a line, whatever bytes it was made of.
            path = quote(scope["path"].encode("utf-8", "replace"), safe="/@:-._~")[:200]
            ms = 1000 * (time.monotonic() - began)
            words = "".join(f", {number} {name}" for name, number in counts.items())
            words += f", key {key}" if key else ""
            who = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {client(scope)}"
            self._log(f"{who} {scope['method']} {path} {counts.pop('status', status)} {ms:.0f} ms{words}")

    def _check_places(self, address: str) -> None:
        for number, most in (
            (self._open[address], self._max_open),
            (self._open.total(), self._max_open + PLACES_OF_OTHERS),
        ):
            if number > most:
                raise Refusal(429, f"{most} requests are open; try again later")

    def _check(self, scope: Scope) -> str | None:
        """Refuse a request, or return the name of its key."""
        headers = Headers(scope=scope)
        if self._max == 0 and (scope["method"] not in ("GET", "HEAD") or _announces_body(headers)):
            raise Refusal(405, "this server takes no bodies: send GET", closes=True)
        # A proxy in front of us may go by the other one, and then takes a part of this body for the next request.
        if "transfer-encoding" in headers and ("content-length" in headers or scope["http_version"] == "1.0"):
            raise Refusal(
                400,
                "the length of the body is ambiguous: send Content-Length, or Transfer-Encoding with HTTP/1.1",
                closes=True,
            )
        if self._hosts is not None and _host(headers.get("host", "")) not in self._hosts:
            raise Refusal(
                400, "the Host header does not name this server; open it as localhost, or set serve.host and an API key"
            )
        if self._keys is None:
            scope[HAS_KEY] = True
            return None
        name = self._keys.name(headers.get("authorization", "").encode("latin-1", "replace"), self._log)
        scope[HAS_KEY] = name is not None
        if name is None and scope["path"] not in OPEN:
            raise Refusal(401, "this server needs its API key: Authorization: Bearer KEY")
        return name

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        too_large = Refusal(413, f"the body is larger than serve.max_body_bytes ({self._max:,})")
        declared = headers.get("content-length", "0")
        if declared.isdecimal() and int(declared[:20]) > self._max:
            if "expect" not in headers:  # somebody who asks first has sent nothing
                await _discard(receive, 8 * self._max)
            raise too_large
        if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Refusal(415, "the body must be JSON: send the header Content-Type: application/json")
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for piece in _pieces(receive):
                    body += piece
                    if len(body) > self._max:
                        body.clear()
                        await _discard(receive, 8 * self._max)
                        raise too_large
        except TimeoutError:
            raise Refusal(408, f"the body did not arrive within {BODY_SECONDS:.0f} s") from None
        return bytes(body)


async def refuse(refusal: Refusal, path: str, send: Send) -> None:
    """Send a refusal."""
    body = json.dumps(refusal.body(path)).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **refusal.headers}
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


async def _pieces(receive: Receive):  # type: ignore[no-untyped-def]
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refusal(499, "the client disconnected")
        yield message.get("body", b"")
        more = message.get("more_body", False)


async def _discard(receive: Receive, most: int) -> None:
    """Read on for a moment: a client that is still sending would otherwise never see the answer."""
    with suppress(TimeoutError, Refusal):
        async with asyncio.timeout(_DISCARD_SECONDS):
            async for piece in _pieces(receive):
                most -= len(piece)
                if most < 0:
                    return


def _again(body: bytes, receive: Receive) -> Receive:
    """`receive` with the body that was read from it."""
    read = False

    async def first() -> Message:
        nonlocal read
        if read:
            return await receive()
        read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return first


def client(scope: Scope) -> str:
    """Address and port of the client of a request; `socket` for one that came through a unix socket."""
    host, port = scope["client"] or ("socket", None)
    return host if port is None else f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _announces_body(headers: Headers) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


def _host(header: str) -> str:
    """The name of a Host header, without the port."""
    name = header[1:].partition("]")[0] if header.startswith("[") else header.partition(":")[0]
    return name.lower()
