"""State of a run, from its files and the scheduler."""

from __future__ import annotations

import pwd
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from pipeline.common.errors import (
    EXIT_HANG,
    EXIT_INTERRUPTED,
    EXIT_NUMERICAL,
    EXIT_OK,
    EXIT_REFUSED,
    EXIT_STOPPED,
    EXIT_SUPERSEDED,
    EXIT_UNSAVED,
)
from pipeline.common.format import counted, duration, listed, when
from pipeline.train.run.attempts import Attempt
from pipeline.train.run.heartbeat import ENDED, HUNG, Beat
from slurm import jobs
from slurm.jobs import ARRAYS, Cancelled, Job, Stage, resources_key, stage_name
from slurm.pending_reasons import HELD, meaning
from slurm.record.launch_log import Launch, Next
from slurm.scheduler import UNKNOWN
from slurm.status.files import RunSnapshot
from slurm.status.queued import QueuedJob, SchedulerSnapshot, in_question, is_of

# fmt: off
State = Literal[
    "nothing known", "pending", "held", "running", "stalled", "suspended", "requeued", "preprocessing", "evaluating",
    "curating", "stopped", "cancelled", "failed", "refused", "hung", "diverged", "unsaved", "superseded",
    "chain exhausted", "done", "unknown",
]
# fmt: on
_OF_CODE: dict[int | None, State] = {
    EXIT_OK: "done",
    EXIT_REFUSED: "refused",
    EXIT_STOPPED: "stopped",
    EXIT_HANG: "hung",
    EXIT_NUMERICAL: "diverged",
    EXIT_UNSAVED: "unsaved",
    EXIT_SUPERSEDED: "superseded",
    EXIT_INTERRUPTED: "stopped",
}
LOST = "its end was not recorded, as when its node is lost"
"""Reason of a launch that is over and has no end."""
_NO_LOG = (
    ": SLURM could not open its log, so the run folder was not there; is the disk of run.dir mounted on its nodes? "
    "Submit the run again"
)
_ENDED: tuple[State, ...] = (
    "nothing known",
    *dict.fromkeys(_OF_CODE.values()),
    "cancelled",
    "failed",
    "chain exhausted",
)
"""States of a run of which nothing runs or waits."""
_SUSPENDED = ("SUSPENDED", "STOPPED")
_AGAIN: tuple[Next, ...] = ("requeue", "scheduler", "relaunch")
_BUSY: dict[Stage, State] = {
    "train": "running",
    "curate": "curating",
    "decide": "curating",
    "preprocess": "preprocessing",
    "finish": "preprocessing",
    "eval": "evaluating",
}
_BY_HAND: dict[str, State] = {"eval": "evaluating", "curate": "curating"}


@dataclass(frozen=True)
class RunVerdict:
    """The state of a run."""

    state: State
    stage: str | None
    """The stage that it is in, or that it has come to."""
    why: str
    """In words, "" where the state says all."""


def judge(
    facts: RunSnapshot,
    snapshot: SchedulerSnapshot,
    waiting: Sequence[QueuedJob],
    tries: Sequence[Attempt],
    beats: Mapping[int, Beat],
    *,
    patience: float,
    total: int | None,
) -> RunVerdict:
    """The state of a run.

    Args:
        facts: its files.
        snapshot: of the scheduler.
        waiting: its jobs that wait or run.
        tries: attempts at training.
        beats: heartbeats of the last one.
        patience: seconds after the last heartbeat from which it has stalled.
        total: steps of the run.
    """
    waiting = in_question(facts, waiting)
    if (note := facts.lost_folder) is not None and (note.waits or not waiting):
        return RunVerdict("stalled" if note.waits else "failed", stage_name(note.stage), note.words)
    if tries and tries[-1].end is None:
        stopped = next((job for job in waiting if job.stage == "train" and job.state in _SUSPENDED), None)
        return _suspended(stopped) if stopped else _training(facts, tries[-1], beats, patience)
    for stages in (("train",), ("curate", "decide", "preprocess", "finish")):
        if verdict := _at_work(facts, [job for job in waiting if job.stage in stages]):
            return verdict
    hand, evaluation = facts.by_hand(), _at_work(facts, [job for job in waiting if job.stage == "eval"])
    if hand is not None and not (hand.stage == "eval" and evaluation is not None):  # else it is of that job
        on = f"process {hand.pid} on {hand.host}, since {when(hand.start)}"
        if hand.stage == "train":
            return RunVerdict("running", hand.stage, f"{on}; its first step has not begun")
        return RunVerdict(_BY_HAND.get(hand.stage, "preprocessing"), hand.stage, on)
    in_queue = [job for job in waiting if job.waits and job.stage != "eval"]
    if in_queue:
        return _waits(facts, in_queue)
    trained = _training_ended(facts, snapshot, tries, total)
    if evaluation is not None:
        after = f"training: {trained.state}" if trained is not None and trained.state != "done" else ""
        return RunVerdict("evaluating", "eval", "; ".join(filter(None, (evaluation.why, after))))
    if trained is not None:
        return _with_evaluation(facts, snapshot, waiting, trained) if trained.state == "done" else trained
    if waiting:
        return _waits(facts, waiting)
    for group in (("preprocess", "finish"), ("curate", "decide"), ("eval",)):
        if (ended := _stage_ended(facts, snapshot, group)) is not None:
            return ended
    if facts.cancelled is not None and facts.sent:
        return _cancelled(facts, facts.cancelled, None, tries)
    missing = (
        "" if facts.run.is_dir() else f"; {facts.run} is not there: it was not started, or its disk is not mounted"
    )
    return RunVerdict("nothing known", None, f"there is no record of any stage of the run{missing}")


