"""Attacks on `pipeline serve`; part of `attack_network.py`, which starts them."""

from __future__ import annotations

import http.client
import json
import re
import socket
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from attack_victim import SECONDS, done, family, listeners, outer_addresses, pipeline, reached, said, victim

HALF_OPEN = 300
TIMES = 20
"""Each hostile body is sent so often."""
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
BODY = b'{"prompt":"a","max_tokens":1}'
SECOND = b"GET /smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"
"""What a proxy would take for a part of the body before it."""


class Target:
    """The server, and what it has answered so far."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.statuses: Counter[int] = Counter()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def send(self, data: bytes) -> list[int]:
        """Statuses of all answers to bytes, until the server closes or has said nothing for 1 s after an answer."""
        text = b""
        with suppress(OSError), self.connect() as connection:
            connection.sendall(data)
            while piece := connection.recv(65536):
                text += piece
                connection.settimeout(1)
        found = [int(each) for each in re.findall(rb"HTTP/1\.1 (\d{3}) ", text)]
        self.statuses.update(found)
        return found

    def ask(self, body: bytes = BODY, path: str = "/v1/completions", **headers: str) -> int:
        """Status of the answer to a request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"} | headers)
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException):
            status = 0
        finally:
            connection.close()
        self.statuses[status] += 1
        return status


def serve(root: Path) -> None:
    """All attacks on a server."""
    file = victim(root, "served")
    done("preprocess", file)
    code, text = done("train", file)
    assert code == 0, text
    with pipeline("serve", file, "--no-key", "--port", "0") as process:
        assert process.stdout
        port, end = 0, time.monotonic() + SECONDS
        while not port and time.monotonic() < end and (line := process.stdout.readline()):
            port = int(found[1]) if (found := re.search(r"http://127\.0\.0\.1:(\d+)", line)) else 0
        assert port, "the server did not start"
        target = Target(port)
        assert target.ask() == 200
        places = listeners(family(file))
        outer = [each for each in outer_addresses() if reached(each, port)]
        said("serve: reach it from another address", not outer and bool(places), f"it listens on {sorted(places)}")
        for attack in (half_open, slow_bodies, smuggling, hosts, bodies):
            attack(target)
            normal = target.ask()
            said(f"serve: a normal request after {attack.__name__}", normal == 200, f"answer {normal}")
        bad = {status: number for status, number in target.statuses.items() if status >= 500}
        said("serve: 5xx", not bad and process.poll() is None, f"{bad or 'none'} of {dict(target.statuses)}")


def half_open(target: Target) -> None:
    """Connections that never finish their headers."""
    with ExitStack() as stack:
        held = []
        for _ in range(HALF_OPEN):
            with suppress(OSError):
                held.append(stack.enter_context(target.connect()))
                held[-1].sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-")
        began = time.monotonic()
        normal = target.ask()
        took = time.monotonic() - began
        said(
            f"serve: {HALF_OPEN} half-open connections", normal == 200, f"a request meanwhile: {normal} in {took:.1f} s"
        )
        end, ended = time.monotonic() + 15, 0
        for each in held:
            each.settimeout(max(0.01, end - time.monotonic()))
            with suppress(TimeoutError):
                try:
                    while each.recv(4096):
                        pass
                except ConnectionError:
                    pass
                ended += 1
        said("serve: half-open connections are closed", ended == len(held), f"{ended} of {len(held)} within 15 s")


def slow_bodies(target: Target) -> None:
    """Complete headers and a body that does not come."""
    head = HEAD + b"Content-Length: 999\r\n\r\n{"
    with ExitStack() as stack:
        held = []
        for _ in range(HALF_OPEN):
            with suppress(OSError):
                held.append(stack.enter_context(target.connect()))
                held[-1].sendall(head)
        began = time.monotonic()
        while (answer := target.ask()) != 200 and time.monotonic() - began < 60:
            time.sleep(1)
        took = time.monotonic() - began
        verdict: bool | str = True if took < 5 else "remains"
        said(
            f"serve: {HALF_OPEN} slow bodies",
            verdict if answer == 200 else False,
            f"a request meanwhile is answered after {took:.0f} s (429 before that); a body has 30 s",
        )


