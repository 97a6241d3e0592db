"""The run folder: who may write to it, which attempt this is, and how the last one ended.

One process at a time trains in a run folder. The lock names it; a lock whose process is gone is taken over.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from pipeline.data import store
from pipeline.errors import UserError


@dataclass(frozen=True)
class RunFolder:
    """Paths in a run folder, and the number of this attempt at the run (from 1)."""

    path: Path
    attempt: int

    @property
    def checkpoints(self) -> Path:
        """Committed checkpoints, `latest`, and `abandoned/`."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """One JSON object a step and attempt."""
        return metrics_path(self.path)

    @property
    def stop_file(self) -> Path:
        """Its existence asks the run to save and stop."""
        return self.path / "stop"

    def write_exit(self, code: int, reason: str, step: int) -> None:
        """Say how this attempt ended, for whoever decides what happens next."""
        store.put_json(self.path / "exit.json", {"attempt": self.attempt, "code": code, "reason": reason, "step": step})


def metrics_path(run: Path) -> Path:
    """`metrics.jsonl` of a run folder."""
    return run / "metrics.jsonl"


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The metrics of every step, in order: one row a step, validation included.

    Of a step that was trained more than once the last attempt counts. A line that a crash cut short is passed over.
    """
    steps: dict[int, dict[str, Any]] = {}
    path = metrics_path(run)
    if not path.exists():
        return []
    for line in path.read_bytes().splitlines():
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        before = steps.get(row["step"], {})
        steps[row["step"]] = {**before, **row} if before.get("attempt") == row["attempt"] else row
    return [steps[step] for step in sorted(steps)]


def make_writable(path: Path) -> None:
    """Create the run folder, or say in one sentence why it cannot be used."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = store.temporary(path / "probe")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"run.dir {path} cannot be written to ({error.strerror}); make it writable or set run.dir to another folder"
        ) from error


@contextmanager
def open_run(path: Path) -> Iterator[RunFolder]:
    """Lock a run folder for this process and count the attempt.

    Raises:
        UserError: the folder is not writable, or another process trains in it.
    """
    make_writable(path)
    lock = path / "lock"
    _acquire(lock)
    try:
        counter = path / "attempt"
        attempt = (int(counter.read_text()) if counter.exists() else 0) + 1
        store.put(counter, f"{attempt}\n".encode())
        yield RunFolder(path, attempt)
    finally:
        lock.unlink(missing_ok=True)


def _acquire(lock: Path) -> None:
    mine = {"host": socket.gethostname(), "pid": os.getpid(), "started": _start_time(os.getpid())}
    # Written in full before it gets its name, so that nobody reads half a lock; link() fails where one exists.
    tmp = store.temporary(lock)
    tmp.write_bytes(orjson.dumps(mine))
    try:
        for _ in range(2):
            try:
                os.link(tmp, lock)
                return
            except FileExistsError:
                holder = _holder(lock)
                if holder is not None:
                    raise UserError(
                        f"run folder {lock.parent} is in use by process {holder['pid']} on {holder['host']}; "
                        f"wait for it, or, if you know that it is gone, remove {lock}"
                    ) from None
                lock.unlink(missing_ok=True)
        raise UserError(f"run folder {lock.parent} was taken by another process a moment ago")
    finally:
        tmp.unlink(missing_ok=True)


def _holder(lock: Path) -> dict[str, Any] | None:
    """Who holds the lock, or None if that process is known to be gone."""
    try:
        holder: dict[str, Any] = orjson.loads(lock.read_bytes())
    except (FileNotFoundError, orjson.JSONDecodeError):
        return None
    if holder["host"] == socket.gethostname() and _start_time(holder["pid"]) != holder["started"]:
        return None
    return holder


def _start_time(pid: int) -> int | None:
    """Start time of a process in clock ticks after boot (proc(5), field 22), so that a reused pid is told apart."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    return int(stat.rpartition(b")")[2].split()[19])
