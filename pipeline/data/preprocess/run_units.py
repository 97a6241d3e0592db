"""The units of a run on worker processes: what failed is tried again, what others hold is waited for or left."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeline.common import storage
from pipeline.common.console import say, warn
from pipeline.config.root import Config
from pipeline.data.preprocess.tokenize_unit import (
    EngineRejected,
    UnitJob,
    WorkerContext,
    make_tokenize,
    read_condemned,
)
from pipeline.data.sources.records import NOT_BAD
from pipeline.data.tokenization.coverage import Coverage, covered
from pipeline.data.tokenization.engine_choice import EngineChoice
from pipeline.data.tokenization.engines import EngineDiffers
from pipeline.data.work.job_run import Busy, JobRun
from pipeline.data.work.progress import ProgressLine
from pipeline.data.work.unit_chunks import UnitDone
from pipeline.data.work.worker_count import worker_count
from pipeline.data.work.worker_pool import Workers, can_fork

_WARN_AFTER_RECORDS = 1000
_REFUSE_AFTER_TOKENS = 100_000
"""Of fewer, the share that is unknown is compared with the limit when all of the source is there."""


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


class _Run(JobRun[UnitJob, UnitDone]):
    """Units on one pool of workers."""

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
        super().__init__(console, line, workers, waits=waits, clock=clock)
        self._condemned = condemned
        self._engine = engine
        self._limit = config.data.preprocess.max_error_rate
        self._max_unknown = config.data.preprocess.max_unknown
        self._outcome = Outcome()
        self._records: Counter[str] = Counter()
        self._bad: Counter[str] = Counter()
        self._warned: set[str] = set()
        self._coverage: dict[str, Coverage] = {}

    def run(self, jobs: Sequence[UnitJob]) -> Outcome:
        try:
            self.run_all(jobs)
        except EngineDiffers as error:
            self._condemn(str(error))
        except EngineRejected as error:
            self._outcome.condemned = str(error)
        return replace(self._outcome, units=self.made, failed=self.failed, held=self.held)

    def finished(self, job: UnitJob, result: UnitDone, advanced: int) -> bool:
        # Bytes that were only estimated, or skipped, count now.
        self._line.advance(job.unit.bytes - advanced)
        self._line.unit_done(result.coverage.tokens)
        self._outcome.damaged |= bool(result.damaged)
        for damaged in result.damaged:
            warn(self._console, f"{job.unit.source}: {damaged}")
        self._watch_rejected(job, result)
        self._watch_coverage(job.source.folder.name, result.coverage)
        return result.made > 0

    def failures(self, job: UnitJob) -> tuple[Path, dict[str, Any]]:
        return job.source.folder, {"unit": job.unit.index}

    def concerns_all(self, error: Exception) -> bool:
        return super().concerns_all(error) or isinstance(error, EngineDiffers | EngineRejected)

    def _condemn(self, evidence: str) -> None:
        storage.put_json(self._condemned, read_condemned(self._condemned) | {self._engine: evidence})
        self._outcome.condemned = self._engine
        say(self._console, f"{evidence}; all output of {self._engine} is made again with another engine")

    def _watch_coverage(self, source: str, coverage: Coverage) -> None:
        """Refuse a source of whose text too much has no token, while there is time: after its first units."""
        found = self._coverage[source] = covered([self._coverage.get(source, Coverage()), coverage])
        if found.tokens >= _REFUSE_AFTER_TOKENS:
            found.check(source, self._max_unknown, so_far=True)

    def _watch_rejected(self, job: UnitJob, done: UnitDone) -> None:
        """Say once, while there is time to stop, that a source has more bad records than are allowed."""
        source = job.source.folder.name
        self._records[source] += done.records
        self._bad[source] += sum(count for reason, count in done.rejected.items() if reason not in NOT_BAD)
        records, bad = self._records[source], self._bad[source]
        if records >= _WARN_AFTER_RECORDS and bad > self._limit * records and source not in self._warned:
            self._warned.add(source)
            reasons = ", ".join(f"{count} {reason}" for reason, count in done.rejected.items() if reason not in NOT_BAD)
            warn(
                self._console,
                f"{bad} of the first {records} records of {source} are bad, more than "
                f"data.preprocess.max_error_rate {self._limit} allows over all records (in {job}: {reasons or 'none'})",
            )
