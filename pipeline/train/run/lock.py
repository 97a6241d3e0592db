"""The lock of a run folder: which process writes there, and when another one may take its place.

The file `lock` names its holder. It is taken over when the holder is known to be gone, and refused when that cannot be
known from here. Whoever lost it learns so at its next commit, which looks at the lock again and gives up.

The look at a lock and its replacement are one step under `flock` on a file beside it. Where the file system has no
`flock`, or one for each node alone (Lustre without `-o flock`), hard links and renames, which no two processes can make
of the same name, still let only one win.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any

import orjson

from pipeline.common import process_identity, storage
from pipeline.common.errors import MachineError, UserError
from pipeline.common.file_lock import exclusive
from pipeline.common.format import when
from pipeline.common.run_files import RunFiles
from pipeline.train.run.heartbeat import read_beat

_SQUEUE_SECONDS = 20.0
"""A scheduler that takes longer to answer is not waited for: then nothing is known of the job."""
_NOT_RUNNING = frozenset(
    {
        *("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "BOOT_FAIL", "CANCELLED", "COMPLETED"),
        *("DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
    }
)
"""States of SLURM in which no process of a job is left. A job that is completing may have some."""
_NO_SUCH_JOB = "Invalid job id"
"""Message of squeue for a job that ended so long ago that the scheduler has forgotten it."""

Holder = dict[str, Any]
"""Content of the file: host, pid, start time of the process and so on."""


class Lock:
    """A lock that this process holds; `take` makes one.

    Args:
        path: the file.
        mine: what it says while it is this process's.
    """

    def __init__(self, path: Path, mine: Holder) -> None:
        self._path = path
        self._mine = mine

    @classmethod
    def take(cls, run: Path) -> Lock:
        """Take the lock of a run folder, over from a holder that is gone if there is one.

        Raises:
            UserError: another process holds it, or may.
        """
        path, mine = RunFiles(run).lock, _identity()
        with _guard(path):
            before = _bytes(path)
            if before is not None:
                refuse = _why_not(_parse(path, before), mine)
                if refuse:
                    raise UserError(_in_use(run, _parse(path, before), refuse))
            if not _replace(path, before, orjson.dumps(mine)):
                raise UserError(_in_use(run, holder(run) or {}, "it started at the same moment"))
        return cls(path, mine)

    def note(self, attempt: int) -> None:
        """Write down which attempt the holder makes."""
        with _guard(self._path):
            self.assert_mine()
            self._mine = {**self._mine, "attempt": attempt}
            storage.put(self._path, orjson.dumps(self._mine))

    def is_mine(self) -> bool:
        """True if nobody has taken it over."""
        try:
            return holder(self._path.parent) == self._mine
        except UserError:
            return False

    def assert_mine(self) -> None:
        """A `MachineError` if the lock is no longer this process's: whoever has it now must not be written over."""
        now = holder(self._path.parent)
        if now != self._mine:
            by = f"taken over by {_who(now)}" if now else "removed, and may be another process's"
            raise MachineError(
                f"{self._path} was {by}; nothing more is written here. What this process had committed before is kept"
            )

    def release(self) -> None:
        """Give it back, if it is still this process's."""
        with ExitStack() as stack:
            with suppress(MachineError):  # a guard that is never released must not stop the run
                stack.enter_context(_guard(self._path))
            if self.is_mine():
                self._path.unlink(missing_ok=True)


def holder(run: Path) -> Holder | None:
    """The holder of the lock of a run folder, gone or not; None if nobody has it.

    Raises:
        UserError: the file is damaged.
    """
    data = _bytes(RunFiles(run).lock)
    return None if data is None else _parse(RunFiles(run).lock, data)


def is_held(run: Path, job_state: Callable[[str], str | None] | None = None) -> bool:
    """True if a process trains in a run folder, or may; for reports.

    Args:
        run: folder.
        job_state: what the scheduler says of a job, where it was asked already: a state in which some process of it may
            run, "" if none can, None if it does not say. By default it is asked now.
    """
    try:
        found = holder(run)
    except UserError:
        return True
    return found is not None and _why_not(found, _identity(), job_state) is not None


def refusal(run: Path) -> str | None:
    """The message with which `Lock.take` would refuse this process now; None if it would get the lock."""
    found = holder(run)
    why = None if found is None else _why_not(found, _identity())
    return None if found is None or why is None else _in_use(run, found, why)


def clear(run: Path, job: str) -> str | None:
    """Remove the lock of a run folder if the job that holds it is gone; returns why that may not be, if it may not.

    Args:
        run: folder.
        job: that asks, none of whose processes trains now: a lock of its own is of a step that has ended. What lives on
            of that, on a node that was lost, finds out at its next commit.
    """
    try:
        with _guard(RunFiles(run).lock):
            found = holder(run)
            if found is None or "job" not in found:
                return None  # whether a process without a job lives training can find out itself
            why = None if found["job"] == job else _why_not(found, _identity())
            if why is not None:
                return _in_use(run, found, why)
            RunFiles(run).lock.unlink()
    except FileNotFoundError:
        return None
    except MachineError as error:  # the guard is held
        return str(error)
    return None


