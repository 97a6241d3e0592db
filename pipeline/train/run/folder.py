"""The run folder: who may write to it, which attempt this is, and how the last one ended.

One process at a time trains in a run folder: the one that has its lock.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.common import links, run_identity, storage
from pipeline.common.console import alarm
from pipeline.common.errors import (
    EXIT_OK,
    EXIT_REFUSED,
    EXIT_STOPPED,
    EXIT_SUPERSEDED,
    MachineError,
    RankFailed,
    Stopped,
    UnsavedError,
    UserError,
    end_reason,
    exit_code,
)
from pipeline.common.paths import StrPath
from pipeline.common.run_files import RunFiles
from pipeline.train.run.attempts import RunningAttempt, correct_end, last_begun, record_missing_end
from pipeline.train.run.goodput import goodput
from pipeline.train.run.heartbeat import read_beat
from pipeline.train.run.lock import Lock, last_attempt, note_attempt

_OF_A_JOB = ("SLURM_JOB_ID", "SUBMITIT_LOCAL_JOB_ID")
"""Environment variables of the processes of a job, of the scheduler or of this machine."""
_OF_A_START = {RunFiles.folder_id, RunFiles.ledger, RunFiles.exit, RunFiles.heartbeats, RunFiles.logs}


@dataclass(frozen=True)
class _ExitFile:
    """`exit.json` as it was written: its content and its times (accessed, changed), in nanoseconds."""

    state: dict[str, Any]
    data: bytes
    times: tuple[int, int]


@dataclass
class RunFolder:
    """A locked run folder: its paths, the number of this attempt at the run (from 1), and how far it has come.

    Rank 0 has the lock; for the other ranks it is the place where the run is.
    """

    path: Path
    attempt: int
    step: int = 0
    """Steps trained so far, for `exit.json`."""
    lock: Lock | None = None
    running: RunningAttempt | None = field(default=None, init=False)
    """Entry of this attempt in the ledger, once it has begun."""
    reserved: storage.Reserved | None = None
    """Room for `exit.json` on a disk that is full by then."""
    before: _ExitFile | None = None
    """`exit.json` as this process found it."""

    def begin(self, first_step: int, *, layout: dict[str, int], config: str) -> None:
        """Note in the ledger that this attempt begins; rank 0 calls this.

        Args:
            first_step: steps of the checkpoint that it resumes from.
            layout: processes by axis.
            config: hash of what it is started with.
        """
        self.assert_mine()
        note_attempt(self.path, self.attempt)
        self.running = RunningAttempt(self.path, self.attempt, first_step, layout, config)

    def next_attempt(self, *, write: bool) -> None:
        """Count another attempt within this process, since steps are made again; rank 0 writes it down."""
        if not write:
            self.attempt += 1
            return
        self.assert_mine()
        self.attempt += 1
        note_attempt(self.path, self.attempt)
        if self.lock is not None:
            self.lock.note(self.attempt)
        if self.running is not None:
            self.running = self.running.rewound(self.attempt, self.step)

    def assert_mine(self) -> None:
        """A `MachineError` if the lock is no longer this process's: whoever has it now must not be written over."""
        assert self.lock is not None, "rank 0 alone writes"
        self.lock.assert_mine()

    def end(self, code: int, reason: str, *, agreed: bool = False) -> None:
        """Write how this attempt ended: `exit.json`, and its line in the ledger. For `agreed` see `Stopped`.

        The line has the goodput of the run so far, if the end was a peaceful one. After another one those who wait for
        this process may not wait until all metrics have been read.
        """
        if self.lock is None or not self.lock.is_mine():
            return  # who has it now writes there
        if self.running is None and self.before is not None and _leaves_end(self.before.state, code):
            self._put_exit(self.before.data)
            with suppress(OSError):  # the end of an earlier start, not of this one
                os.utime(RunFiles(self.path).exit, ns=self.before.times)
            return
        exit_state = {"attempt": self.attempt, "code": code, "reason": reason, "agreed": agreed, "step": self.step}
        try:
            self._put_exit(storage.json_bytes(exit_state))
        except OSError as error:
            why = error.strerror or str(error)
            alarm(
                "error:", f"{RunFiles(self.path).exit} cannot be written ({why}). It would say, code {code}: {reason}"
            )
        if self.running is None:
            return
        more: dict[str, Any] = {}
        if code in (EXIT_OK, EXIT_STOPPED):
            with suppress(Exception):  # the end of the attempt must be recorded whatever the files hold
                spent = goodput(self.path)
                more = {"goodput": spent.to_json()} if spent else {}
        self.running.end(code, reason, self.step, **more)

    def _put_exit(self, data: bytes) -> None:
        file = RunFiles(self.path).exit
        try:
            storage.put(file, data)
        except OSError:
            if self.reserved is None:
                raise
            self.reserved.become(file, data)
        if self.reserved is not None:
            self.reserved.remove()


