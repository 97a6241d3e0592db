"""Jobs of a stage on worker processes: what failed is tried again, what others hold is waited for or left."""

from __future__ import annotations

import errno
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

from rich.console import Console

from pipeline.common import storage
from pipeline.common.console import say, verbatim
from pipeline.common.errors import UserError
from pipeline.common.format import counted
from pipeline.data.work.leases import PATIENCE_S
from pipeline.data.work.progress import ProgressLine
from pipeline.data.work.worker_pool import Advanced, Done, J, Lost, R, Silent, Workers

FAILURES_FILE = "failures.jsonl"
"""In a source's folder: one line for every time that a job failed."""
GIVEN_UP_AT_MOST = 10
"""Jobs given up after which the command stops: the fault is not theirs."""
_LOOK_AGAIN_S = 1.0
_SAY_AGAIN_S = 60.0
_SHOWN = 5


@dataclass(frozen=True)
class Busy:
    """Another process has the job."""

    holder: str


class JobRun(ABC, Generic[J, R]):
    """One pool of workers and what happens in it. A job gives its result, or `Busy`.

    Attributes:
        made: jobs that this run did.
        failed: jobs that were given up, with how they failed last, and after how many attempts.
        held: jobs that were left to other commands, which have them.

    Args:
        console: where progress goes.
        line: of the progress.
        workers: that run the jobs.
        waits: for jobs that other commands have; else they are left to them when no other is free.
        noun: of a job, for messages.
        clock: seconds of a clock that never goes back.
    """

    def __init__(
        self,
        console: Console,
        line: ProgressLine,
        workers: Workers[J, R | Busy],
        *,
        waits: bool,
        noun: str = "unit",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.made = 0
        self.failed: list[tuple[J, str]] = []
        self.held = 0
        self._console = console
        self._line = line
        self._workers = workers
        self._waits = waits
        self._noun = noun
        self._clock = clock
        self._waits_for: dict[tuple[str, str], tuple[float, float]] = {}
        """By holder and job: since when, and when to say it again."""

    @abstractmethod
    def finished(self, job: J, result: R, advanced: int) -> bool:
        """Take the result of a job, and what it has advanced; returns whether this run made it, and did not find it."""

    @abstractmethod
    def failures(self, job: J) -> tuple[Path, dict[str, Any]]:
        """Folder whose `FAILURES_FILE` lists a failed job, and the keys that name it there."""

    def concerns_all(self, error: Exception) -> bool:
        """Tell whether other jobs would fail in the same way: the disk is full, say."""
        everywhere = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE}
        return error.errno in everywhere if isinstance(error, OSError) else isinstance(error, UserError)

    def run_all(self, jobs: Sequence[J]) -> None:
        """Run the jobs, and those again that others had and left.

        Raises:
            Exception: what a job raised, if it concerns all.
        """
        waiting = list(jobs)
        while waiting:
            held: list[tuple[J, str]] = []
            made = self.made
            for event in self._workers.insist(waiting, lambda error: not self.concerns_all(error)):
                if isinstance(event, Advanced):
                    self._line.advance(event.amount)
                elif isinstance(event, Done):
                    if isinstance(event.result, Busy):
                        held.append((event.job, event.result.holder))
                    else:
                        self.made += self.finished(event.job, event.result, event.advanced)
                elif isinstance(event, Silent):
                    say(self._console, str(event))
                else:
                    self._lost(event)
                if len(self.failed) >= GIVEN_UP_AT_MOST:
                    return
            waiting = [job for job, _ in held]
            if not self._waits:
                # While this one made some, others may have died that held some. Else nothing has changed.
                if self.made > made:
                    continue
                self.held = len(held)
                return
            self._say_waiting(held)
            if held:
                time.sleep(_LOOK_AGAIN_S)

    def _say_waiting(self, held: list[tuple[J, str]]) -> None:
        """Say what is waited for, at once and again after each time twice as long."""
        now = self._clock()
        waits = {(holder, str(job)): self._waits_for.get((holder, str(job)), (now, now)) for job, holder in held}
        due = [(key, since) for key, (since, again) in waits.items() if now >= again]
        for (holder, job), since in due:
            waits[holder, job] = (since, now + max(now - since, _SAY_AGAIN_S))
        for (holder, job), since in due[:_SHOWN]:
            so_far = f" for {now - since:.0f} s" if now > since else ""
            say(self._console, f"waiting{so_far} for {job}, which is held by {holder}")
        if due:
            rest = len(due) - _SHOWN
            more = f"and for {counted(rest, f'more {self._noun}')}; each " if rest > 0 else ""
            say(
                self._console,
                f"{more or 'it '}is taken over when its process has ended, or after {PATIENCE_S:.0f} s without a "
                "sign of life, if the process is stopped or on another machine",
            )
        self._waits_for = waits

    def _lost(self, event: Lost[J]) -> None:
        folder, name = self.failures(event.job)
        record = {
            **name,
            "attempt": event.attempt,
            "how": event.how,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": time.time(),
        }
        storage.add_json_line(folder / FAILURES_FILE, record)
        say(self._console, f"{event}, {'it is given up' if event.is_last else 'it will be tried again'}")
        if event.is_last:
            if event.details:
                verbatim(self._console, event.details)
            self.failed.append((event.job, f"{event.how} ({counted(event.attempt, 'attempt')})"))
