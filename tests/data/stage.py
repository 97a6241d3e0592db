"""The preprocess command as processes: started, watched, killed; and what it may leave behind."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from pipeline.common import storage
from pipeline.config import Config
from tests.tiny import command
from tests.waiting import runs, until


def write_run_file(config: Config, path: Path) -> Path:
    """A run file of a config."""
    path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_defaults=True)))
    return path


def start(file: Path, *words: str, **options: Any) -> subprocess.Popen[str]:
    """Start the command, with further words of it, in a process group of its own."""
    return subprocess.Popen(
        command("preprocess", file, *words),
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


_ON_TERMINAL = "import os, sys; os.login_tty(0); os.execvp(sys.argv[1], sys.argv[1:])"


@contextmanager
def on_terminal(file: Path, until: Callable[[], object]) -> Iterator[subprocess.Popen[bytes]]:
    """The command on a terminal of its own, which is gone when something is so."""
    ours, theirs = pty.openpty()
    begin = [sys.executable, "-c", _ON_TERMINAL]
    process = subprocess.Popen([*begin, *command("preprocess", file)], stdin=theirs)
    os.close(theirs)
    try:
        said = b""
        deadline = time.monotonic() + 60
        with suppress(OSError):  # how Linux says that nobody has the other end open any more
            while not until() and time.monotonic() < deadline:
                if select.select([ours], [], [], 0.01)[0]:
                    said += os.read(ours, 2**16)
        assert until() and process.poll() is None, said.decode()
    except BaseException:
        process.kill()
        raise
    finally:
        os.close(ours)
    with process:
        yield process


_KILLED = """
import os, signal, sys
log, wanted = sys.argv[1], int(sys.argv[2])

def hook(event, arguments):
    if event == "os.rename":
        file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, b"x")
        size = os.fstat(file).st_size
        os.close(file)
        if size == wanted:
            os.killpg(0, signal.SIGKILL)

sys.addaudithook(hook)
sys.argv[:3] = ["pipeline"]
from pipeline.cli.main import app
app()
"""


def killed_at_rename(log: Path, wanted: int, *words: object) -> subprocess.CompletedProcess[str]:
    """A command that is killed with its workers before the rename with this number; `log` has a byte for each."""
    log.unlink(missing_ok=True)
    return subprocess.run(
        [sys.executable, "-c", _KILLED, str(log), str(wanted), *map(str, words)],
        start_new_session=True,
        capture_output=True,
        text=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        check=False,
    )


def receipts(config: Config) -> int:
    """Links, and buckets of a global shuffle, that are done."""
    return sum(1 for _ in config.data_dir.glob("*/receipts/**/*.json"))


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Wait until something is so, while a process runs; for moments that are soon over."""
    until(condition, process, pause=0.002)


def left_behind(config: Config) -> list[Path]:
    """Temporary files and leases."""
    return [
        path
        for path in config.data_dir.rglob("*")
        if path.is_file() and (path.name.endswith(".tmp") or "leases" in path.parts)
    ]


def left_by_living_nodes(config: Config) -> list[Path]:
    """The same without temporary files of other machines: nobody can say whether their processes write them yet."""
    return [path for path in left_behind(config) if not path.name.endswith(".tmp") or storage.is_stale(path)]


def children(pid: int) -> list[int]:
    """Processes that a process started."""
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def workers(pid: int) -> list[int]:
    """Worker processes of the command."""
    found = []
    for child in children(pid):
        try:
            if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
        except (FileNotFoundError, ProcessLookupError):
            pass
    return found


def gone(pids: list[int]) -> None:
    """Wait until processes that are not our children have ended."""
    until(lambda: not any(map(runs, pids)), why=f"{pids} are still there")
