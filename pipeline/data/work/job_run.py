"""Jobs of a stage on worker processes: what failed is tried again, what others hold is waited for or left."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rich.console import Console

from pipeline.common import storage
from pipeline.common.console import say, verbatim
from pipeline.common.errors import MachineError, UserError
from pipeline.common.format import counted
from pipeline.config.root import Config
from pipeline.data.work.job import Busy, R, StageJob, make_worker
from pipeline.data.work.leases import PATIENCE_S
from pipeline.data.work.progress import ProgressLine
from pipeline.data.work.worker_pool import Advanced, Done, Lost, Silent, Workers, can_fork

J = TypeVar("J", bound=StageJob[Any])

FAILURES_FILE = "failures.jsonl"
"""In a source's folder: one line for every time that a job failed."""
GIVEN_UP_AT_MOST = 10
"""Jobs given up after which the command stops: the fault is not theirs."""
_LOOK_AGAIN_S = 1.0
_SAY_AGAIN_S = 60.0
_SHOWN = 5


@dataclass
class JobOutcome(Generic[J]):
    """Outcome of a run of jobs.

    Attributes:
        made: jobs that this run did.
        failed: jobs that were given up, with how they failed last, and after how many attempts.
        held: jobs that were left to other commands, which have them.
    """

    made: int = 0
    failed: list[tuple[J, str]] = field(default_factory=list)
    held: int = 0

    def check(self, noun: str, of: str, consequence: str) -> None:
        """Refuse to continue without jobs that failed; the arguments are those of `failure`.

        Raises:
            MachineError: jobs failed.
        """
        if self.failed:
            raise MachineError(failure(noun, of, self.failed, consequence))


def failure(noun: str, of: str, failed: Sequence[tuple[object, str]], consequence: str) -> str:
    """Message about jobs that failed; empty if none did.

    Args:
        noun: of a job.
        of: what they are of.
        failed: jobs, and how they failed.
        consequence: sentence that says what cannot be done without them.
    """
    if not failed:
        return ""
    lines = "".join(f"  {job}: {how}\n" for job, how in failed)
    return (
        f"{counted(len(failed), noun)} of {of} failed:\n{lines}{consequence}. What is complete is kept; fix the "
        "cause, and run the same command to resume"
    )


class JobRun(Generic[J, R]):
    """Runs jobs of a stage on one pool of workers. Subclasses follow what happens.

    Args:
        console: where progress goes.
        shared: as `StageJob.run` takes it; workers that are not forked get a pickled copy.
        workers: processes at most.
        verb: participle of what is done, for messages: `shuffling`.
        noun: of a job, for messages.
        waits: for jobs that other commands have; else they are left to them when no other is free.
        leased: each job has a lease of its own. Without, the caller has one for all of them: those of a command that
            died would be waited for a second time.
        clock: seconds of a clock that never goes back.
    """

    def __init__(
        self,
        console: Console,
        shared: Any,
        workers: int,
        verb: str,
        noun: str = "unit",
        *,
        waits: bool = True,
        leased: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.outcome = JobOutcome[J]()
        self._console = console
        self._shared = shared
        self._count = workers
        self._verb = verb
        self._noun = noun
        self._waits = waits
        self._leased = leased
        self._clock = clock
        self._waits_for: dict[tuple[str, str], tuple[float, float]] = {}
        """By holder and job: since when, and when to say it again."""

    def run(self, jobs: Sequence[J], done_before: int = 0) -> JobOutcome[J]:
        """Run the jobs, and those again that others had and left.

        Args:
            jobs: without receipts.
            done_before: jobs of the pass that are complete, for the message.

        Raises:
            Exception: what a job raised, if it concerns all.
        """
        if not jobs:
            return self.outcome
        # Forked workers have what was opened before; others take so long to start that it is opened meanwhile.
        ready = self.prepare(jobs) if can_fork() else None
        total = sum(job.bytes for job in jobs)
        with Workers[J, R | Busy](make_worker, (self._shared, self._leased), min(self._count, len(jobs))) as workers:
            ready = ready or self.prepare(jobs)
            with ProgressLine(self._console, total, len(jobs), done_before, self._verb, self._noun) as self._line:
                self._run_all(ready, workers)
        return self.outcome

    def prepare(self, jobs: Sequence[J]) -> Sequence[J]:
        """Open what workers need; returns the jobs as they are to be run."""
        return jobs

    def done(self, job: J, result: R) -> int:
        """Look at the result of a job; returns the tokens that it made, for progress."""
        return 0

    def concerns_all(self, error: Exception) -> bool:
        """Tell whether other jobs would fail in the same way: the disk is full, say."""
        everywhere = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE}
        return error.errno in everywhere if isinstance(error, OSError) else isinstance(error, UserError)

    def _run_all(self, jobs: Sequence[J], workers: Workers[J, R | Busy]) -> None:
        outcome, waiting = self.outcome, list(jobs)
        while waiting:
            held: list[tuple[J, str]] = []
            made = outcome.made
            for event in workers.retry(waiting, lambda error: not self.concerns_all(error)):
                if isinstance(event, Advanced):
                    self._line.advance(event.amount)
                elif isinstance(event, Done):
                    if isinstance(event.result, Busy):
                        held.append((event.job, event.result.holder))
                        continue
                    # Bytes that were only estimated, or skipped, count now.
                    self._line.advance(event.job.bytes - event.advanced)
                    self._line.unit_done(self.done(event.job, event.result))
                    outcome.made += event.result.made > 0
                elif isinstance(event, Silent):
                    say(self._console, str(event))
                else:
                    self._lost(event)
                if len(outcome.failed) >= GIVEN_UP_AT_MOST:
                    return
            waiting = [job for job, _ in held]
            if not self._waits:
                # While this one made some, others may have died that held some. Else nothing has changed.
                if outcome.made > made:
                    continue
                outcome.held = len(held)
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
        job = event.job
        record = {
            "unit" if isinstance(job.name, int) else "job": job.name,
            "attempt": event.attempt,
            "how": event.how,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": time.time(),
        }
        storage.add_json_line(job.folder / FAILURES_FILE, record)
        say(self._console, f"{event}, {'it is given up' if event.is_last else 'it will be tried again'}")
        if event.is_last:
            if event.details:
                verbatim(self._console, event.details)
            self.outcome.failed.append((job, f"{event.how} ({counted(event.attempt, 'attempt')})"))


def worker_count(config: Config, jobs: int = 2**31) -> int:
    """Number of worker processes, of which no more are needed than there are jobs."""
    return min(config.data.preprocess.workers or len(os.sched_getaffinity(0)), jobs)
