"""The units of a run on worker processes: what failed is tried again, what others hold is waited for or left."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from pipeline.common import storage
from pipeline.common.console import say, verbatim, warn
from pipeline.common.errors import UserError
from pipeline.common.format import counted
from pipeline.config.root import Config
from pipeline.data.preprocess.tokenize_unit import (
    Busy,
    EngineRejected,
    UnitDone,
    UnitJob,
    WorkerContext,
    make_tokenize,
    read_condemned,
)
from pipeline.data.sources.records import EMPTY
from pipeline.data.tokenization.engine_choice import EngineChoice
from pipeline.data.tokenization.engines import EngineDiffers
from pipeline.data.work.leases import PATIENCE_S
from pipeline.data.work.progress import ProgressLine
from pipeline.data.work.worker_pool import Advanced, Done, Lost, Silent, Workers, can_fork

FAILURES_FILE = "failures.jsonl"
"""In a source's folder: one line for every time that a unit failed."""
_GIVEN_UP_AT_MOST = 10
"""Units given up after which the command stops: the fault is not theirs."""
_LOOK_AGAIN_S = 1.0
_SAY_AGAIN_S = 60.0
_SHOWN = 5
_WARN_AFTER_RECORDS = 1000


@dataclass
class Outcome:
    """Outcome of tokenizing units.

    Attributes:
        units: units that this run made, wholly or in part.
        failed: units that were given up, with how they failed last.
        condemned: the engine gave other ids than `tokenizers`, so its units have to be made again.
        damaged: whether files were found to be damaged.
        held: units that were left to other commands, which have them.
    """

    units: int = 0
    failed: list[tuple[UnitJob, str]] = field(default_factory=list)
    condemned: str | None = None
    damaged: bool = False
    held: int = 0


def worker_count(config: Config, jobs: int) -> int:
    """Number of worker processes for a number of jobs."""
    return min(config.data.preprocess.workers or len(os.sched_getaffinity(0)), jobs)


def tokenize_units(
    config: Config,
    console: Console,
    jobs: Sequence[UnitJob],
    units: int,
    context: WorkerContext,
    choose_engine: Callable[[], EngineChoice],
    *,
    waits: bool = True,
) -> Outcome:
    """Make all of the units, or find out which cannot be made.

    Args:
        config: the run.
        console: where progress goes.
        jobs: the units that are not done.
        units: of all sources, done ones too.
        context: of the workers.
        choose_engine: opens in `context` what computes the ids.
        waits: for units that other commands have; else they are left to them when no other is free.

    Raises:
        UserError: something in the config or the data has to be fixed first.
        OSError: the disk is full or read-only, say.
    """
    total_bytes = sum(job.unit.bytes for job in jobs)
    # Forked workers have it open from the beginning; others take so long to start that it is chosen meanwhile.
    early = choose_engine() if can_fork() else None
    with Workers[UnitJob, UnitDone | Busy](make_tokenize, (context,), worker_count(config, len(jobs))) as workers:
        engine = early or choose_engine()
        with ProgressLine(console, total_bytes, len(jobs), units - len(jobs)) as line:
            run = _Run(config, console, line, workers, context.condemned, engine.name, waits=waits)
            return run.run([replace(job, engine=engine.which) for job in jobs])