def with_refusal(facts: RunSnapshot, waiting: Sequence[QueuedJob], verdict: RunVerdict) -> RunVerdict:
    """A verdict with the refusal of the newest submission, if nothing has begun since."""
    refusal = facts.refusal
    begun = [each.time for each in facts.launches] + [each.start for each in facts.stages]
    if refusal is None or waiting or verdict.state not in _ENDED or max(begun, default=0.0) > refusal.time:
        return verdict
    text = f"the submission of {stage_name(refusal.stage)} at {when(refusal.time)} was refused: {refusal.why}"
    if verdict.state == "nothing known":
        return RunVerdict("refused", stage_name(refusal.stage), text)
    return RunVerdict(verdict.state, verdict.stage, "; ".join(filter(None, (verdict.why, text))))


def _with_evaluation(
    facts: RunSnapshot, snapshot: SchedulerSnapshot, waiting: Sequence[QueuedJob], trained: RunVerdict
) -> RunVerdict:
    """Verdict on a training that is done, with the end of an evaluation after it that did not end well."""
    begun = [(each.time, each.stage) for each in facts.launches] + [(each.start, each.stage) for each in facts.stages]
    if any(job.stage == "eval" for job in waiting) or max(begun, default=(0.0, ""))[1] != "eval":
        return trained
    ended = _stage_ended(facts, snapshot, ("eval",))
    if ended is None or ended.state == "done":
        return trained
    return RunVerdict("done", "train", "; ".join(filter(None, (trained.why, f"evaluation {ended.state}: {ended.why}"))))


def _training(facts: RunSnapshot, attempt: Attempt, beats: Mapping[int, Beat], patience: float) -> RunVerdict:
    """Verdict on an attempt that runs, or may."""
    notes = []
    since = attempt.begin
    if facts.cancelled is not None and facts.cancelled.time >= since:
        notes.append(f"{facts.cancelled.by} has cancelled it at {when(facts.cancelled.time)}")
    if facts.files.stop.exists():
        notes.append("it is asked to stop (stop file)")
    alive = {rank: beat for rank, beat in beats.items() if beat.phase != ENDED}
    notes += [f"rank {rank} on {beat.host} hangs at {beat.place}" for rank, beat in alive.items() if beat.phase == HUNG]
    if not alive:
        silent = facts.now - since > patience
        text = "no process has given a sign of life yet" if not beats else "its processes have left the training"
        if silent and facts.hidden is not None:
            return RunVerdict("unknown", "train", "; ".join([*notes, text, _hidden(facts.hidden)]))
        return RunVerdict("stalled" if silent and not beats else "running", "train", "; ".join([*notes, text]))
    oldest = min(alive.values(), key=lambda beat: beat.time)
    least, most = facts.now - max(beat.time for beat in alive.values()), facts.now - oldest.time
    if least > patience:
        words = f"no sign of life for {duration(least)}"
        if len(alive) > 1:
            words += f"; the oldest is of {_who(facts, oldest)}, {duration(most)} ago"
        if facts.hidden is not None:
            return RunVerdict("unknown", "train", "; ".join([*notes, words, _hidden(facts.hidden)]))
        return RunVerdict("stalled", "train", "; ".join([*notes, words]))
    if most > patience:
        notes.append(f"{_who(facts, oldest)} has given no sign of life for {duration(most)}")
    return RunVerdict("running", "train", "; ".join(notes))


