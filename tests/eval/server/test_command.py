"""`pipeline serve` as a user runs it: a process, signals, exit codes, and what it refuses to start with."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
from rich.console import Console

from pipeline.common.errors import UserError
from pipeline.config.load import load
from pipeline.eval.server.keys import Keys
from pipeline.eval.server.serve import Access, opened, serve
from tests import tiny
from tests.eval.server.running import running

KEY = "0123456789abcdef"


@contextmanager
def _started(*arguments: object, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command in a process, without a key, and the address that it says."""
    process = subprocess.Popen(
        tiny.command("serve", "--no-key", *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | environment,
    )
    try:
        assert process.stdout is not None
        found = next((each for line in process.stdout if (each := re.search(r"http://\S+", line))), None)
        assert found, "it ended without an address"
        yield process, found[0]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.guard
@pytest.mark.parallel
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGINT, signal.SIGHUP)),
    ],
)
@pytest.mark.usefixtures("hangup")
def test_a_signal_ends_it_cleanly(run_file: Path, number: signal.Signals) -> None:
    folder = load(run_file).run.dir
    # The folder of a run that may have been moved, as in `pipeline status`.
    with _started(folder, "--port", 0, "serve.max_length=4096", "serve.slots=1") as (process, url):
        body = {"prompt": "the", "max_tokens": 60, "temperature": 0}
        answers: list[httpx2.Response] = []
        client = threading.Thread(
            target=lambda: answers.append(httpx2.post(f"{url}/v1/completions", json=body, timeout=300))
        )
        client.start()
        while httpx2.get(f"{url}/health").json()["running"] == 0 and not answers:
            pass
        process.send_signal(number)
        output, _ = process.communicate(timeout=300)
        client.join(60)
        assert process.returncode == 0, output
        assert [answer.status_code for answer in answers] == [200]
        assert output.endswith("ended\n")
        assert "Traceback" not in output


@pytest.mark.parallel
@pytest.mark.slow
def test_a_text_that_takes_too_long_is_ended(run_file: Path) -> None:
    """A stream that is cut says so; the exit code is 0 all the same."""
    with _started(run_file, "--port", 0, "serve.max_length=1000000") as (process, url):
        body = {"prompt": "the", "max_tokens": 900_000, "temperature": 0, "stream": True}
        with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as streamed:
            lines = streamed.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1].startswith('data: {"error":')
        assert process.wait(300) == 0


def test_a_port_that_is_taken_is_said(run_file: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = load(run_file, [f"serve.port={port}"])
        with pytest.raises(UserError, match=rf"serve\.port {port} of 127\.0\.0\.1 is taken .* --port, or 0"):
            serve(config, None, Access(no_key=True), Console())


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_other_machines_need_a_key(run_file: Path, host: str) -> None:
    config = load(run_file, [f"serve.host='{host}'", "serve.port=0"])
    with pytest.raises(UserError, match=r"there is no API key: .* --api-key-file"):
        serve(config, None, Access(no_key=True), Console())
    if host == "0.0.0.0":
        with running(config, key=KEY) as server:
            url = server.url.replace("0.0.0.0", "127.0.0.1")
            assert httpx2.get(f"{url}/v1/models").status_code == 401
            headers = {"Authorization": f"Bearer {KEY}", "Host": "node7:5000"}
            assert httpx2.get(f"{url}/v1/models", headers=headers).status_code == 200
            assert httpx2.get(f"{url}/health").json() == {"status": "ok"}
            assert httpx2.get(f"{url}/health", headers=headers).json()["run"]


def test_a_host_that_is_not_there_is_said(run_file: Path) -> None:
    for host in ("no-such-host.invalid", "203.0.113.1"):
        config = load(run_file, [f"serve.host={host}", "serve.port=0"])
        with (
            pytest.raises(UserError, match=r"serve\.host"),
            opened(config, None, Access(), Keys([("", KEY)]), Console()),
        ):
            pass


def test_a_run_without_checkpoints_is_refused(tmp_path: Path) -> None:
    config = load(tiny.write_run(tmp_path), ["serve.port=0"])
    with pytest.raises(UserError, match="train first"):
        serve(config, None, Access(no_key=True), Console())


def test_more_positions_than_learned_ones_are_refused(tmp_path: Path) -> None:
    file = tiny.write_run(tmp_path, {"model.positions": "learned"})
    with pytest.raises(UserError, match=r"serve\.max_length: 64 is more than the 32 learned positions"):
        load(file, ["serve.max_length=64"])
