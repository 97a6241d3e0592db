"""A command and a server that receive notices."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from pipeline.config.notify import NotifyConfig, NotifyEvent

ALL: list[NotifyEvent] = [
    "done",
    "failed",
    "stopped",
    "requeued",
    "stalled",
    "spike",
    "saves_failing",
    "export_failed",
    "mirror_failing",
    "hardware",
]
SECRET = "T0/s3cr3t"
"""Path of the server's address."""


def to_file(file: Path, on: list[NotifyEvent] = ALL) -> dict[str, Any]:
    """A notification whose command adds a line of JSON to a file."""
    return {"on": on, "command": ["sh", "-c", f"{{ cat; echo; }} >> '{file}'"]}


def received(file: Path) -> list[dict[str, Any]]:
    """The notices in the file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def entry(**values: Any) -> NotifyConfig:
    """A notification of all events."""
    return NotifyConfig(**{"on": ALL, **values})


class Server(ThreadingHTTPServer):
    """A webhook at `address`, whose `status` is that of its answers; 0: it never answers."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = 200
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.over = threading.Event()
        self.address = f"http://127.0.0.1:{self.server_address[1]}/{SECRET}"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        assert self.headers["Content-Type"] == "application/json"
        self.server.paths.append(self.path)
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if not self.server.status:
            self.server.over.wait()
            return
        self.send_response(self.server.status)
        if self.server.status == 302:
            self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    do_GET = do_POST

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving() -> Iterator[Server]:
    """A server in a thread."""
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        server.shutdown()
        thread.join()
        server.server_close()
