"""Facts about a run from the files of its folder, read without its lock and without disturbing it.

A run may be going on, may have failed, or may lack any of its files: what cannot be read is None, and said.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.common.run_files import RunFiles
from pipeline.config import Config
from pipeline.config.load import load_run, no_run_folder, written_values
from pipeline.data.order.consumption import Account, accounts
from pipeline.data.order.journal_file import read_journal
from pipeline.data.order.run_length import run_length
from pipeline.data.order.sampler import Sampler
from pipeline.eval.report.epoch_losses import EpochLoss, epoch_losses
from pipeline.eval.report.scores import ReportedScore, read_made_with, read_scores
from pipeline.eval.report.series import Columns
from pipeline.eval.report.state import State, judge
from pipeline.eval.reports import Evaluation, read_evaluations
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.monitor.goodput import Goodput, goodput, is_step, number
from pipeline.train.run.attempts import Attempt, attempts
from pipeline.train.run.heartbeat import Beat, read_beats

_TRACES = (RunFiles.config, RunFiles.metrics, RunFiles.ledger, RunFiles.exit, RunFiles.checkpoints)
"""Each of these is in a run folder and nowhere else."""
_RECENT = 100
"""Steps whose median is the speed of now."""
T = TypeVar("T")


@dataclass(frozen=True)
class Consumption:
    """Tokens that a run has drawn from a source, and is to draw by its plan."""

    source: str
    drawn: int | None
    """As the metrics have it; None before the first step."""
    by_now: Account | None
    """Consumption until now, by the plan."""
    in_all: Account | None
    """Consumption of the whole run, by the plan."""


@dataclass
class RunFacts:
    """Facts about a run."""

    folder: Path
    name: str
    columns: Columns
    tries: list[Attempt]
    state: State
    goodput: Goodput | None
    config: Config | None
    values: dict[str, Any]
    """The resolved config as plain values, which may be of another version of this program."""
    steps: int | None
    """Steps of the whole run."""
    tokens: int | None
    """Tokens of the whole run."""
    length_reason: str
    consumption: list[Consumption]
    evaluations: list[Evaluation]
    made_with: dict[tuple[int, str], dict[str, Any]]
    """Settings of each evaluation, by step and weights."""
    scores: list[ReportedScore]
    checkpoint: dict[str, Any]
    """The state that the newest checkpoint has written down."""
    epoch_losses: list[EpochLoss] = field(default_factory=list)
    """Where the losses of samples are recorded."""
    problems: list[str] = field(default_factory=list)
    """Files that are missing or could not be read."""

    @property
    def step(self) -> int:
        """Steps done."""
        if len(self.columns):
            return self.columns.step[-1]
        step = self.tries[-1].step if self.tries else self.checkpoint.get("step")
        return step if is_step(step) else 0

    @property
    def start(self) -> float | None:
        """Start of its first attempt, in seconds since 1970."""
        if self.tries:
            return self.tries[0].begin
        return next((time for time in self.columns.time if math.isfinite(time)), None)

    def recent(self, name: str) -> float | None:
        """Median of a number over the newest steps."""
        values = np.asarray(self.columns.numbers[name])[-_RECENT:]
        values = values[np.isfinite(values)]
        return float(np.median(values)) if values.size else None


def gather(run: Path) -> RunFacts:
    """The facts about a run.

    Args:
        run: its run file or its folder.

    Raises:
        UserError: it is neither, or nothing of the run is there.
    """
    folder = _folder(run)
    files, problems = RunFiles(folder), list[str]()

    def read(what: str, function: Callable[[], T], otherwise: T) -> T:
        """Something that may be missing or damaged; that becomes a problem, and the rest is still read."""
        try:
            return function()
        except FileNotFoundError as error:
            problems.append(f"{what} is missing ({Path(error.filename).name if error.filename else error})")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, IndexError) as error:
            problems.append(f"{what} cannot be read: {str(error) or type(error).__name__}")
        return otherwise

    tries = _attempts(folder, read, problems)
    columns, spent = _metrics(folder, tries, read, problems)
    for path, why in (
        (files.metrics, "no step has been made yet"),
        (files.ledger, "no attempt has begun yet"),
        (files.journal, "no attempt has recorded its data yet"),
    ):
        if not path.exists():
            problems.append(f"{path.name} is missing: {why}, or it was moved away")
    values: dict[str, Any] | None = read(RunFiles.config, lambda: written_values(files.config), None)
    config: Config | None = None if values is None else read(RunFiles.config, lambda: load_run(folder), None)
    checkpoint: dict[str, Any] = read("the newest checkpoint", lambda: _checkpoint(folder), {})
    steps, tokens, why = _length(folder, config, read)
    no_evaluations: tuple[list[Evaluation], list[Path]] = ([], [])
    evaluations, damaged = read("eval", lambda: read_evaluations(folder), no_evaluations)
    no_scores: tuple[list[ReportedScore], list[Path]] = ([], [])
    scores, damaged_scores = read("eval", lambda: read_scores(folder), no_scores)
    problems += [
        f"{path.relative_to(folder)} is damaged; remove it, and evaluate that step again"
        for path in (*damaged, *damaged_scores)
    ]
    exit_state: dict[str, Any] = read(RunFiles.exit, files.read_exit, {})
    beats: dict[int, Beat] = read(RunFiles.heartbeats, lambda: read_beats(folder), {})
    problems += _contradictions(columns, tries, exit_state)
    times = np.asarray(columns.time)
    times = times[np.isfinite(times)]
    step_seconds = np.diff(times[-_RECENT:])
    found = RunFacts(
        folder=folder,
        name=folder.name,
        columns=columns,
        tries=tries,
        state=judge(
            folder,
            tries,
            exit_state,
            beats,
            newest=float(times[-1]) if times.size else None,
            step_seconds=float(np.median(step_seconds)) if step_seconds.size else 0.0,
            heartbeat_seconds=config.launch.heartbeat_seconds if config is not None else 30.0,
            now=time.time(),
        ),
        goodput=spent,
        config=config,
        values=values or {},
        steps=steps,
        tokens=tokens,
        length_reason=why,
        consumption=[],
        evaluations=evaluations,
        made_with=read("eval", lambda: read_made_with(folder), {}),
        scores=scores,
        checkpoint=checkpoint,
        problems=problems,
    )
    found.consumption = read("the plan of the data", lambda: _consumption(found), [])
    found.epoch_losses = read(RunFiles.losses, lambda: epoch_losses(folder), [])
    return found


def gather_all(runs: Sequence[Path]) -> list[RunFacts]:
    """`gather` of several runs, under names that differ."""
    found = [gather(run) for run in runs]
    folders = [each.folder for each in found]
    for each in found:
        if folders.count(each.folder) > 1:
            raise UserError(f"{each.folder} is named more than once; name each run once")
    depth = 1
    while len({each.name for each in found}) < len(found):
        depth += 1
        for each in found:
            each.name = os.path.join(*each.folder.parts[-depth:])
    return found


def _folder(run: Path) -> Path:
    if run.is_dir():
        if not any((run / trace).exists() for trace in _TRACES):
            raise no_run_folder(run)
        return run.absolute()
    config = load_run(run)
    if not config.run.dir.is_dir():
        raise UserError(
            f"run.dir {config.run.dir} of {run} does not exist: this run was not trained yet. Train it, or name "
            "the folder of another run"
        )
    return config.run.dir.absolute()


class _Unread:
    """Counter of the lines of a file that cannot be read."""

    def __init__(self) -> None:
        self.lines = 0

    def __call__(self) -> None:
        self.lines += 1

    def problems(self, path: Path) -> list[str]:
        """A line for the list of problems, or none."""
        return [f"{self.lines:,} line{'s' * (self.lines > 1)} of {path.name} cannot be read"] if self.lines else []


def _attempts(folder: Path, read: Callable[..., Any], problems: list[str]) -> list[Attempt]:
    """The attempts that the ledger has, without those whose figures make no sense."""
    path = RunFiles(folder).ledger
    unread = _Unread()
    lines = storage.json_lines(path, unread)
    begun: list[Any] = read(path.name, lambda: [x.get("attempt") for x in lines if x.get("event") == "attempt"], [])
    problems += unread.problems(path)
    tries: list[Attempt] = read(path.name, lambda: attempts(folder), [])
    sound = [each for each in tries if _is_sound(each)]
    numbers = [each.number for each in sound]
    if strange := sum(number not in numbers for number in begun):
        problems.append(f"{path.name} is damaged: {strange:,} of {len(begun):,} lines of attempts are not valid")
    return sound


def _is_sound(attempt: Attempt) -> bool:
    times = (attempt.begin, attempt.begin if attempt.end is None else attempt.end)
    return (
        type(attempt.number) is int
        and is_step(attempt.first_step)
        and is_step(attempt.step)
        and all(math.isfinite(number(time)) for time in times)
        and (attempt.code is None or type(attempt.code) is int)
        and isinstance(attempt.reason, str)
        and isinstance(attempt.host, str)
        and isinstance(attempt.layout, dict)
        and all(type(each) is int for each in attempt.layout.values())
    )


def _contradictions(columns: Columns, tries: Sequence[Attempt], exit_state: dict[str, Any]) -> Iterator[str]:
    """Steps and attempts that other files have and the metrics lack."""
    name, last = RunFiles.metrics, tries[-1] if tries else None
    strange = sorted(set(columns.attempt) - {each.number for each in tries})
    if strange:
        which = ", ".join(map(str, strange[:5])) + ", …" * (len(strange) > 5)
        yield f"{name} has steps of attempt {which}, which {RunFiles.ledger} does not mention"
    ends: dict[str, Any] = {}  # the last step by the file that has it
    # Of one that was killed the step is a guess by the heartbeat, which is ahead of the metrics.
    if last is not None and last.end is not None and last.code is not None:
        ends[RunFiles.ledger] = last.step
    if last is None or (last.end is not None and exit_state.get("attempt") == last.number):
        ends.setdefault(RunFiles.exit, exit_state.get("step"))
    done = columns.step[-1] if len(columns) else 0
    file, step = max(ends.items(), key=lambda item: item[1] if is_step(item[1]) else -1, default=("", 0))
    if is_step(step) and step > done:
        yield f"{name} ends at step {done:,}, but {file} says that step {step:,} was made"


def _metrics(
    folder: Path, tries: list[Attempt], read: Callable[..., Any], problems: list[str]
) -> tuple[Columns, Goodput | None]:
    """Columns and goodput, in one pass through what may be a file of gigabytes."""
    path = RunFiles(folder).metrics
    unread = _Unread()

    def read_rows(*, with_goodput: bool) -> tuple[Columns, Goodput | None]:
        columns, unread.lines = Columns(tries), 0
        rows = columns.taking(storage.json_lines(path, unread))
        spent = goodput(folder, tries, rows) if with_goodput else None
        for _ in rows:  # those that the goodput has not taken, as without an attempt that is known
            pass
        columns.finish()
        return columns, spent

    found: tuple[Columns, Goodput | None] | None = read("the goodput", lambda: read_rows(with_goodput=True), None)
    if found is None:
        found = read(path.name, lambda: read_rows(with_goodput=False), (Columns(), None))
    columns, spent = found
    unread.lines += columns.unread
    problems += unread.problems(path)
    if columns.untimed:
        without = f"{columns.untimed:,} line{'s have' if columns.untimed > 1 else ' has'} no time"
        problems.append(f"{path.name}: {without}; the goodput leaves them out")
    return columns, spent


def _checkpoint(folder: Path) -> dict[str, Any]:
    """The state of the newest checkpoint; the run may remove any while it is looked for."""
    for checkpoint in reversed(Checkpoints.of_run(folder).all()):
        with suppress(FileNotFoundError):
            return checkpoint.state()
    return {}


def _length(folder: Path, config: Config | None, read: Callable[..., Any]) -> tuple[int | None, int | None, str]:
    """Steps and tokens of the whole run, and what ends it there."""
    if config is None:
        return None, None, ""
    duration = config.train.duration
    if RunFiles(folder).journal.exists():

        def by_plan() -> tuple[int, int, str]:
            journal = read_journal(folder)
            length = run_length(config, Sampler(journal))
            return length.steps, journal.tokens(length.steps), length.reason

        found: tuple[int, int, str] | None = read(RunFiles.journal, by_plan, None)
        if found is not None:
            return found
    words = f"train.duration: {duration.count:,} {duration.unit}"
    return (duration.count, None, words) if duration.unit == "steps" else (None, duration.count, words)


def _consumption(found: RunFacts) -> list[Consumption]:
    """By source, in the order of the tokens that the plan wants of them."""
    drawn: dict[str, Any] = {}
    if found.columns.newest is not None and isinstance(found.columns.newest.get("tokens_by_source"), dict):
        drawn = {k: v for k, v in found.columns.newest["tokens_by_source"].items() if math.isfinite(number(v))}
    by_now: dict[str, Account] = {}
    in_all: dict[str, Account] = {}
    if RunFiles(found.folder).journal.exists():
        sampler = Sampler(read_journal(found.folder))
        by_now = accounts(sampler, found.step)
        if found.steps is not None:
            in_all = accounts(sampler, found.steps)
    names = dict.fromkeys([*drawn, *by_now, *in_all])
    rows = [Consumption(name, drawn.get(name), by_now.get(name), in_all.get(name)) for name in names]
    return sorted(rows, key=lambda row: (-(row.in_all.drawn if row.in_all else row.drawn or 0), row.source))
