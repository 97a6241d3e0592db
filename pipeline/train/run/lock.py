"""The lock of a run folder: which process writes there, and when another one may take its place.

The file `lock` names its holder. It is taken over when the holder is known to be gone, and refused when that cannot be
known from here, until a person says so (`take_over`). Whoever lost it learns so at its next commit, which looks at the
lock again and gives up.

The lock has fencing numbers that only grow: the attempt, and the generation within it. Where the lock is free the file
`attempt` keeps the former. So who finds a higher attempt knows that it was replaced, also long after that one ended.

The look at a lock and its replacement are one step under `flock` on a file beside it. Where the file system has no
`flock`, or one for each node alone (Lustre without `-o flock`), hard links and renames, which no two processes can make
of the same name, still let only one win.
"""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path

import orjson

from pipeline.common import links, storage
from pipeline.common.errors import MachineError, SupersededError, UserError
from pipeline.common.file_lock import exclusive
from pipeline.common.format import when
from pipeline.common.run_files import RunFiles
from pipeline.common.slurm_commands import JobAnswer
from pipeline.train.run.heartbeat import read_beat
from pipeline.train.run.lock_holder import AskForJob, Holder, identity, whether_holds, why_not_taken_over


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
        path, mine = RunFiles(run).lock, identity()
        with _guard(path):
            before = _bytes(path)
            held = None if before is None else _parse(path, before)
            if held is not None and (found := whether_holds(held, mine)).state != "ended":
                raise UserError(_in_use(run, held, found))
            mine |= {"attempt": _after(run, held), "generation": 0}
            if not _replace(path, before, orjson.dumps(mine)):
                raise UserError(_in_use(run, holder(run) or {}, JobAnswer("running", "it started just now")))
        return cls(path, mine)

    @property
    def attempt(self) -> int:
        """The attempt that the lock is held for."""
        return int(self._mine["attempt"])

    def note(self, attempt: int) -> None:
        """Write down which attempt the holder makes from now on."""
        self._rewrite({"attempt": attempt, "generation": 0})

    def next_generation(self) -> None:
        """Write down that the holder starts its ranks anew within the attempt, before any of them starts."""
        self._rewrite({"generation": self._mine["generation"] + 1})

    def _rewrite(self, values: Holder) -> None:
        with _guard(self._path):
            self.assert_mine()
            self._mine = {**self._mine, **values}
            storage.put(self._path, orjson.dumps(self._mine))

    def is_mine(self) -> bool:
        """True if no other process has taken the lock over."""
        try:
            return holder(self._path.parent) == self._mine
        except UserError:
            return False

    def assert_mine(self) -> None:
        """Refuse to go on if the lock is no longer this process's: whoever has it now must not be written over.

        Raises:
            SupersededError: a later attempt has begun or was allowed to; this one ends for good.
            MachineError: the lock is another's, or gone.
        """
        now = holder(self._path.parent)
        if now == self._mine:
            return
        by = f"taken over by {_described(now)}" if now else "removed, and may be another process's"
        newest = max(number_of(now), last_attempt(self._path.parent))
        if newest > self.attempt:
            raise SupersededError(
                f"{self._path} was {by}: attempt {newest} takes the place of attempt {self.attempt}, which ends here "
                "and is not started again. What it had committed before is kept"
            )
        raise MachineError(
            f"{self._path} was {by}; nothing more is written here. What this process had committed before is kept"
        )

    def release(self) -> None:
        """Remove the lock, if it is still this process's."""
        with ExitStack() as stack:
            with suppress(MachineError):  # a guard that is never released must not stop the run
                stack.enter_context(_guard(self._path))
            if self.is_mine():
                links.remove(self._path, missing_ok=True)


def holder(run: Path) -> Holder | None:
    """The holder of the lock of a run folder, gone or not; None if nobody has it.

    Raises:
        UserError: the file is damaged.
    """
    data = _bytes(RunFiles(run).lock)
    return None if data is None else _parse(RunFiles(run).lock, data)


def is_held(run: Path, ask: AskForJob | None = None) -> bool:
    """True if a process trains in a run folder, or may; for reports.

    Args:
        run: folder.
        ask: for what the scheduler says of a job, where it was asked already. By default it is asked now.
    """
    try:
        found = holder(run)
    except UserError:
        return True
    return found is not None and whether_holds(found, identity(), ask).state != "ended"


def refusal(run: Path) -> str | None:
    """The message with which `Lock.take` would refuse this process now; None if it would get the lock."""
    held = holder(run)
    found = None if held is None else whether_holds(held, identity())
    return None if held is None or found is None or found.state == "ended" else _in_use(run, held, found)


TAKEN_OVER = "taken over"
"""Event of the ledger."""