def smuggling(target: Target) -> None:
    """Requests of which two parsers could read two different numbers."""
    length = b"Content-Length: %d\r\n" % len(BODY)
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    forms: dict[str, tuple[bytes, bytes]] = {
        "TE and CL": (CHUNKED + length, chunks),
        "CL and TE": (length + CHUNKED, chunks),
        "CL.TE with a second request": (b"Content-Length: %d\r\n" % (5 + len(SECOND)) + CHUNKED, b"0\r\n\r\n"),
        "two CL that differ": (length + b"Content-Length: 3\r\n", BODY),
        "CL as a list that differs": (b"Content-Length: %d, 3\r\n" % len(BODY), BODY),
        "CL +29": (b"Content-Length: +%d\r\n" % len(BODY), BODY),
        "CL -1": (b"Content-Length: -1\r\n", BODY),
        "CL 0x1d": (b"Content-Length: 0x1d\r\n", BODY),
        "CL 1_0": (b"Content-Length: 2_9\r\n", BODY),
        "blank before the colon": (b"Content-Length : %d\r\n" % len(BODY), BODY),
        "TE of two codings": (b"Transfer-Encoding: gzip, chunked\r\n", chunks),
        "TE twice": (CHUNKED + CHUNKED, chunks),
        "TE xchunked": (b"Transfer-Encoding: xchunked\r\n", chunks),
        "TE with a tab and a control character": (b"Transfer-Encoding:\x0bchunked\r\n", chunks),
        "bare CR in a header": (b"X: a\rContent-Length: 3\r\n" + length, BODY),
        "obs-fold": (b"X: a\r\n " + CHUNKED + length, BODY),
        "obs-fold of TE": (b"Transfer-Encoding:\r\n chunked\r\n" + length, chunks),
        "NUL in a header": (b"X: a\0b\r\n" + length, BODY),
        "chunk size with a sign": (CHUNKED, b"+1d\r\n" + BODY + b"\r\n0\r\n\r\n"),
        "chunk size 2**64": (CHUNKED, b"10000000000000000\r\n" + BODY),
        "bare LF after a chunk": (CHUNKED, b"%x\n%s\n0\n\n" % (len(BODY), BODY)),
    }
    wrong = []
    answers: Counter[str] = Counter()
    for name, (headers, body) in forms.items():
        found = target.send(HEAD + headers + b"\r\n" + body + SECOND)
        answers[str(found)] += 1
        # 200 and 404 are a body of one length and the request behind it: only where both lengths are the same to all.
        ambiguous = len(found) > 1 and name not in ("obs-fold",)
        if ambiguous or any(each >= 500 for each in found):
            wrong.append(f"{name}: {found}")
    said(
        f"serve: {len(forms)} forms of smuggled requests", not wrong, f"{'; '.join(wrong) or 'answers'} {dict(answers)}"
    )


def hosts(target: Target) -> None:
    """A page elsewhere whose name points here."""
    given = [
        "evil.example",
        "127.0.0.1.evil.example",
        "localhost.evil",
        "evil@localhost",
        "localhost#.evil",
        "0.0.0.0",
        "",
    ]
    found = {host: target.ask(Host=host) for host in given}
    twice = target.send(
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\nConnection: close\r\n\r\n"
    )
    whole = target.send(b"GET http://evil.example/v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    well = all(400 <= each < 500 for each in [*found.values(), *twice, *whole])
    said("serve: foreign Host headers", well, f"{found}, two Host headers: {twice}, another host in the line: {whole}")


def bodies(target: Target) -> None:
    """Hostile JSON."""
    fields: list[dict[str, Any]] = [
        {"max_tokens": 10**18}, {"max_tokens": -1}, {"max_tokens": 1e308}, {"n": 10**9}, {"best_of": 10**9},
        {"temperature": -1}, {"top_p": 1e-320}, {"top_k": 2**63}, {"logprobs": 10**9}, {"seed": 2**200},
        {"stop": [""]}, {"stop": ["a"] * 10_000}, {"prompt": ["a"] * 10_000}, {"prompt": [[10**9]]},
        {"prompt": [-1]}, {"prompt": "a" * 200_000}, {"model": "../../etc/passwd"}, {"logit_bias": {"-1": 1e9}},
        {"stream": "yes"}, {"prompt": {"a": {}}}, {"echo": 2}, {"suffix": "\0" * 1000}, {"user": "\x1b]0;x\x07"},
    ]  # fmt: skip
    raw = [
        b"", b"null", b"[" * 100_000, b'{"a":' * 100_000, b'{"prompt":"a","temperature":NaN}',
        b'{"prompt":"a","temperature":-Infinity}', b'{"prompt":"a","top_k":' + b"9" * 100_000 + b"}",
        b'{"prompt":"\\ud800"}', b'{"prompt":"\xff\xfe"}', b"\xef\xbb\xbf{}", b'{"prompt":"a","prompt":"b"}',
        b"a" * 2**20, b'{"' + b"k" * 900_000 + b'":1}', b"{" + b",".join(b'"%d":0' % n for n in range(50_000)) + b"}",
    ]  # fmt: skip
    sent = raw + [json.dumps({"prompt": "a", "max_tokens": 1} | each).encode() for each in fields]
    answers: Counter[int] = Counter()
    slowest = 0.0
    for _ in range(TIMES):
        for body in sent:
            began = time.monotonic()
            answers[target.ask(body)] += 1
            slowest = max(slowest, time.monotonic() - began)
    for path in (
        "/api",
        "/v1/completions",
        "/v1/chat/completions",
        "/../../etc/passwd",
        "/%2e%2e/%00",
        "//evil/",
        "/" + "a" * 9000,
    ):
        answers[target.ask(b"{}", path)] += 1
    well = all(200 <= each < 500 for each in answers)
    said(f"serve: {answers.total()} hostile bodies", well, f"answers {dict(answers)}, the slowest in {slowest:.1f} s")
