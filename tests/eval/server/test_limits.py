"""Clients that send or read slowly or not at all, and bodies that would be much work: each has an end, others go on."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPConnection
from typing import Any

import pytest
from pydantic import ValidationError
from tokenizers import Regex, decoders, pre_tokenizers

from pipeline.config import Config
from pipeline.config.load import load
from pipeline.data.tokenization.definition import load_definition
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.eval.server import asking, connection, serve, worker
from pipeline.eval.server.bodies import Completion, Generate
from pipeline.eval.server.watch import load_served
from tests.eval.server.running import Running, running
from tests.waiting import until

MUCH = {"prompt": "the sea " * 400, "logprobs": 20, "echo": True, "temperature": 0}
"""Its answer is megabytes."""


@pytest.fixture(scope="module")
def small(run_file: Any) -> Config:
    return load(run_file, ["serve.port=0", "serve.slots=1", "serve.queue=1", "serve.max_length=4096"])


@pytest.fixture
def single(small: Config) -> Iterator[Running]:
    """One slot, one text that waits."""
    with running(small) as server:
        yield server


def _connect(server: Running) -> socket.socket:
    """A connection with room for little that is not read, on either side."""
    server.server.listening[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)  # connections have it from there
    client = socket.socket()
    client.settimeout(30)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(server.server.listening[0].getsockname())
    return client


def _head(length: int) -> bytes:
    return (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


def _post(server: Running, body: Any) -> socket.socket:
    """A request whose answer nobody reads."""
    client, data = _connect(server), json.dumps(body).encode()
    client.sendall(_head(len(data)) + data)
    return client


def _connections(server: Running) -> int:
    return len(server.server.server_state.connections)


@pytest.mark.guard
@pytest.mark.parametrize("how", [{"stream": True, "max_tokens": 3000}, {"max_tokens": 1}], ids=["stream", "whole"])
def test_a_client_that_does_not_read_is_dropped(
    single: Running, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    monkeypatch.setattr(connection, "STALL_SECONDS", 0.3)
    with _post(single, {**MUCH, **how}):
        until(lambda: "POST /v1/completions" in single.log.getvalue() and _connections(single) == 0)
    single.until(running=0, waiting=0)
    assert single.post("/v1/completions", {"prompt": "the", "max_tokens": 2}).status_code == 200


def test_what_a_client_has_not_read_is_bounded(single: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "MOST_UNREAD", 20)
    slow = single.server._serving.worker.served.model.register_forward_pre_hook(lambda *_: time.sleep(0.005))
    with _post(single, {**MUCH, "stream": True, "max_tokens": 3000}) as client:
        single.until(running=1)
        single.until(running=0)  # long before 3000 tokens
        received = b""
        while b"20 tokens behind" not in received[-4000:]:
            more = client.recv(2**20)
            assert more, received[-4000:]
            received += more
    slow.remove()
    assert received.count(b"data: ") < 1000


def test_open_requests_are_bounded(single: Running) -> None:
    """Also those that do not get as far as the queue: 1 that waits, 1 that is answered, and 64."""
    with ExitStack() as stack:
        for _ in range(66):
            stack.enter_context(_connect(single)).sendall(_head(100))
        until(lambda: _connections(single) == 66)
        for _ in range(100):  # until the last one's headers have been read
            refused = single.post("/v1/completions", {"prompt": "the", "max_tokens": 1})
            if refused.status_code == 429:
                break
        assert refused.status_code == 429
        assert refused.headers["Retry-After"] == "1"
        assert "66 requests are open" in refused.text
        assert single.health()["status"] == "ok"
    until(lambda: single.post("/v1/completions", {"prompt": "the", "max_tokens": 1}).status_code == 200)


@pytest.mark.guard
def test_headers_that_do_not_end_end_the_connection(single: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 2.0)
    with _connect(single) as silent, _connect(single) as slow, _connect(single) as second, _connect(single) as body:
        slow.sendall(b"GET /health HTTP/1.1\r\nHost:")
        second.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert second.recv(65536).startswith(b"HTTP/1.1 200")
        second.sendall(b"GET /health HT")  # a further request on the same connection
        body.sendall(_head(30))  # has the time of a body
        for client in (silent, slow):
            assert client.recv(100) == b""
        while second.recv(65536):  # the rest of the answer
            pass
        body.sendall(b'{"prompt":"a","max_tokens":1} ')
        assert body.recv(65536).startswith(b"HTTP/1.1 200")


def _is_closed(client: socket.socket) -> bool:
    """Waits until the server answers, or ends the connection without an answer."""
    try:
        return client.recv(1000) == b""
    except ConnectionResetError:
        return True


def test_half_open_connections_give_way(single: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest first: 50 clients begin a request for 20 places, and others who send one are answered."""
    monkeypatch.setattr(connection, "HEAD_SECONDS", 600.0)  # it is not time that ends them
    monkeypatch.setattr(single.server.config.http_protocol_class, "most", 20)
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with ExitStack() as stack:
        half_open = []
        for number in range(50):
            half_open.append(stack.enter_context(_connect(single)))
            half_open[-1].sendall(head[:20])
            if number % 10 == 9:
                assert single.health()["status"] == "ok"
        assert all(_is_closed(client) for client in half_open[:30])
        # 19, since the last question was one more connection.
        for client in half_open[31:]:
            client.sendall(head[20:])
        assert [client.recv(1000)[:12] for client in half_open[31:]] == [b"HTTP/1.1 200"] * 19
    until(lambda: _connections(single) == 0)
    assert not single.server.config.http_protocol_class.waiting


