"""Bodies that nobody should send: each gets an answer below 500, and the server goes on."""

from __future__ import annotations

import json
import socket
from functools import partial
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.eval.server.bodies import hostile, of_schema
from tests.eval.server.running import Running

JSON = {"Content-Type": "application/json"}
ROUTES = [("POST", "/v1/completions"), ("PUT", "/api")]


def _fuzz(server: Running, examples: int) -> None:
    root = server.get("/openapi.json").json()
    found: set[int] = set()
    with httpx2.Client(base_url=server.url, timeout=300) as client:
        for method, path in ROUTES:
            schema = root["paths"][path][method.lower()]["requestBody"]["content"]["application/json"]["schema"]

            send = partial(client.request, method, path)

            @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
            @given(hostile(schema, root) | of_schema(schema, root), st.just(send))
            def no_failure(body: Any, send: Any) -> None:
                answer = send(content=json.dumps(body), headers=JSON)
                assert answer.status_code in (200, 404, 422), (body, answer.text)
                found.add(answer.status_code)
                if answer.status_code != 200:
                    error = answer.json().get("error", answer.json())
                    assert error["message"]

            no_failure()
    assert {200, 422} <= found
    assert server.until(running=0, waiting=0)["status"] == "ok"


@pytest.mark.guard
def test_bodies_of_the_schema(server: Running) -> None:
    _fuzz(server, 30)


@pytest.mark.slow
def test_many_bodies_of_the_schema(server: Running) -> None:
    _fuzz(server, 1000)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "the body"),
        (b"null", "the body must be a JSON object"),
        (b"[]", "the body must be a JSON object"),
        (b'"prompts"', "the body must be a JSON object"),
        (b'{"prompts": ["a"], "temperature": NaN}', "temperature: input should be a finite number"),
        (b'{"prompts": ["a"], "temperature": 1e400}', "temperature: input should be a finite number"),
        (b'{"prompts": ["a"], "top_k": 1' + b"0" * 5000 + b"}", "the body is not JSON"),
        (b'{"prompts": ["a"], "top_p": ' + b"[" * 90_000 + b"]" * 90_000 + b"}", "the body is not JSON"),
        (b'{"prompts": ["\\ud800"]}', "prompts.0: input should be a valid string"),
        (b'{"prompts": ["a"], "\\ud800": 1}', "\\ud800: there is no such field"),
        (b'{"prompts": ["\xff"]}', "the body"),
        (b'{"prompts": ["a"]', "the body is not JSON"),
    ],
)
def test_bodies_that_are_no_json_of_ours(server: Running, body: bytes, says: str) -> None:
    answer = httpx2.put(f"{server.url}/api", content=body, headers=JSON, timeout=300)
    assert answer.status_code == 422
    assert answer.json()["message"].startswith(says)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_half_characters_are_refused_in_every_field(server: Running, method: str, path: str) -> None:
    root = server.get("/openapi.json").json()
    name = root["paths"][path][method.lower()]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    needed = {"prompts": ["a"]} if path == "/api" else {}
    with httpx2.Client(base_url=server.url, timeout=300) as client:
        for field in root["components"]["schemas"][name.rpartition("/")[2]]["properties"]:
            for value in ("\ud800", ["\ud800"], {"\ud800": "\ud800"}, {"a": "\ud800"}):
                answer = client.request(method, path, content=json.dumps({**needed, field: value}), headers=JSON)
                assert answer.status_code == 422, (field, value)
                assert answer.json().get("error", answer.json())["message"].startswith(field)


def test_control_characters_are_text(server: Running) -> None:
    answer = server.post("/api", {"prompts": ["a\0b\x1b[31m\u202e"], "tokens_to_generate": 1})
    assert answer.status_code == 200
    assert answer.json()["text"][0].startswith("a\0b\x1b[31m\u202e")


def test_a_body_that_is_too_large_is_not_read(server: Running) -> None:
    answer = server.post("/api", {"prompts": ["a" * 2**20]})
    assert answer.status_code == 413
    assert "serve.max_body_bytes (1,048,576)" in answer.json()["message"]
    in_chunks = httpx2.put(
        f"{server.url}/api", content=iter([b" " * 2**18] * 8), headers=JSON, timeout=300
    )  # without a length
    assert in_chunks.status_code == 413
    declared = _raw(
        server,
        b"PUT /api HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nExpect: 100-continue\r\n"
        b"Content-Length: 99999999999\r\n\r\n",
    )
    assert declared.startswith(b"HTTP/1.1 413")


def test_requests_that_are_no_http_of_ours(server: Running) -> None:
    assert httpx2.put(f"{server.url}/api", content=b"{}", timeout=300).status_code == 415
    as_text = httpx2.put(f"{server.url}/api", content=b"{}", headers={"Content-Type": "text/plain"}, timeout=300)
    assert as_text.status_code == 415
    assert server.get("/api").status_code == 405
    for path in ("/docs", "/redoc", "/v1/chat", "/..%2f..%2fetc/passwd", "/%00", "/%0a%0dX", "/\u00e9"):
        assert server.get(path).status_code == 404, path
    assert _raw(server, b"\x16\x03\x01 nonsense\r\n\r\n").startswith(b"HTTP/1.1 400")
    log = server.log.getvalue()
    assert "GET /%00 404" in log
    assert all(line.isprintable() for line in log.splitlines())


@given(st.binary(max_size=200))
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_bytes_that_are_no_request(server: Running, data: bytes) -> None:
    _raw(server, data)
    assert server.health()["status"] == "ok"


def test_foreign_hosts_are_refused(server: Running) -> None:
    """A page elsewhere whose name has been pointed at this machine."""
    for path in ("/", "/health", "/v1/models"):
        answer = server.get(path, headers={"Host": "evil.example:80"})
        assert answer.status_code == 400
        assert "Host" in answer.json()["error"]["message"]
    for host in ("localhost", "localhost:8888", "127.0.0.1", "[::1]:5000"):
        assert server.get("/health", headers={"Host": host}).status_code == 200
    assert "access-control-allow-origin" not in server.get("/health", headers={"Origin": "https://a.b"}).headers


def _raw(server: Running, data: bytes) -> bytes:
    """The begin of what comes back for bytes; empty if the server only closes."""
    host, port = server.server.listening[0].getsockname()
    with socket.create_connection((host, port), timeout=300) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return connection.recv(65536)
