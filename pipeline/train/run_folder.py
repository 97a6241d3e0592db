"""The run folder: who may write to it, which attempt this is, and how the last one ended.

One process at a time trains in a run folder. The lock names it; a lock whose process is gone is taken over.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from pipeline.data import machine, store
from pipeline.errors import EXIT_OK, MachineError, UserError, exit_code


@dataclass
class RunFolder:
    """A locked run folder: its paths, the number of this attempt at the run (from 1), and how far it has come."""

    path: Path
    attempt: int
    step: int = 0
    """Steps trained so far, for `exit.json`."""

    @property
    def metrics(self) -> Path:
        """One JSON object a step and attempt."""
        return metrics_path(self.path)

    @property
    def stop_file(self) -> Path:
        """Its existence asks the run to save and stop."""
        return self.path / "stop"

    def assert_mine(self) -> None:
        """A `MachineError` if the lock is no longer this process's: whoever has it now must not be written over."""
        if _read_lock(self.path / "lock") != _identity():
            raise MachineError(f"{self.path / 'lock'} was taken over by another process; nothing more is written here")


def metrics_path(run: Path) -> Path:
    """`metrics.jsonl` of a run folder."""
    return run / "metrics.jsonl"


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The metrics of every step, in order: one row a step, validation included.

    Of a step that was trained more than once the last attempt counts. A line that a crash cut short is passed over.
    """
    steps: dict[int, dict[str, Any]] = {}
    for row in store.read_json_lines(metrics_path(run)):
        step = row.get("step")
        if isinstance(step, int):
            before = steps.get(step, {})
            steps[step] = {**before, **row} if before.get("attempt") == row.get("attempt") else row
    return [steps[step] for step in sorted(steps)]


def make_writable(path: Path) -> None:
    """Create the run folder, or say in one sentence why it cannot be used."""
    if path.exists() and not path.is_dir():
        raise UserError(f"run.dir {path} is a file; set run.dir to a folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = store.temporary(path / "probe")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise MachineError(
            f"run.dir {path} cannot be written to ({error.strerror}); make it writable or set run.dir to another folder"
        ) from error


@contextmanager
def open_run(path: Path) -> Iterator[RunFolder]:
    """Lock a run folder for this process, count the attempt, and write `exit.json` when it ends.

    Raises:
        UserError: the folder is not writable, or another process trains in it.
    """
    make_writable(path)
    lock = path / "lock"
    _acquire(lock)
    try:
        for tmp in path.glob(f".*{store.TEMPORARY_SUFFIX}"):
            store.remove_if_stale(tmp)  # of an attempt that was killed while it wrote a small file
        folder = RunFolder(path, _next_attempt(path))
        exit_file = path / "exit.json"
        exit_file.unlink(missing_ok=True)
        code, reason = EXIT_OK, "done"
        try:
            yield folder
        except BaseException as error:
            code, reason = exit_code(error), str(error) or type(error).__name__
            raise
        finally:
            with suppress(OSError):  # a full disk, of which the exception speaks already
                exit_state = {"attempt": folder.attempt, "code": code, "reason": reason, "step": folder.step}
                store.put_json(exit_file, exit_state)
    finally:
        if _read_lock(lock) == _identity():
            lock.unlink(missing_ok=True)


def last_attempt(run: Path) -> int:
    """Number of the newest attempt at a run, from 1; 0 before the first one."""
    counter = run / "attempt"
    text = counter.read_text() if counter.exists() else "0"
    if not text.strip().isdecimal():
        raise UserError(f"{counter} is damaged: it should hold the number of attempts so far; write a number into it")
    return int(text)


def _next_attempt(run: Path) -> int:
    attempt = last_attempt(run) + 1
    store.put(run / "attempt", f"{attempt}\n".encode())
    return attempt


def _identity() -> dict[str, Any]:
    """What tells this process apart from every other one, also from a later one with the same pid."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": _start_time(os.getpid())}


def _acquire(lock: Path) -> None:
    # Looking at a lock and replacing it must be one step: two processes may find the same stale one.
    with lock.with_name("lock.guard").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        holder = _holder(lock)
        if holder is not None:
            raise UserError(
                f"run folder {lock.parent} is in use by process {holder['pid']} on {holder['host']}; "
                f"wait for it, or, if you know that it is gone, remove {lock}"
            )
        store.put(lock, orjson.dumps(_identity()))


def _read_lock(lock: Path) -> dict[str, Any] | None:
    try:
        holder = orjson.loads(lock.read_bytes())
    except FileNotFoundError:
        return None
    except orjson.JSONDecodeError:
        holder = None
    if not isinstance(holder, dict) or holder.keys() != _identity().keys():
        raise UserError(f"{lock} is damaged; if no process trains in {lock.parent}, remove it")
    return holder


def _holder(lock: Path) -> dict[str, Any] | None:
    """Who holds the lock, or None if that process is known to be gone."""
    holder = _read_lock(lock)
    if holder and holder["host"] == socket.gethostname() and _start_time(holder["pid"]) != holder["started"]:
        return None
    return holder


def _start_time(pid: int) -> int | None:
    """Start time of a running process in clock ticks after boot, so that a reused pid is told apart."""
    found = machine.process(pid)
    # A dead one stays in the table until its parent has asked how it ended, which some never do (PID 1 of containers).
    return None if found is None or found[0] in "ZX" else found[1]