def _hidden(job: str) -> str:
    return f"the scheduler does not show job {job} to {jobs.user()}: ask its user whether it runs"


def _who(facts: RunSnapshot, beat: Beat) -> str:
    return f"rank {beat.rank} on {node_of(facts, beat)}"


def node_of(facts: RunSnapshot, beat: Beat) -> str:
    """Node of a rank, as the scheduler names it if it started it."""
    last = facts.launches[-1] if facts.launches else None
    if last is None or last.stage != "train" or last.end is not None or beat.time < last.time:
        return beat.host
    return last.node_of(beat.rank) or beat.host


def _suspended(job: QueuedJob) -> RunVerdict:
    return RunVerdict(
        "suspended",
        stage_name(job.stage),
        f"job {job.job} is suspended, by an administrator (`scontrol suspend`) or for a job of higher priority; it "
        f"resumes when that one has ended, or when an administrator calls `scontrol resume {job.job}`",
    )


def _at_work(facts: RunSnapshot, among: Sequence[QueuedJob]) -> RunVerdict | None:
    """Verdict on the first job that runs."""
    job = next((job for job in among if job.runs), None)
    if job is None:
        return None
    if job.state in _SUSPENDED:
        return _suspended(job)
    what = f"{'process' if job.where == 'local' else 'job'} {job.job}"
    what += f" (step {job.step:,})" if job.step is not None else ""
    past = [each for each in facts.launches if is_of(each, job)]
    # Of an array the tasks that are at work, whatever has become of others.
    last = next((each for each in reversed(past) if each.end is None and each.key not in facts.lost), None)
    if last is not None:
        why = f"{what}, since {when(last.time)}"
        if last.stage == "train":
            why += "; its first step has not begun, or it is about to end"
    elif not past or (job.tasks and (end := past[-1].end) is not None and end.next not in ("requeue", "relaunch")):
        why = f"{what} has started, its processes have not yet"
    elif (end := past[-1].end) is None:
        why = f"{what} starts again after: {LOST}"
    else:
        leaves = end.next == "scheduler" and job.state == "COMPLETING"
        why = f"{what} {'is about to end' if leaves else 'starts again after'}: {listed(end.reason)}"
    last = past[-1] if past else None
    if job.state == UNKNOWN:
        why += "; by the run's files alone"
    stage = job.stage if last is None else last.stage
    return RunVerdict(_BUSY[stage], stage_name(stage), why)


def _waits(facts: RunSnapshot, waiting: Sequence[QueuedJob]) -> RunVerdict:
    """Verdict on the job that waits next: not one that waits for other jobs, if there is another."""
    job = next((job for job in waiting if "Dependency" not in job.reason), waiting[0])
    past = [launch for launch in facts.launches if is_of(launch, job)]
    words = [f"job {job.job}" + (f" ({job.reason})" if job.reason else "")]
    if job.state == UNKNOWN:
        words = [f"job {job.job} by the run's files alone"]
    if found := meaning(job.reason or (HELD if job.held else "")):
        words.append(found.words(facts.run, job.job, resources_key(job.stage), job.excluded))
    if job.start is not None:
        words.append(f"expected to start at {when(job.start)}")
    state: State = "held" if job.held else "pending"
    if past:
        words.insert(0, f"requeued {counted(past[-1].restarts + 1, 'time')}, waits for its next start")
        state = "held" if job.held else "requeued"
    before = past[-1] if past else next((each for each in reversed(facts.launches) if each.stage == job.stage), None)
    if before is not None and (before.end is not None or before.key in facts.lost):
        words.append(f"the last end: {listed(before.end.reason) if before.end else LOST}")
    return RunVerdict(state, stage_name(job.stage), "; ".join(words))


@dataclass(frozen=True)
class _StageEnd:
    """An end that something has told of."""

    time: float
    code: int | None
    reason: str
    final: bool = True
    """Nothing was to follow."""
    next: Next | None = None


