"""Progress of the preprocess stage, from any shell while it runs: read from plans, receipts and leases alone.

Nothing is written, and no process is asked. Times are those of the file system; where its clock differs from this
machine's, rates and ages are off by that much.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeline.common import storage
from pipeline.common.console import print_table, say
from pipeline.common.errors import UserError
from pipeline.common.format import counted, duration, size
from pipeline.config.data import InputConfig
from pipeline.config.root import Config
from pipeline.data.datasets.files import PLAN_FILE, TRAIN
from pipeline.data.datasets.manifest import are_written
from pipeline.data.datasets.packing.files import packs_folder
from pipeline.data.packing.pack_pass import PackPass
from pipeline.data.preprocess.run_tokenizer import ORIGIN_FILE, tokenizer_folder
from pipeline.data.preprocess.tokenize_unit import REJECTED_ENGINES_FILE, read_rejected_engines
from pipeline.data.sources.damage import DamagedFile, in_words
from pipeline.data.sources.globs import File
from pipeline.data.sources.records import Damage
from pipeline.data.work.job_run import FAILURES_FILE
from pipeline.data.work.leases import PATIENCE_S, WorkerProgress, read_workers
from pipeline.data.work.progress import NOTHING_TO_DO, WIDE
from pipeline.data.work.receipt_totals import Counts, ReceiptTotals, read_plan_totals, whole
from pipeline.data.work.worker_pool import ATTEMPTS

WINDOW_S = 600.0
"""The rate is that of this last stretch."""
SHOWN = 20
"""Processes and failures of a source that are listed."""
_BUSY = ("starting", "working")


@dataclass(frozen=True)
class UnitFailure:
    """The last failure of a unit that is not done."""

    unit: int
    attempts: int
    how: str
    host: str
    pid: int
    time: float

    @property
    def is_final(self) -> bool:
        """The command that saw it has given the unit up."""
        return self.attempts >= ATTEMPTS


@dataclass
class SourceProgress:
    """Progress of a source.

    Attributes:
        name: of the source.
        folder: where its plan, receipts and datasets are.
        state: `not begun`, `starting` (a process is at work, but there is no plan yet), `damaged`, `working`, `waiting`
            (another source is being worked on), `stopped`, `tokenized` (manifests or packs are missing) or `finished`.
        units: of the plan.
        done: units that are finished.
        in_work: units that a living process has.
        redo: units that an engine made which is rejected by now.
        bytes: of the plan's files, as they lie on disk.
        bytes_done: of them; for units in work as far as they have said.
        splits: by name.
        records: read so far.
        rejected: records by reason.
        engines: receipts by the engine that made them.
        damaged: what could not be read of its files.
        unreadable: damaged receipts; what they stand for is made again.
        rate: bytes per second, None if it is not known.
        workers: who has a lease.
        failures: of units that are not done.
        problem: what is wrong with the plan.
        unpacked: sequence lengths of packs that are missing, of finished datasets.
    """

    name: str
    folder: Path
    state: str = "not begun"
    units: int = 0
    done: int = 0
    in_work: int = 0
    redo: int = 0
    bytes: int = 0
    bytes_done: int = 0
    splits: dict[str, Counts] = field(default_factory=dict)
    records: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    engines: Counter[str] = field(default_factory=Counter)
    damaged: list[DamagedFile] = field(default_factory=list)
    unreadable: int = 0
    rate: float | None = None
    workers: list[WorkerProgress] = field(default_factory=list)
    failures: list[UnitFailure] = field(default_factory=list)
    problem: str = ""
    unpacked: list[int] = field(default_factory=list)

    @property
    def in_words(self) -> str:
        """The state, as it is shown."""
        if self.state == "tokenized":
            return "tokenized, not packed" if self.unpacked else "tokenized, not finished"
        return self.state

    @property
    def failed(self) -> int:
        """Units that were given up, and that nobody tries again by now."""
        held = {worker.what for worker in self.workers if worker.state == "works"}
        return sum(failure.is_final and failure.unit not in held for failure in self.failures)

    @property
    def eta_s(self) -> float | None:
        """Seconds until all units are done at this rate."""
        return (self.bytes - self.bytes_done) / self.rate if self.state == "working" and self.rate else None

    @property
    def tokens(self) -> int:
        """Tokens of all splits."""
        return sum(split.tokens for split in self.splits.values())

    @property
    def documents(self) -> int:
        """Documents of all splits."""
        return sum(split.documents for split in self.splits.values())


def read_state(config: Config) -> list[SourceProgress]:
    """Progress of each source that has files or a hub dataset."""
    now = time.time()
    rejected_engines, inputs = frozenset(_rejected_engines(config)), config.data.inputs.values()
    states = [_read_source(config, source, rejected_engines, now) for source in inputs if source.dataset is None]
    if any(state.state in _BUSY for state in states):
        for state in states:
            if state.state == "stopped":
                state.state = "waiting"
    return states


def _rejected_engines(config: Config) -> dict[str, str]:
    try:
        return dict(read_rejected_engines(tokenizer_folder(config) / REJECTED_ENGINES_FILE))
    except (UserError, TypeError, ValueError):
        return {}


def _read_source(config: Config, source: InputConfig, rejected_engines: frozenset[str], now: float) -> SourceProgress:
    folder = config.data_dir / source.name
    places = [folder, *(packs_folder(folder / TRAIN, length) for length in config.pack_lengths)]
    state = SourceProgress(source.name, folder, workers=[each for place in places for each in read_workers(place, now)])
    working = [worker for worker in state.workers if worker.state == "works"]
    try:
        found = read_plan_totals(folder, rejected_engines)
        plan, totals = found.plan, found.totals
        names = [storage.plain_name(name, folder / PLAN_FILE) for name in plan["splits"]]
    except FileNotFoundError:
        state.state = "starting" if working else state.state
        return state
    except (UserError, TypeError) as error:
        state.problem = str(error) if isinstance(error, UserError) else f"{folder / PLAN_FILE} is damaged: no splits"
        state.state = "damaged"
        return state
    sizes = totals.sizes
    state.units, state.done, state.redo = len(sizes), len(totals.done), len(totals.redo)
    state.splits = {name: totals.splits.get(name, Counts()) for name in names}
    state.records, state.rejected, state.engines = totals.records, totals.rejected, totals.engines
    state.unreadable = totals.unreadable
    with suppress(TypeError, ValueError, IndexError):  # a plan that is damaged, too
        damaged = [_damaged(plan, unit, damage) for unit, damage in totals.damaged]
        state.damaged = sorted(damaged, key=lambda each: (each.file.name, each.detail))
    state.failures = [
        failure for failure in _read_failures(folder) if failure.unit < len(sizes) and failure.unit not in totals.done
    ]
    held = {w.what: w for w in working if isinstance(w.what, int) and w.what < len(sizes) and w.what not in totals.done}
    reached = dict(totals.open)
    for unit, worker in held.items():
        reached[unit] = min(max(worker.done, totals.open.get(unit, 0)), sizes[unit])
    state.in_work = len(held)
    state.bytes = sum(sizes)
    state.bytes_done = sum(sizes[unit] for unit in totals.done) + sum(reached.values())
    state.rate = _rate(totals, held, reached, found.planned, now)
    if working:
        state.state = "working"
    elif state.done < state.units:
        state.state = "stopped"
    else:
        finished = are_written(folder, names, plan["config_hash"] if totals.earlier else None)
        state.unpacked = PackPass(config).missing(source.name) if finished else []
        state.state = "finished" if finished and not state.unpacked else "tokenized"
        state.rate = None  # nothing is left to be read
    return state


def _damaged(plan: Any, unit: int, damage: Damage) -> DamagedFile:
    name, path, size = plan["files"][plan["units"][unit][damage.piece][0]]
    return DamagedFile(File(str(name), str(path), whole(size), 0), damage.reason, damage.detail, damage.lost)


def _rate(
    totals: ReceiptTotals, held: dict[int, WorkerProgress], reached: dict[int, int], planned: float, now: float
) -> float | None:
    """Bytes a second: of the last stretch while units are in work, else from the plan to the last receipt.

    Args:
        totals: of all receipts.
        held: who works on which unit.
        reached: bytes of units that are not done.
        planned: when the plan was made.
        now: the time.
    """
    if not held:
        last = max((when for when, *_ in totals.chunks), default=planned)
        return sum(amount for _, amount, _ in totals.chunks) / (last - planned) if last > planned else None
    began = min(worker.began for worker in held.values())
    start = max(now - WINDOW_S, min(began, now))
    recent = [(when, amount) for when, amount, _ in totals.chunks if when >= start]
    amount = float(sum(amount for _, amount in recent))
    last_chunk: dict[int, float] = {}
    for when, _, unit in totals.chunks:
        if unit in held:
            last_chunk[unit] = max(when, last_chunk.get(unit, 0.0))
    older = 0
    for unit, worker in held.items():
        since = min(max(worker.since, last_chunk.get(unit, 0.0)), now)
        flying = reached[unit] - totals.open.get(unit, 0)
        older += since < start
        amount += flying * min(1.0, (now - start) / max(now - since, 1e-9))
    if began < start and recent:
        # Chunks that were begun before the stretch and ended in it count half of what they are on average.
        amount -= max(len(held) - older, 0) * sum(size for _, size in recent) / len(recent) / 2
    return amount / (now - start) if amount > 0 and now > start else None


def _read_failures(folder: Path) -> list[UnitFailure]:
    """The last failure of each unit."""
    last: dict[int, UnitFailure] = {}
    for row in storage.read_json_lines(folder / FAILURES_FILE):
        try:
            failure = UnitFailure(
                whole(row["unit"]),
                whole(row["attempt"]),
                str(row["how"]),
                str(row["host"]),
                whole(row["pid"]),
                float(row["time"]),
            )
        except (KeyError, TypeError, ValueError):
            continue
        last[failure.unit] = failure
    return [last[unit] for unit in sorted(last)]


def print_status(console: Console, config: Config, run: str = "RUN.yaml") -> None:
    """Print the progress of the stage, and the command that resumes it where nobody works.

    Args:
        console: where to.
        config: the run.
        run: its file and overrides as a shell takes them, for the command.
    """
    states = read_state(config)
    now = time.time()
    making = [worker for worker in read_workers(tokenizer_folder(config), now) if worker.state == "works"]
    say(console, f"data: {config.data_dir}")
    if (tokenizer_folder(config) / ORIGIN_FILE).is_file():
        say(console, "tokenizer: there")
    elif making:
        say(console, f"tokenizer: being made by {making[0]}, for {duration(now - making[0].since)}")
    elif config.tokenizer.path is not None:
        path = config.tokenizer.path
        is_missing = isinstance(path, Path) and not path.exists()
        say(console, f"tokenizer: {path}" + (", which does not exist" if is_missing else ""))
    else:
        say(console, "tokenizer: not there yet")
    for engine, evidence in _rejected_engines(config).items():
        say(console, f"{engine} gave other ids than tokenizers; its units are made again: {evidence}")
    as_table = console.is_terminal and console.width >= WIDE
    if as_table and states:
        _print_table(console, states)
    for state in states:
        details = list(_details(state, now))
        if details or not as_table:
            say(console, state.name if as_table else f"{state.name}: {_summary(state)}")
        for line in details:
            say(console, f"  {line}")
    _print_next(console, states, bool(making), run)


def _print_table(console: Console, states: list[SourceProgress]) -> None:
    table = Table("source", "state", "units", "bytes", "", "documents", "tokens", "rejected", "rate", "left")
    table.title = "preprocess: status"
    for column in table.columns[2:]:
        column.justify = "right"
    for state in states:
        table.add_row(
            state.name,
            state.in_words,
            f"{state.done:,}/{state.units:,}",
            f"{size(state.bytes_done)}/{size(state.bytes)}",
            _share(state),
            f"{state.documents:,}",
            f"{state.tokens:,}",
            f"{state.rejected.total():,}",
            "-" if state.rate is None else f"{size(state.rate)}/s",
            "-" if state.eta_s is None else duration(state.eta_s),
        )
    print_table(console, table)


def _share(state: SourceProgress) -> str:
    # Rounded down: what is shown as 100 % is all of it.
    return f"{100 * state.bytes_done // state.bytes} %" if state.bytes else "-"


def _summary(state: SourceProgress) -> str:
    if state.state in ("not begun", "starting", "damaged"):
        return state.state
    text = f"{state.in_words}; {state.done:,} of {counted(state.units, 'unit')} done"
    text += f"; {size(state.bytes_done)} of {size(state.bytes)} ({_share(state)})"
    text += "" if state.rate is None else f", {size(state.rate)}/s"
    return text + ("" if state.eta_s is None else f", {duration(state.eta_s)} left")


def _details(state: SourceProgress, now: float) -> Iterator[str]:
    if state.problem:
        yield state.problem
    units = {"in work": state.in_work, "failed": state.failed, "to be made again": state.redo}
    if any(units.values()):
        yield "units " + ", ".join(f"{what}: {count:,}" for what, count in units.items() if count)
    if state.engines:
        for name, split in state.splits.items():
            yield f"{name}: {counted(split.documents, 'document')}, {counted(split.tokens, 'token')}"
        yield "engine: " + ", ".join(f"{name} ({counted(n, 'part')})" for name, n in sorted(state.engines.items()))
    if state.unpacked:
        yield f"packs to make, of {' and '.join(f'{length:,}' for length in state.unpacked)} tokens"
    if state.rejected:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in state.rejected.most_common())
        yield f"rejected: {state.rejected.total():,} of {counted(state.records, 'record')}: {reasons}"
    if state.damaged:
        yield in_words(state.damaged, state.bytes)
        yield from map(str, state.damaged[:SHOWN])
        if len(state.damaged) > SHOWN:
            yield f"and {len(state.damaged) - SHOWN:,} more"
    if state.unreadable:
        yield f"{counted(state.unreadable, 'receipt')} cannot be read; their units are made again"
    for worker in state.workers[:SHOWN]:
        work = f"unit {worker.what}, {size(worker.done)} done" if isinstance(worker.what, int) else worker.what
        ages = f"for {duration(now - worker.since)}, last sign of life {duration(worker.beat_s)} ago"
        note = ""
        if worker.state != "works":
            its = "unit" if isinstance(worker.what, int) else "work"
            by = "" if state.state in _BUSY else " by the next command"
            when = f", {duration(PATIENCE_S)} after it was seen to be silent" if worker.state == "stopped" else ""
            note = f"; it is {worker.state}; its {its} will be taken over{by}{when}"
            if worker.state == "stopped":
                note += f", or `kill -CONT {worker.pid}` continues it"
        yield f"{worker}: {work}, {ages}{note}"
    if len(state.workers) > SHOWN:
        yield f"and {len(state.workers) - SHOWN:,} more"
    for failure in state.failures[:SHOWN]:
        yield (
            f"unit {failure.unit} failed, attempt {failure.attempts} of {ATTEMPTS}, {duration(now - failure.time)} ago "
            f"(process {failure.pid} on {failure.host}): {failure.how}"
        )
    if len(state.failures) > SHOWN:
        yield f"and {len(state.failures) - SHOWN:,} more in {state.folder / FAILURES_FILE}"


def _print_next(console: Console, states: list[SourceProgress], making: bool, run: str) -> None:
    command = f"`pipeline preprocess {run}`"
    working = [state for state in states if state.state in _BUSY]
    rate = sum(state.rate or 0.0 for state in working)
    if working and rate and len(states) > 1 and all(state.units for state in states):
        left = sum(state.bytes - state.bytes_done for state in states)
        say(console, f"all sources: {size(rate)}/s, {duration(left / rate)} left")
    if working or making:
        return
    if not states:
        say(console, NOTHING_TO_DO)
    elif all(state.state == "finished" for state in states):
        say(console, "finished")
    elif all(state.state == "not begun" for state in states):
        say(console, f"no process works on it; run {command} to start")
    else:
        again = "; units that failed are tried again" if any(state.failed for state in states) else ""
        say(console, f"no process works on it; run {command} to resume{again}")
