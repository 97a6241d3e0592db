"""The preprocess stage: documents to tokens. Plan units, tokenize them in worker processes, commit, write manifests.

Layout of a source below the data folder: `plan.json`, `receipts/`, `leases/`, a dataset for each split (`train/`,
`heldout/`), `rejected.jsonl` and `report.json`. A chunk of a unit is done when its receipt is there and the
sizes of its files are those in it; a run does what is missing. The datasets are the same bytes for any number of
workers, commands at a time, and interruptions. Commands at a time share the units; some only make units.
Packs of the training data come last, where the run has any.
"""

from __future__ import annotations

import time

from pipeline.common import links
from pipeline.common.console import Console, say
from pipeline.common.errors import MachineError, UserError
from pipeline.common.format import counted
from pipeline.config.root import Config
from pipeline.data.packing.pack_pass import PackPass
from pipeline.data.preprocess.finalize import Finalizer
from pipeline.data.preprocess.prepare import checked_scope, find_plans, freeze_plans, remove_stale, start_over
from pipeline.data.preprocess.report import PreprocessReport, SourceReport, print_report
from pipeline.data.preprocess.run_tokenizer import tokenizer_folder
from pipeline.data.preprocess.run_units import TokenizeRun
from pipeline.data.preprocess.shuffle_pass import ShufflePass
from pipeline.data.preprocess.source_plan import SourcePlan, source_job
from pipeline.data.preprocess.source_work import SourceWork
from pipeline.data.preprocess.tokenize_unit import UnitJob, WorkerContext, read_rejected_engines
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.data.work.job_run import failure
from pipeline.data.work.passes import Rounds
from pipeline.data.work.units import reading


def preprocess(config: Config, *, dry_run: bool = False, units: bool = False, grow: bool = False) -> PreprocessReport:
    """Run the stage; prints progress and a table.

    Args:
        config: the run.
        dry_run: only print what there is to do.
        units: make units as long as there are free ones, and finish no source. A later run without this finishes.
        grow: append files that were added to sources since their plans were made.

    Raises:
        UserError: something in the config or the data has to be fixed first.
        MachineError: units failed again and again; the message lists them.
        OSError: the disk is full or read-only, say; what was committed stays.
    """
    started = time.monotonic()
    console = Console()
    if dry_run:
        from pipeline.data.preprocess.dry_run import print_dry_run

        print_dry_run(console, config, grow=grow)
        return PreprocessReport()
    scope = checked_scope(config, grow=grow)
    with reading(config, scope.sources):
        tokenizer, plans = freeze_plans(scope, console, units=units, grow=grow)
        try:
            stage = _Stage(config, console, tokenizer, plans)
            return stage.make_units(started) if units else stage.run(started)
        finally:
            remove_stale(config, plans)


def grow_plans(config: Config) -> None:
    """Append the files that were added to sources to their plans, as `preprocess` with `grow`; makes no unit.

    Raises:
        UserError: something in the config or the data has to be fixed first.
    """
    scope = checked_scope(config, grow=True)
    with reading(config, scope.sources):
        freeze_plans(scope, Console(), units=True, grow=True)


def is_complete(config: Config) -> bool:
    """Tell whether the stage would find nothing to do, by the rules by which it does; writes nothing.

    False also where documents would have to be read to know it, and where records are bad or files damaged, of which
    the stage tells each time.

    Raises:
        UserError: something in the config or the data has to be fixed first.
    """
    if (found := find_plans(config)) is None:
        return False
    stage = _Stage(config, Console(quiet=True), *found)
    return all(stage.is_finished(plan) for plan in found[1])


