"""The units of a run on worker processes: what failed is tried again, what others hold is waited for or left."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from rich.console import Console

from pipeline.common import storage
from pipeline.common.console import say, warn
from pipeline.common.paths import cache_folder
from pipeline.config.root import Config
from pipeline.data.preprocess.tokenize_unit import (
    EngineRejected,
    UnitJob,
    WorkerContext,
    read_rejected_engines,
)
from pipeline.data.sources.records import NOT_BAD
from pipeline.data.tokenization.coverage import Coverage, covered
from pipeline.data.tokenization.engine_choice import choose_engine
from pipeline.data.tokenization.engines import EngineDiffers
from pipeline.data.work.job_run import JobOutcome, JobRun, worker_count
from pipeline.data.work.unit_chunks import UnitDone

_WARN_AFTER_RECORDS = 1000
_REFUSE_AFTER_TOKENS = 100_000
"""Of fewer, the share that is unknown is compared with the limit when all of the source is there."""


class TokenizeRun(JobRun[UnitJob, UnitDone]):
    """Units on one pool of workers.

    Attributes:
        engine_is_rejected: the engine gave other ids than `tokenizers`, so its units have to be made again.
        damaged: files were found to be damaged.

    Args:
        config: the run.
        console: where progress goes.
        context: of the workers.
        waits: as in `JobRun`.
        clock: as in `JobRun`.
    """

    def __init__(
        self,
        config: Config,
        console: Console,
        context: WorkerContext,
        *,
        waits: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(console, context, worker_count(config), "tokenizing", waits=waits, clock=clock)
        self.engine_is_rejected = False
        self.damaged = False
        self._context = context
        self._engine_setting = config.data.preprocess.engine
        self._limit = config.data.preprocess.max_error_rate
        self._max_unknown = config.data.preprocess.max_unknown
        self._records: Counter[str] = Counter()
        self._bad: Counter[str] = Counter()
        self._warned: set[str] = set()
        self._coverage: dict[str, Coverage] = {}

    def run(self, jobs: Sequence[UnitJob], done_before: int = 0) -> JobOutcome[UnitJob]:
        try:
            super().run(jobs, done_before)
        except EngineDiffers as error:
            self._reject_engine(str(error))
        except EngineRejected:
            self.engine_is_rejected = True
        return self.outcome

    def prepare(self, jobs: Sequence[UnitJob]) -> Sequence[UnitJob]:
        """Choose the engine, opened in the context of the workers."""
        context, rejected = self._context, set(read_rejected_engines(self._context.rejected_engines_file))
        cache = cache_folder() / "engines"
        choice = choose_engine(self._engine_setting, context.tokenizer, cache, rejected, context.engine)
        say(self._console, f"engine: {choice.name} ({choice.why})")
        if note := context.tokenizer.template_note:
            say(self._console, note)
        self._engine = choice.name
        # Conversations are encoded by the library that says which characters a token is of.
        return [job if job.source.chat else replace(job, engine=choice.which) for job in jobs]

    def done(self, job: UnitJob, result: UnitDone) -> int:
        self.damaged |= bool(result.damaged)
        for damaged in result.damaged:
            warn(self._console, f"{job.unit.source}: {damaged}")
        self._watch_rejected(job, result)
        self._watch_coverage(job.source.folder.name, result.coverage)
        return result.coverage.tokens

    def concerns_all(self, error: Exception) -> bool:
        return super().concerns_all(error) or isinstance(error, EngineDiffers | EngineRejected)

    def _reject_engine(self, evidence: str) -> None:
        path = self._context.rejected_engines_file
        storage.put_json(path, read_rejected_engines(path) | {self._engine: evidence})
        self.engine_is_rejected = True
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