def test_idle_connections_give_way(single: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that asks again is not the oldest any more."""
    monkeypatch.setattr(single.server.config, "timeout_keep_alive", 600)
    monkeypatch.setattr(single.server.config.http_protocol_class, "most", 2)
    host, port = single.server.listening[0].getsockname()

    def ask(client: HTTPConnection) -> int:
        client.request("GET", "/health")
        with client.getresponse() as answer:
            answer.read()
            return answer.status

    first, second, third = clients = [HTTPConnection(host, port, timeout=300) for _ in range(3)]
    assert [ask(client) for client in (first, second, first)] == [200, 200, 200]
    kept = first.sock
    assert ask(third) == 200
    assert _is_closed(second.sock)
    assert ask(first) == 200
    assert first.sock is kept
    for client in clients:
        client.close()


def test_connections_with_a_request_stay(single: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    protocol = single.server.config.http_protocol_class
    monkeypatch.setattr(protocol, "most", 3)
    body = b'{"prompt":"a","max_tokens":1}'
    with ExitStack() as stack:
        clients = [stack.enter_context(_connect(single)) for _ in range(3)]
        for client in clients:
            client.sendall(_head(len(body)))
        until(lambda: _connections(single) == 3 and not protocol.waiting)
        answer = stack.enter_context(_connect(single)).recv(1000)
        assert answer.startswith(b"HTTP/1.1 429")
        assert b"Retry-After" in answer
        clients[0].sendall(body)
        assert clients[0].recv(1000).startswith(b"HTTP/1.1 200")
    until(lambda: _connections(single) == 0)
    assert single.health()["status"] == "ok"


@pytest.mark.parametrize(
    "lines",
    [
        "POST /v1/completions HTTP/1.1\r\nContent-Length: 4\r\nTransfer-Encoding: chunked",
        "GET /health HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 4",
        "POST /api HTTP/1.0\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked",
        "POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: identity\r\nContent-Length: 4",
        "POST /v1/completions HTTP/1.1\r\nContent-Length: 4\r\nContent-Length: 5",
    ],
)
def test_a_body_of_ambiguous_length_ends_the_connection(server: Running, lines: str) -> None:
    """Or a part of it would be the next request to one of two programs, and a body to the other."""
    smuggled = "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    text = f"{lines}\r\nHost: localhost\r\nContent-Type: application/json\r\n\r\n0\r\n\r\n{smuggled}"
    with _connect(server) as client:
        client.sendall(text.encode())
        answer = b""
        while more := client.recv(2**16):
            answer += more
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"\r\nconnection: close\r\n" in answer.lower()


def test_clients_that_do_not_read_are_no_failure_at_the_end(
    small: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serve, "_GRACE_SECONDS", 0.2)
    monkeypatch.setattr(serve, "_FLUSH_SECONDS", 0.2)
    with (
        running(small) as server,
        _post(server, {**MUCH, "stream": True, "max_tokens": 3000}),
        _post(server, {**MUCH, "max_tokens": 1}),
        _connect(server) as slow,
    ):
        slow.sendall(_head(100))
        server.until(running=1)
        server.server.should_exit = True
        until(lambda: "ended" in server.log.getvalue() or not server.server.server_state.connections)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert "Traceback" not in server.log.getvalue()


def test_a_long_prompt_is_refused_before_it_is_tokens(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = max(len(server.server._serving.served.tokenizer.decode([id_]).encode()) for id_ in range(1, 280))

    def encode_batch(*_: object) -> None:
        raise AssertionError("tokens of what is too long anyhow")

    with monkeypatch.context() as patched:
        patched.setattr(Tokenizer, "encode_batch", encode_batch)
        for path, name, prompts in (("/v1/completions", "prompt", "prompt"), ("/api", "prompts", "prompts")):
            text = "é" * (127 * longest // 2 + 1)
            refused = server.post(path, {prompts: text if path != "/api" else [text]})
            assert refused.status_code == 422
            assert f"{name}: has {len(text.encode()):,} bytes" in refused.text
            assert "at most 127 are allowed (serve.max_length is 128" in refused.text
    refused = server.post("/v1/completions", {"prompt": "é" * (127 * longest // 2)})
    assert f"prompt: has {127 * longest // 2 * 2} tokens; at most 127" in refused.text


def test_a_tokenizer_that_panics_is_an_error_of_the_request(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = server.server._serving.served.tokenizer
    engine = load_definition(tokenizer.definition.encode(), "tokenizer.json")
    engine.pre_tokenizer = pre_tokenizers.Split(Regex("(?:a|aa)+$"), "isolated")
    engine.decoder = decoders.Strip("a", 0, 10**6)
    ids = tokenizer.encode("aa")
    monkeypatch.setattr(tokenizer, "_engine", engine)
    monkeypatch.setitem(tokenizer.__dict__, "definition", engine.to_str())
    for prompt, said in (("a" * 45 + "b", "(?:a|aa)+$"), (ids, "fails on a text")):
        answer = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 1})
        assert answer.status_code == 422, answer.text
        assert said in answer.json()["error"]["message"]
    monkeypatch.undo()
    assert server.post("/v1/completions", {"prompt": "the sea", "max_tokens": 1}).status_code == 200


def test_a_full_queue_is_said_before_a_prompt_is_tokens(single: Running) -> None:
    busy = single.server._serving.worker.served.model.register_forward_pre_hook(lambda *_: time.sleep(0.02))
    too_long = {"prompt": "the sea " * 2000, "max_tokens": 1}
    assert single.post("/v1/completions", too_long).status_code == 422
    endless = {"prompt": "the", "max_tokens": 4000, "temperature": 0}
    with _post(single, endless):
        single.until(running=1)
        with _post(single, endless):
            single.until(waiting=1)
            assert single.post("/v1/completions", too_long).status_code == 429
    busy.remove()


def test_the_loop_goes_on_while_prompts_become_tokens(config: Config) -> None:
    """And the ids are those of the tokenizer."""
    served = load_served(config, None)
    model = worker.Worker(served, slots=1, max_length=2**20, queue=1, report=print)
    serving, text = asking.Serving(model, config.serve, print), "a " * 2**18

    async def turns() -> int:
        encoding = asyncio.create_task(asking.encode(serving, [text], "prompt", 1))
        count = 0
        while not encoding.done():
            await asyncio.sleep(0.001)
            count += 1
        assert (await encoding)[0] == served.tokenizer.encode(text)
        assert await asking.encode(serving, ["", "é"], "prompt", 1) == [
            [served.tokenizer.end_of_document],
            served.tokenizer.encode("é"),
        ]
        return count

    assert asyncio.run(turns()) > 10


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"prompt": ["a"] * 10**5}, "has 100000 prompts; at most 128"),
        ({"prompt": [1] * 10**5 + ["a"]}, "must be a text, a list of texts"),
        ({"prompt": [True] * 10**5}, "must be a text, a list of texts"),
        ({"logit_bias": {str(n): "a" for n in range(10**5)}}, "is not supported here; leave it out, or give {}"),
        ({"logit_bias": []}, "is not supported here"),
        ({"stop": [1] * 10**5}, "a list of at most 16"),
        ({"stream_options": {str(n): 1 for n in range(10**5)}}, "0: there is no such field"),
        ({str(n): 1 for n in range(10**5)}, "0: there is no such field"),
        ({"prompts": [1] * 10**5}, "valid string"),
        ({"prompts": ["a"] * 10**5}, "at most 128 items"),
    ],
)
def test_many_mistakes_are_one(body: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says) as refused:
        (Generate if "prompts" in body else Completion).model_validate(body)
    assert refused.value.error_count() == 1