class _Stage:
    """From frozen plans to finished datasets."""

    def __init__(self, config: Config, console: Console, tokenizer: Tokenizer, plans: list[SourcePlan]) -> None:
        self._config = config
        self._console = console
        self._tokenizer = tokenizer
        self._context = WorkerContext(tokenizer_folder(config), config.data.preprocess.verify_rate, tokenizer)
        self._plans = plans
        self._jobs = {plan.found.source.name: source_job(plan, config, start_over(config, plan)) for plan in plans}
        self._shuffle_pass = ShufflePass(config, console, tokenizer.dtype)
        self._pack_pass = PackPass(config)
        self._rounds = Rounds()
        self._made = 0
        """Units that this run made, wholly or in part."""
        self._states: dict[str, SourceWork] = {}
        """By source, of the last round."""

    def run(self, started: float) -> PreprocessReport:
        """Make what is missing, then finish every source that can be."""
        failed: list[tuple[UnitJob, str]] = []
        before: list[UnitJob] = []
        repeated = ""
        while (missing := self._missing()) and not failed and not repeated:
            run = self._make(missing, waits=True)
            failed, repeated = run.outcome.failed, self._rounds.count("tokenizing", missing)
            if missing == before and not (run.outcome.made or run.engine_is_rejected or failed):
                missing = []  # only the times of files were to be noted, on a disk that cannot be written
                break
            before = missing
        unfinished = {job.unit.source for job in missing}
        problem = self._problem(failed, unfinished) or (repeated if unfinished else "")
        reports = []
        for plan in self._plans:
            if plan.found.source.name not in unfinished:
                try:
                    reports.append(self._finish(plan))
                except UserError as error:
                    raise MachineError(f"{problem}\n{error}") if problem else error from None
        report = PreprocessReport(reports, self._made, time.monotonic() - started)
        print_report(self._console, report, self._config.data.splits)
        if problem:
            raise MachineError(problem)
        for plan in self._plans:
            self._pack_pass.run(plan.found.source.name, self._console)
        return report

    def make_units(self, started: float) -> PreprocessReport:
        """Make units as long as there are free ones, beside other commands that do the same."""
        held = 0
        while missing := self._missing():
            run = self._make(missing, waits=False)
            held = run.outcome.held
            if run.outcome.failed:
                failed = run.outcome.failed
                raise MachineError(self._problem(failed, {job.unit.source for job, _ in failed}))
            finds = run.damaged and self._config.data.preprocess.on_damaged_file == "drop"
            if not run.engine_is_rejected and not finds:
                break
        made = counted(self._made, "unit") + " made"
        if not missing or not held:
            say(self._console, f"{made}; all units are complete" if self._made else "all units are complete")
        else:
            others = f"{held:,} {'is' if held == 1 else 'are'} held by others"
            say(
                self._console,
                f"{made}, {others}; `pipeline preprocess` without --units, or the last job of a submitted "
                "preprocessing, makes the missing units and finishes the datasets",
            )
        return PreprocessReport(units_done=self._made, seconds=time.monotonic() - started)

    def is_finished(self, plan: SourcePlan) -> bool:
        """Tell whether nothing of a source is missing; changes nothing."""
        return self._state(plan).is_finished(self._tokenizer, self._pack_pass)

    def _missing(self) -> list[UnitJob]:
        return [job for plan in self._plans for job in self._look(plan)]

    def _state(self, plan: SourcePlan) -> SourceWork:
        job = self._jobs[plan.found.source.name]
        return SourceWork(plan, job, self._shuffle_pass, self._rejected_engines(), self._config)

    def _look(self, plan: SourcePlan) -> list[UnitJob]:
        """The missing units; manifests are removed if parts will be made again."""
        state = self._state(plan)
        if state.manifests and state.is_outdated:
            with self._shuffle_pass.alone(plan):
                state = self._state(plan)  # another command may just have made them again
                for path in state.manifests if state.is_outdated else ():
                    links.remove(path, missing_ok=True)
        self._states[plan.found.source.name] = state
        return state.missing_units

    def _make(self, missing: list[UnitJob], *, waits: bool) -> TokenizeRun:
        run = TokenizeRun(self._config, self._console, self._context, waits=waits)
        outcome = run.run(missing, sum(len(plan.units) for plan in self._plans) - len(missing))
        self._made += outcome.made
        return run

    def _problem(self, failed: list[tuple[UnitJob, str]], unfinished: set[str]) -> str:
        """Message about sources that cannot be finished; empty if all can, also where another command made units."""
        if not unfinished:
            return ""
        sources = ", ".join(sorted(unfinished))
        return failure("unit", sources, failed, f"Without them {sources} cannot be finished")

    def _rejected_engines(self) -> dict[str, str]:
        return read_rejected_engines(self._context.rejected_engines_file)

    def _finish(self, plan: SourcePlan) -> SourceReport:
        state = self._states[plan.found.source.name]
        state.job.check_plan()  # another command may have appended to it
        advice = start_over(self._config, plan)  # which depends on what is finished by now
        finish = Finalizer(plan, self._config, self._tokenizer, advice, self._rejected_engines(), state.receipts)
        finish.check()
        if state.is_shuffled and not self._shuffle_pass.has_left(plan):
            self._shuffle_pass.run(plan, state.receipts, finish)
            return finish.write()
        with self._shuffle_pass.alone(plan):
            receipts = self._state(plan).receipts  # while this waited, another command may have made them again
            self._shuffle_pass.run(plan, receipts, finish)
            report = finish.write()
            self._shuffle_pass.clean(plan, receipts)
        return report
