"""The curation stage: which documents are kept. Measure units, compare documents, decide, write `curation.json`.

Layout: see `files`. Each pass is jobs with receipts; a run does what is missing, beside other commands that do the
same. The decisions are the same bytes for any number of workers, commands at a time, and interruptions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from pipeline.common import storage
from pipeline.common.console import Console, say, warn
from pipeline.common.errors import MachineError
from pipeline.common.format import counted
from pipeline.common.problems import Problems
from pipeline.config.root import Config
from pipeline.data.curate.checks import CURATE_CHECKS, CurateScope, no_tasks
from pipeline.data.curate.curation_plan import (
    HUB_TWICE,
    CurationPlan,
    curate_config,
    plan_sources,
    unit_source,
    with_items,
)
from pipeline.data.curate.decontamination.index import prepare_index
from pipeline.data.curate.files import CURATE
from pipeline.data.curate.measure_unit import MeasureJob, chunk_is_valid
from pipeline.data.curate.measurers import Measuring, choose_engine, comparison_engine, items_folder
from pipeline.data.curate.passes.across import ACROSS, across_folder, across_jobs, across_lines, counts_across
from pipeline.data.curate.passes.excerpts import ReadTexts
from pipeline.data.curate.passes.finish import SourceCuration, finish_source
from pipeline.data.curate.passes.names import MEASURE
from pipeline.data.curate.passes.scope_passes import ScopePasses, ScopePlan, make_scopes
from pipeline.data.curate.report.index import write_index
from pipeline.data.curate.results.differences import estimated_before, find_differences
from pipeline.data.curate.results.summary import print_summary
from pipeline.data.curate.verdicts import find_curation
from pipeline.data.work.bad_input import BadInput
from pipeline.data.work.frozen_plan import freeze_alone, make_data_dir
from pipeline.data.work.job_run import JobOutcome, JobRun, worker_count
from pipeline.data.work.leases import LEASES, sweep
from pipeline.data.work.passes import MissingJobs, Pass, Rounds, missing_jobs, removing_damaged
from pipeline.data.work.receipts import Receipts
from pipeline.data.work.unit_chunks import UnitDone
from pipeline.data.work.unit_source import without_damaged
from pipeline.data.work.units import find_source_files, reading


@dataclass
class CurationReport:
    """Results of all sources that have files."""

    sources: list[SourceCuration] = field(default_factory=list)
    made: int = 0
    """Jobs done by this run; the others were complete before."""
    seconds: float = 0.0


def curate(
    config: Config,
    *,
    dry_run: bool = False,
    units: bool = False,
    read_texts: ReadTexts | None = None,
    task_problems: Callable[[Config], list[str]] = no_tasks,
) -> CurationReport:
    """Run the stage; prints progress and a table.

    Args:
        config: the run.
        dry_run: only print what there is to do.
        units: do free jobs of the first pass that is not complete, and finish nothing. A later run without this does.
        read_texts: reads examples for the report.
        task_problems: reasons why items of evaluation tasks could not be read.

    Raises:
        UserError: something in the config or the data has to be fixed first.
        MachineError: jobs failed again and again; the message lists them.
        OSError: the disk is full or read-only, say; what was committed stays.
    """
    started = time.monotonic()
    console = Console()
    curate_config(config)
    problems = Problems()
    sources = find_source_files(config, problems, held_out=False)
    scope = CurateScope(config, sources, task_problems)
    with reading(config, sources):
        problems.look(CURATE_CHECKS, scope)
        if dry_run:
            from pipeline.data.curate.results.dry_run import print_dry_run

            print_dry_run(console, scope)
        problems.raise_problems()
        if dry_run:
            return CurationReport()
        plans = scope.plans
        if (contamination := curate_config(config).decontaminate) is not None:
            make_data_dir(config, items_folder(config))
            prepare_index(contamination, items_folder(config))
            plans = [with_items(plan, config) for plan in plans]
        stage = CurationStage(config, console, plans, read_texts)
        stage.freeze()
        try:
            report = stage.make_units() if units else stage.run()
        finally:
            stage.remove_stale()
    report.seconds = time.monotonic() - started
    return report


def is_complete(config: Config) -> bool:
    """Tell whether the active decisions about all sources are those of the run; writes nothing.

    False also with decontamination, whose items would have to be read to know it.

    Raises:
        UserError: something in the config or the data has to be fixed first.
    """
    curate = curate_config(config)
    if curate.decontaminate is not None:
        return False
    for scope in make_scopes(config, plan_sources(config, find_source_files(config, held_out=False))):
        for number in range(len(scope.plans)):
            active = scope.active(number)
            if active is None or active.about.get("mode") != curate.mode:
                return False
    return True


class CurationStage:
    """From plans to finished curations.

    Args:
        config: the run.
        console: where messages go.
        plans: of all sources.
        read_texts: reads examples for the report.
    """

    def __init__(
        self, config: Config, console: Console, plans: list[CurationPlan], read_texts: ReadTexts | None = None
    ) -> None:
        self._read_texts = read_texts
        self._config = config
        self._curate = curate_config(config)
        self._console = console
        self._plans = plans
        self._receipts: dict[str, Receipts] = {}
        """By source, of the last look."""
        self._is_checked = False
        self._rounds = Rounds()
        self._made = 0
        self._counts_across = False
        """True if texts of several scopes are counted; a what-if counts none."""

    def freeze(self) -> None:
        """Write the plans, or compare them with those that are there."""
        for plan in self._plans:
            if plan.found.source.hub is not None:
                say(self._console, HUB_TWICE.format(plan.name))
            freeze_alone(plan, self._config, plan.folder, self._console)
        self._counts_across = counts_across(self._config, self.scopes)
        folders = [scope.folder for scope in self.scopes]
        for folder in [*folders, across_folder(self._config)] if self._counts_across else folders:
            make_data_dir(self._config, folder)

    @cached_property
    def context(self) -> Measuring:
        """State of the workers that measure."""
        engine, note = choose_engine(self._curate.engine)
        if note:
            say(self._console, f"data.curate.engine: python, because numba cannot be used: {note}")
        return Measuring(self._config, {plan.name: plan.settings for plan in self._plans}, engine)

    @cached_property
    def _comparing(self) -> Measuring:
        """Types of tables and the engine, for the passes behind `measure`."""
        compares = any(scope.compared for scope in self.scopes)
        engine = comparison_engine(self._curate.engine) if compares else "python"
        return Measuring(self._config, {plan.name: plan.settings for plan in self._plans}, engine)

    @cached_property
    def scopes(self) -> list[ScopePlan]:
        """Scopes of the run."""
        return make_scopes(self._config, self._plans)

    def run(self) -> CurationReport:
        """Do what is missing, then finish every source."""
        report = CurationReport(self.decide())
        report.made = self._made
        index = write_index(self._config.data_dir, [each.curation.decisions for each in report.sources])
        print_summary(self._console, report.sources, self._curate.mode, index)
        for line in across_lines(self._config, self._passes()):
            say(self._console, line)
        return report

    def decide(self, *, activate: bool = True) -> list[SourceCuration]:
        """Do what is missing, then write the decisions about every source.

        Args:
            activate: whether they are to hold from now on.
        """
        while True:
            with removing_damaged(self._console):
                if self._run_next(waits=True) is None:
                    return self._finish(activate=activate)

    def _finish(self, *, activate: bool) -> list[SourceCuration]:
        found = []
        for passes in self._passes():
            for number, plan in enumerate(passes.plan.plans):
                before = find_curation(plan.folder) if activate else None
                source = finish_source(passes, number, self._curate.mode, activate=activate)
                if before is not None and estimated_before(before, source.curation):
                    changed = find_differences(before, source.curation, 0).changed
                    source.estimated = (before.decisions, changed)
                found.append(source)
        return sorted(found, key=lambda each: each.name)

    def make_units(self) -> CurationReport:
        """Do free jobs of the first pass that is not complete, beside other commands that do the same."""
        with removing_damaged(self._console):
            if (step := self._run_next(waits=False)) is None:
                say(self._console, "all passes are complete; `pipeline curate` without --units writes the decisions")
                return CurationReport()
            name, outcome = step
            others = f", {outcome.held:,} held by others" if outcome.held else ""
            say(self._console, f"{name}: {counted(outcome.made, 'job')} made{others}")
        return CurationReport(made=self._made)

    def _run_next(self, *, waits: bool) -> tuple[str, JobOutcome[Any]] | None:
        """Do missing jobs of the first pass that is not complete; returns its name, or None if all are.

        Raises:
            DamagedResult: a file of an earlier pass is not as it was written.
        """
        workers = worker_count(self._config)
        if units := self._missing_units():
            run = MeasureRun(self._console, self.context, workers, MEASURE, waits=waits)
            return self._run(MEASURE, run, units, sum(len(plan.units) for plan in self._plans) - len(units))
        self._check_inputs()
        found = self._missing_after_measure()
        if not found.jobs:
            return None
        name = " and ".join(found.names)
        return self._run(name, JobRun(self._console, found.shared, workers, name, "job", waits=waits), found.jobs)

    def _run(
        self, name: str, run: JobRun[Any, Any], jobs: Sequence[Any], done_before: int = 0
    ) -> tuple[str, JobOutcome[Any]]:
        outcome = run.run(jobs, done_before)
        outcome.check("job", name, "Without them nothing can be decided")
        if problem := self._rounds.count(name, jobs):
            raise MachineError(problem)
        self._made += outcome.made
        return name, outcome

    def _missing_units(self) -> list[MeasureJob]:
        self._receipts = {plan.name: Receipts(plan.folder) for plan in self._plans}
        missing = [job for plan in self._plans for job in missing_units(self._config, plan, self._receipts[plan.name])]
        if missing:
            self._is_checked = False
            for plan in self._plans:
                self.context.measurers(plan.name)  # forked workers share what is opened here
        return missing

    def _check_inputs(self) -> None:
        if not self._is_checked:
            for plan in self._plans:
                self._check_input(plan)
            self._is_checked = True

    def _check_input(self, plan: CurationPlan) -> None:
        """Refuse a source with damaged files or too many bad records, as preprocess would."""
        start_over = unit_source(plan, self._config).start_over
        reader, receipts = plan.found.reader, self._receipts[plan.name]
        bad = BadInput(plan.folder, plan.name, plan.units, reader, receipts, start_over)
        bad.write()
        bad.check(self._config.data.preprocess)

    def _passes(self) -> list[ScopePasses]:
        return [
            ScopePasses(scope, [self._receipts[plan.name] for plan in scope.plans], self._comparing, self._read_texts)
            for scope in self.scopes
        ]

    def _missing_after_measure(self) -> MissingJobs:
        scopes = self._passes()
        lists: list[Iterable[Pass]] = [scope.passes() for scope in scopes]
        if self._counts_across:
            lists.append([Pass(ACROSS, partial(across_jobs, self._config, scopes))])
        found = missing_jobs(lists)
        for folder in {job.folder for job in found.jobs}:
            storage.make_below(self._config.data_dir, folder)
        return found

    def remove_stale(self) -> None:
        """Remove what processes that were killed left half-written."""
        folders = [plan.folder for plan in self._plans] + [self._config.data_dir / CURATE]
        for folder in folders:
            with suppress(OSError):
                for path in folder.rglob(f"*{storage.TEMPORARY_SUFFIX}"):
                    storage.remove_if_stale(path)
                for leases in folder.rglob(LEASES):
                    sweep(leases.parent)


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
