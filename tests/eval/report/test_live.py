"""Runs that are followed: only new rows are read, whatever happens to the files, and nobody else can look."""

from __future__ import annotations

import contextlib
import io
import random
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest
from rich.console import Console

from pipeline.common.errors import UserError
from pipeline.eval.report.gather import RunReader, gather
from pipeline.eval.report.live import view as live
from pipeline.eval.report.live.server import LiveServer, follow
from pipeline.eval.report.live.view import LiveView, followed_folder
from pipeline.eval.report.series import Columns
from pipeline.eval.server.listening import LOOPBACK, bound
from tests.eval.report.test_odd import begin, end, row
from tests.eval.server.thread import in_thread
from tests.tiny import pipeline


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are looked at, and reports drawn, whenever they are asked for."""
    monkeypatch.setattr(live, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(live, "DRAW_SECONDS", 0.0)
    monkeypatch.setattr(live, "_DRAW_FACTOR", 0)


def append(file: Path, *lines: dict[str, Any]) -> None:
    with file.open("ab") as out:
        out.writelines(orjson.dumps(line) + b"\n" for line in lines)


def content(columns: Columns) -> dict[str, Any]:
    """All of it, NaN as a text that is equal to itself."""
    values = dict(vars(columns)) | {"loads": vars(columns.loads), "lost": 0, "_attempt": 0}
    return {name: repr(value) for name, value in values.items()}


def test_following_ends_where_reading_at_once_does(tmp_path: Path) -> None:
    """Rows come in pieces of any size, with half lines, damage, attempts that go back, and files that are replaced."""
    chance = random.Random(7)
    for number in range(12):
        run = tmp_path / f"{number}"
        run.mkdir()
        metrics, ledger = run / "metrics.jsonl", run / "ledger.jsonl"
        seen: list[int] = []
        reader = RunReader(run, follows=True, seen=lambda each, seen=seen: seen.append(each["step"]))  # type: ignore[misc]
        done, rows = 0, 0
        for attempt in range(1, 5):
            first = chance.randint(max(0, done - 5), done)
            append(ledger, begin(attempt, first))
            if chance.random() < 0.5:
                reader.progress()
            done = first + chance.randint(0, 9)
            lines = [row(step, attempt, loss=chance.choice([1.5, None, 1e300])) for step in range(first + 1, done + 1)]
            data = b"".join(orjson.dumps(line) + b"\n" for line in lines)
            rows += len(lines)
            if chance.random() < 0.3:
                data = b"{damaged\n" + data
            while data:
                size = chance.randint(1, len(data))
                with metrics.open("ab") as out:
                    out.write(data[:size])
                data = data[size:]
                reader.progress()
            if chance.random() < 0.7:
                append(ledger, end(attempt, done))
        assert len(seen) == rows, "each row is read once"
        made, expected = reader.facts(), gather(run)
        assert content(made.columns) == content(expected.columns)
        assert made.problems == expected.problems and made.state == expected.state
        for facts in (made, expected):
            assert facts.goodput is not None
        assert made.goodput.productive == expected.goodput.productive  # type: ignore[union-attr]
        assert made.goodput.lost == expected.goodput.lost  # type: ignore[union-attr]
        shutil.copy(metrics, run / "new")
        append(run / "new", row(done + 1, 4))
        if chance.random() < 0.5:
            (run / "new").replace(metrics)
        else:
            metrics.write_bytes((run / "new").read_bytes()[len(orjson.dumps(row(1))) + 1 :])
        assert content(reader.facts().columns) == content(gather(run).columns)


def test_rows_of_an_attempt_that_the_ledger_shows_late(tmp_path: Path) -> None:
    """On a network file system the ledger may come after the rows: what was read without it is read again."""
    append(tmp_path / "ledger.jsonl", begin())
    append(tmp_path / "metrics.jsonl", *(row(step) for step in range(1, 9)))
    reader = RunReader(tmp_path, follows=True)
    reader.progress()
    append(tmp_path / "metrics.jsonl", row(5, 3))
    assert list(reader.progress().columns.step) == [1, 2, 3, 4, 5]
    append(tmp_path / "ledger.jsonl", begin(2, 2), begin(3, 4))
    made = reader.progress()
    assert list(made.columns.step) == list(gather(tmp_path).columns.step) == [1, 2, 5]


@pytest.mark.slow
def test_a_run_from_an_empty_folder_to_its_end_and_away(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    shown = LiveView([run])
    assert b"Not begun" in shown.report() or b"not begun" in shown.report()
    first = shown.newest(0)
    assert first["runs"][0]["word"] == "not begun" and first["rows"] == [] and not first["ended"]
    append(run / "ledger.jsonl", begin())
    append(run / "metrics.jsonl", row(1), row(2, loss=float("nan")), {"step": 2, "attempt": 1, "validation_loss": 2.5})
    found = shown.newest(0)
    assert [(each["step"], each["loss"], each["validation_loss"]) for each in found["rows"]] == [
        (1, 4.0, None),
        (2, None, None),
        (2, None, 2.5),
    ]
    assert found["due"] and found["next"] == 3 and shown.newest(3)["rows"] == []
    assert b">2<" in shown.report() and not shown.newest(3)["due"]
    before = {path.name: path.stat().st_mtime_ns for path in run.rglob("*")}
    append(run / "ledger.jsonl", end(step=2))
    ended = shown.newest(3)
    assert ended["runs"][0]["word"] == "done" and ended["ended"] and ended["due"]
    assert b"done" in shown.report() and not shown.newest(3)["due"]
    assert {path.name for path in run.rglob("*")} == set(before), "nothing is written"
    (run / "eval").mkdir()
    (run / "eval/step-00000002.json").write_text("{")
    assert shown.newest(3)["due"], "an evaluation has come"
    last = shown.report()
    shutil.rmtree(run)
    gone = shown.newest(3)
    assert gone["runs"][0]["word"] == "deleted" and "does not exist any more" in gone["runs"][0]["why"]
    assert shown.report() == last, "what was shown stays"
    run.mkdir()
    append(run / "metrics.jsonl", row(7))
    again = shown.newest(3)
    assert [each["step"] for each in again["rows"]] == [7] and again["runs"][0]["step"] == 7


def test_what_cannot_be_followed(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/letter.txt").write_text("x")
    with pytest.raises(UserError, match="notes"):
        followed_folder(tmp_path / "notes")
    with pytest.raises(UserError, match="no-such"):
        followed_folder(tmp_path / "no-such")
    (tmp_path / "run").mkdir()
    with pytest.raises(UserError, match="more than once"):
        LiveView([tmp_path / "run", tmp_path / "run"])
    for arguments in (["--live", "--out", "a.html"], ["--live", "--png"], ["--port", "1"]):
        done = pipeline("report", tmp_path / "run", *arguments)
        assert done.returncode == 2 and arguments[0] in done.stderr
    with serving(tmp_path / "run") as server, pytest.raises(UserError, match="--port"):
        follow([tmp_path / "run"], Console(quiet=True), port=server.listening[0].getsockname()[1])


@contextmanager
def serving(*runs: Path, log: io.StringIO | None = None) -> Iterator[LiveServer]:
    """A server in a thread, on a free port."""
    with bound(LOOPBACK, 0, "--port", has_keys=True) as listening:
        server = LiveServer(LiveView(runs), listening, Console(file=log or io.StringIO(), width=300))
        with in_thread(server):
            yield server
        server.link.remove()


def test_only_who_knows_the_address_and_asks_this_machine_sees_it(tmp_path: Path) -> None:
    run, log = tmp_path / "run\x1b[31m", io.StringIO()
    run.mkdir()
    append(run / "metrics.jsonl", row(1))
    with serving(run, log=log) as server:
        host, port = server.listening[0].getsockname()[:2]
        address, url = server.address, server.url
        assert host == "127.0.0.1"

        def get(path: str, **headers: str) -> httpx2.Response:
            return httpx2.get(path, headers=headers, timeout=None)

        answer = get(server.address)
        assert answer.status_code == 200 and "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert get(f"{server.address}newest").json()["rows"][0]["step"] == 1
        assert "frame-ancestors 'self'" in get(f"{server.address}report").headers["content-security-policy"]
        assert get(f"{server.address}newest", host=f"localhost:{port}").status_code == 200
        for path in ("", "newest", "report"):
            assert get(f"{server.address}{path}", host=f"evil.example:{port}").status_code == 400
            assert get(f"{server.url}/guess/{path}").status_code == 404
        assert get(server.url).status_code == get(f"{server.url}/newest").status_code == 404
        assert httpx2.post(server.address, json={}, timeout=None).status_code in (404, 405)
        assert get(f"{server.address}newest?after=x").status_code == 422
        (run / "metrics.jsonl").unlink()
        (run / "metrics.jsonl").mkdir()
        assert get(f"{server.address}report").status_code == 200
    said = log.getvalue()
    secret = address.rstrip("/").rpartition("/")[2]
    assert secret not in said, "whoever reads a log would have it"
    assert url in said and f"ssh -L {port}:127.0.0.1:{port}" in said
    assert "has opened the report" in said and "\x1b" not in said


def test_who_sends_bodies_takes_no_place_from_the_owner(tmp_path: Path) -> None:
    """70 clients without the secret begin to send, and never end; the page has 64 places."""
    (tmp_path / "run").mkdir()
    head = b"POST /guess/ HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 900\r\n\r\n{"
    with serving(tmp_path / "run") as server, contextlib.ExitStack() as open_ones:
        address = server.listening[0].getsockname()[:2]
        slow = [open_ones.enter_context(socket.create_connection(address)) for _ in range(70)]
        for client in slow:
            client.sendall(head)
        answers = [httpx2.get(f"{server.address}newest", timeout=None).status_code for _ in range(10)]
        assert answers == [200] * 10
        assert all(_is_refused(client) for client in slow)


def test_one_address_leaves_places_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.eval.report.live.server._CONNECTIONS", 4)
    (tmp_path / "run").mkdir()
    with serving(tmp_path / "run") as server, contextlib.ExitStack() as open_ones:
        address = server.listening[0].getsockname()[:2]
        ones = [socket.create_connection(address, None, ("127.0.0.2", 0)) for _ in range(6)]
        for client in ones:
            open_ones.enter_context(client)
        # The ones that have waited longest gave their places to the newest of the same address, not others theirs.
        other = open_ones.enter_context(socket.create_connection(address, None, ("127.0.0.3", 0)))
        other.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert other.recv(64).split()[1] == b"404"
        ends = [client.recv(1) if not _waits(client) else None for client in ones]
        assert ends == [b"", b"", None, None, None, None]


def _is_refused(client: socket.socket) -> bool:
    """Tell whether a request was refused: with an answer, or by the end of the connection where bytes were left."""
    try:
        return client.recv(64)[9:12] in (b"405", b"429", b"")
    except ConnectionResetError:
        return True


def _waits(client: socket.socket) -> bool:
    """Tell whether a connection is open and has nothing to read."""
    client.setblocking(False)
    try:
        client.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        client.setblocking(True)
    return False