def _training_ended(
    facts: RunSnapshot, snapshot: SchedulerSnapshot, tries: Sequence[Attempt], total: int | None
) -> RunVerdict | None:
    """Verdict on training of which nothing runs or waits; None if there was none."""
    end = _last_end(facts, "train")
    last = tries[-1] if tries else None
    if last is not None and last.end is not None and (end is None or last.begin > end.time):
        of_job = facts.last_job("train")
        final = last.code == EXIT_OK or of_job is None or last.job != of_job.job
        end = _StageEnd(last.end, last.code, listed(last.reason), final)
    if last is not None and last.code == EXIT_OK and last.end is not None and end is not None:
        # Its job may have been ended before it could note that.
        begun = [launch.time for launch in facts.launches if launch.stage == "train"]
        end = end if max(begun, default=0) > last.end else _StageEnd(max(last.end, end.time), EXIT_OK, "")
    end = _end_in_ledger(facts, "train", end) or end
    lost = _lost(facts, snapshot, ("train",), end)
    if end is None and lost is None:
        return None
    step = max((each.step for each in tries), default=0)
    if end is not None and end.code == EXIT_OK and lost is None:
        return RunVerdict("done", "train", _too_late(facts.cancelled, end.time))
    if facts.cancelled is not None and facts.cancelled.stages != ("eval",):
        return _cancelled(facts, facts.cancelled, end, tries)
    if lost is not None:
        return lost
    assert end is not None
    if end.next == "next link":
        of = f" of {total:,}" if total is not None else ""
        why = f"all jobs of the chain have ended, at step {step:,}{of}; submit the run again to continue; "
        why += f"the last end: {end.reason}"
        return RunVerdict("chain exhausted", "train", why)
    return RunVerdict(_OF_CODE.get(end.code, "failed"), "train", end.reason)


def _too_late(by: Cancelled | None, end: float) -> str:
    """Note on who cancelled a training that reached its end all the same."""
    if by is None or "train" not in (by.stages or ("train",)):
        return ""
    how = "which did not stop it" if by.time <= end else "after its end"
    return f"{by.by} cancelled it at {when(by.time)}, {how}"


def _cancelled(facts: RunSnapshot, by: Cancelled, end: _StageEnd | None, tries: Sequence[Attempt]) -> RunVerdict:
    """Verdict on a cancelled run.

    Args:
        facts: files of the run.
        by: who, and when.
        end: of the training; one that is older has nothing to do with it.
        tries: attempts at training.
    """
    last = facts.launches[-1].stage if facts.launches else "train"
    stage = by.stages[0] if by.stages else last
    who = f"by {by.by} at {when(by.time)}"
    ended = end is not None and end.time >= by.time
    reason = end.reason if end is not None and ended else ""
    job = facts.last_job(stage)
    if job is not None and not ended and not facts.launches_of(job):
        who += f", before job {job.job} began"
    elif stage == "train" and ended:
        own = [each.reason for each in tries[-1:] if each.end is not None and each.end >= by.time]
        who += ", after a save" if any("; saved" in text for text in (reason, *own)) else ", without saving"
    return RunVerdict("cancelled", stage_name(stage), "; ".join(filter(None, (who, reason))))


def _stage_ended(facts: RunSnapshot, snapshot: SchedulerSnapshot, group: Sequence[Stage]) -> RunVerdict | None:
    """Verdict on another stage of which nothing runs or waits; None if there was none."""
    ends = [end for stage in group if (end := _last_end(facts, stage)) is not None]
    end = max(ends, key=lambda each: each.time, default=None)
    end = _end_in_ledger(facts, group[0], end) or end
    if lost := _lost(facts, snapshot, group, end):
        return lost
    if end is None:
        return None
    if end.code == EXIT_OK:
        return RunVerdict("done", group[0], "training has not begun" if group[0] in ARRAYS else "")
    if facts.cancelled is not None:
        return RunVerdict("cancelled", group[0], f"by {facts.cancelled.by} at {when(facts.cancelled.time)}")
    return RunVerdict(_OF_CODE.get(end.code, "failed"), group[0], end.reason)


