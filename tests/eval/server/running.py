"""A server in a thread of the test, over a small trained run: the real one, on a real port."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from openai import OpenAI
from rich.console import Console

from pipeline.config import Config
from pipeline.eval.server.keys import Keys
from pipeline.eval.server.serve import Access, Server, opened
from pipeline.train.checkpoint.exported import WeightsOf
from tests.eval.server.thread import in_thread

ANYBODY = Access(no_key=True)


@dataclass(frozen=True)
class Running:
    """A server that listens."""

    server: Server
    url: str
    log: io.StringIO

    def get(self, path: str, **options: Any) -> httpx2.Response:
        return httpx2.get(self.url + path, timeout=300, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx2.Response:
        return httpx2.post(self.url + path, json=body, timeout=300, **options)

    def put(self, path: str, body: Any, **options: Any) -> httpx2.Response:
        return httpx2.put(self.url + path, json=body, timeout=300, **options)

    def health(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.get("/health").json()
        return answer

    def until(self, **wanted: Any) -> dict[str, Any]:
        """Wait until /health says so."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            found = self.health()
            if all(found[name] == value for name, value in wanted.items()):
                return found
            time.sleep(0.02)
        raise AssertionError(f"{found} instead of {wanted}")

    def openai(self, key: str = "none") -> OpenAI:
        """Their client, which does not try again by itself."""
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=300)


@contextmanager
def running(
    config: Config,
    *,
    key: str | None = None,
    keys: Keys | None = None,
    step: WeightsOf = None,
    access: Access = ANYBODY,
    chat_template: Path | None = None,
) -> Iterator[Running]:
    """A server over the run of a config whose `serve.port` is 0; it asks for no key unless one is given."""
    log = io.StringIO()
    keys = keys if key is None else Keys([("", key)])
    with opened(config, step, access, keys, Console(file=log), chat_template) as server, in_thread(server):
        yield Running(server, server.url, log)
