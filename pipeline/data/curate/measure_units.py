"""The pass `measure` on worker processes: the units of all sources."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeline.common.console import warn
from pipeline.config.root import Config
from pipeline.data.curate.curation_plan import CurationPlan, unit_source
from pipeline.data.curate.measure_unit import MeasureContext, MeasureJob, chunk_stands, make_measure
from pipeline.data.curate.passes.names import MEASURE
from pipeline.data.curate.passes.run import JobOutcome
from pipeline.data.sources.records import START
from pipeline.data.work.job_run import Busy, JobRun
from pipeline.data.work.progress import ProgressLine
from pipeline.data.work.receipts import Receipts
from pipeline.data.work.unit_chunks import UnitDone
from pipeline.data.work.unit_source import UnitSource, without_damaged
from pipeline.data.work.units import input_stat
from pipeline.data.work.worker_count import worker_count
from pipeline.data.work.worker_pool import Workers


def missing_units(config: Config, plan: CurationPlan, receipts: Receipts) -> list[MeasureJob]:
    """The units of a source that have a chunk without a complete receipt, or whose input has another time.

    Args:
        config: the run.
        plan: of the source.
        receipts: of the source, read anew.
    """
    source = without_damaged(unit_source(plan, config), plan.units, receipts)
    return [MeasureJob(source, unit) for unit in plan.units if not _is_done(source, MeasureJob(source, unit), receipts)]


def _is_done(source: UnitSource, job: MeasureJob, receipts: Receipts) -> bool:
    position, stat = START, input_stat(job.unit)
    for receipt in receipts.of(job.unit.index):
        if not chunk_stands(source, job.unit, receipt, position) or receipt["input"]["stat"] != stat:
            return False
        if receipt["last"]:
            return True
        position = tuple(receipt["next"])
    return False


class _MeasureRun(JobRun[MeasureJob, UnitDone]):
    """Units on one pool of workers."""

    damaged = False
    """True if files were found to be damaged."""

    def finished(self, job: MeasureJob, result: UnitDone, advanced: int) -> bool:
        # Bytes that were only estimated, or skipped, count now.
        self._line.advance(job.unit.bytes - advanced)
        self._line.unit_done(0)
        self.damaged |= bool(result.damaged)
        for damaged in result.damaged:
            warn(self._console, f"{job.unit.source}: {damaged}")
        return result.made > 0

    def failures(self, job: MeasureJob) -> tuple[Path, dict[str, Any]]:
        return job.source.folder, {"unit": job.unit.index}


def measure_units(
    config: Config, console: Console, jobs: Sequence[MeasureJob], units: int, context: MeasureContext, *, waits: bool
) -> JobOutcome:
    """Make all of the units, or find out which cannot be made.

    Args:
        config: the run.
        console: where progress goes.
        jobs: the units that are not done.
        units: of all sources, done ones too.
        context: of the workers.
        waits: for units that other commands have; else they are left to them when no other is free.

    Raises:
        UserError: something in the config or the data has to be fixed first.
        OSError: the disk is full or read-only, say.
    """
    total = sum(job.unit.bytes for job in jobs)
    workers = Workers[MeasureJob, UnitDone | Busy](make_measure, (context,), worker_count(config, len(jobs)))
    with workers, ProgressLine(console, total, len(jobs), units - len(jobs), MEASURE) as line:
        run = _MeasureRun(console, line, workers, waits=waits)
        run.run_all(jobs)
        return JobOutcome(run.made, run.failed, run.held, run.damaged)