def take_over(run: Path) -> str | None:
    """Free the lock of a run folder from a holder of whom it is unknown whether it runs, since a person says that.

    It is fenced: where it lives on after all, its next commit fails, and it is not started again.

    Returns:
        The holder, in words; None if the lock is free, or will be taken from a holder that is known to be gone.

    Raises:
        UserError: the holder runs, or has given a sign of life within `STALE_SECONDS`.
    """
    held = holder(run)
    if held is None or (found := whether_holds(held, identity())).state == "ended":
        return None
    why = found.why if found.state == "running" else why_not_taken_over(run)
    if why is not None:
        raise UserError(_in_use(run, held, JobAnswer("running", why)))
    with _guard(RunFiles(run).lock):
        if (now := holder(run)) != held:
            raise UserError(_in_use(run, now or {}, JobAnswer("running", "it came just now")))
        note_attempt(run, _after(run, held))  # before the lock is free, so that its holder is fenced whoever comes next
        storage.add_json_line(RunFiles(run).ledger, {"event": TAKEN_OVER, "time": time.time()})
        links.remove(RunFiles(run).lock)
    return _described(held)


def taken_over(run: Path) -> float:
    """Time of the last take-over, in seconds since 1970; 0 without one. Jobs that were sent before are fenced."""
    times = [line.get("time") for line in RunFiles(run).ledger_lines() if line.get("event") == TAKEN_OVER]
    return max((each for each in times if isinstance(each, float)), default=0.0)  # others may write to the ledger


def clear(run: Path, job: str) -> str | None:
    """Remove the lock of a run folder if the job that holds it is gone; returns why that may not be, if it may not.

    Args:
        run: folder.
        job: that asks, none of whose processes trains now: a lock of its own is of a step that has ended. What lives on
            of that, on a node that was lost, finds out at its next commit.
    """
    try:
        with _guard(RunFiles(run).lock):
            held = holder(run)
            if held is None or "job" not in held:
                return None  # whether a process without a job lives training can find out itself
            if held["job"] != job and (found := whether_holds(held, identity())).state != "ended":
                return _in_use(run, held, found)
            links.remove(RunFiles(run).lock)
    except FileNotFoundError:
        return None
    except MachineError as error:  # the guard is held
        return str(error)
    return None


def last_attempt(run: Path) -> int:
    """Number of the newest attempt at a run, from 1; 0 before the first one."""
    counter = RunFiles(run).attempt
    text = storage.read_bytes(counter, storage.SMALL_BYTES).decode(errors="replace") if counter.exists() else "0"
    if not text.strip().isdecimal():
        raise UserError(f"{counter} is damaged: it should hold the number of attempts so far; write a number into it")
    return int(text)


def note_attempt(run: Path, attempt: int) -> None:
    """Write down the number of the newest attempt."""
    storage.put(RunFiles(run).attempt, f"{attempt}\n".encode())


def number_of(held: Holder | None) -> int:
    """The attempt of a holder, 0 where it has none yet."""
    return int((held or {}).get("attempt", 0))


def _after(run: Path, held: Holder | None) -> int:
    """A number above all attempts that have begun, and above that of a holder that is replaced."""
    return max(last_attempt(run), number_of(held)) + 1


def _in_use(run: Path, held: Holder, found: JobAnswer) -> str:
    text = f"run folder {run} is in use by {_described(held)} ({found.why})"
    if since := held.get("since"):
        text += f", since {when(since)}"
    if beat := read_beat(run):
        place = "" if beat.step is None else f", at step {beat.step}"
        text += f"; its last sign of life was at {when(beat.time)}{place} (phase {beat.phase})"
    text += f"; wait for it, or stop it with `touch {RunFiles(run).stop}`"
    known = found.state == "running"
    return text if known else f"{text}; if you know that it is gone, run the same command with --take-over"


def _described(held: Holder) -> str:
    """The holder in words, as far as it is known: `process 12 on node-1 of job 77, attempt 3`."""
    text = f"process {held.get('pid', '?')} on {held.get('host', '?')}"
    if "job" in held:
        text += f" of job {held['job']}"
    return text if "attempt" not in held else f"{text}, attempt {held['attempt']}"


def _bytes(lock: Path) -> bytes | None:
    try:
        return storage.read_bytes(lock, storage.SMALL_BYTES)
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
    """A guard that lets one process in at a time, where the file system can do that."""
    return exclusive(lock.with_name(RunFiles.lock_guard))


def _replace(lock: Path, before: bytes | None, after: bytes) -> bool:
    """Put a lock in the place of the one that was looked at, or of none; False if another process was faster."""
    new, old = storage.temporary(lock), storage.temporary(lock)
    try:
        new.write_bytes(after)
        storage.sync(new)
        if before is not None:
            with suppress(FileNotFoundError):
                links.replace(lock, old)
                if old.read_bytes() != before:  # of a process that came between
                    with suppress(FileExistsError):
                        os.link(old, lock)
                    return False
        try:
            os.link(new, lock)
        except FileExistsError:
            return False
        except OSError:  # no hard links here; the guard has to do
            links.replace(new, lock)
        storage.sync(lock.parent)
        return True
    finally:
        links.remove(new, missing_ok=True)
        links.remove(old, missing_ok=True)