def read_metrics(run: StrPath) -> list[dict[str, Any]]:
    """The metrics of every step, in order: one row a step, validation included.

    Of a step that was trained more than once the last attempt counts. A line that a crash cut short is skipped.
    """
    steps: dict[int, dict[str, Any]] = {}
    for row in storage.read_json_lines(RunFiles(Path(run)).metrics):
        step = row.get("step")
        if isinstance(step, int):
            before = steps.get(step, {})
            attempts = before.get("attempt", 0), row.get("attempt", 0)
            if attempts[0] <= attempts[1]:  # else of a process that had lost the lock and had not noticed yet
                steps[step] = {**before, **row} if attempts[0] == attempts[1] else row
    return [steps[step] for step in sorted(steps)]


def refuse_lost_checkpoints(run: Path) -> None:
    """A `UserError` where a run has saved and no checkpoint is there: its folder was cleaned, or a disk is missing."""
    files = RunFiles(run)
    saved = next((row["step"] for row in files.newest_rows() if "save_seconds" in row), None)
    if saved is not None:
        raise UserError(
            f"this run has saved step {saved} ({files.metrics.name}), but there is no checkpoint in "
            f"{files.checkpoints}; refusing to restart from random weights. Is a disk or symbolic link missing? "
            "Restore the checkpoints, or set run.dir to a new folder to train from scratch"
        )


def make_writable(path: Path) -> None:
    """Create the run folder with its id, or say in one sentence why it cannot be used.

    A process of a job, and a rank, never create it: theirs exists, or is gone for a while.

    Raises:
        UserError: it is a file.
        MachineError: it cannot be written to, or the folder that this process works for is not there.
    """
    wanted = run_identity.expected_id(path)
    run_identity.refuse_lost(path, wanted)
    if os.path.exists(path) and not os.path.isdir(path):  # pathlib's raise where a folder may not be searched
        raise UserError(f"run.dir {path} is a file; set run.dir to a folder")
    try:
        if wanted is None:
            path.mkdir(parents=True, exist_ok=True)
        probe = storage.temporary(path / "probe")
        probe.touch()
        links.remove(probe)
        run_identity.take_id(path)
    except OSError as error:
        raise MachineError(
            f"run.dir {path} cannot be written to ({error.strerror}); make it writable or set run.dir to another folder"
        ) from error


@contextmanager
def open_run(path: Path) -> Iterator[RunFolder]:
    """Lock a run folder for this process, and write `exit.json` when it ends.

    The attempt counts when it begins; one that is refused before leaves its number to the next.

    Raises:
        UserError: the folder is not writable, or another process trains in it.
    """
    make_writable(path)
    lock = Lock.take(path)
    try:
        for tmp in path.glob(f".*{storage.TEMPORARY_SUFFIX}"):
            storage.remove_if_stale(tmp)  # of an attempt that was killed while it wrote a small file
        record_missing_end(path)
        # The ledger counts, too: metrics of an attempt with a lower number than one before it would be skipped.
        attempt = max(lock.attempt, last_begun(path) + 1)
        folder = RunFolder(path, attempt, lock=lock, reserved=storage.Reserved(RunFiles(path).exit_room))
        lock.note(folder.attempt)
        folder.before = _take_exit(path)
        code, reason, agreed = EXIT_OK, "done", True
        try:
            yield folder
        except BaseException as error:
            code, reason = exit_code(error), end_reason(error)
            agreed = isinstance(error, UnsavedError) or (isinstance(error, Stopped) and error.agreed)
            raise
        finally:
            with suppress(OSError):  # a full disk, of which the exception speaks already
                folder.end(code, reason, agreed=agreed)
    finally:
        lock.release()


