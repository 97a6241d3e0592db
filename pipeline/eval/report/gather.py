"""Facts about a run from the files of its folder, read without its lock and without disturbing it.

A run may be going on, may have failed, or may lack any of its files: what cannot be read is None, and said.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

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
from pipeline.data.order.segments import Segment
from pipeline.eval.report.metrics_reader import MetricsReader
from pipeline.eval.report.reading import Reading
from pipeline.eval.report.scores import ReportedScore, read_made_with, read_scores
from pipeline.eval.report.sections.sample_losses import LossSummary, sample_losses
from pipeline.eval.report.sections.texts import SampleTexts, read_texts
from pipeline.eval.report.series import Columns
from pipeline.eval.report.state import State, judge
from pipeline.eval.reports import Evaluation, read_evaluations
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.run.attempts import Attempt, attempts
from pipeline.train.run.goodput import Goodput, is_step, number
from pipeline.train.run.heartbeat import Beat, read_beats

TRACES = (RunFiles.config, RunFiles.metrics, RunFiles.ledger, RunFiles.exit, RunFiles.checkpoints)
"""Each of these is in a run folder and nowhere else."""
_RECENT = 100
"""Steps whose median is the speed of now."""
_LOSSES_SECONDS = 60.0
"""Recorded losses of a run that is followed are not read again before."""


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
    changes: dict[str, list[int]] = field(default_factory=dict, kw_only=True)
    """First steps with another blend, batch size or sequence length than the step before, by the name of these."""
    checkpoint: dict[str, Any]
    """The state that the newest checkpoint has written down."""
    texts: SampleTexts = field(default_factory=SampleTexts)
    """What evaluations have generated."""
    sample_losses: LossSummary = field(default_factory=LossSummary)
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


@dataclass(frozen=True)
class Progress:
    """Steps, attempts and state of a run."""

    columns: Columns
    tries: list[Attempt]
    state: State
    goodput: Goodput | None
    values: dict[str, Any] | None
    """The resolved config as plain values."""
    config: Config | None
    """The same, as this version understands it."""


class RunReader:
    """Reads the facts about a run; also again and again while it trains.

    Args:
        folder: of the run.
        follows: whether it is asked again and again: what has not changed is not read again then.
        seen: told each row of the metrics.
    """

    def __init__(
        self, folder: Path, *, follows: bool = False, seen: Callable[[dict[str, Any]], None] = lambda row: None
    ) -> None:
        self.folder = folder
        self._follows = follows
        self._reading = Reading(keeps=follows)
        self._metrics = MetricsReader(folder, follows=follows, seen=seen)

    def progress(self) -> Progress:
        """Steps, attempts and state, by the files that change with each step."""
        folder, files, reading = self.folder, RunFiles(self.folder), self._reading
        reading.begin()
        values: dict[str, Any] | None = reading.unless_kept(
            "values", RunFiles.config, [files.config], lambda: written_values(files.config), None
        )
        config: Config | None = None
        if values is not None:
            config = reading.unless_kept("config", RunFiles.config, [files.config], lambda: load_run(folder), None)
        tries = _attempts(folder, reading)
        nothing: tuple[Columns, Goodput | None, list[str]] = (self._metrics.columns, None, [])
        columns, spent, strange = reading.read(
            files.metrics.name, lambda: self._metrics.read(tries, lambda: _sound_attempts(folder)), nothing
        )
        exit_state: dict[str, Any] = reading.read(RunFiles.exit, files.read_exit, {})
        beats: dict[int, Beat] = reading.read(RunFiles.heartbeats, lambda: read_beats(folder), {})
        reading.problems += [*strange, *_contradictions(columns, tries, exit_state)]
        times = np.asarray(columns.time)
        times = times[np.isfinite(times)]
        step_seconds = np.diff(times[-_RECENT:])
        state = judge(
            folder,
            tries,
            exit_state,
            beats,
            newest=float(times[-1]) if times.size else None,
            step_seconds=float(np.median(step_seconds)) if step_seconds.size else 0.0,
            heartbeat_seconds=config.launch.heartbeat_seconds if config is not None else 30.0,
            now=time.time(),
        )
        return Progress(columns, tries, state, spent, values, config)

    def facts(self) -> RunFacts:
        """All that is known about the run."""
        folder, files, reading = self.folder, RunFiles(self.folder), self._reading
        made, problems = self.progress(), reading.problems
        for path, why in (
            (files.metrics, "no step has been made yet"),
            (files.ledger, "no attempt has begun yet"),
            (files.journal, "no attempt has recorded its data yet"),
        ):
            if not path.exists():
                problems.append(f"{path.name} is missing: {why}, or it was moved away")
        config = made.config
        saved = [files.checkpoints, *files.checkpoint_steps().values()]
        checkpoint: dict[str, Any] = reading.unless_kept(
            "checkpoint", "the newest checkpoint", saved, lambda: _checkpoint(folder), {}
        )
        plan = [files.config, files.journal]
        unknown: tuple[int | None, int | None, str] = (None, None, "")
        steps, tokens, why = reading.unless_kept(
            "length", RunFiles.journal, plan, lambda: _length(folder, config, reading), unknown
        )
        evaluated = [files.summary, *sorted(files.evaluations.glob("*.json")), files.checkpoints]
        evaluations, scores, texts, made_with = reading.unless_kept(
            "evaluations",
            RunFiles.evaluations,
            evaluated,
            lambda: _evaluations(folder, reading),
            _Evaluated([], [], SampleTexts(), {}),
        )
        found = RunFacts(
            folder=folder,
            name=folder.name,
            # A chart may hold on to the columns, which then could not grow.
            columns=deepcopy(made.columns) if self._follows else made.columns,
            tries=made.tries,
            state=made.state,
            goodput=made.goodput,
            config=config,
            values=made.values or {},
            steps=steps,
            tokens=tokens,
            length_reason=why,
            consumption=[],
            evaluations=evaluations,
            made_with=made_with,
            scores=scores,
            texts=texts,
            checkpoint=checkpoint,
            problems=problems,
        )
        nothing: tuple[list[Consumption], dict[str, list[int]]] = ([], {})
        found.consumption, found.changes = reading.read("the plan of the data", lambda: _by_plan(found), nothing)
        found.sample_losses = reading.unless_kept(
            "losses",
            RunFiles.losses,
            [files.losses, files.journal],
            lambda: sample_losses(folder),
            LossSummary(),
            seconds=_LOSSES_SECONDS,
        )
        return found


def gather(run: Path) -> RunFacts:
    """The facts about a run.

    Args:
        run: its run file or its folder.

    Raises:
        UserError: it is neither, or nothing of the run is there.
    """
    return RunReader(_folder(run)).facts()


def gather_all(runs: Sequence[Path]) -> list[RunFacts]:
    """`gather` of several runs, under names that differ."""
    found = [gather(run) for run in runs]
    refuse_twice([each.folder for each in found])
    return under_names(found)


def refuse_twice(folders: Sequence[Path]) -> None:
    """Refuse a run that is named more than once.

    Raises:
        UserError: one is.
    """
    for folder in folders:
        if folders.count(folder) > 1:
            raise UserError(f"{folder} is named more than once; name each run once")


def under_names(found: list[RunFacts]) -> list[RunFacts]:
    """The facts about runs, under names that differ."""
    depth = 1
    while len({each.name for each in found}) < len(found):
        depth += 1
        for each in found:
            each.name = os.path.join(*each.folder.parts[-depth:])
    return found


def _folder(run: Path) -> Path:
    if run.is_dir():
        if not any((run / trace).exists() for trace in TRACES):
            raise no_run_folder(run)
        return run.absolute()
    config = load_run(run)
    if not config.run.dir.is_dir():
        raise UserError(
            f"run.dir {config.run.dir} of {run} does not exist: this run was not trained yet. Train it, or name "
            "the folder of another run"
        )
    return config.run.dir.absolute()


def _attempts(folder: Path, reading: Reading) -> list[Attempt]:
    """The attempts that the ledger has, without those whose figures make no sense."""
    path, unread = RunFiles(folder).ledger, list[None]()
    lines = storage.json_lines(path, lambda: unread.append(None))
    begun: list[Any] = reading.read(
        path.name, lambda: [x.get("attempt") for x in lines if x.get("event") == "attempt"], []
    )
    if unread:
        reading.problems.append(f"{len(unread):,} line{'s' * (len(unread) > 1)} of {path.name} cannot be read")
    sound: list[Attempt] = reading.read(path.name, lambda: _sound_attempts(folder), [])
    numbers = [each.number for each in sound]
    if strange := sum(number not in numbers for number in begun):
        reading.problems.append(
            f"{path.name} is damaged: {strange:,} of {len(begun):,} lines of attempts are not valid"
        )
    return sound


def _sound_attempts(folder: Path) -> list[Attempt]:
    return [each for each in attempts(folder) if _is_sound(each)]


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


class _Evaluated(NamedTuple):
    evaluations: list[Evaluation]
    scores: list[ReportedScore]
    texts: SampleTexts
    made_with: dict[tuple[int, str], dict[str, Any]]


def _evaluations(folder: Path, reading: Reading) -> _Evaluated:
    """Measurements on the checkpoints of a run, and texts by them."""
    no_evaluations: tuple[list[Evaluation], list[Path]] = ([], [])
    evaluations, damaged = reading.read("eval", lambda: read_evaluations(folder), no_evaluations)
    no_scores: tuple[list[ReportedScore], list[Path]] = ([], [])
    scores, damaged_scores = reading.read("eval", lambda: read_scores(folder), no_scores)
    reading.problems += [
        f"{path.relative_to(folder)} is damaged; remove it, and evaluate that step again"
        for path in (*damaged, *damaged_scores)
    ]
    replaced = {(each.step, each.weights) for each in evaluations if each.replaced}
    texts = reading.read("eval", lambda: read_texts(folder), SampleTexts()).without(replaced)
    return _Evaluated(evaluations, scores, texts, reading.read("eval", lambda: read_made_with(folder), {}))


def _checkpoint(folder: Path) -> dict[str, Any]:
    """The state of the newest checkpoint; the run may remove any while it is looked for."""
    for checkpoint in reversed(Checkpoints.of_run(folder).all()):
        with suppress(FileNotFoundError):
            return checkpoint.state()
    return {}


def _length(folder: Path, config: Config | None, reading: Reading) -> tuple[int | None, int | None, str]:
    """Steps and tokens of the whole run, and what ends it there."""
    if config is None:
        return None, None, ""
    duration = config.train.duration
    if RunFiles(folder).journal.exists():

        def by_plan() -> tuple[int, int, str]:
            journal = read_journal(folder)
            length = run_length(config, Sampler(journal))
            return length.steps, journal.tokens(length.steps), length.reason

        found: tuple[int, int, str] | None = reading.read(RunFiles.journal, by_plan, None)
        if found is not None:
            return found
    words = f"train.duration: {duration.count:,} {duration.unit}"
    steps, tokens = (duration.count if duration.unit == unit else None for unit in ("steps", "tokens"))
    return steps, tokens, words


def _changes(segments: Sequence[Segment]) -> dict[str, list[int]]:
    kinds: dict[str, Callable[[Segment], Any]] = {
        "blend": lambda segment: {name: source.weight for name, source in segment.sources.items()},
        "batch size": lambda segment: segment.batch_size,
        "sequence length": lambda segment: segment.sequence_length,
    }
    return {
        kind: [two.first_step + 1 for one, two in pairwise(segments) if of(one) != of(two)]
        for kind, of in kinds.items()
    }


def _by_plan(found: RunFacts) -> tuple[list[Consumption], dict[str, list[int]]]:
    """Consumption by source, in the order of the tokens that the plan wants of them, and the changes of the plan."""
    drawn: dict[str, Any] = {}
    if found.columns.newest is not None and isinstance(found.columns.newest.get("tokens_by_source"), dict):
        drawn = {k: v for k, v in found.columns.newest["tokens_by_source"].items() if math.isfinite(number(v))}
    by_now: dict[str, Account] = {}
    in_all: dict[str, Account] = {}
    changes: dict[str, list[int]] = {}
    if RunFiles(found.folder).journal.exists():
        sampler = Sampler(read_journal(found.folder))
        changes = _changes(sampler.journal.segments)
        by_now = accounts(sampler, found.step)
        if found.steps is not None:
            in_all = accounts(sampler, found.steps)
    names = dict.fromkeys([*drawn, *by_now, *in_all])
    rows = [Consumption(name, drawn.get(name), by_now.get(name), in_all.get(name)) for name in names]
    rows.sort(key=lambda row: (-(row.in_all.drawn if row.in_all else row.drawn or 0), row.source))
    return rows, changes