def job() -> dict[str, Any]:
    """The job and step that this process is part of, how often the job was restarted, where; {} outside of SLURM."""
    number = os.environ.get("SLURM_JOB_ID", "")
    if not number:
        return {}
    if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
        number = f"{array}_{os.environ.get('SLURM_ARRAY_TASK_ID', '')}"  # as people and commands name it
    cluster = os.environ.get("SLURM_CLUSTER_NAME")
    starts = {"restarts": _number("SLURM_RESTART_COUNT"), "step": _number("SLURM_STEP_ID")}
    return {"job": number, **starts, "cluster": cluster}


def _number(variable: str) -> int:
    """A number in the environment, 0 where it is not set."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else 0


def _identity() -> Holder:
    """The identity of this process, which no other one has, also not a later one with the same pid."""
    return {**process_identity.identity(), **job(), "since": time.time()}


def _why_not(held: Holder, mine: Holder, job_state: Callable[[str], str | None] | None = None) -> str | None:
    """The reason why a lock may not be taken over by `mine`, in words; None if its holder is known to be gone."""
    alive = _lives_here(held, mine)
    if alive is not None:
        return "it runs" if alive else None
    number = held.get("job")
    if number is None or held.get("cluster") != mine.get("cluster", held.get("cluster")):
        return "this machine cannot tell whether it runs"
    if number == mine.get("job"):
        # A job starts again only when its last start is over, and its next step when the last one is. What lives on,
        # on a node that was lost, finds out at its next commit.
        if _start(held) < _start(mine):
            return None
        return f"job {number} is this process's own"
    state = (job_state or _job_state)(str(number))
    if state is None:
        return f"the scheduler does not say whether job {number} runs"
    return f"job {number} is {state}" if state else None


def _start(of: Holder) -> tuple[int, int]:
    """Numbers that grow with each start of the training in a job."""
    return of.get("restarts", 0), of.get("step", 0)


def _lives_here(held: Holder, mine: Holder) -> bool | None:
    """True if the holder runs, None if that cannot be looked up from here."""
    if held["host"] != mine["host"]:
        return None
    boot, space = held.get("boot") or mine["boot"], held.get("namespace") or mine["namespace"]
    if boot != mine["boot"]:
        # The machine was started anew since; the scheduler knows better whether it is the same machine.
        return None if "job" in held else False
    if space != mine["namespace"]:
        return None  # in another container, whose processes have other numbers
    return bool(process_identity.start_time(held["pid"]) == held["started"])


def _job_state(number: str) -> str | None:
    """State of a job in which some process of it may run, "" if none can, None if the scheduler does not say."""
    command = ["squeue", "--noheader", "--jobs", number, "--format", "%T"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SQUEUE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return "" if _NO_SUCH_JOB in done.stderr else None
    running = [state for state in done.stdout.split() if state not in _NOT_RUNNING]
    return running[0] if running else ""


def _in_use(run: Path, held: Holder, why: str) -> str:
    text = f"run folder {run} is in use by {_who(held)} ({why})"
    if since := held.get("since"):
        text += f", since {when(since)}"
    if beat := read_beat(run):
        place = "" if beat.step is None else f", at step {beat.step}"
        text += f"; its last sign of life was at {when(beat.time)}{place} (phase {beat.phase})"
    stop, lock = RunFiles(run).stop, RunFiles(run).lock
    return f"{text}; wait for it, stop it with `touch {stop}`, or, if you know that it is gone, remove {lock}"


def _who(held: Holder) -> str:
    """`process 12 on node-1 of job 77, attempt 3`, as far as it is known."""
    text = f"process {held.get('pid', '?')} on {held.get('host', '?')}"
    if "job" in held:
        text += f" of job {held['job']}"
    return text if "attempt" not in held else f"{text}, attempt {held['attempt']}"


def _bytes(lock: Path) -> bytes | None:
    try:
        return storage.read_bytes(lock)
    except FileNotFoundError:
        return None


def _parse(lock: Path, data: bytes) -> Holder:
    try:
        held = orjson.loads(data)
    except orjson.JSONDecodeError:
        held = None
    if not isinstance(held, dict) or not held.keys() >= {"host", "pid", "started"}:
        raise UserError(f"{lock} is damaged; if no process trains in {lock.parent}, remove it")
    return held


def _guard(lock: Path) -> AbstractContextManager[None]:
    """One process at a time, where the file system can do that."""
    return exclusive(lock.with_name(RunFiles.lock_guard))


def _replace(lock: Path, before: bytes | None, after: bytes) -> bool:
    """Put a lock in the place of the one that was looked at, or of none; False if another process was faster."""
    new, old = storage.temporary(lock), storage.temporary(lock)
    try:
        new.write_bytes(after)
        storage.sync(new)
        if before is not None:
            with suppress(FileNotFoundError):
                os.rename(lock, old)
                if old.read_bytes() != before:  # of a process that came between
                    with suppress(FileExistsError):
                        os.link(old, lock)
                    return False
        try:
            os.link(new, lock)
        except FileExistsError:
            return False
        except OSError:  # no hard links here; the guard has to do
            os.replace(new, lock)
        storage.sync(lock.parent)
        return True
    finally:
        new.unlink(missing_ok=True)
        old.unlink(missing_ok=True)
