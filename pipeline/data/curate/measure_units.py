"""The pass `measure` on worker processes: the units of all sources."""

from __future__ import annotations

from functools import partial

from pipeline.common.console import warn
from pipeline.config.root import Config
from pipeline.data.curate.curation_plan import CurationPlan, unit_source
from pipeline.data.curate.measure_unit import MeasureJob, chunk_is_valid
from pipeline.data.work.job_run import JobRun
from pipeline.data.work.receipts import Receipts
from pipeline.data.work.unit_chunks import UnitDone
from pipeline.data.work.unit_source import without_damaged


def missing_units(config: Config, plan: CurationPlan, receipts: Receipts) -> list[MeasureJob]:
    """The units of a source that have a chunk without a complete receipt, or whose input has another time.

    Args:
        config: the run.
        plan: of the source.
        receipts: of the source, read anew.
    """
    source = without_damaged(unit_source(plan, config), plan.units, receipts)
    jobs = (MeasureJob(source, unit) for unit in plan.units)
    return [job for job in jobs if not job.is_done(receipts, partial(chunk_is_valid, source, job.unit))]


class MeasureRun(JobRun[MeasureJob, UnitDone]):
    """Units on one pool of workers."""

    def done(self, job: MeasureJob, result: UnitDone) -> int:
        for damaged in result.damaged:
            warn(self._console, f"{job.unit.source}: {damaged}")
        return 0
