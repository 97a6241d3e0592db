"""`pipeline curate --status`: passes, jobs and bytes, from files that the commands at work write. Changes nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pipeline.common import storage
from pipeline.common.console import print_table, say
from pipeline.common.errors import UserError
from pipeline.common.format import counted, duration, percent, size
from pipeline.config.root import Config
from pipeline.data.curate.curation_plan import CurationPlan, curate_config, make_curation_plan
from pipeline.data.curate.files import CURATE, curate_folder
from pipeline.data.curate.measurers import Measuring, measure_settings
from pipeline.data.curate.passes.across import ACROSS, across_folder, across_jobs, counts_across
from pipeline.data.curate.passes.scope_passes import ScopePasses, make_scopes
from pipeline.data.curate.report.build import Excerpt, Key
from pipeline.data.curate.verdicts import find_curation
from pipeline.data.datasets.files import PLAN_FILE
from pipeline.data.datasets.manifest import PLAN_KEYS
from pipeline.data.work.job import ReceiptJob
from pipeline.data.work.leases import LEASES, read_leases
from pipeline.data.work.receipt_totals import read_plan_totals
from pipeline.data.work.receipts import Receipts
from pipeline.data.work.units import SourceFiles, find_source_files


@dataclass
class MeasureProgress:
    """Progress of measuring a source.

    Attributes:
        name: of the source.
        units: of its plan; 0 if there is none.
        done: units that are measured.
        bytes: of its files.
        bytes_done: of them that were read.
        rate: bytes per second since the plan was made, while units are missing.
        workers: processes that hold a lease, as words.
        problem: reason why nothing can be told.
    """

    name: str
    units: int = 0
    done: int = 0
    bytes: int = 0
    bytes_done: int = 0
    rate: float = 0.0
    workers: tuple[str, ...] = ()
    problem: str = ""

    @property
    def is_complete(self) -> bool:
        """True if all units are measured."""
        return 0 < self.units == self.done


def print_status(console: Console, config: Config, words: str) -> None:
    """Print how far each source and pass is.

    Args:
        console: where to.
        config: the run.
        words: of the command line that name the run, for advice.
    """
    curate_config(config)
    found = [
        read_progress(curate_folder(config.data_dir / s.name), s.name) for s in config.data.sources if not s.dataset
    ]
    table = Table("source", "measured", "bytes", "", "rate", "left", title="curate")
    for each in found:
        left = duration((each.bytes - each.bytes_done) / each.rate) if each.rate and not each.is_complete else ""
        share = percent(each.bytes_done / each.bytes, 0) if each.bytes else ""
        rate = f"{size(each.rate)}/s" if each.rate else ""
        units = f"{each.done:,}/{counted(each.units, 'unit')}" if each.units else each.problem or "not planned"
        table.add_row(each.name, units, size(each.bytes_done), share, rate, left)
    print_table(console, table)
    complete = _print_passes(console, config, {each.name for each in found if each.is_complete})
    complete = complete and all(each.is_complete for each in found)
    workers = [worker for each in found for worker in each.workers] + _working(config.data_dir / CURATE)
    say(console, f"at work: {', '.join(workers)}" if workers else "no worker is running")
    for each in found:
        active = find_curation(curate_folder(config.data_dir / each.name))
        if active is not None:
            kept, documents = active.about["kept"], active.about["documents"]
            say(console, f"{each.name}: {kept:,} of {counted(documents, 'document')} kept, by {active.decisions}")
    if not workers and not complete:
        say(console, f"`pipeline curate {words}` does what is missing")


def _print_passes(console: Console, config: Config, measured: set[str]) -> bool:
    """Print the jobs of the passes of each scope whose sources are measured. True if their decisions are active."""
    if not measured:
        return False
    complete = True
    try:
        found = find_source_files(config, held_out=False)
        plans = [_plan(config, each) for each in found if each.source.name in measured]
        of_run = {plan.name: plan.settings for plan in plans}
        scopes: list[ScopePasses] = []
        for scope in make_scopes(config, plans) if len(of_run) == len(measured) and of_run else ():
            receipts = [Receipts(plan.folder) for plan in scope.plans]
            complete &= all(scope.active(number) is not None for number in range(len(scope.plans)))
            scopes.append(ScopePasses(scope, receipts, Measuring(config, of_run, "python"), _read_nothing))
            _print_scope(console, scopes[-1])
        if counts_across(config, scopes) and across_folder(config).is_dir():
            _print_jobs(console, ACROSS, across_jobs(config, scopes))
    except (UserError, KeyError) as error:
        say(console, f"passes: {error}")
        return False
    return complete


def _plan(config: Config, found: SourceFiles) -> CurationPlan:
    """The plan of a source that is measured; models are as they were then, and none is read."""
    known = storage.get_json(curate_folder(config.data_dir / found.source.name) / PLAN_FILE, *PLAN_KEYS)["settings"]
    return make_curation_plan(found, config, measure_settings(config, found.source, known=known))


def _read_nothing(folder: Path, keys: Sequence[Key]) -> Mapping[Key, Excerpt]:
    """Reader of texts of commands that do no job."""
    return {}


def _print_scope(console: Console, passes: ScopePasses) -> None:
    for each in passes.passes():
        if not _print_jobs(console, f"{passes.plan.name}: {each.name}", each.jobs()):
            return


def _print_jobs(console: Console, name: str, jobs: Sequence[ReceiptJob]) -> bool:
    """Print how many are done; whether all are."""
    done = [job for job in jobs if job.find() is not None]
    of_bytes = f"{size(sum(job.bytes for job in done))} of {size(sum(job.bytes for job in jobs))}"
    say(console, f"{name}: {len(done):,} of {counted(len(jobs), 'job')}, {of_bytes}")
    return len(done) == len(jobs)


def read_progress(folder: Path, name: str) -> MeasureProgress:
    """Progress of measuring a source, by the folder of its curation."""
    found = MeasureProgress(name, workers=tuple(_working(folder)))
    try:
        read = read_plan_totals(folder)
    except FileNotFoundError:
        return found
    except UserError as error:
        found.problem = str(error)
        return found
    totals, sizes = read.totals, read.totals.sizes
    found.units, found.done, found.bytes = len(sizes), len(totals.done), sum(sizes)
    found.bytes_done = sum(sizes[unit] for unit in totals.done) + sum(totals.open.values())
    last = time.time() if found.workers else max((when for when, *_ in totals.chunks), default=read.planned)
    found.rate = found.bytes_done / (last - read.planned) if last > read.planned else 0.0
    return found


def _working(folder: Path) -> list[str]:
    """Leases below a folder whose processes may be at work."""
    found = []
    for leases in sorted(folder.rglob(LEASES)) if folder.is_dir() else ():
        for what, lease, _ in read_leases(leases.parent):
            if lease.is_running() is not False:
                found.append(f"{lease.holder} ({what if isinstance(what, str) else f'unit {what}'})")
    return found
