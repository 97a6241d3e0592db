"""Worker processes that take jobs one at a time, report progress, and are missed when they die.

Like a process pool, but it knows which job a dead worker held, and ends with its parent whatever ends that.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar, cast

from pipeline.errors import UserError

J = TypeVar("J")
R = TypeVar("R")
Progress = Callable[[int], None]
"""A worker calls this with an amount of work done since the last call."""

_PATIENCE_S = 10.0
"""How long workers may take to clean up before they are killed."""


class WorkerDied(UserError):
    """A worker process ended without an answer."""


class Workers(Generic[J, R]):
    """`count` processes that run jobs. Use as a context manager: leaving it ends the processes.

    Args:
        make: an importable function called once in every process; it returns the function that runs a job.
        args: its arguments.
        count: processes.
    """

    def __init__(self, make: Callable[..., Callable[[J, Progress], R]], args: tuple[Any, ...], count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._processes: dict[Connection, BaseProcess] = {}
        try:
            with _interrupts_wait():
                for _ in range(count):
                    ours, theirs = context.Pipe()
                    process = context.Process(target=_serve, args=(theirs, make, args), daemon=True)
                    process.start()
                    theirs.close()
                    self._processes[ours] = process
        except BaseException:  # an interrupt that waited, say: nobody will leave the context that was never entered
            self._end()
            raise

    def run(self, jobs: Sequence[J]) -> Iterator[tuple[J, int | None, R | None]]:
        """Run jobs; yields (job, amount of progress, None) and (job, None, result) as they come, in any order.

        Raises:
            WorkerDied: a process ended; the message names its job.
            Exception: what a job raised.
        """
        waiting = list(reversed(jobs))
        holding: dict[Connection, J] = {}
        for connection in self._processes:
            self._give(connection, waiting, holding)
        while holding:
            for ready in wait(list(holding)):
                connection = cast(Connection, ready)
                job = holding[connection]
                try:
                    kind, value = connection.recv()
                except (EOFError, ConnectionError):
                    raise WorkerDied(self._obituary(connection, job)) from None
                if kind == "progress":
                    yield job, value, None
                elif kind == "error":
                    raise value
                else:
                    del holding[connection]
                    self._give(connection, waiting, holding)
                    yield job, None, value

    def _give(self, connection: Connection, waiting: list[J], holding: dict[Connection, J]) -> None:
        if waiting:
            holding[connection] = job = waiting.pop()
            with contextlib.suppress(ConnectionError):  # it is dead; reading its answer finds that out
                connection.send(job)

    def _obituary(self, connection: Connection, job: J) -> str:
        process = self._processes[connection]
        process.join(_PATIENCE_S)
        code = process.exitcode
        how = f"exit code {code}"
        if code is not None and code < 0:
            how = signal.Signals(-code).name
        memory = " (the system sends it when memory runs out; fewer data.preprocess.workers need less)"
        return (
            f"worker process {process.pid} died by {how}{memory if how == 'SIGKILL' else ''} while it held {job}; "
            "what was finished before stays, the same command goes on from there"
        )

    def __enter__(self) -> Workers[J, R]:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        for connection, process in self._processes.items():
            connection.close()  # an idle worker leaves by itself
            if process.is_alive():
                process.terminate()
        for process in self._processes.values():
            process.join(_PATIENCE_S)
            if process.is_alive():
                process.kill()
                process.join()


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Ctrl-C comes afterwards; processes started inside never get it (they inherit the mask), the parent ends them."""
    # The first process of a program starts the tracker of resources, and that unblocks the signal.
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


def _serve(connection: Connection, make: Callable[..., Callable[[Any, Progress], Any]], args: tuple[Any, ...]) -> None:
    """What a worker process does."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # blocked so far
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that files being written are removed

    def progress(amount: int) -> None:
        connection.send(("progress", amount))

    # A closed pipe means that the parent is gone or wants no more.
    with contextlib.suppress(EOFError, ConnectionError):
        run: Callable[[Any, Progress], Any] | None = None
        while True:
            job = connection.recv()
            try:
                run = run or make(*args)
                result = run(job, progress)
            except ConnectionError:
                return
            except Exception as error:
                if not isinstance(error, UserError):
                    error.add_note(f"in a worker process, running {job}:\n{traceback.format_exc()}")
                connection.send(("error", error))
            else:
                connection.send(("done", result))
