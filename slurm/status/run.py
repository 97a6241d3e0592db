"""Status of a run: its state, progress, speed and attempts."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.common.errors import EXIT_OK
from pipeline.common.format import listed
from pipeline.common.run_files import RunFiles
from pipeline.common.slurm_commands import JobAnswer, JobIdentity
from pipeline.config.run import LaunchConfig
from pipeline.train.checkpoint.committed import COMMIT
from pipeline.train.checkpoint.manager import Checkpoint, Checkpoints
from pipeline.train.run.attempts import Attempt, attempts
from pipeline.train.run.goodput import goodput
from pipeline.train.run.heartbeat import ENDED, Beat, read_beats
from pipeline.train.run.lock import is_held
from pipeline.train.run.mirror_state import MirrorState, read_mirror_state
from pipeline.train.run.stop_requests import RESUME_ADVICE
from pipeline.train.run.unsaved import read_saves
from slurm.job.restart_policy import suspects
from slurm.record.launch_log import Launch, LaunchEnd, next_words
from slurm.status.files import MetricRows, RunSnapshot
from slurm.status.queued import QueuedJob, SchedulerSnapshot, lost_launches, queue
from slurm.status.state import LOST, State, judge, node_of, row_outcome, with_refusal

_LARGE = 2**26
"""Bytes of metrics above which they are not read as a whole: the goodput is then that of the last end in peace."""
_STOP = 120.0
"""Seconds before the end of a job at which it stops, about: the training measures what it needs."""
_OVER: tuple[State, ...] = ("done", "stopped", "cancelled")
"""States in which nothing is left to wait for: whoever stopped a run decides whether it continues."""
_AT_LEAST = 60.0
"""Seconds of a job that count, however short it is."""


@dataclass(frozen=True)
class RankBeat:
    """The heartbeat of a rank."""

    rank: int
    node: str
    step: int | None
    """From 1, the one that it is in."""
    phase: str
    seconds: float
    """Since then."""


@dataclass(frozen=True)
class AttemptRow:
    """An attempt at training with the launch that it was part of; or a launch that came to none."""

    number: int | None
    """Number of the attempt."""
    job: str | None
    restarts: int
    launch: int | None
    """Within this start of the job, from 1; None for what was started by hand."""
    link: int | None
    nodes: tuple[str, ...]
    first_step: int
    step: int
    begin: float
    """In seconds since 1970."""
    seconds: float
    outcome: str
    reason: str
    next: str | None
    """What followed on the launch."""


@dataclass(frozen=True)
class ExpertLoads:
    """Loads of experts in the last step."""

    max_over_mean: float
    """Of the busiest expert, in the layer where it is highest."""
    layer: int | None
    """That layer."""
    dead: int
    """Experts of a layer without a token, at most."""
    forced: bool
    """Tokens were dealt in turn."""

    def __str__(self) -> str:
        where = "" if self.layer is None else f" (layer {self.layer})"
        forced = "; forced by train.balance.force" if self.forced else ""
        return f"busiest {self.max_over_mean:.2f}x the mean{where}, {self.dead:,} dead{forced}"


@dataclass(frozen=True)
class SetLoss:
    """The newest validation loss on a set of `heldout_sets`."""

    step: int
    loss: float | None


@dataclass(frozen=True)
class RunStatus:
    """Status of a run; None stands for what is not known."""

    run: Path
    state: State
    stage: str | None
    why: str
    step: int | None
    steps: int | None
    """Steps of the whole run."""
    tokens: int | None
    loss: float | None
    validation_loss: float | None
    validation_step: int | None
    validation_sets: dict[str, SetLoss] | None
    """By name of `heldout_sets`, as far as they were scored."""
    step_seconds: float | None
    """Median of the last steps."""
    tokens_per_second: float | None
    mfu: float | None
    experts: ExpertLoads | None
    """Of a model that has some."""
    seconds_left: float | None
    """At the pace of the last steps, validations and saves included; None of a run that was stopped, too."""
    starts_left: int | None
    """Starts of jobs after the one that runs, within their time limit."""
    checkpoint: int | None
    """Steps of the newest one."""
    checkpoint_seconds: float | None
    """Since it was committed."""
    failed_saves: str
    """Saves that have failed since then, in words; "" for none."""
    mirror: str
    """The newest checkpoint in the mirror (`train.checkpoint.mirror`), in words; "" without one."""
    failed_mirror: str
    """Since when and why nothing is uploaded there, in words; "" if uploads succeed."""
    ranks: int | None
    """Ranks of the last attempt."""
    beating: int
    """Ranks that have given a sign of life and not left."""
    newest_beat: RankBeat | None
    oldest_beat: RankBeat | None
    restarts: int
    """Number of times that the scheduler has started a job of the training again."""
    attempts: list[AttemptRow]
    goodput: dict[str, float] | None
    goodput_to_last_end: bool
    """It is that of the last attempt which ended in peace, since the metrics are large."""
    nodes: list[str]
    """That it runs on now."""
    suspects: dict[str, str]
    """Nodes, and what they are suspected of."""
    queue: list[QueuedJob]
    evaluations: int
    last_evaluation: dict[str, Any] | None
    scheduler: str | None
    """Why it did not answer."""
    problems: list[str]
    """Messages about what could not be read."""

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {**asdict(self), "run": str(self.run)}


def describe(facts: RunSnapshot, snapshot: SchedulerSnapshot, *, spent: bool = True) -> RunStatus:
    """Status of a run.

    Args:
        facts: its files.
        snapshot: of the scheduler.
        spent: whether the goodput is wanted, for which all metrics are read.
    """
    run = facts.run
    launch = LaunchConfig() if facts.config is None else facts.config.launch
    waiting = queue(facts, snapshot)
    everything: dict[int, Beat] = facts.read(RunFiles.heartbeats, lambda: read_beats(run), {})
    facts.lost = lost_launches(facts, snapshot, waiting, fresh=_is_fresh(facts, everything, launch))
    tries: list[Attempt] = facts.read(
        RunFiles.ledger, lambda: attempts(run, lambda _: _holds(facts, snapshot, everything, launch)), []
    )
    last = tries[-1] if tries else None
    running = last is not None and last.end is None
    beats = {rank: beat for rank, beat in everything.items() if last is not None and beat.attempt == last.number}
    rows = facts.rows(None if last is None or running else last.step)
    if last is not None and running and rows.newest is not None and rows.newest.get("attempt", 0) < last.number:
        rows = facts.rows(last.first_step)  # what came after it in an earlier attempt is lost
    step = _step(last, rows)
    total = facts.total_steps()
    pace = _pace(rows)
    median = statistics.median(seconds) if (seconds := _each(rows, "step_seconds")) else None
    patience = max(3 * launch.heartbeat_seconds, 2 * (median or 0.0))
    verdict = judge(facts, snapshot, waiting, tries, beats, patience=patience, total=total)
    verdict = with_refusal(facts, waiting, verdict)
    saved = facts.read(RunFiles.checkpoints, lambda: Checkpoints.of_run(run).latest(), None)
    left = None
    if total is not None and pace is not None and verdict.state not in _OVER and not _is_cancelled(facts, last):
        left = max(0, total - (step or 0)) * pace
    evaluated = facts.evaluations()
    trained = [each for each in facts.launches if each.stage == "train"]
    alive = sorted((beat for beat in beats.values() if beat.phase != ENDED), key=lambda beat: beat.time)
    spent_now, partial = _goodput(facts, tries) if spent else (None, False)
    mirror = _mirror(facts, last)
    return RunStatus(
        run=run,
        state=verdict.state,
        stage=verdict.stage,
        why=verdict.why,
        step=step,
        steps=total,
        tokens=rows.newest["tokens"] if rows.newest else None,
        loss=rows.trained["loss"] if rows.trained else None,
        validation_loss=rows.validated["validation_loss"] if rows.validated else None,
        validation_step=rows.validated["step"] if rows.validated else None,
        validation_sets={
            name: SetLoss(row["step"], row["validation"][name].get("loss")) for name, row in rows.sets.items()
        }
        or None,
        step_seconds=median,
        tokens_per_second=statistics.median(rates) if (rates := _each(rows, "tokens_per_second")) else None,
        mfu=statistics.median(shares) if (shares := _each(rows, "mfu")) else None,
        experts=_experts(rows.trained),
        seconds_left=left,
        starts_left=_starts(facts, left, waiting, launch),
        checkpoint=saved.step if saved else None,
        checkpoint_seconds=facts.read(RunFiles.checkpoints, lambda: _age(facts, saved), None),
        failed_saves=_failed_saves(facts, last),
        mirror=mirror.summary(facts.now) if mirror else "",
        failed_mirror=mirror.words(facts.now if last is None or last.end is None else last.end) if mirror else "",
        ranks=last.layout.get("world_size") if last else None,
        beating=len(alive),
        newest_beat=_rank_beat(facts, alive[-1]) if running and alive else None,
        oldest_beat=_rank_beat(facts, alive[0]) if running and alive else None,
        restarts=max((each.restarts for each in trained), default=0),
        attempts=facts.read(RunFiles.ledger, lambda: _rows_of(tries, trained, facts), []),
        goodput=spent_now,
        goodput_to_last_end=partial,
        nodes=_nodes(last if running else None, alive, waiting, facts),
        suspects=_suspects(trained, [each for each in trained if each.end or each.key in facts.lost], saved),
        queue=waiting,
        evaluations=len(evaluated),
        last_evaluation=evaluated[-1][1] if evaluated else None,
        scheduler=snapshot.problem,
        problems=facts.problems,
    )


def _is_cancelled(facts: RunSnapshot, last: Attempt | None) -> bool:
    """True if somebody has cancelled the training: nothing of it is left, though it may still save."""
    by = facts.cancelled
    return by is not None and "train" in (by.stages or ("train",)) and (last is None or by.time >= last.begin)


def _holds(facts: RunSnapshot, snapshot: SchedulerSnapshot, beats: Mapping[int, Beat], launch: LaunchConfig) -> bool:
    """True if a process trains in the run folder, or may."""
    if facts.holder is not None and (number := facts.holder.get("job")) is not None:
        last = next((each for each in reversed(facts.launches) if each.job == str(number)), None)
        if last is not None and last.key in facts.lost:
            return False

    def answer(job: JobIdentity) -> JobAnswer:
        state = None if snapshot.states is None else snapshot.states.get(job.number)
        if state is not None:
            return JobAnswer("running" if state.runs else "ended", f"job {job.number} is {state.state}")
        accounted = snapshot.accounted.get(job.number)
        known = (accounted is not None and accounted.over) or (snapshot.states is not None and job.is_own)
        if known and not _is_fresh(facts, beats, launch):
            return JobAnswer("ended", f"job {job.number} has ended")
        if snapshot.states is not None:
            facts.hidden = job.number
        return JobAnswer("unknown", f"the scheduler does not show job {job.number} to this user")

    return is_held(facts.run, answer)


def _is_fresh(facts: RunSnapshot, beats: Mapping[int, Beat], launch: LaunchConfig) -> bool:
    """True if a rank has given a sign of life just now."""
    return any(facts.now - beat.time < 3 * launch.heartbeat_seconds for beat in beats.values() if beat.phase != ENDED)


def _step(last: Attempt | None, rows: MetricRows) -> int | None:
    """Steps that are done."""
    newest = rows.newest
    if last is None:
        return newest["step"] if newest else None
    if newest is not None and newest.get("attempt", 0) >= last.number:
        return max(last.first_step, int(newest["step"]))
    return last.first_step if last.end is None else last.step


def _each(rows: MetricRows, key: str) -> list[float]:
    return [value for row in rows.steps if isinstance(value := row.get(key), (int, float))]


def _experts(trained: Mapping[str, Any] | None) -> ExpertLoads | None:
    told = (trained or {}).get("experts")
    if not isinstance(told, dict) or not isinstance(told.get("load_max_over_mean"), (int, float)):
        return None
    load, dead = told["load_max_over_mean"], told.get("dead_experts", 0)
    return ExpertLoads(load, told.get("load_max_layer"), dead, told.get("balance_forced", False))


def _pace(rows: MetricRows) -> float | None:
    """Seconds from step to step, with all that comes between."""
    times: list[tuple[int, float]] = [(row["step"], row["time"]) for row in rows.steps if "time" in row]
    if len(times) > 1 and times[0][0] > times[-1][0]:
        return (times[0][1] - times[-1][1]) / (times[0][0] - times[-1][0])
    seconds = _each(rows, "step_seconds")
    return seconds[0] if seconds else None


def _starts(facts: RunSnapshot, left: float | None, waiting: Sequence[QueuedJob], launch: LaunchConfig) -> int | None:
    submission = facts.submission(facts.last_job("train"))
    if left is None or submission is None or submission.where == "local" or submission.resources.time is None:
        return None
    limit, given = 60 * submission.resources.time, launch.stop_before_end_seconds
    before = min(_STOP, limit / 4) if given is None else given
    ends = [job.end for job in waiting if job.stage == "train" and job.runs and job.end is not None]
    here = max(0.0, ends[0] - facts.now - before) if ends else 0.0
    return math.ceil(max(0.0, left - here) / max(_AT_LEAST, limit - before))


def _age(facts: RunSnapshot, saved: Checkpoint | None) -> float | None:
    return max(0.0, facts.now - (saved.path / COMMIT).stat().st_mtime) if saved else None


def _failed_saves(facts: RunSnapshot, last: Attempt | None) -> str:
    found = read_saves(facts.run)
    if found is None or last is None or found.attempt < last.number:
        return ""
    return found.words(facts.now if last.end is None else last.end)


def _mirror(facts: RunSnapshot, last: Attempt | None) -> MirrorState | None:
    found = read_mirror_state(facts.run)
    return None if found is None or last is None or found.attempt < last.number else found


def _rank_beat(facts: RunSnapshot, beat: Beat) -> RankBeat:
    return RankBeat(beat.rank, node_of(facts, beat), beat.step, beat.phase, max(0.0, facts.now - beat.time))


def _goodput(facts: RunSnapshot, tries: Sequence[Attempt]) -> tuple[dict[str, float] | None, bool]:
    """The goodput, and whether it is of an earlier moment."""
    path = facts.files.metrics
    if not path.exists():
        return None, False
    if path.stat().st_size > _LARGE:
        return facts.last_goodput(), True
    found = facts.read(RunFiles.metrics, lambda: goodput(facts.run, tries), None)
    return (found.to_json() if found else None), False


def _rows_of(tries: Sequence[Attempt], trained: Sequence[Launch], facts: RunSnapshot) -> list[AttemptRow]:
    """Attempts and launches of the training as one table, in order."""
    now = facts.now
    found: list[AttemptRow] = []
    seen: dict[tuple[str, int, int], int] = {}
    for each in tries:
        launch = _launch_of(each, trained, now)
        if launch is not None:
            seen[launch.key] = len(found)
        found.append(
            AttemptRow(
                number=each.number,
                job=launch.job if launch else each.job,
                restarts=launch.restarts if launch else each.restarts,
                launch=launch.number if launch else None,
                link=launch.link if launch else None,
                nodes=(launch.nodes if launch else ()) or (each.host,),
                first_step=each.first_step,
                step=each.step,
                begin=each.begin,
                seconds=max(0.0, (now if each.end is None else each.end) - each.begin),
                outcome=each.outcome,
                reason="" if each.end is None else listed(each.reason),
                next=None,
            )
        )
    # What a launch came to, its last attempt came to.
    for launch in trained:
        if launch.end is not None and launch.key in seen:
            place = seen[launch.key]
            found[place] = _with_end(found[place], launch, launch.end)
        elif launch.key not in seen:
            found.append(_without_attempt(launch, now, is_lost=launch.key in facts.lost))
    return sorted(found, key=lambda each: each.begin)


def _with_end(row: AttemptRow, launch: Launch, end: LaunchEnd) -> AttemptRow:
    """A row with the end of its launch: that knows the first failure, an attempt perhaps only what followed from it."""
    row = replace(row, next=end.next)
    if end.next not in ("done", "end"):
        row = replace(row, reason=row.reason.removesuffix(listed(RESUME_ADVICE)).removesuffix("."))
    if launch.crashed or (row.outcome == "killed" and end.code != EXIT_OK):
        row = replace(row, outcome=row_outcome(launch), reason=_cause(end))
    return row


def _cause(end: LaunchEnd) -> str:
    """Reason for the end of a launch, without what followed."""
    for words in (next_words(end.next), end.next):  # the latter of earlier versions
        before, found, _ = end.reason.rpartition(f"; {words}: ")
        if found:
            return listed(before)
    return listed(end.reason)


def _without_attempt(launch: Launch, now: float, *, is_lost: bool) -> AttemptRow:
    end = launch.end
    over = end.time if end else launch.time if is_lost else now
    open_reason = LOST if is_lost else "no attempt has begun"
    return AttemptRow(
        number=None,
        job=launch.job,
        restarts=launch.restarts,
        launch=launch.number,
        link=launch.link,
        nodes=launch.nodes or (launch.host,),
        first_step=launch.checkpoint,
        step=launch.checkpoint,
        begin=launch.time,
        seconds=max(0.0, over - launch.time),
        outcome=row_outcome(launch, is_lost=is_lost),
        reason=_cause(end) if end else open_reason,
        next=end.next if end else None,
    )


def _launch_of(attempt: Attempt, trained: Sequence[Launch], now: float) -> Launch | None:
    """The launch that an attempt was part of, if any: the last one that had begun before it.

    Its ranks may outlive the launch and see the next one begin. Where clocks differ, it is the first one of its time.
    """
    of_its_time = [launch for launch in trained if launch.time <= (now if attempt.end is None else attempt.end) + 1]
    before = [launch for launch in of_its_time if launch.time <= attempt.begin + 1]
    found = before[-1] if before else next(iter(of_its_time), None)
    return None if found is None or (found.end is not None and attempt.begin > found.end.time) else found


def _nodes(last: Attempt | None, alive: Sequence[Beat], waiting: Sequence[QueuedJob], facts: RunSnapshot) -> list[str]:
    """Nodes on which it runs now."""
    open_launches = [launch for launch in facts.launches if launch.end is None and launch.key not in facts.lost]
    jobs = {job.job: job for job in waiting if job.runs}
    for launch in reversed(open_launches):
        if not jobs.keys().isdisjoint((launch.job, launch.job.partition("_")[0])):
            return list(launch.nodes) or [launch.host]
    if last is not None:
        return sorted({beat.host for beat in alive}) or [last.host]
    return sorted({job.nodes for job in jobs.values() if job.nodes})


def _suspects(trained: Sequence[Launch], over: Sequence[Launch], saved: Checkpoint | None) -> dict[str, str]:
    """Nodes that were lost or unhealthy, and those that the last crashes have in common.

    Args:
        trained: launches of the training, in order.
        over: those that run no more: one that runs has not crashed.
        saved: the newest checkpoint.
    """
    found = Counter(node for launch in trained if launch.end for node in launch.end.failed_nodes)
    words = {node: f"failed in {count} of {len(trained)} launches" for node, count in found.items()}
    for node in suspects(over, saved.step if saved else 0):
        words[node] = "; ".join(filter(None, (words.get(node), "the last crashes have it in common")))
    return words
