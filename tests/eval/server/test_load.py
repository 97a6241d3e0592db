"""More requests than there is room for, clients that leave, models that fail, and the end of the server."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from pipeline.config import Config
from pipeline.config.load import load
from tests.eval.server.running import Running, running

LONG = {"prompt": "the", "max_tokens": 4000, "temperature": 0, "repetition_penalty": 1.0}


@pytest.fixture(scope="module")
def small(run_file: Any) -> Config:
    """Two slots, three that wait, and texts that take a while."""
    return load(run_file, ["serve.port=0", "serve.slots=2", "serve.queue=3", "serve.max_length=4096"])


@pytest.fixture
def busy(small: Config) -> Iterator[Running]:
    with running(small) as server:
        slow_down(server)
        yield server


def slow_down(server: Running) -> None:
    """On a fast machine, too, texts take a while."""
    server.server._serving.worker.served.model.register_forward_pre_hook(lambda *_: time.sleep(0.01))


def _endless(server: Running) -> Any:
    """A streamed request that will not end soon."""
    return httpx2.stream("POST", f"{server.url}/v1/completions", json={**LONG, "stream": True}, timeout=300)


def test_a_full_queue_is_said(busy: Running) -> None:
    with _endless(busy), _endless(busy):
        busy.until(running=2)
        waiting = [threading.Thread(target=_quietly, args=(busy,)) for _ in range(3)]
        for thread in waiting:
            thread.start()
        busy.until(waiting=3)
        for path, body in (("/v1/completions", LONG), ("/api", {"prompts": ["the"]})):
            refused = busy.post(path, body)
            assert refused.status_code == 429
            assert refused.headers["Retry-After"] == "1"
            assert "serve.queue is 3" in refused.text
        # What would never find room is another mistake.
        assert busy.post("/api", {"prompts": ["the"] * 4}).status_code == 422
        assert busy.health()["status"] == "ok"
    # Whoever has left makes room for those who wait.
    for thread in waiting:
        thread.join(60)


def _quietly(server: Running) -> None:
    assert server.post("/v1/completions", {**LONG, "max_tokens": 3}).status_code == 200


def test_clients_that_leave_free_their_slots(busy: Running) -> None:
    with _endless(busy) as streamed:
        lines = streamed.iter_lines()  # which closes the connection when it is gone
        assert next(lines).startswith("data: {")
        busy.until(running=1)
    busy.until(running=0)
    with pytest.raises(httpx2.ReadTimeout):
        httpx2.post(f"{busy.url}/v1/completions", json=LONG, timeout=0.5)
    with pytest.raises(httpx2.ReadTimeout):
        httpx2.put(f"{busy.url}/api", json={"prompts": ["a"] * 3, "tokens_to_generate": 4000, "top_k": 1}, timeout=0.5)
    busy.until(running=0, waiting=0)
    assert busy.post("/v1/completions", {"prompt": "the", "max_tokens": 2}).status_code == 200
    assert "499" in busy.log.getvalue()


def test_a_model_that_fails_fails_its_requests_alone(busy: Running) -> None:
    model = busy.server._serving.worker.served.model
    diverged = model.register_forward_hook(lambda _, __, logits: logits * float("nan"))
    for path, body in (("/v1/completions", LONG), ("/api", {"prompts": ["the"]})):
        failed = busy.post(path, body)
        assert failed.status_code == 503
        assert "the model failed: the model's logits are not finite" in failed.text
    health = busy.health()
    assert health["status"] == "failing"
    assert "logits are not finite" in health["error"]
    diverged.remove()
    again = busy.post("/v1/completions", {"prompt": "the", "max_tokens": 2})
    assert again.status_code == 200, again.text

    def broken(*_: object) -> None:
        raise RuntimeError("the device is gone")

    failing = model.register_forward_pre_hook(broken)
    for number in range(3):
        failed = busy.post("/v1/completions", {**LONG, "stream": bool(number % 2)})
        assert failed.status_code == 503
        assert "the model failed: RuntimeError: the device is gone" in failed.text
    failing.remove()
    assert busy.post("/v1/completions", {"prompt": "the", "max_tokens": 2}).status_code == 200
    assert busy.health()["status"] == "ok"


@pytest.mark.guard
def test_an_end_gives_every_request_an_answer(small: Config) -> None:
    with running(small) as server, ThreadPoolExecutor(5) as pool:
        slow_down(server)
        answers = [pool.submit(server.post, "/v1/completions", {**LONG, "max_tokens": 200}) for _ in range(2)]
        server.until(running=2)
        late = [pool.submit(server.post, "/v1/completions", LONG) for _ in range(3)]
        server.until(waiting=3)
        server.server.should_exit = True
        assert [each.result().status_code for each in answers] == [200, 200]
        assert [each.result().status_code for each in late] == [503] * 3
        assert "the server is shutting down" in late[0].result().text


def test_prompts_are_logged_only_where_that_is_wanted(run_file: Any) -> None:
    values = ["serve.port=0", "serve.max_length=64"]
    body = {"prompts": ["secret\nline"], "tokens_to_generate": 1}
    with running(load(run_file, values)) as server:
        server.post("/api", body)
        server.post("/v1/completions", {"prompt": "secret"})
        server.post("/v1/completions", {"prompt": "secret", "secret": 1})
        server.get("/health")
    assert "secret" not in server.log.getvalue()
    assert "POST /api 200" in server.log.getvalue()
    with running(load(run_file, [*values, "serve.log_prompts=true"])) as server:
        server.post("/api", body)
        server.post("/api", {**body, "no_log": True})
    assert server.log.getvalue().count('prompts ["secret\\nline"]') == 1


def _hammer(server: Running, clients: int, seconds: float) -> Counter[int]:
    counts: Counter[int] = Counter()
    ready = threading.Barrier(clients)

    def client(number: int) -> None:
        with httpx2.Client(base_url=server.url, timeout=300) as session:
            ready.wait()
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                body = {"prompt": "the sea " * (number % 7), "max_tokens": number % 20 + 1, "seed": number}
                counts[session.post("/v1/completions", json=body).status_code] += 1

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(client, range(clients)))
    return counts


@pytest.mark.guard
def test_many_clients_get_texts_or_429(run_file: Any) -> None:
    config = load(run_file, ["serve.port=0", "serve.slots=8", "serve.queue=8", "serve.max_length=64"])
    with running(config) as server:
        counts = _hammer(server, clients=32, seconds=1.5)
        assert server.until(running=0, waiting=0)["status"] == "ok"
    assert counts.keys() == {200, 429}
    assert counts[200] >= 8


@pytest.mark.parallel
@pytest.mark.slow
def test_200_clients_for_a_minute(run_file: Any) -> None:
    """No answer but texts and 429, no stream that is cut, and memory that does not grow."""
    script = Path(__file__).parents[3] / "benchmarks" / "eval" / "serve_clients.py"
    command = [sys.executable, script, run_file, "--seconds", "60", "serve.queue=64", "serve.max_length=256"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["statuses"].keys() == {"200", "429"}
    assert found["health"] == {"status": "ok", "waiting": 0, "running": 0}
    assert found["exit_code"] == 0
    memory = found["rss_mb"]["samples"]
    assert memory[-1] < 1.1 * memory[2], memory
