"""A small web server with the objects of a dictionary: ranges, ETags, If-Match, and requests that are counted."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


class Web:
    """Objects of a server on this machine.

    Attributes:
        objects: by path without the first slash, decoded.
        requests: (method, path, headers) of each request.
        sent: bytes of bodies.
        no_ranges: answer with the whole object, whatever part is asked for.
        weak: give weak ETags.
        redirect: URL of another server that the requests are sent on to.
        pages: JSON by path, which is answered before anything else.
        refusals: (status, body) of the next answers, in place of objects.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.sent = 0
        self.no_ranges = self.weak = False
        self.redirect = ""
        self.pages: dict[str, str] = {}
        self.refusals: list[tuple[int, str]] = []
        self.port = 0

    def url(self, key: str = "") -> str:
        return f"http://127.0.0.1:{self.port}/{key}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(request.path).path.lstrip("/"))
        self.requests.append((request.command, request.path, {k.lower(): v for k, v in request.headers.items()}))
        if (page := self.pages.get(unquote(urlsplit(request.path).path))) is not None:
            self._send(request, 200, page.encode(), {"Content-Type": "application/json"})
        elif request.path.startswith("/api/"):
            self._send(request, 404, b"{}")
        elif self.refusals:
            status, text = self.refusals.pop(0)
            self._send(request, status, text.encode(), {"Content-Type": "application/xml"})
        elif self.redirect:
            self._send(request, 307, b"", {"Location": self.redirect + request.path})
        elif path not in self.objects:
            self._send(request, 404, b"")
        else:
            self._object(request, self.objects[path])

    def _object(self, request: BaseHTTPRequestHandler, data: bytes) -> None:
        tag = f'{"W/" if self.weak else ""}"{hashlib.md5(data).hexdigest()}"'
        headers = {"ETag": tag, "Last-Modified": "Mon, 30 Nov 2026 09:00:00 GMT", "Accept-Ranges": "bytes"}
        if request.headers.get("If-Match") not in (None, tag):
            self._send(request, 412, b"")
            return
        found = re.fullmatch(r"bytes=(\d+)-(\d+)?", request.headers.get("Range") or "")
        if found is None or self.no_ranges:
            self._send(request, 200, data, headers)
            return
        start, end = int(found[1]), min(int(found[2] or len(data)) + 1, len(data))
        if start >= len(data):
            self._send(request, 416, b"", {"Content-Range": f"bytes */{len(data)}"})
            return
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        self._send(request, 206, data[start:end], headers)

    def _send(
        self, request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str] | None = None
    ) -> None:
        request.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)
            self.sent += len(body)


@contextmanager
def web() -> Iterator[Web]:
    """Start a server on a port that the system chooses, and end it."""
    served = Web()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            served.answer(self)

        do_HEAD = do_GET

        def log_message(self, *_: Any) -> None:
            return

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: Any) -> None:
            return  # a client that has gone

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    served.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