class _Run:
    """One pool of workers and what happens in it."""

    def __init__(
        self,
        config: Config,
        console: Console,
        line: ProgressLine,
        workers: Workers[UnitJob, UnitDone | Busy],
        condemned: Path,
        engine: str,
        *,
        waits: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._line = line
        self._workers = workers
        self._condemned = condemned
        self._engine = engine
        self._waits = waits
        self._limit = config.data.preprocess.max_error_rate
        self._outcome = Outcome()
        self._records: Counter[str] = Counter()
        self._bad: Counter[str] = Counter()
        self._warned: set[str] = set()
        self._clock = clock
        self._waits_for: dict[tuple[str, str], tuple[float, float]] = {}
        """By holder and unit: since when, and when to say it again."""

    def run(self, jobs: Sequence[UnitJob]) -> Outcome:
        waiting: list[UnitJob] = list(jobs)
        while waiting:
            held: list[tuple[UnitJob, str]] = []
            made = self._outcome.units
            try:
                for event in self._workers.insist(waiting, lambda error: not _concerns_all(error)):
                    if isinstance(event, Done) and isinstance(event.result, Busy):
                        held.append((event.job, event.result.holder))
                        continue
                    self._handle(event)
                    if len(self._outcome.failed) >= _GIVEN_UP_AT_MOST:
                        return self._outcome
            except EngineDiffers as error:
                self._condemn(str(error))
                return self._outcome
            except EngineRejected as error:
                self._outcome.condemned = str(error)
                return self._outcome
            waiting = [job for job, _ in held]
            if not self._waits:
                # While this one made units, others may have died that held some. Else nothing has changed.
                if self._outcome.units > made:
                    continue
                self._outcome.held = len(held)
                return self._outcome
            self._say_waiting(held)
            if held:
                time.sleep(_LOOK_AGAIN_S)
        return self._outcome

    def _say_waiting(self, held: list[tuple[UnitJob, str]]) -> None:
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
            more = f"and for {counted(len(due) - _SHOWN, 'more unit')}; each " if len(due) > _SHOWN else ""
            say(
                self._console,
                f"{more or 'it '}is taken over when its process has ended, or after {PATIENCE_S:.0f} s without a "
                "sign of life, if the process is stopped or on another machine",
            )
        self._waits_for = waits

    def _handle(
        self, event: Advanced[UnitJob] | Done[UnitJob, UnitDone | Busy] | Lost[UnitJob] | Silent[UnitJob]
    ) -> None:
        if isinstance(event, Advanced):
            self._line.advance(event.amount)
        elif isinstance(event, Done):
            assert isinstance(event.result, UnitDone)
            self._outcome.units += event.result.made > 0
            # Bytes that were only estimated, or skipped, count now.
            self._line.advance(event.job.unit.bytes - event.advanced)
            self._line.unit_done(event.result.tokens)
            self._outcome.damaged |= bool(event.result.damaged)
            for damaged in event.result.damaged:
                warn(self._console, f"{event.job.unit.source}: {damaged}")
            self._watch_rejected(event.job, event.result)
        elif isinstance(event, Silent):
            say(self._console, str(event))
        else:
            self._lost(event)

    def _lost(self, event: Lost[UnitJob]) -> None:
        record = {
            "unit": event.job.unit.index,
            "attempt": event.attempt,
            "how": event.how,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": time.time(),
        }
        storage.add_json_line(event.job.source.folder / FAILURES_FILE, record)
        say(self._console, f"{event}, {'it is given up' if event.is_last else 'it will be tried again'}")
        if event.is_last:
            if event.details:
                verbatim(self._console, event.details)
            self._outcome.failed.append((event.job, event.how))

    def _condemn(self, evidence: str) -> None:
        storage.put_json(self._condemned, read_condemned(self._condemned) | {self._engine: evidence})
        self._outcome.condemned = self._engine
        say(self._console, f"{evidence}; all output of {self._engine} is made again with another engine")

    def _watch_rejected(self, job: UnitJob, done: UnitDone) -> None:
        """Say once, while there is time to stop, that a source has more bad records than are allowed."""
        source = job.source.folder.name
        self._records[source] += done.records
        self._bad[source] += sum(count for reason, count in done.rejected.items() if reason != EMPTY)
        records, bad = self._records[source], self._bad[source]
        if records >= _WARN_AFTER_RECORDS and bad > self._limit * records and source not in self._warned:
            self._warned.add(source)
            reasons = ", ".join(f"{count} {reason}" for reason, count in done.rejected.items() if reason != EMPTY)
            warn(
                self._console,
                f"{bad} of the first {records} records of {source} are bad, more than "
                f"data.preprocess.max_error_rate {self._limit} allows over all records (in {job}: {reasons or 'none'})",
            )


def _concerns_all(error: Exception) -> bool:
    """Tell whether other units would fail in the same way: the disk is full, say."""
    everywhere = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE}
    if isinstance(error, OSError):
        return error.errno in everywhere
    return isinstance(error, EngineDiffers | EngineRejected | UserError)
