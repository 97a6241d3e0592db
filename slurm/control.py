"""Commands that change what the jobs of a run do: cancel, hold, release.

What is asked of a run is written into its folder first; the processes and jobs read it there. So it holds for what
starts meanwhile, for colleagues whom the scheduler would not obey, and while the scheduler does not answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from pipeline.common import links, storage
from pipeline.common.console import say
from pipeline.common.errors import EXIT_OK, UserError
from pipeline.common.format import when
from pipeline.common.run_files import RunFiles
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.run.heartbeat import read_beat
from pipeline.train.run.lock import holder, is_held
from slurm import jobs, scheduler
from slurm.jobs import Stage
from slurm.local.background import LocalSteps
from slurm.record import active_jobs
from slurm.record.active_jobs import ActiveJob
from slurm.record.live_jobs import LiveJobs, live_jobs, runs, waits
from slurm.run_argument import run_folder
from slurm.scheduler import SchedulerError

_ORDER: tuple[tuple[Stage, ...], ...] = (("curate", "decide"), ("preprocess", "finish"), ("train",), ("eval",))
"""Stages that are ended together, in the order of a run."""
_FIRST_LOOK, _LONGEST_LOOK = 0.5, 10.0
"""Seconds between looks at what ends: the scheduler of a site should not be asked all the time."""
_REFUSED = "denied"
"""In what SLURM says where the job is another user's."""


def cancel(run: Path, console: Console, *, now: bool, chain: bool, wait: float, evaluate: bool = False) -> None:
    """End what a run does, and do not let it start again.

    The first stage of which something runs or waits ends; training saves before that. Jobs of later stages stay, but
    for an evaluation that waits for the end of a training.

    Args:
        run: run file or folder.
        console: for what happens.
        now: do not wait for a save.
        chain: all stages, and all that waits.
        wait: seconds to wait for the end of what runs.
        evaluate: the evaluation that waits for the training stays, too.

    Raises:
        UserError: there is no such run, or this user may not write to its folder.
    """
    folder = run_folder(run)
    before = jobs.cancelled(folder)
    if jobs.sent(folder):
        _note(folder, now=now)  # before anything is asked: from now on nothing goes back into the queue
    found = live_jobs(folder)
    if found.unknown is not None:
        say(console, f"{found.unknown}\nIts jobs read the request in {folder}: those that wait start nothing.")
    if found.nothing and not is_held(folder):
        if before is None:
            jobs.forget_cancelled(folder)
        say(console, f"no job of {folder} waits or runs")
        return
    stages = () if chain or found.unknown is not None else _stages(found)
    if jobs.sent(folder):
        _note(folder, now=now, stages=stages)
    _Cancelling(folder, console, stages, now=now, evaluate=evaluate).run(found, wait)


def hold(run: Path, console: Console) -> None:
    """Keep the waiting jobs of a run from starting.

    Raises:
        UserError: there is no such run.
        SchedulerError: the scheduler does not answer or refuses.
    """
    _change(run, console, scheduler.hold, "held until `pipeline release`")


def release(run: Path, console: Console) -> None:
    """Let the held jobs of a run start.

    Raises:
        UserError: there is no such run.
        SchedulerError: the scheduler does not answer or refuses.
    """
    _change(run, console, scheduler.release, "may start")


def _change(run: Path, console: Console, change: Callable[[Sequence[str]], None], what: str) -> None:
    folder = run_folder(run)
    found = live_jobs(folder)
    if found.unknown is not None:
        raise found.unknown
    waiting = [each for each in found.active if waits(each) and each.job.where == "slurm"]
    change([each.job.job for each in waiting])
    for each in waiting:
        say(console, f"{active_jobs.stage_names(folder, each.job)}: job {each.job.job} {what}")
    for each in found.active:
        if each not in waiting:
            why = "because it runs" if runs(each) else "because it is not in a queue"
            if active_jobs.is_hidden(each):
                why = "because only its user can change it"
            say(console, f"not affected, {why}: {active_jobs.describe(folder, each)}")
    if not found.active:
        say(console, f"no job of {folder} waits")


def _stages(found: LiveJobs) -> tuple[Stage, ...]:
    """Stages to end, () for all: the first one of which something waits or runs."""
    if found.elsewhere or any(each.job.where == "local" for each in found.active):
        return ()  # one process does them all
    there = {each.job.stage for each in found.active}
    return next((group for group in _ORDER if there & set(group)), ())


