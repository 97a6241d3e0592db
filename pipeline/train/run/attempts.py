"""The attempts at a run: when each began and at which step, how it ended and how far it had come.

`ledger.jsonl` in the run folder has a line when an attempt at training begins and one when it ends. One that was killed
writes none; what is known of it then is in `metrics.jsonl` and in rank 0's heartbeat, and the next attempt, which
overwrites the heartbeat, notes it down.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.common import storage
from pipeline.common.errors import (
    EXIT_HANG,
    EXIT_INTERRUPTED,
    EXIT_NUMERICAL,
    EXIT_OK,
    EXIT_REFUSED,
    EXIT_STOPPED,
    EXIT_SUPERSEDED,
    EXIT_UNSAVED,
    UserError,
)
from pipeline.common.run_files import RunFiles
from pipeline.train.run.heartbeat import HUNG, read_beat
from pipeline.train.run.lock import is_held
from pipeline.train.run.lock_holder import job

_BEGIN, _END = "attempt", "attempt end"
LAUNCH, LAUNCH_END = "launch", "launch end"
"""Events of a job that starts the processes of a stage, in `slurm.record.launch_log`."""
_QUEUED = ("requeue", "scheduler", "next link")
"""Ends of a launch after which a job waits in the queue."""
_NEUTRAL_ENDS = (EXIT_REFUSED, EXIT_INTERRUPTED, EXIT_UNSAVED)
"""Ends by a mistake in the run file, by hand, or by a disk: they neither make nor break a crash loop."""
_KILLED = "ended without a record of it, as after kill -9 or the loss of a node"
_REWOUND = "rewind"


@dataclass(frozen=True)
class Attempt:
    """An attempt at training, as far as its records tell."""

    number: int
    begin: float
    """Time at which its stage was started, in seconds since 1970."""
    end: float | None
    """Time at which it ended, or gave its last sign of life; None if it still runs."""
    first_step: int
    """Steps of the checkpoint that it resumed from."""
    step: int
    """Steps trained when it ended, as far as is known."""
    code: int | None
    """Its exit code; None if it left none, because it runs, was killed, or went on as the next attempt."""
    reason: str
    """Why it ended."""
    host: str
    pid: int
    job: str | None
    """Job id of the scheduler."""
    restarts: int
    """Number of times that the scheduler had started that job before."""
    layout: dict[str, int]
    """Processes by axis of parallelism."""
    config: str
    """Hash of what it was started with."""
    launched: float | None = None
    """Time at which its job launched its processes; None if no job did, or an earlier attempt was of that launch."""
    opened: float | None = None
    """Time at which its processes had found each other and opened the run."""
    queued: bool = False
    """True if the launch before had ended with its job, or the next one of its chain, in the queue."""

    @property
    def outcome(self) -> str:
        """The end of the attempt, in a word."""
        if self.end is None:
            return "running"
        if self.code is None:
            return "rewound" if self.reason.startswith(_REWOUND) else "killed"
        words = {
            EXIT_OK: "done",
            EXIT_REFUSED: "refused",
            EXIT_STOPPED: "stopped",
            EXIT_HANG: "hung",
            EXIT_NUMERICAL: "diverged",
            EXIT_UNSAVED: "unsaved",
            EXIT_SUPERSEDED: "superseded",
            EXIT_INTERRUPTED: "interrupted",
        }
        return words.get(self.code, "failed")

    @property
    def died(self) -> bool:
        """True if no request of a person or scheduler that the run could handle ended it."""
        return self.outcome in ("killed", "hung", "diverged", "unsaved", "failed")


def attempts(run: Path, held: Callable[[Path], bool] = is_held) -> list[Attempt]:
    """The attempts at training in a run folder, in order, without those that were refused before they began.

    Args:
        run: folder.
        held: whether a process may train in it now, which is asked if the last attempt has not ended.
    """
    begins, ends, stages, launches = _entries(run)
    numbers = sorted(begins)
    found: list[Attempt] = []
    for number in numbers:
        begin, end = begins[number], ends.get(number)
        runs = end is None and number == numbers[-1] and held(run)
        if end is None:
            end = _inferred_end(run, begin)
        start = _stage_start(stages, begin["time"], found[-1].end if found else None)
        launched, queued = _launch(launches, start, found[-1].begin if found else 0.0)
        found.append(
            Attempt(
                number=number,
                begin=start,
                end=None if runs else max(start, begin["time"] + end["seconds"]),
                first_step=begin["first_step"],
                step=end["step"],
                code=end["code"],
                reason=end["reason"],
                host=begin["host"],
                pid=begin["pid"],
                job=begin.get("job"),
                restarts=begin.get("restarts", 0),
                layout=begin["layout"],
                config=begin["config"],
                launched=launched,
                opened=begin["time"],
                queued=queued,
            )
        )
    return found


class RunningAttempt:
    """The attempt that this process makes, from its line in the ledger on.

    Args:
        run: folder; its lock is held.
        number: of the attempt.
        first_step: steps of the checkpoint that it resumes from.
        layout: processes by axis.
        config: hash of what it is started with.
    """

    def __init__(self, run: Path, number: int, first_step: int, layout: dict[str, int], config: str) -> None:
        self._run = run
        self._clock = time.monotonic()
        self._line = {
            "event": _BEGIN,
            "attempt": number,
            "time": time.time(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            **job(),
            "layout": layout,
            "first_step": first_step,
            "config": config,
        }
        append_entry(run, self._line)

    def end(self, code: int | None, reason: str, step: int, **more: Any) -> None:
        """Write the end of the attempt."""
        seconds = time.monotonic() - self._clock
        append_entry(self._run, _end_line(self._line["attempt"], code, reason, step, seconds) | more)

    def rewound(self, number: int, step: int) -> RunningAttempt:
        """The run has gone back to `step` in this process: this attempt ends, and the next one begins."""
        self.end(None, f"{_REWOUND} to step {step}", _inferred_end(self._run, self._line)["step"])
        return RunningAttempt(self._run, number, step, self._line["layout"], self._line["config"])


def record_missing_end(run: Path) -> None:
    """Note what is known of the last attempt if it left no line of its end. Only the holder of the lock calls this."""
    begins, ends, *_ = _entries(run)
    if begins and (last := max(begins)) not in ends:
        append_entry(run, {**_inferred_end(run, begins[last]), "event": _END, "attempt": last})


def first_steps(run: Path) -> dict[int, int]:
    """Number of each attempt that the ledger has, and the step that it began at."""
    return {number: line["first_step"] for number, line in _entries(run)[0].items()}


def last_begun(run: Path) -> int:
    """Number of the last attempt that the ledger has; 0 before the first one."""
    return max(_entries(run)[0], default=0)


def correct_end(run: Path, since: float, code: int, reason: str) -> None:
    """Write how the last attempt ended, by a process that saw it end and knows better than its own record.

    Args:
        run: folder.
        since: nothing is written if no attempt has begun after this time.
        code: exit code.
        reason: in words.
    """
    begins, ends, *_ = _entries(run)
    if not begins:
        return
    begin = begins[max(begins)]
    if begin["time"] < since:
        return
    known = ends.get(begin["attempt"]) or _inferred_end(run, begin)
    append_entry(run, _end_line(begin["attempt"], code, reason, known["step"], time.time() - begin["time"]))


def steps_lost(run: Path, checkpoint: int, steps: int) -> str:
    """Sentence about the last attempt, if it died after the checkpoint that is resumed from; else empty.

    Args:
        run: folder, whose lock this process has.
        checkpoint: steps of the checkpoint.
        steps: of the whole run.
    """
    found = attempts(run, held=lambda _: False)
    again = min(found[-1].step, steps) if found else 0
    if not found or not found[-1].died or again <= checkpoint:
        return ""
    last = found[-1]
    why = f"{last.outcome}: {last.reason.partition('. ')[0]}"
    return (
        f"attempt {last.number} ended after step {last.step:,} ({why}); steps {checkpoint + 1:,} to {again:,} are "
        "trained again"
    )


def refuse_crash_loop(
    run: Path, limit: int, checkpoint: int, config: str, is_skipped: Callable[[int], bool] = lambda step: False
) -> None:
    """A `UserError` where the last attempts all died at the same step, and the next would come to it again.

    Args:
        run: folder.
        limit: number of them, `launch.crash_loop`.
        checkpoint: steps of the checkpoint that the next one resumes from.
        config: hash of what it is started with. Attempts that were started with something else do not count: what was
            changed may be what mends it.
        is_skipped: whether a step, counted from 0, is skipped now.
    """
    row: list[Attempt] = []
    for attempt in reversed(attempts(run)):
        if attempt.code in _NEUTRAL_ENDS:
            continue
        if not attempt.died or attempt.config != config or (row and attempt.step != row[0].step):
            break
        row.append(attempt)
    if len(row) < limit or checkpoint > row[0].step or is_skipped(row[0].step):
        return
    step = row[0].step + 1
    numbers = ", ".join(str(attempt.number) for attempt in reversed(row[:limit]))
    which = f"attempts {numbers}" if limit > 1 else f"attempt {numbers}"
    # The first sentence: what follows in such a message is advice for another moment.
    ends = "; ".join(sorted({f"{attempt.outcome}: {attempt.reason.partition('. ')[0]}" for attempt in row[:limit]}))
    point = f"the checkpoint of step {checkpoint}" if checkpoint else "the start of the run"
    raise UserError(
        f"{which} at this run died in step {step} ({ends}). The next one would begin at {point} and reach step {step} "
        f"again, so it is not started. See what happened there (`logs` and `ledger.jsonl` in {run}). If the cause is "
        f"the data of the step, skip it (blend.skip: [{{steps: {step}}}]); otherwise remove the cause: an attempt with "
        "a changed key or changed code counts as a new try. If the run is not to blame, raise launch.crash_loop "
        f"({limit})"
    )


def append_entry(run: Path, entry: dict[str, Any]) -> None:
    """Add a line to the ledger."""
    storage.add_json_line(RunFiles(run).ledger, entry)


def _end_line(number: int, code: int | None, reason: str, step: int, seconds: float) -> dict[str, Any]:
    return {
        "event": _END,
        "attempt": number,
        "time": time.time(),
        "code": code,
        "reason": reason,
        "step": step,
        "seconds": seconds,
    }


def _entries(
    run: Path,
) -> tuple[dict[int, dict[str, Any]], dict[int, dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """Lines by attempt of its begin and its end, the last of each, those of the stage, and of launches by jobs.

    Damaged ones are left out.
    """
    begins, ends, stages, launches = {}, {}, [], []
    for line in RunFiles(run).ledger_lines():
        event = line.get("event")
        if event == _BEGIN and line.keys() >= {"attempt", "time", "host", "pid", "layout", "first_step", "config"}:
            begins[line["attempt"]] = line
        elif event == _END and line.keys() >= {"attempt", "code", "reason", "step", "seconds"}:
            ends[line["attempt"]] = line
        elif line.get("stage") == "train" and "start" in line:
            stages.append(line)
        elif event in (LAUNCH, LAUNCH_END) and isinstance(line.get("time"), (int, float)):
            launches.append(line)
    return begins, ends, stages, launches


def _stage_start(stages: list[dict[str, Any]], begin: float, after: float | None) -> float:
    """The start of the stage that came to an attempt at `begin`; processes and packages take a while."""
    found = [
        line["start"]
        for line in stages
        if line["event"] == "start" and line["start"] <= begin and (after is None or line["start"] >= after)
    ]
    return max(found, default=begin)


def _launch(lines: list[dict[str, Any]], start: float, before: float) -> tuple[float | None, bool]:
    """Time of the launch that came to a start of the stage, and whether it had waited in the queue.

    Args:
        lines: of launches, in order.
        start: of the stage.
        before: start of the attempt before, which a launch that came to this one alone is after.
    """
    queued, found = False, (None, False)
    for line in lines:
        if line["event"] == LAUNCH_END:
            queued = line.get("next") in _QUEUED
        elif line.get("stage") == "train" and before < line["time"] <= start:
            found = line["time"], queued
    return found


def _inferred_end(run: Path, begin: dict[str, Any]) -> dict[str, Any]:
    """The end of an attempt that has left none, as the files of the run tell it."""
    number, last, step = begin["attempt"], float(begin["time"]), int(begin["first_step"])
    for row in RunFiles(run).newest_rows():
        if row.get("attempt", number) > number:
            continue
        if row.get("attempt", 0) < number:
            break
        last = max(last, row.get("time", last))
        if "tokens" in row:  # of a step, which those of saves and validations are not
            step = max(step, row["step"])
            break
    code, reason = None, _KILLED
    beat = read_beat(run)
    if beat is not None and beat.attempt == number:
        last = max(last, beat.time)
        if beat.step is not None:  # the one that it is in
            step = max(step, beat.step - 1)
        if beat.phase == HUNG:  # its watchdog has ended it, and nobody was there to note that
            code, reason = EXIT_HANG, "it hung"
    exit_state = RunFiles(run).exit_state()
    if exit_state.get("attempt") == number and exit_state.keys() >= {"code", "reason"}:
        code, reason = exit_state["code"], exit_state["reason"]
    return _end_line(number, code, reason, step, last - begin["time"]) | {"time": last}
