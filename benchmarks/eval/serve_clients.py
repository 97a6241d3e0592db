"""Many clients against `pipeline serve`: answers by status, latency, tokens/s, and the server's memory over time.

Run it as `python benchmarks/eval/serve_clients.py RUN --clients 200 --seconds 60`. The server is a process of its own;
the clients ask one request after the other, and wait a moment after a 429, as its Retry-After says.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2


class Load:
    """What the clients have met."""

    def __init__(self, url: str, seconds: float, max_tokens: int) -> None:
        self.url, self.max_tokens = url, max_tokens
        self.end = time.monotonic() + seconds
        self.statuses: Counter[str] = Counter()
        self.latencies: list[float] = []
        self.tokens = 0

    async def client(self, number: int) -> None:
        """One client: whole answers and streams, prompts and texts of all lengths."""
        chance = random.Random(number)
        limits = httpx2.Limits(max_connections=1)
        async with httpx2.AsyncClient(base_url=self.url, timeout=120, limits=limits) as session:
            while time.monotonic() < self.end:
                body = {
                    "prompt": "import os\n" * chance.randint(0, 8),
                    "max_tokens": chance.randint(1, self.max_tokens),
                    "seed": chance.randrange(2**32),
                    "stream": chance.random() < 0.5,
                }
                began = time.monotonic()
                try:
                    status = await self._ask(session, body)
                except httpx2.HTTPError as error:
                    status = type(error).__name__
                self.statuses[status] += 1
                if status == "200":
                    self.latencies.append(time.monotonic() - began)
                else:
                    await asyncio.sleep(chance.uniform(0.5, 1.5))

    async def _ask(self, session: httpx2.AsyncClient, body: dict[str, Any]) -> str:
        if not body["stream"]:
            answer = await session.post("/v1/completions", json=body)
            if answer.status_code == 200:
                self.tokens += answer.json()["usage"]["completion_tokens"]
            return str(answer.status_code)
        body = body | {"stream_options": {"include_usage": True}}
        async with session.stream("POST", "/v1/completions", json=body) as streamed:
            last = previous = ""
            async for line in streamed.aiter_lines():
                if line:
                    previous, last = last, line
            if streamed.status_code == 200:
                if last != "data: [DONE]":
                    return "cut stream"
                self.tokens += json.loads(previous.removeprefix("data: "))["usage"]["completion_tokens"]
            return str(streamed.status_code)


def resident_mb(pid: int) -> float:
    """Resident memory of a process, in MB."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return round(int(found[1]) / 1000, 1)


async def _measure(load: Load, clients: int, pid: int, seconds: float) -> list[float]:
    """Memory ten times over the run, beginning after the first tenth, in which buffers are made."""
    memory = []

    async def sample() -> None:
        for _ in range(10):
            await asyncio.sleep(seconds / 10)
            memory.append(resident_mb(pid))

    await asyncio.gather(sample(), *(load.client(number) for number in range(clients)))
    return memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="run file or run folder")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--max-tokens", type=int, default=64, help="new tokens of a request at most")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE for `pipeline serve`")
    arguments = parser.parse_intermixed_args()
    command = [
        sys.executable,
        "-m",
        "pipeline",
        "serve",
        str(arguments.run),
        "--no-key",
        "--port",
        "0",
        *arguments.overrides,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        found = re.search(r"http://\S+", server.stdout.readline())
        assert found, "the server did not start"
        # Its log goes on; somebody has to read it.
        log = subprocess.Popen(["cat"], stdin=server.stdout, stdout=subprocess.DEVNULL)
        before = resident_mb(server.pid)
        load = Load(found[0], arguments.seconds, arguments.max_tokens)
        began = time.monotonic()
        memory = asyncio.run(_measure(load, arguments.clients, server.pid, arguments.seconds))
        seconds = time.monotonic() - began
        health = httpx2.get(f"{found[0]}/health").json()
        server.send_signal(signal.SIGTERM)
        code = server.wait(60)
        log.wait(10)
    latencies = sorted(load.latencies)
    print(
        json.dumps(
            {
                "clients": arguments.clients,
                "seconds": round(seconds, 1),
                "statuses": dict(load.statuses),
                "latency_p50_s": round(statistics.median(latencies), 3),
                "latency_p95_s": round(latencies[int(0.95 * len(latencies))], 3),
                "tokens_per_second": round(load.tokens / seconds),
                "rss_mb": {"loaded": before, "samples": memory},
                "health": {name: health[name] for name in ("status", "waiting", "running")},
                "exit_code": code,
            }
        )
    )


if __name__ == "__main__":
    main()
