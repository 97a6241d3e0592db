"""Delivery of notices to real commands and to a real server."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from slurm.notify.notice import Notice
from slurm.notify.outbox import Outbox, deliver
from slurm.notify.webhook import post
from tests.clock import set_time
from tests.slurm.notify.receivers import SECRET, entry, received, serving, to_file
from tests.waiting import runs, until

NOTICE = Notice(
    "failed",
    Path("/runs/a b"),
    "train",
    "the disk of\nhttps://me:pw@host/x is full",
    job="7_1",
    restarts=2,
    attempt=3,
    step=1200,
    code=79,
    next="end",
    time=1e9,
)


def test_a_command_gets_the_event_as_json_and_in_its_environment(tmp_path: Path) -> None:
    out = tmp_path / "out"
    names = "EVENT RUN RUN_DIR STAGE JOB RESTARTS ATTEMPT STEP CODE NEXT REASON TEST".split()
    variables = "; ".join(f'echo "$PIPELINE_{name}"' for name in names)
    command = ["sh", "-c", f"{{ cat; echo; {variables}; }} > '{out}'"]
    assert deliver(entry(command=command), NOTICE) == ""
    reason = "the disk of https://***@host/x is full"
    lines = out.read_text().splitlines()
    assert lines[1:] == ["failed", "a b", "/runs/a b", "train", "7_1", "2", "3", "1200", "79", "end", reason, ""]
    out.write_text(lines[0] + "\n")
    (values,) = received(out)
    assert values == NOTICE.to_json() and values["reason"] == reason
    assert values["text"] == f"a b: train has failed at step 1,200 (job 7_1): {reason}"


def test_a_command_that_hangs_ends_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = tmp_path / "pids"

    asked: list[None] = []

    def monotonic() -> float:
        """Its time begins with the first question, and is over as soon as both children have begun."""
        asked.append(None)
        return 10.0 if len(asked) > 1 and pids.exists() and pids.read_text().count("\n") == 2 else 0.0

    set_time(monkeypatch, monotonic=monotonic)
    script = f"sleep 600 & echo $! >> '{pids}'; sh -c 'echo $$ >> {pids}; sleep 600'; sleep 600"
    problem = deliver(entry(command=["sh", "-c", script], timeout_seconds=1), NOTICE)
    assert "timeout_seconds (1)" in problem
    found = [int(line) for line in pids.read_text().split()]
    assert len(found) == 2
    until(lambda: not any(map(runs, found)))


def test_commands_that_fail_say_why_and_no_secrets(capfd: pytest.CaptureFixture[str]) -> None:
    shell = ["sh", "-c", f"echo {SECRET}; echo {SECRET} >&2; exit 3"]
    problems = [deliver(entry(command=words), NOTICE) for words in (shell, ["no-such-program"], ["/etc/passwd"])]
    assert "code 3" in problems[0] and "no-such-program" in problems[1] and problems[2]
    assert SECRET not in "".join([*problems, *capfd.readouterr()])


def test_a_webhook(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets JSON with a text; whatever goes wrong, the address is in no message."""
    with serving() as server:
        hook = entry(webhook_env="HOOK", timeout_seconds=600)
        assert "HOOK is not set" in deliver(hook, NOTICE)
        monkeypatch.setenv("HOOK", server.address)
        assert deliver(hook, NOTICE) == ""
        assert (server.paths, server.bodies) == ([f"/{SECRET}"], [NOTICE.to_json()])
        server.status = 500
        assert "HTTP status 500" in deliver(hook, NOTICE)
        server.status = 302
        assert "HTTP status 302" in post(server.address, b"{}")
        assert len(server.paths) == 3, "a redirect is not followed"
        server.status = 0
        problem = deliver(entry(webhook_env="HOOK", timeout_seconds=1.5), NOTICE)
        assert "timeout_seconds (1.5)" in problem and SECRET not in problem
        monkeypatch.delenv("HOOK")
    for address in (server.address, f"ftp://host/{SECRET}", f"http://[{SECRET}", f"http://a b/{SECRET}", SECRET):
        problem = post(address, b"{}")
        assert problem and SECRET not in problem and "s3cr3t" not in problem


def test_a_webhook_gets_no_markup_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    notice = replace(NOTICE, reason="<!channel> <https://evil.example|a & b>")
    with serving() as server:
        monkeypatch.setenv("HOOK", server.address)
        assert deliver(entry(webhook_env="HOOK"), notice) == ""
    (body,) = server.bodies
    assert "&lt;!channel&gt; &lt;https://evil.example|a &amp; b&gt;" in body["text"]
    assert body["reason"] == notice.reason


def test_an_outbox_waits_for_nobody_and_warns_once(tmp_path: Path) -> None:
    """A notification that hangs holds up neither the sender nor the others."""
    said: list[str] = []
    go, seen = tmp_path / "go", tmp_path / "seen"
    os.mkfifo(go)
    entries = [
        entry(command=["cat", str(go)], timeout_seconds=600),
        entry(**to_file(seen)),
        entry(command=["false"]),
        entry(on=["done"], command=["touch", str(tmp_path / "done")]),
    ]
    sender = Outbox(entries, said.append)
    assert [sender.wants(event) for event in ("done", "failed")] == [True, True]
    for _ in range(3):
        sender.send(NOTICE)
    # The command that wrote the last one has ended, too, so that `close` does not end it.
    until(lambda: len(received(seen)) == 3 and all(lane.wait(0) for lane in sender._lanes[1:]))
    assert not sender.wait(0.1)
    sender.close(0.1)
    until(lambda: len(said) > 1)
    assert [line.partition(" was")[0] for line in said] == ["notify.2 (command false)", "notify.0 (command cat)"]
    assert not (tmp_path / "done").exists()
    assert not [each for each in threading.enumerate() if each.name == "notify-3"]
