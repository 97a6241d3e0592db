"""The preprocess stage: documents to tokens. Plan units, tokenize them in worker processes, commit, write manifests.

Layout of a source below the data folder: `plan.json`, `receipts/`, `leases/`, a dataset for each split (`train/`,
`heldout/`), `rejected.jsonl` and `report.json`. A chunk of a unit is done when its receipt is there and the
sizes of its files are those in it; a run does what is missing. The datasets are the same bytes for any number of
workers, commands at a time, and interruptions. Commands at a time share the units; some only make units.
Packs of the training data come last, where the run has any.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pipeline.common import links, storage
from pipeline.common.console import Console, say, warn
from pipeline.common.errors import MachineError, UserError
from pipeline.common.format import counted
from pipeline.common.paths import cache_folder
from pipeline.common.problems import Problems
from pipeline.config.root import Config
from pipeline.data.curate.results.apply import applied_curations
from pipeline.data.datasets.files import MANIFEST_FILE, PARTS_FILE, PLAN_FILE
from pipeline.data.datasets.manifest import read_manifest
from pipeline.data.datasets.open import dataset_folder, open_datasets
from pipeline.data.packing.pack_pass import PackPass
from pipeline.data.preprocess.checks import PREPROCESS_CHECKS, PreprocessScope, check_adopted
from pipeline.data.preprocess.disk_space import dataset_warning
from pipeline.data.preprocess.finalize import REPORT_FILE, Finalizer
from pipeline.data.preprocess.make_tokenizer import prepare_tokenizer, withdraw_tokenizer
from pipeline.data.preprocess.report import PreprocessReport, SourceReport, print_report
from pipeline.data.preprocess.run_tokenizer import (
    ORIGIN_FILE,
    OtherTokenizer,
    check_tokenizer_settings,
    named_tokenizer,
    run_tokenizer,
    tokenizer_folder,
)
from pipeline.data.preprocess.run_units import TokenizeRun
from pipeline.data.preprocess.shuffle_pass import ShufflePass
from pipeline.data.preprocess.source_plan import SourcePlan, make_plan, source_job
from pipeline.data.preprocess.split_counts import find_splits, known_splits
from pipeline.data.preprocess.splits import Splits
from pipeline.data.preprocess.tokenize_unit import (
    CONDEMNED_FILE,
    SourceJob,
    UnitJob,
    WorkerContext,
    read_condemned,
    receipt_is_valid,
)
from pipeline.data.sources.records import NOT_BAD, Position
from pipeline.data.tokenization.coverage import coverage_of
from pipeline.data.tokenization.engine_choice import EngineChoice, choose_engine
from pipeline.data.tokenization.tokenizer import TOKENIZER_FILE, Tokenizer
from pipeline.data.work.freezing import freeze_alone, make_data_dir
from pipeline.data.work.job_run import failure
from pipeline.data.work.leases import LeaseWatch, sweep, take_when_free
from pipeline.data.work.progress import NOTHING_TO_DO
from pipeline.data.work.receipts import Receipts
from pipeline.data.work.rounds import Rounds
from pipeline.data.work.unit_source import damage_stands, without_damaged
from pipeline.data.work.units import SourceFiles, find_source_files, reading

__all__ = ["PreprocessReport", "dataset_folder", "open_datasets", "preprocess", "run_tokenizer"]


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
    scope = _checked(config, grow=grow)
    with reading(config, scope.sources):
        tokenizer, plans = _frozen_plans(scope, console, units=units, grow=grow)
        try:
            stage = _Stage(config, console, tokenizer, plans)
            return stage.make_units(started) if units else stage.run(started)
        finally:
            _remove_stale(config, plans)


def grow_plans(config: Config) -> None:
    """Append the files that were added to sources to their plans, as `preprocess` with `grow`; makes no unit.

    Raises:
        UserError: something in the config or the data has to be fixed first.
    """
    scope = _checked(config, grow=True)
    with reading(config, scope.sources):
        _frozen_plans(scope, Console(), units=True, grow=True)


def _checked(config: Config, *, grow: bool) -> PreprocessScope:
    """A run that nothing speaks against, with its sources."""
    found = Problems()
    scope = PreprocessScope(config, find_source_files(config, found, grow=grow))
    with reading(config, scope.sources):
        found.look(PREPROCESS_CHECKS, scope)
    found.raise_problems()
    return scope


def is_complete(config: Config) -> bool:
    """Tell whether the stage would find nothing to do, by the rules by which it does; writes nothing.

    False also where documents would have to be read to know it, and where records are bad or files damaged, of which
    the stage tells each time.

    Raises:
        UserError: something in the config or the data has to be fixed first.
    """
    if not (tokenizer_folder(config) / ORIGIN_FILE).is_file():
        return False
    sources = find_source_files(config)
    tokenizer = run_tokenizer(config)
    if config.tokenizer.path is not None:
        check_tokenizer_settings(config)
        asked = named_tokenizer(config)
        if asked.special_tokens != tokenizer.special_tokens:  # then the kept one is written anew
            return False
        _check_datasets(config, tokenizer)
    else:
        prepare_tokenizer(config, sources, {}, partial(_check_datasets, config))  # compares: there is one
    plans = []
    curations = applied_curations(config, sources)
    for found in sources:
        curation = curations.get(found.source.name)
        folder, splits = config.data_dir / found.source.name, known_splits(config, found, curation)
        if splits is None or not (folder / PLAN_FILE).exists():
            return False
        plan = make_plan(found, tokenizer, config, splits, curation)
        if plan.differences(folder):
            return False
        plans.append(plan)
    stage = _Stage(config, Console(quiet=True), tokenizer, plans)
    return all(stage.is_finished(plan) for plan in plans)


def _frozen_plans(
    scope: PreprocessScope, console: Console, *, units: bool, grow: bool
) -> tuple[Tokenizer, list[SourcePlan]]:
    """Make tokenizer and plans, or compare them with those that are there."""
    config, sources = scope.config, scope.sources
    for found in sources if grow else ():
        if not found.grows:
            say(console, f"{found.source.name}: no files were added to a plan")
    splits = find_splits(config, console, sources, scope.curations)
    tokenizer = _tokenizer(config, console, sources, splits)
    if not sources:
        say(console, NOTHING_TO_DO)
    if not units and (warning := dataset_warning(config, sources, tokenizer.dtype.itemsize)):
        warn(console, warning)
    plans = [
        make_plan(found, tokenizer, config, splits[found.source.name], scope.curations.get(found.source.name))
        for found in sources
    ]
    for plan in plans:
        freeze_alone(plan, config, config.data_dir / plan.found.source.name, console)
    _remove_stale(config, plans)
    return tokenizer, plans


@dataclass(frozen=True)
class _Found:
    """State of a source in a round."""

    receipts: Receipts
    job: SourceJob
    is_shuffled: bool
    """True if a global shuffle has taken all documents out of the parts of the units."""


class _Stage:
    """From frozen plans to finished datasets."""

    def __init__(self, config: Config, console: Console, tokenizer: Tokenizer, plans: list[SourcePlan]) -> None:
        self._config = config
        self._console = console
        self._tokenizer = tokenizer
        self._context = WorkerContext(tokenizer_folder(config), config.data.preprocess.verify_rate, tokenizer)
        self._plans = plans
        self._jobs = {plan.found.source.name: source_job(plan, config, _start_over(config, plan)) for plan in plans}
        self._shuffle_pass = ShufflePass(config, console, tokenizer.dtype)
        self._pack_pass = PackPass(config)
        self._rounds = Rounds()
        self._made = 0
        """Units that this run made, wholly or in part."""
        self._found: dict[str, _Found] = {}
        """By source, of the last round."""

    def run(self, started: float) -> PreprocessReport:
        """Make what is missing, then finish every source that can be."""
        failed: list[tuple[UnitJob, str]] = []
        before: list[UnitJob] = []
        while (missing := self._missing()) and not failed:
            run = self._make(missing, waits=True)
            failed = run.outcome.failed
            if missing == before and not (run.outcome.made or run.condemned or failed):
                missing = []  # only the times of files were to be noted, on a disk that cannot be written
                break
            before = missing
        unfinished = {job.unit.source for job in missing}
        problem = self._problem(failed, unfinished)
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
            if not run.condemned and not finds:
                break
        made = counted(self._made, "unit") + " made"
        if not missing or not held:
            say(self._console, f"{made}; all units are complete" if self._made else "all units are complete")
        else:
            others = f"{held:,} {'is' if held == 1 else 'are'} held by others"
            say(
                self._console,
                f"{made}, {others}; `pipeline preprocess` without --units, or the finish job of a submitted run, makes "
                "the missing units and finishes the datasets",
            )
        return PreprocessReport(units_done=self._made, seconds=time.monotonic() - started)

    def is_finished(self, plan: SourcePlan) -> bool:
        """Tell whether all units of a source are done, and its datasets and packs finished; changes nothing."""
        condemned = self._condemned()
        found = self._find(plan, condemned)
        folder = found.job.folder
        files = [folder / REPORT_FILE]
        files += [folder / name / file for name in plan.splits.names for file in (MANIFEST_FILE, PARTS_FILE)]
        if not all(file.is_file() for file in files):
            return False
        if plan.earlier and any(
            read_manifest(folder / name).config_hash != plan.config_hash for name in plan.splits.names
        ):
            return False  # it has not grown yet
        if not all(self._tokenizer.is_saved_in(folder / name) for name in plan.splits.names):
            return False
        if self._is_retracted(plan, found, condemned) or (found.is_shuffled and self._shuffle_pass.has_left(plan)):
            return False
        receipts = [receipt for unit in plan.units for receipt in found.receipts.of(unit.index)]
        if any(receipt.get("damaged") or receipt["rejected"].keys() - NOT_BAD for receipt in receipts):
            return False  # whether so much may be, finishing tells
        if coverage_of(receipts).unknown_share > self._config.data.preprocess.max_unknown:
            return False  # as above
        source = replace(found.job, has_parts=not found.is_shuffled)
        if self._units_to_make(plan, source, found.receipts, condemned):
            return False
        return not self._pack_pass.missing(plan.found.source.name)

    def _missing(self) -> list[UnitJob]:
        return [job for plan in self._plans for job in self._look(plan)]

    def _make(self, missing: list[UnitJob], *, waits: bool) -> TokenizeRun:
        run = TokenizeRun(self._config, self._console, self._context, self._choose_engine, waits=waits)
        outcome = run.run(missing, sum(len(plan.units) for plan in self._plans) - len(missing))
        self._made += outcome.made
        self._rounds.count("tokenizing", missing)
        return run

    def _problem(self, failed: list[tuple[UnitJob, str]], unfinished: set[str]) -> str:
        """Message about sources that cannot be finished; empty if all can."""
        sources = ", ".join(sorted(unfinished))
        return failure("unit", sources, failed, f"Without them {sources} cannot be finished")

    def _condemned(self) -> dict[str, str]:
        return read_condemned(tokenizer_folder(self._config) / CONDEMNED_FILE)

    def _look(self, plan: SourcePlan) -> list[UnitJob]:
        """The units that have a chunk without a complete receipt, or whose input has another time.

        Manifests are taken back if parts will be made again with other bytes, or by a whole first pass.
        """
        condemned = self._condemned()
        found = self._find(plan, condemned)
        source = found.job
        manifests = [path for name in plan.splits.names if (path := source.folder / name / MANIFEST_FILE).exists()]
        if manifests and self._is_retracted(plan, found, condemned):
            with self._shuffle_pass.alone(plan):
                found = self._find(plan, condemned)  # another command may just have made them again
                source = found.job
                if self._is_retracted(plan, found, condemned):
                    for path in manifests:
                        links.remove(path, missing_ok=True)
        if found.is_shuffled:
            source = replace(source, has_parts=False)
        return self._units_to_make(plan, source, found.receipts, condemned)

    @staticmethod
    def _units_to_make(
        plan: SourcePlan, source: SourceJob, receipts: Receipts, condemned: dict[str, str]
    ) -> list[UnitJob]:
        def is_valid(job: UnitJob) -> Callable[[Any, Position], bool]:
            return lambda receipt, start: receipt_is_valid(source, job.unit, receipt, start, condemned)

        jobs = (UnitJob(source, unit) for unit in plan.units)
        return [job for job in jobs if not job.is_done(receipts, is_valid(job))]

    def _find(self, plan: SourcePlan, condemned: dict[str, str]) -> _Found:
        """Read the receipts of a source."""
        receipts = Receipts(self._jobs[plan.found.source.name].folder)
        job = without_damaged(self._jobs[plan.found.source.name], plan.units, receipts)
        is_shuffled = self._shuffle_pass.is_done(plan, receipts, condemned) and _damage_stands(job, plan, receipts)
        found = _Found(receipts, job, is_shuffled)
        self._found[plan.found.source.name] = found
        return found

    def _is_retracted(self, plan: SourcePlan, found: _Found, condemned: dict[str, str]) -> bool:
        if self._config.data.preprocess.shuffle == "global":
            return not found.is_shuffled
        if not _damage_stands(found.job, plan, found.receipts):
            return True
        return bool(condemned) and any(
            receipt["engine"] in condemned for unit in plan.units for receipt in found.receipts.of(unit.index)
        )

    def _choose_engine(self) -> EngineChoice:
        setting, condemned = self._config.data.preprocess.engine, set(self._condemned())
        cache = cache_folder() / "engines"
        choice = choose_engine(setting, self._tokenizer, cache, condemned, self._context.engine)
        say(self._console, f"engine: {choice.name} ({choice.why})")
        if note := self._tokenizer.template_note:
            say(self._console, note)
        return choice

    def _finish(self, plan: SourcePlan) -> SourceReport:
        found = self._found[plan.found.source.name]
        start_over = _start_over(self._config, plan)
        found.job.check_plan()  # another command may have appended to it
        finish = Finalizer(plan, self._config, self._tokenizer, start_over, self._condemned(), found.receipts)
        finish.check()
        if found.is_shuffled and not self._shuffle_pass.has_left(plan):
            self._shuffle_pass.run(plan, found.receipts, finish)
            return finish.write()
        with self._shuffle_pass.alone(plan):
            receipts = Receipts(finish.report.folder)  # while this waited, another command may have made them again
            self._shuffle_pass.run(plan, receipts, finish)
            report = finish.write()
            self._shuffle_pass.clean(plan, receipts)
        return report


def _damage_stands(source: SourceJob, plan: SourcePlan, receipts: Receipts) -> bool:
    """Tell whether all chunks were made with the same files dropped as now, and of damaged files that are the same."""
    return all(damage_stands(source, unit, receipt) for unit in plan.units for receipt in receipts.of(unit.index))


def _tokenizer(config: Config, console: Console, sources: list[SourceFiles], splits: dict[str, Splits]) -> Tokenizer:
    check = partial(_check_datasets, config)
    folder = tokenizer_folder(config)
    if config.tokenizer.train is None or (folder / ORIGIN_FILE).exists():
        try:
            return prepare_tokenizer(config, sources, splits, check)
        except OtherTokenizer as error:
            if not withdraw_tokenizer(config, sources):
                raise
            say(console, f"the tokenizer is made again, since no unit was started with it ({error.difference})")
            return _tokenizer(config, console, sources, splits)
    make_data_dir(config, folder)
    with (
        take_when_free(
            folder,
            "train",
            LeaseWatch(),
            lambda holder: say(console, f"waiting for {holder}, which trains the tokenizer"),
        ) as lease,
        lease.beating(),
    ):
        trains = not (folder / ORIGIN_FILE).exists()
        if trains:
            say(console, "training the tokenizer")
        tokenizer = prepare_tokenizer(config, sources, splits, check)
    wanted = config.tokenizer.train.vocab_size
    if trains and tokenizer.vocab_size < wanted:
        say(
            console,
            f"the tokenizer has {tokenizer.vocab_size:,} entries instead of {wanted:,} (tokenizer.train.vocab_size): "
            "the text has no more pairs that occur tokenizer.train.min_frequency times",
        )
    return tokenizer


def _check_datasets(config: Config, tokenizer: Tokenizer) -> None:
    """Datasets made elsewhere, which are checked here for a tokenizer that was trained just now."""
    found = Problems()
    check_adopted(config, tokenizer, found)
    found.raise_problems()


def _start_over(config: Config, plan: SourcePlan) -> str:
    """Advice on starting a source over whose files have changed: plan and trained tokenizer are of the old ones."""
    folder = config.data_dir / plan.found.source.name
    if config.tokenizer.path is not None:
        return f"remove {folder}, which was begun with the files as they are now"
    if any(config.data_dir.glob("*/*/manifest.json")):
        kept = tokenizer_folder(config) / TOKENIZER_FILE
        return (
            f"remove {folder}, which was begun with the files as they are now, and keep the tokenizer of "
            f"the finished sources with tokenizer.path: {kept} in place of tokenizer.train"
        )
    return f"remove {config.data_dir}, which was begun with the files as they are now"


def _remove_stale(config: Config, plans: list[SourcePlan]) -> None:
    """Remove what processes that were killed left half-written."""
    for folder in (tokenizer_folder(config), *(config.data_dir / plan.found.source.name for plan in plans)):
        with suppress(OSError):
            for path in folder.rglob(f"*{storage.TEMPORARY_SUFFIX}"):
                storage.remove_if_stale(path)
            sweep(folder)