def _last_end(facts: RunSnapshot, stage: Stage) -> _StageEnd | None:
    """End of the last launch of a stage; of an array that of a task that failed or was stopped, if one has."""
    past = [launch for launch in facts.launches if launch.stage == stage]
    if not past:
        return None
    same = {launch.job: launch for launch in past if launch.job.partition("_")[0] == past[-1].job.partition("_")[0]}
    ended = [launch for launch in same.values() if launch.end is not None]
    if not ended:
        return None
    bad = [each for each in ended if each.crashed] or [each for each in ended if each.end and each.end.code != EXIT_OK]
    how = (bad[0] if bad else ended[-1]).end
    assert how is not None
    return _StageEnd(how.time, how.code, listed(how.reason), how.next not in _AGAIN, how.next)


def _end_in_ledger(facts: RunSnapshot, stage: str, known: _StageEnd | None) -> _StageEnd | None:
    """The end of a stage that the ledger has of its own, if it came after what is known."""
    last = next((each for each in reversed(facts.stages) if each.stage == stage), None)
    if last is None or (known is not None and last.start <= known.time):
        return None
    if last.end is None:
        text = f"process {last.pid} on {last.host} has no recorded end, or cannot be seen from here"
        return _StageEnd(last.start, None, text)
    same = stage == "train" and facts.exit_state.get("code") == last.code
    well = known is not None and known.code in (EXIT_OK, EXIT_STOPPED)
    if stage == "train" and last.code == EXIT_REFUSED and well and not same:
        return None  # a start by hand that came to nothing: the run is what it was
    reason = facts.exit_state.get("reason") if same else None
    text = str(reason or last.reason or f"it exited with code {last.code}")
    return _StageEnd(last.end, last.code, text)


def _lost(
    facts: RunSnapshot, snapshot: SchedulerSnapshot, group: Sequence[Stage], end: _StageEnd | None
) -> RunVerdict | None:
    """Verdict on the newest job of a stage, if it has left the queue without a word in the ledger."""
    job = next((each for each in reversed(facts.sent) if each.stage in group), None)
    if job is None or job.where == "local" or facts.is_over(job) or snapshot.states is None:
        return _lost_here(facts, job, end)
    if end is not None and end.final and end.time > job.time:
        return None
    stage = stage_name(job.stage)
    for number in job.numbers:
        state, accounted = snapshot.states.get(number), snapshot.accounted.get(number)
        if accounted is not None and not accounted.over:
            accounted = None
        word = accounted.state if accounted else state.state if state else ""
        if not word or word == "COMPLETED":
            continue
        if word == "CANCELLED" and (accounted or (state and state.reason == "DependencyNeverSatisfied")):
            return None  # by nobody: what it waited for has not come to a good end, which is told instead
        text = f"job {number} ended as {word}"
        if accounted is not None:
            text += f" after {accounted.elapsed}" + (f" on {accounted.nodes}" if accounted.nodes else "")
            text += f", exit code {accounted.exit_code}" if accounted.exit_code != "0:0" else ""
            text += _NO_LOG if accounted.exit_code == "0:53" else ""
        if word.startswith("CANCELLED"):
            by = word.removeprefix("CANCELLED").removeprefix(" by ").strip()
            return RunVerdict("cancelled", stage, f"job {number} was cancelled" + (f" by {_user(by)}" if by else ""))
        reason = facts.own_error(job) or (end.reason if end else "")
        return RunVerdict("failed", stage, "; ".join(filter(None, (text, reason))))
    error = facts.own_error(job)
    if end is not None and not error:
        return None
    text = f"job {job.job} has left the queue without an entry in the ledger"
    return RunVerdict("failed", stage, "; ".join(filter(None, (text, error))))


def _lost_here(facts: RunSnapshot, job: Job | None, end: _StageEnd | None) -> RunVerdict | None:
    """Verdict on a lost job of this machine, which nobody but the process table knows."""
    if job is None or job.where != "local" or facts.is_over(job) or end is not None:
        return None
    text = f"process {job.job} on {job.host} has ended without an entry in the ledger"
    return RunVerdict("failed", stage_name(job.stage), "; ".join(filter(None, (text, facts.own_error(job)))))


def _user(number: str) -> str:
    with suppress(KeyError, ValueError):
        return pwd.getpwuid(int(number)).pw_name
    return f"user {number}"


def row_outcome(launch: Launch, *, is_lost: bool = False) -> str:
    """Outcome of a launch without an attempt at training, in a word."""
    if is_lost:
        return "lost"
    return "running" if launch.end is None else _OF_CODE.get(launch.end.code, "failed")
