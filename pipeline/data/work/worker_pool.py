"""Worker processes that take jobs one at a time, report progress, and are missed when they die.

Like a process pool, but it knows which job a dead worker held, and ends with its parent whatever ends that.

A parent of one thread forks its workers, which then have all that it has imported and opened. With more threads, one of
them may hold a lock at that moment, which would stay locked in the worker: then a new interpreter is spawned for each.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

from pipeline.common import process_identity
from pipeline.common.errors import UserError
from pipeline.common.signals import ignore
from pipeline.data.sources import foreign_parser
from pipeline.data.work.worker_watch import Parsed, WorkerWatch, die_with, new_slot

J = TypeVar("J")
R = TypeVar("R")
Progress = Callable[[int], None]
"""A worker calls this with an amount of work done since the last call."""

ATTEMPTS = 3
"""A job that came to nothing so often is given up."""
SILENT_S = 120.0
"""A worker that has not been heard of for so long is told of, and again after each time twice as long."""
_LOOK_S = 1.0
_PATIENCE_S = 10.0
"""Seconds that a worker may take to end after it closed its pipe."""
_LEAVE_S = 3.0
"""Seconds that all workers together may take to clean up before they are killed."""


class _Abandoned(BaseException):
    """The pipe to the parent is closed. No `Exception`: a job must not take it for an error of its own."""


@dataclass(frozen=True)
class Advanced(Generic[J]):
    """A job got on by some amount."""

    job: J
    amount: int


@dataclass(frozen=True)
class Done(Generic[J, R]):
    """A job has a result."""

    job: J
    result: R
    advanced: int = field(default=0, compare=False)
    """Sum of the amounts of its `Advanced`; of this attempt, if there were several. So below."""


@dataclass(frozen=True)
class Failed(Generic[J]):
    """A job raised an exception."""

    job: J
    error: Exception
    advanced: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Died(Generic[J]):
    """The process that held a job ended without an answer; another one was started in its place."""

    job: J
    how: str
    advanced: int = field(default=0, compare=False)
    killed: bool = False
    """Its parser was above a bound (`worker_watch`)."""
    parsed: Parsed | None = None
    """The call of a parser that it was in."""


@dataclass(frozen=True)
class Silent(Generic[J]):
    """The process that holds a job has not been heard of for long."""

    job: J
    pid: int
    seconds: float
    is_stopped: bool
    """By SIGSTOP, say."""
    parsed: Parsed | None = None
    """The call of a parser that it is in."""

    def __str__(self) -> str:
        why = f"; it is stopped, `kill -CONT {self.pid}` continues it" if self.is_stopped else ""
        silent = f"worker process {self.pid} has shown no sign of life for {self.seconds:.0f} s"
        inside = f", in {self.parsed}" if self.parsed else ""
        return f"{silent} while it held {self.job}{inside}{why}"


@dataclass(frozen=True)
class Lost(Generic[J]):
    """An attempt at a job came to nothing."""

    job: J
    how: str
    attempt: int
    """Its number, from 1."""
    details: str = ""
    is_hopeless: bool = False
    """Another attempt would come to the same."""

    def __str__(self) -> str:
        return f"{self.how} while it held {self.job}; attempt {self.attempt} of {ATTEMPTS}"

    @property
    def is_last(self) -> bool:
        """Tell whether the job is given up."""
        return self.is_hopeless or self.attempt == ATTEMPTS


@dataclass
class _LostJob(Generic[J]):
    """A job that came to nothing before."""

    job: J
    """Kept, so that its id stays its own."""
    attempts: int = 0
    is_careful: bool = False
    """Its worker was lost inside of a parser: its records are handed over one at a time."""


Event = Advanced[J] | Done[J, R] | Failed[J] | Died[J] | Silent[J]


class Workers(Generic[J, R]):
    """`count` processes that run jobs. Use as a context manager: leaving it ends the processes.

    Args:
        make: an importable function called once in every process; it returns the function that runs a job.
        args: its arguments. A forked process has them as they are, a spawned one pickled copies.
        count: processes.
        clock: seconds of a clock that never goes back.
    """

    def __init__(
        self,
        make: Callable[..., Callable[[J, Progress], R]],
        args: tuple[Any, ...],
        count: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._make = make
        self._args = args
        self._processes: dict[Connection, BaseProcess] = {}
        self._waiting: deque[J] = deque()
        self._lost: dict[int, _LostJob[J]] = {}
        # By id: a job has no hash where the config in it holds lists.
        self._watches: dict[Connection, WorkerWatch] = {}
        try:
            with _interrupts_wait():
                for _ in range(count):
                    self._start()
        except BaseException:  # an interrupt that waited, say: nobody will leave the context that was never entered
            self._end()
            raise

    def _start(self) -> Connection:
        ours, theirs = multiprocessing.Pipe()
        slot = new_slot()
        self._processes[ours] = self._fork(theirs, ours, slot) if can_fork() else self._spawn(theirs, slot)
        self._watches[ours] = WorkerWatch(slot)
        theirs.close()
        return ours

    def _spawn(self, theirs: Connection, slot: ctypes.Array[ctypes.c_char]) -> BaseProcess:
        spawn = multiprocessing.get_context("spawn")
        args = (theirs, os.getpid(), slot, self._make, self._args)
        process = spawn.Process(target=_serve, args=args, daemon=True)
        with _no_main_module():
            process.start()
        return process

    def _fork(self, theirs: Connection, ours: Connection, slot: ctypes.Array[ctypes.c_char]) -> BaseProcess:
        # Signals wait until the process has handlers of its own.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            args = (mask, [*self._processes, ours], theirs, os.getpid(), slot, self._make, self._args)
            process = multiprocessing.get_context("fork").Process(target=_serve_forked, args=args, daemon=True)
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return process

    def add(self, job: J) -> None:
        """Give another job to the `run` that is under way; it comes last."""
        self._waiting.append(job)

    def run(self, jobs: Iterable[J]) -> Iterator[Event[J, R]]:
        """Run jobs and what is added meanwhile; yields what happens, of all jobs in any order."""
        self._waiting.extend(jobs)
        holding: dict[Connection, J] = {}
        advanced: Counter[Connection] = Counter()
        heard: dict[Connection, float] = {}
        limits: dict[Connection, float] = {}
        looked = self._clock()
        while True:
            for connection in self._processes:
                if self._waiting and connection not in holding:
                    holding[connection] = job = self._waiting.popleft()
                    heard[connection], limits[connection] = self._clock(), SILENT_S
                    with contextlib.suppress(ConnectionError):  # it is dead; reading its answer finds that out
                        lost = self._lost.get(id(job))
                        connection.send((job, lost is not None and lost.is_careful))
            if not holding:
                return
            ready_ones = wait(list(holding), _LOOK_S)
            if self._clock() - looked >= _LOOK_S:
                looked = self._clock()
                self._kill_above_bounds(holding.keys())
            for connection in holding.keys() - set(ready_ones):
                silent = self._clock() - heard[connection]
                if silent >= limits[connection]:
                    limits[connection] = 2 * silent
                    pid = self._processes[connection].pid or 0
                    state = process_identity.process(pid)
                    is_stopped = state is not None and state[0] in "Tt"
                    yield Silent(holding[connection], pid, silent, is_stopped, self._watches[connection].parsed)
            for ready in ready_ones:
                connection = cast(Connection, ready)
                job = holding[connection]
                heard[connection], limits[connection] = self._clock(), SILENT_S
                try:
                    kind, value = connection.recv()
                except (EOFError, OSError):  # it is gone, perhaps in the middle of an answer
                    del holding[connection]
                    yield self._died(connection, job, advanced.pop(connection, 0))
                    continue
                if kind == "progress":
                    advanced[connection] += value
                    yield Advanced(job, value)
                    continue
                del holding[connection]
                amount = advanced.pop(connection, 0)
                yield Failed(job, value, amount) if kind == "error" else Done(job, value, amount)

    def retry(
        self, jobs: Iterable[J], passes: Callable[[Exception], bool] = lambda _: False
    ) -> Iterator[Advanced[J] | Done[J, R] | Lost[J] | Silent[J]]:
        """`run`, where a job whose process died is run again, up to `ATTEMPTS` times in all.

        What the lost attempt had advanced is taken back by a negative amount.

        Args:
            jobs: to run.
            passes: of an exception that a job raised: whether the job is to be run again as if its process had died.

        Raises:
            Exception: a job raised it, and it does not pass.
        """
        for event in self.run(jobs):
            if isinstance(event, Advanced | Done | Silent):
                yield event
                continue
            known = self._lost.setdefault(id(event.job), _LostJob(event.job))
            hopeless = False
            if isinstance(event, Died):
                how, details = event.how, ""
                if event.parsed is not None:
                    known.is_careful = True
                    hopeless = event.killed and not event.parsed.is_batch
            elif passes(event.error):
                how = f"{type(event.error).__name__}: {event.error}"
                details = "\n".join(getattr(event.error, "__notes__", []))
            else:
                raise event.error
            known.attempts += 1
            lost = Lost(event.job, how, known.attempts, details, hopeless)
            if lost.is_last:
                del self._lost[id(event.job)]
            else:
                self.add(event.job)
            yield Advanced(event.job, -event.advanced)
            yield lost

    def _kill_above_bounds(self, holding: Iterable[Connection]) -> None:
        """End workers whose parser takes more than any record needs. Reading their pipes finds that out."""
        for connection in holding:
            watch, process = self._watches[connection], self._processes[connection]
            above = watch.is_above(process.pid or 0)
            if above and not watch.killed_for:
                watch.killed_for = above
                process.kill()

    def _died(self, connection: Connection, job: J, advanced: int) -> Died[J]:
        watch = self._watches.pop(connection)
        parsed = watch.parsed
        how = self._reap(connection)
        if parsed is None:
            return Died(job, how, advanced)
        if watch.killed_for:
            how = f"{parsed} took {watch.killed_for}: its worker process was killed"
        else:
            how = f"{how} in {parsed}"
        if parsed.records and not parsed.is_batch:
            how += f"; `skip_records: [{parsed.records[0]!r}]` of the source leaves that record out"
        return Died(job, how, advanced, bool(watch.killed_for), parsed)

    def _reap(self, connection: Connection) -> str:
        """Start a process in place of one that is gone; how that one ended."""
        process = self._processes.pop(connection)
        connection.close()
        process.join(_PATIENCE_S)
        code = process.exitcode
        if code is None:
            process.kill()
            process.join()
        with _interrupts_wait():
            self._start()
        if code is None:
            return f"worker process {process.pid} closed its pipe, did not end within {_PATIENCE_S:g} s, and was killed"
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        memory = " (sent by the system when memory runs out; fewer data.preprocess.workers need less)"
        return f"worker process {process.pid} died by {how}{memory if how == 'SIGKILL' else ''}"

    def __enter__(self) -> Workers[J, R]:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        for connection, process in self._processes.items():
            connection.close()  # an idle worker leaves by itself
            if process.is_alive():
                process.terminate()
        # One that is inside of C code handles no signal. The next start removes the files that it leaves.
        end = time.monotonic() + _LEAVE_S
        for process in self._processes.values():
            process.join(max(0.0, end - time.monotonic()))
        for process in self._processes.values():
            if process.is_alive():
                process.kill()
        for process in self._processes.values():
            process.join()


def can_fork() -> bool:
    """Tell whether this process has one thread, so that no other can hold a lock while it is copied."""
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:  # not Linux
        return False


@contextlib.contextmanager
def _no_main_module() -> Iterator[None]:
    """A spawned process runs the main module again: the command line with all its packages. Workers need none of it."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Ctrl-C comes afterwards; processes started inside never get it (they inherit the mask), the parent ends them."""
    if not can_fork():
        # The first process that a program spawns starts the tracker of resources, and that unblocks the signal.
        resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    came: list[int] = []
    in_main = threading.current_thread() is threading.main_thread()
    # Another thread, of the bar say, may take the signal all the same; the main thread runs the handler for it.
    handler = signal.signal(signal.SIGINT, lambda number, _: came.append(number)) if in_main else None
    try:
        yield
    finally:
        if in_main:
            signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if came:
            signal.raise_signal(signal.SIGINT)


