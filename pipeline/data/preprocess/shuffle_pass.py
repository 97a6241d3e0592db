"""The second pass of `shuffle: global` as a part of the stage: when it is needed, its workers, its parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from rich.console import Console

from pipeline.common.console import say
from pipeline.config.root import Config
from pipeline.data.global_shuffle.bucket import UNSHUFFLED, ShuffleJob
from pipeline.data.global_shuffle.external_sort import Shuffle, SortedRun
from pipeline.data.preprocess.finalize import Finalizer
from pipeline.data.preprocess.source_plan import SourcePlan
from pipeline.data.work.job import JobDone
from pipeline.data.work.job_run import JobRun, worker_count
from pipeline.data.work.leases import Holder, LeaseWatch, take_when_free
from pipeline.data.work.receipts import Receipts
from pipeline.data.work.units import order_key


class ShufflePass:
    """The second pass of the sources of a run; unless it is wanted (`shuffle: global`), all of it does nothing."""

    def __init__(self, config: Config, console: Console, dtype: np.dtype[Any]) -> None:
        self._config = config
        self._console = console
        self._dtype = dtype
        self.is_wanted = config.data.preprocess.shuffle == "global"

    def has_left(self, plan: SourcePlan) -> bool:
        """Tell whether there is something to remove of the first pass."""
        folder = self._config.data_dir / plan.found.source.name
        return self.is_wanted and any((folder / name / UNSHUFFLED).exists() for name in plan.splits.names)

    def is_done(self, plan: SourcePlan, receipts: Receipts, rejected_engines: Mapping[str, str]) -> bool:
        """Tell whether all of a source was shuffled before, so that what the first pass wrote is not needed.

        Args:
            plan: of the source.
            receipts: of the source.
            rejected_engines: engines whose ids are not trusted any more.
        """
        if not self.is_wanted:
            return False
        shuffles = self._shuffles(plan, receipts, rejected_engines)
        return shuffles is not None and all(shuffle.finished() for shuffle in shuffles.values())

    @contextmanager
    def alone(self, plan: SourcePlan) -> Iterator[None]:
        """One command at a time shuffles, finishes and removes what the first pass wrote of a source."""
        if not self.is_wanted:
            yield
            return
        folder = self._config.data_dir / plan.found.source.name
        with take_when_free(folder, "shuffle", LeaseWatch(), self._say_waiting) as lease, lease.beating():
            yield

    def run(self, plan: SourcePlan, receipts: Receipts, finish: Finalizer) -> None:
        """Shuffle what the first pass wrote; the parts of the result replace those in `finish`."""
        if not self.is_wanted:
            return
        shuffles = self._shuffles(plan, receipts)
        assert shuffles is not None, "the first pass is done"
        jobs = [job for shuffle in shuffles.values() for job in shuffle.jobs()]
        workers = worker_count(self._config)
        run = JobRun[ShuffleJob, JobDone](self._console, None, workers, "shuffling", "bucket", leased=False)
        outcome = run.run(jobs)
        outcome.check("bucket", plan.found.source.name, "Without them the source cannot be finished")
        finish.parts = {name: shuffle.table() for name, shuffle in shuffles.items()}

    def _say_waiting(self, holder: Holder) -> None:
        say(self._console, f"waiting for {holder}, which shuffles")

    def clean(self, plan: SourcePlan, receipts: Receipts) -> None:
        """Remove what the first pass wrote of a source whose manifests are there."""
        for shuffle in ((self.is_wanted and self._shuffles(plan, receipts)) or {}).values():
            shuffle.remove_unshuffled()

    def _shuffles(
        self, plan: SourcePlan, receipts: Receipts, rejected_engines: Mapping[str, str] | None = None
    ) -> dict[str, Shuffle] | None:
        """The shuffles of a source by split; None if the first pass has units to make."""
        folder = self._config.data_dir / plan.found.source.name
        runs: dict[str, list[SortedRun]] = {name: [] for name in plan.splits.names}
        for unit in plan.units:
            key, last = order_key(self._config.data.preprocess.seed, unit), False
            for receipt in receipts.of(unit.index):
                if receipt["config_hash"] != plan.config_hash or receipt["engine"] in (rejected_engines or {}):
                    return None
                for name, table in runs.items():
                    table.append(SortedRun.of(receipt, name, key))
                last = receipt["last"]
            if not last:
                return None
        return {name: Shuffle(folder, name, table, self._dtype, plan.config_hash) for name, table in runs.items()}
