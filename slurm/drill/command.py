"""`pipeline drill`: kill a part of a training that runs, and watch it come back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from rich.console import Console

from pipeline.common.console import say
from pipeline.common.errors import EXIT_OTHER, MachineError, UserError
from pipeline.common.format import counted, duration
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.run.attempts import attempts
from pipeline.train.run.heartbeat import ENDED, read_beats
from slurm import jobs, scheduler
from slurm.drill.strike import Part, Target
from slurm.job.restart_policy import crashes_in_a_row
from slurm.jobs import Job
from slurm.logs.parts import parts
from slurm.record.drill_record import DrillRecord, remove_drill
from slurm.record.launch_log import Launch, launches
from slurm.record.live_jobs import live_jobs, runs
from slurm.record.submission import Submission, read_submission
from slurm.run_argument import run_folder

_LOOK = 1.0
"""Seconds between looks at the files of the run."""
_EXPECTED: dict[Part, str] = {
    "rank": "the other processes end, and the job starts all of them again on its nodes",
    "node": "the other processes end, and the job starts all of them again; on spare nodes only where that fails there",
    "batch": "the processes save if they can, and the job goes back into the queue and starts again",
}
_BY_DRILL = "killed by `pipeline drill`"
"""In the reason of an end that is this command's."""
_NEXT_OF_CHAIN = "the processes save if they can, and the next job of the chain continues"


def drill(run: Path, console: Console, *, kill: Part, rank: int | None, yes: bool, minutes: float) -> None:
    """Kill a part of a training, and report how it came back.

    Args:
        run: run file or folder.
        console: for what is told.
        kill: which part.
        rank: of the process to kill, or one on the node; the last rank by default, which is on another node than the
            batch process where there are several.
        yes: without it, only what would happen is told.
        minutes: to wait for the first step after the kill.

    Raises:
        UserError: nothing trains that a job would start again, it is another user's, the kill would be the end of it,
            or `yes` is missing.
        MachineError: it did not come back.
    """
    folder = run_folder(run)
    job = _training_job(folder)
    if folder.stat().st_uid != os.getuid():
        raise UserError(f"{folder} belongs to another user; drill your own runs")
    submission = read_submission(folder / job.submission)
    target = _target(folder, job, submission, kill, rank)
    before = _Before.of(folder)
    say(console, f"to be killed: {target}")
    for line in _expected(folder, submission, kill, before):
        say(console, line)
    if not yes:
        raise UserError("nothing was killed; give --yes to do it")
    begin = time.time()
    with _recorded(folder, target, before.step, begin):
        target.kill()
    say(console, f"killed at {time.strftime('%H:%M:%S', time.localtime(begin))}")
    _watch(folder, console, before, begin, minutes)


@contextmanager
def _recorded(folder: Path, target: Target, step: int, begin: float) -> Iterator[None]:
    """The record of a kill in the logs of the newest launch; it is removed if the kill fails."""
    newest = [part for part in parts(folder) if part.stage == "train"][-1]
    ranks = () if target.part == "batch" else tuple(target.ranks)
    record = DrillRecord(target.part, target.job.job, target.host, ranks, step, begin)
    places = [each for each in (newest.folder, newest.ranks) if each is not None]
    for each in places:
        record.write(each)
    try:
        yield
    except BaseException:
        for each in places:
            remove_drill(each)
        raise


def _training_job(folder: Path) -> Job:
    """The job that trains now.

    Raises:
        UserError: there is none that would start the training again.
    """
    found = live_jobs(folder)
    if found.unknown is not None:
        raise found.unknown
    running = [each.job for each in found.active if runs(each)]
    trains = [job for job in running if job.stage == "train" or job.where == "local"]
    if not trains:
        raise UserError(
            f"no job of {folder} trains now; a drill needs one, sent with --slurm or --local: nothing else would start "
            "the training again"
        )
    if trains[0].shared:
        raise UserError(f"job {trains[0].job} has other runs, too; drill a run that has its job for itself")
    return trains[0]