def _note(run: Path, *, now: bool, stages: tuple[Stage, ...] = ()) -> None:
    try:
        jobs.note_cancelled(run, now=now, stages=stages)
    except PermissionError as error:
        raise UserError(
            f"{error.filename or RunFiles(run).slurm} cannot be written by {jobs.user()}; only members of the run's "
            "group may cancel it (slurm.group, with slurm.umask=0002), or its owner"
        ) from error


class _Cancelling:
    """The end of stages of a run.

    Args:
        run: folder.
        console: for what happens.
        stages: which; () for all.
        now: without a save.
        evaluate: an evaluation that waits for an ended training stays.
    """

    def __init__(
        self, run: Path, console: Console, stages: tuple[Stage, ...], *, now: bool, evaluate: bool = False
    ) -> None:
        self._run = run
        # SLURM would start them at once: the job of a training that saves and stops comes to a good end.
        self._trained = set() if evaluate else {job.job for job in jobs.sent(run) if job.stage == "train"}
        self._console = console
        self._stages = stages
        self._now = now
        self._begin = time.time()
        self._asked: set[str] = set()
        """Jobs that were dealt with."""
        self._others: dict[str, ActiveJob] = {}
        """Jobs of other stages, as they were at first."""
        self._local = LocalSteps(run)
        self._stop_file = RunFiles(run).stop

    def run(self, found: LiveJobs, wait: float) -> None:
        """Request the end, wait for it, and print the result."""
        end = time.monotonic() + wait
        self._others = {each.job.job: each for each in found.active if not self._is_selected(each)}
        asked = self._stop_or_cancel(found)
        pause, progress = _FIRST_LOOK, None
        while self._still_runs(found):
            if time.monotonic() > end:
                self._say_unfinished(asked)
                return
            time.sleep(min(pause, max(0.0, end - time.monotonic())))
            pause = min(_LONGEST_LOOK, 1.5 * pause)
            progress = self._say_progress(progress)
            found = live_jobs(self._run)
            asked = self._stop_or_cancel(found) or asked  # what went back into the queue at the same moment
        if asked and self._stop_file.exists():
            links.remove(self._stop_file, missing_ok=True)  # nobody has taken it: the next start would stop at once
        self._say_finished(found)

    def _is_selected(self, each: ActiveJob) -> bool:
        waits_for_training = "train" in self._stages and waits(each) and not self._trained.isdisjoint(each.job.after)
        return not self._stages or each.job.stage in self._stages or (each.job.stage == "eval" and waits_for_training)

    def _still_runs(self, found: LiveJobs) -> bool:
        if any(self._is_selected(each) and runs(each) and not each.job.shared for each in found.active):
            return True
        if found.unknown is not None and found.launched:
            return True
        return (not self._stages or "train" in self._stages) and is_held(self._run)

    def _stop_or_cancel(self, found: LiveJobs) -> bool:
        """Let jobs leave the queue, end or stop; whether the training was asked to stop by the file."""
        by_file = False
        to_cancel = []
        for each in filter(self._is_selected, found.active):
            trains = each.job.stage == "train" or each.job.where == "local"
            if each.job.where == "local" and not runs(each):
                self._say_skipped(each)
            elif each.job.where == "local" and self._now:
                self._local.end(each.job)
            elif active_jobs.is_hidden(each):
                by_file = (trains and is_held(self._run)) or by_file
                self._say_hidden(each)
            elif each.job.shared:
                by_file = is_held(self._run) or by_file
                self._say_shared(each)
            elif runs(each) and trains and not self._now:
                by_file = True
            elif each.job.where == "slurm" and each.job.job not in self._asked:
                to_cancel.append(each)
            if each.job.where == "local" and not self._now:
                self._local.stop_other_stages(each.job)
        self._cancel_jobs(to_cancel)
        unseen = found.elsewhere or (found.unknown is not None and found.launched)
        by_hand = all(each.job.where == "local" and not runs(each) for each in found.active) and is_held(self._run)
        if by_file or unseen or by_hand:
            self._request_stop()
            return True
        return False

    def _say_skipped(self, each: ActiveJob) -> None:
        """The process that has it on its list looks whether it is cancelled before it begins."""
        if each.job.job not in self._asked:
            self._asked.add(each.job.job)
            what = active_jobs.stage_names(self._run, each.job)
            say(self._console, f"{what}: process {each.job.job} has not begun it, and will skip it")

    def _say_shared(self, each: ActiveJob) -> None:
        """The job has other runs, too: this one reads the request when it starts, and at its next step."""
        if each.job.job not in self._asked:
            self._asked.add(each.job.job)
            say(self._console, f"job {each.job.job} has other runs, which continue; this one saves and ends")

    def _say_hidden(self, each: ActiveJob) -> None:
        """The job itself reads the request when it starts, or when its launch ends."""
        if each.job.job not in self._asked:
            self._asked.add(each.job.job)
            what = active_jobs.describe(self._run, each)
            say(self._console, f"{what}; it will see that the run is cancelled, and start nothing")

    def _cancel_jobs(self, selected: Sequence[ActiveJob]) -> None:
        for each in selected:
            self._asked.add(each.job.job)
            what = f"{active_jobs.stage_names(self._run, each.job)}: job {each.job.job}"
            try:
                scheduler.cancel([each.job.job])
                say(self._console, f"{what} is ended now" if runs(each) else f"{what} leaves the queue")
            except SchedulerError as error:
                if _REFUSED not in error.output:
                    say(self._console, str(error))
                    continue
                todo = "it will see that the run is cancelled, and start nothing"
                if runs(each):
                    todo = "it is not started again"
                    if each.job.stage == "train":
                        todo += f"; without --now it saves and ends, too: `pipeline cancel {self._run}`"
                say(self._console, f"{what} is {each.job.user}'s, so SLURM does not let {jobs.user()} end it; {todo}")

    def _request_stop(self) -> None:
        if "stop" in self._asked:
            return
        self._asked.add("stop")
        who = None
        with suppress(UserError):
            who = holder(self._run)  # before it is asked, after which it may have left at once
        storage.put(self._stop_file, b"")  # not where a link of somebody else leads
        if who is not None:
            process = f"process {who.get('pid')} on {who.get('host')}"
            more = ""
            if self._now and "job" not in who:
                more = f"; it was started by hand; to end it at once, run `kill {who.get('pid')}` there"
            say(self._console, f"asked {process} to save and stop{more}")
        else:
            say(self._console, "asked the training to save and stop")

    def _say_progress(self, before: str | None) -> str | None:
        """Print what rank 0 does, when that changes. The end names the one step that counts: the checkpoint's."""
        beat = read_beat(self._run)
        if beat is None or beat.time < self._begin:
            return before
        if beat.phase != before:
            say(self._console, f"rank 0: {beat.phase}")
        return beat.phase

    def _say_unfinished(self, by_file: bool) -> None:
        if by_file:
            say(
                self._console,
                "it has not ended yet. It completes its step, saves and ends, and is not started again; "
                f"to end it at once: pipeline cancel {self._run} --now",
            )
        else:
            say(self._console, f"it has not ended yet; `pipeline status {self._run}` shows when it has")

    def _say_finished(self, found: LiveJobs) -> None:
        """Print what there is now, and what stays."""
        done = False
        if not self._stages or "train" in self._stages:
            state = RunFiles(self._run).exit_state(since=self._begin)
            if "reason" in state:
                say(self._console, f"it has ended: {state['reason']}")
                done = state.get("code") == EXIT_OK
            last = Checkpoints.of_run(self._run).latest()
            if last is not None:
                say(self._console, f"the newest checkpoint is of step {last.step:,} ({when(last.time)})")
            elif self._now or RunFiles(self._run).exit.exists():
                say(self._console, "there is no checkpoint")
        for job in self._others.keys() - {each.job.job for each in found.active}:
            what = active_jobs.stage_names(self._run, self._others[job].job)
            say(self._console, f"{what}: job {job} is cancelled, too: SLURM removes jobs that wait for a cancelled one")
        stays = [each for each in found.active if not self._is_selected(each)]
        for each in stays:
            say(self._console, f"stays: {active_jobs.describe(self._run, each)}")
        if stays:
            say(self._console, f"to end these, too: pipeline cancel {self._run} --chain")
        if done:
            say(self._console, f"{self._run} is done: the training reached its end before it could be cancelled")
            return
        say(self._console, f"{self._run} is cancelled" + ("" if not self._stages else f" ({', '.join(self._stages)})"))