def _take_exit(run: Path) -> _ExitFile | None:
    """Remove `exit.json`, and return what it was; None without one, or for a damaged one."""
    files, before = RunFiles(run), None
    if state := files.exit_state():
        with suppress(OSError):
            stat = files.exit.stat()
            before = _ExitFile(state, files.exit.read_bytes(), (stat.st_atime_ns, stat.st_mtime_ns))
    links.remove(files.exit, missing_ok=True)
    return before


def _leaves_end(state: Mapping[str, Any], code: int) -> bool:
    """True if `exit.json` of a run that is done or stopped stays as it is, since a start by hand was refused.

    The processes of a job always write it: the job learns from there why it was refused.
    """
    in_job = any(os.environ.get(name) for name in _OF_A_JOB)
    return (
        code == EXIT_REFUSED and state.get("code") in (EXIT_OK, EXIT_STOPPED) and bool(state.get("step")) and not in_job
    )


def note_end(run: Path, end: BaseException, start: float) -> None:
    """Note why a run ended that could not note it itself: it had no folder yet, or nothing of it ran any more.

    Args:
        run: folder.
        end: what ended it.
        start: when the command was started, in seconds since 1970.
    """
    if exit_code(end) == EXIT_SUPERSEDED:
        return  # the files are the later attempt's
    if not RunFiles(run).exit_state(since=start) and _leaves_end(RunFiles(run).exit_state(), exit_code(end)):
        return
    state = RunFiles(run).exit_state(since=start)
    beat = read_beat(run)
    step = beat.step - 1 if beat is not None and beat.step is not None and beat.time >= start else None
    with suppress(OSError):  # a full disk, say
        code, reason = exit_code(end), end_reason(end)
        how = {"code": code, "reason": reason, "agreed": isinstance(end, Stopped) and end.agreed}
        storage.put_json(RunFiles(run).exit, {"attempt": last_attempt(run), "step": step, **state, **how})
        correct_end(run, start, code, reason)


@contextmanager
def no_trace_if_refused(run: Path) -> Iterator[None]:
    """Remove a run folder that was made inside where what was started is refused (exit code 2) before it began.

    It stays where there is more in it than the files of a start, or where the message names logs in it.
    """
    made = [folder for folder in (run, *run.parents) if not os.path.lexists(folder)]
    try:
        yield
    except (UserError, RankFailed) as error:
        names_logs = isinstance(error, RankFailed) and not error.shown
        if made and exit_code(error) == EXIT_REFUSED and not names_logs:
            with suppress(OSError, UserError):  # somebody else is in it
                _remove_start(run)
                for folder in made:
                    folder.rmdir()
        raise


def _remove_start(run: Path) -> None:
    """Remove the files of this process's start from a run folder in which nobody has begun anything."""
    lock = Lock.take(run)
    try:
        names = {path.name for path in run.iterdir()} - {RunFiles.lock, RunFiles.lock_guard}
        mine = all(line.get("pid") == os.getpid() for line in RunFiles(run).ledger_lines())
        if not mine or last_begun(run) or not names <= _OF_A_START:
            return
        for name in names:
            path = run / name
            links.remove_tree(path) if path.is_dir() else links.remove(path)
    finally:
        lock.release()
    links.remove(RunFiles(run).lock_guard, missing_ok=True)
