"""A connection of uvicorn's, with an end for clients that neither send nor read.

Where all places are taken, the connection that has had no request for longest gives its place to a new one. So clients
that only open connections, however many, keep nobody out who sends a request. The last places are for other addresses
than the one that has taken all before them.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 5.0
"""From a connection, or the first byte of a further request, to the end of the request's headers."""
STALL_SECONDS = 60.0
"""A client that has read nothing for so long of what waits for it is gone."""
PLACES_OF_OTHERS = 16
"""Connections, and requests, beyond those that one address may have at once."""
_FULL = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Connection(H11Protocol):
    """See the module. Make a subclass for each server with `limited`."""

    most: ClassVar[int]
    """Connections of an address at once."""
    waiting: ClassVar[dict[Connection, None]]
    """Those without a request, or with a part of its headers; the one that has waited longest first."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """It begins."""
        super().connection_made(transport)
        # So that `pause_writing` says whenever something waits for the client, be it little. With 0, transports of TLS
        # would pause when nothing waits, and never resume.
        transport.set_write_buffer_limits(high=1)
        if not (
            self._has_place(self._of_my_address(), self.most)
            and self._has_place(self.connections, self.most + PLACES_OF_OTHERS)
        ):
            transport.write(_FULL)
            transport.close()
            return
        self.waiting[self] = None
        self._head = self.loop.call_later(HEAD_SECONDS, self._no_head)

    def _of_my_address(self) -> set[Any]:
        mine = self.client and self.client[0]
        return {
            each for each in self.connections if isinstance(each, Connection) and each.client and each.client[0] == mine
        }

    def _has_place(self, rivals: set[Any], most: int) -> bool:
        """Tell whether there is a place, if need be that of the rival which has waited longest."""
        if len(rivals) <= most:
            return True
        oldest = next((each for each in self.waiting if each in rivals), None)
        if oldest is None:
            return False
        del self.waiting[oldest]
        oldest.transport.abort()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended."""
        self.waiting.pop(self, None)
        for timer in (self._head, self._stall):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of a request."""
        super().data_received(data)
        if not self._has_no_request:
            self.waiting.pop(self, None)
            if self._head is not None:
                self._head.cancel()
            self._head = None
        elif self._head is None and not self.transport.is_closing():
            # uvicorn waits for further requests with a timer of its own, but only for their first byte.
            self._head = self.loop.call_later(HEAD_SECONDS, self._no_head)

    def on_response_complete(self) -> None:
        """A request has been answered; another one may follow."""
        super().on_response_complete()
        if self._has_no_request and not self.transport.is_closing():
            self.waiting[self] = None

    @property
    def _has_no_request(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _no_head(self) -> None:
        self._head = None
        if self._has_no_request:
            self.transport.close()

    def pause_writing(self) -> None:
        """The client reads more slowly than it is written to."""
        super().pause_writing()
        self._look(None)

    def resume_writing(self) -> None:
        """It has caught up."""
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()

    def _look(self, before: int | None) -> None:
        size = self.transport.get_write_buffer_size()
        if size == before:
            self.transport.abort()
        else:
            self._stall = self.loop.call_later(STALL_SECONDS, self._look, size)


def limited(most: int) -> type[Connection]:
    """The connections of a server with a limited number of places for an address."""
    return type("LimitedConnection", (Connection,), {"most": most, "waiting": {}})