def _serve_forked(
    mask: set[signal.Signals],
    of_parent: list[Connection],
    connection: Connection,
    parent: int,
    slot: ctypes.Array[ctypes.c_char],
    make: Callable[..., Callable[[Any, Progress], Any]],
    args: tuple[Any, ...],
) -> None:
    """`_serve` in a copy of the parent, of whose pipes and handlers nothing may be left.

    Args:
        mask: signals that were blocked before this process was forked.
        of_parent: the parent's ends of all pipes, its own too: as long as one is open here, it is not seen to close.
        connection: the end of this process.
        parent: as in `_serve`.
        slot: as in `_serve`.
        make: as in `Workers`.
        args: as in `Workers`.
    """
    for each in of_parent:
        each.close()
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    _set_handlers()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    _serve(connection, parent, slot, make, args)


def _set_handlers() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # blocked so far
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a terminal tells all its processes; the parent ends this one
    signal.signal(signal.SIGTERM, _leave)  # so that files being written are removed


def _serve(
    connection: Connection,
    parent: int,
    slot: ctypes.Array[ctypes.c_char],
    make: Callable[..., Callable[[Any, Progress], Any]],
    args: tuple[Any, ...],
) -> None:
    """Main loop of a worker process.

    Args:
        connection: to the parent.
        parent: its process id.
        slot: where it reads which record a parser has.
        make: as in `Workers`.
        args: as in `Workers`.
    """
    die_with(parent)
    foreign_parser.share(slot)
    # The processes are the parallelism. One thread of its own, and not none: `tokenizers` takes a fifth less time in a
    # thread, because that has another heap than the main one, which glibc keeps in worse order.
    os.environ["RAYON_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    _set_handlers()

    def progress(amount: int) -> None:
        try:
            connection.send(("progress", amount))
        except ConnectionError:
            raise _Abandoned from None

    # A closed pipe means that the parent is gone or wants no more. What a job raises never gets here.
    with contextlib.suppress(_Abandoned, EOFError, ConnectionError):
        run: Callable[[Any, Progress], Any] | None = None
        with contextlib.suppress(Exception):  # the first job will say why
            run = make(*args)
        gc.freeze()  # what is here now stays: the collector need not look at it again and again
        while True:
            job, careful = connection.recv()
            foreign_parser.set_careful(careful)
            try:
                run = run or make(*args)
                result = run(job, progress)
            except Exception as error:
                if not isinstance(error, UserError):
                    error.add_note(f"in a worker process, running {job}:\n{traceback.format_exc()}")
                _send_error(connection, error)
            else:
                connection.send(("done", result))
    ignore(signal.SIGTERM)  # it leaves by itself, and quietly


def _leave(*_: object) -> None:
    ignore(signal.SIGTERM)  # a second one would only interrupt the leaving
    sys.exit(1)


def _send_error(connection: Connection, error: Exception) -> None:
    try:
        data = pickle.dumps(("error", error))
        pickle.loads(data)
    except Exception:  # exceptions of other packages are not always made to be sent
        plain = RuntimeError(f"{type(error).__name__}: {error}")
        plain.add_note("\n".join(getattr(error, "__notes__", [])))
        data = pickle.dumps(("error", plain))
    connection.send_bytes(data)