def _target(folder: Path, job: Job, submission: Submission, kill: Part, rank: int | None) -> Target:
    """Processes to kill, by the signs of life of the running attempt."""
    newest = attempts(folder)[-1:]
    if not newest or newest[0].end is not None:
        raise UserError(f"{folder} does not train at the moment; run the command again when it does (pipeline status)")
    if kill == "batch":
        if job.where == "local":
            raise UserError("--kill batch: nothing would start a training in the background of this machine again")
        chained = [each for each in jobs.sent(folder) if each.stage == "train" and each.link > job.link]
        if submission.chain in ("singleton", "afterany", "none") and not chained:
            raise UserError("--kill batch: no job follows this one, so the training would end")
        host = scheduler.details(job.job).get("BatchHost", "")
        return Target(kill, job, host, (0,), (launches(folder, "train")[-1].pid,))
    beats = {rank: beat for rank, beat in read_beats(folder, newest[0].number).items() if beat.phase != ENDED}
    if not beats:
        raise UserError(f"no process of {folder} has given a sign of life yet; run the command again in a minute")
    chosen = max(beats) if rank is None else rank
    if chosen not in beats:
        raise UserError(f"--rank {chosen}: there are ranks 0 to {max(beats)}")
    host = beats[chosen].host
    ranks = [chosen] if kill == "rank" else sorted(each for each, beat in beats.items() if beat.host == host)
    return Target(kill, job, host, ranks, [beats[each].pid for each in ranks])


@dataclass(frozen=True)
class _Before:
    """The run as it was before the kill."""

    attempt: int
    step: int
    """Steps trained, as metrics and heartbeats have them."""
    checkpoint: int
    launches: int

    @staticmethod
    def of(folder: Path) -> _Before:
        attempt = attempts(folder)[-1]
        latest = Checkpoints.of_run(folder).latest()
        return _Before(attempt.number, attempt.step, latest.step if latest else 0, len(launches(folder, "train")))


def _expected(folder: Path, submission: Submission, kill: Part, before: _Before) -> Iterator[str]:
    """Lines that say what should happen.

    Raises:
        UserError: the kill would be one crash too many.
    """
    past = launches(folder, "train")[:-1]
    crashes = crashes_in_a_row(past, before.checkpoint)
    if kill == "batch":
        # The script of the job counts kills since a launch has ended otherwise, whatever was saved between them.
        killed = takewhile(lambda each: each.end is not None and each.end.code == EXIT_OTHER, reversed(past))
        crashes = max(crashes, sum(1 for _ in killed))
    if crashes + 1 > submission.max_restarts:
        raise UserError(
            f"it would be crash {crashes + 1} in a row, and slurm.max_restarts is {submission.max_restarts}: the "
            "training would end"
        )
    again = max(0, before.step - before.checkpoint)
    chained = kill == "batch" and submission.chain != "requeue"
    yield f"to be expected: {_NEXT_OF_CHAIN if chained else _EXPECTED[kill]}"
    yield (
        f"the newest checkpoint is of step {before.checkpoint:,}, and {counted(before.step, 'step')} are trained: "
        f"{counted(again, 'step')} or more would be trained again"
    )


def _watch(folder: Path, console: Console, before: _Before, begin: float, minutes: float) -> None:
    """Tell what happens as it does, until a step is trained."""

    def told(text: str) -> None:
        say(console, f"after {duration(time.time() - begin)}: {text}")

    def wait(what: Callable[[], bool]) -> None:
        while not what():
            if time.time() > begin + 60 * minutes:
                raise MachineError(
                    f"the training has not come back within {minutes:g} minutes; pipeline status and pipeline logs "
                    f"{folder} --first-error say more"
                )
            time.sleep(_LOOK)

    def ended() -> Launch:
        return launches(folder, "train")[before.launches - 1]

    wait(lambda: ended().end is not None)
    end = ended().end
    assert end is not None, "just waited for"
    if _BY_DRILL not in end.reason:
        raise MachineError(f"the launch has ended for another reason than this kill: {end.reason}")
    told(f"the end was noticed: {end.reason}")
    if end.next in ("done", "end"):
        raise MachineError(f"the training does not come back: {end.reason}")
    wait(lambda: attempts(folder)[-1].number > before.attempt)
    newest = attempts(folder)[-1]
    told(f"attempt {newest.number} has begun, from step {newest.first_step:,}")

    wait(lambda: attempts(folder)[-1].step > newest.first_step)
    ended_at = next(each.step for each in attempts(folder) if each.number == before.attempt)
    again = max(0, ended_at - newest.first_step)
    told(f"step {newest.first_step + 1:,} is trained; {counted(again, 'step')} of before are trained again")
