"""Evaluation jobs for the checkpoints that stay, sent while training goes on."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from contextlib import suppress

from rich.console import Console

from pipeline.common import run_identity
from pipeline.common.console import say, warn
from pipeline.common.errors import EXIT_OK
from pipeline.common.run_files import RunFiles
from pipeline.eval.benchmarks import benchmarks_are_kept
from pipeline.eval.reports import evaluated_checkpoint, report_path
from pipeline.train.checkpoint.committed import COMMIT, Checkpoint
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.checkpoint.policy import is_permanent
from slurm import jobs, scheduler
from slurm.jobs import Job
from slurm.record.submission import Submission
from slurm.submit import job_plan

AT_ONCE = 8
"""Jobs that a look sends at most: a run may have many checkpoints when evaluations are turned on."""
SENDS = 3
"""Number of times that this process tries to send a job that is refused."""
JOBS = 2
"""Jobs of a checkpoint at most: one that ends without a report is sent once more."""
ASK_EVERY = 60.0
"""Seconds to the next question to the scheduler about jobs that have left no report; twice as long after each that
brought nothing new."""
ASK_AT_LEAST = 960.0
"""The longest pause."""
_Identity = tuple[str, int]
"""Name and time of a checkpoint; a run that goes back may come to the same name again."""


class Evaluations:
    """Evaluation jobs of a training: each call of `look` sends those that are due, without raising or waiting.

    What was sent is in the run's `jobs.jsonl`, so another start of the job resumes from there.

    Args:
        submission: of the training.
        console: the job's log.
    """

    def __init__(self, submission: Submission, console: Console) -> None:
        self._submission = submission
        self._console = console
        self._config = submission.config()
        self._run = submission.run
        self._evaluated: set[_Identity] = set()
        self._sent: defaultdict[_Identity, dict[str, Job]] = defaultdict(dict)
        """By number, from this process: the clock of the one that saves may be ahead of ours."""
        self._refused: Counter[_Identity] = Counter()
        self._ended: set[str] = set()
        """Jobs that had ended at the last look without a report, which may take a moment to be seen from here."""
        self._asked, self._pause = -ASK_EVERY, ASK_EVERY
        self._warned: set[str] = set()

    def look(self) -> None:
        """Send jobs for the checkpoints that have neither a report nor a job."""
        try:
            if not jobs.cancelled(self._run):
                self._look()
        except FileNotFoundError:  # the run has just gone back from a checkpoint, or somebody removed it
            pass
        except Exception as error:  # training must not suffer from whatever it is
            self._warn(error)

    def _look(self) -> None:
        if run_identity.problem(self._run, self._submission.folder_id):
            return  # another folder is not to get jobs
        last = self._last_step()
        left = [each for each in self._permanent(last) if not self._is_evaluated(each)]
        if not left:
            return
        sent = [job for job in jobs.sent(self._run) if job.stage == "eval"]
        due = self._due(left, sent)
        if last is not None and any(each.step == last for each in due) and self._one_waits(sent):
            due = [each for each in due if each.step != last]
        for checkpoint in due[:AT_ONCE]:
            self._send(checkpoint)

    def _permanent(self, last: int | None) -> list[Checkpoint]:
        """Checkpoints that stay, by step."""
        policy, found = self._config.train.checkpoint, Checkpoints.of_run(self._run).all()
        return [each for each in found if is_permanent(policy, each.step) or each.step == last]

    def _last_step(self) -> int | None:
        """Steps of the run if it is trained to its end."""
        state = RunFiles(self._run).exit_state()
        with suppress(ValueError, KeyError, TypeError):
            if state["code"] == EXIT_OK:
                return int(state["step"])
        return None

    def _is_evaluated(self, checkpoint: Checkpoint) -> bool:
        """True if a report and all results of this very checkpoint exist: a job may end between the two."""
        identity = _identity(checkpoint)
        if identity not in self._evaluated:
            if evaluated_checkpoint(report_path(self._config, checkpoint.step)) != checkpoint.fingerprint:
                return False
            if not benchmarks_are_kept(self._config, checkpoint):
                return False
            self._evaluated.add(identity)
        return True

    def _due(self, left: list[Checkpoint], sent: list[Job]) -> list[Checkpoint]:
        """Those for which a job is to be sent now."""
        due, unknown, users = [], dict[str, Checkpoint](), dict[str, str]()
        for checkpoint in left:
            own = self._sent[_identity(checkpoint)]
            before = {job.job: job for job in sent if job.step == checkpoint.step and job.time >= checkpoint.time}
            numbers = list(before | own)
            users |= {number: job.user for number, job in (before | own).items()}
            if not numbers:
                due.append(checkpoint)
            elif len(numbers) < JOBS:
                unknown[numbers[-1]] = checkpoint
        ended = self._which_ended({number: users[number] for number in unknown})
        return due + [checkpoint for number, checkpoint in unknown.items() if number in ended]

    def _which_ended(self, owners: dict[str, str]) -> set[str]:
        """Jobs that the scheduler neither runs nor is going to, now and when it was asked before."""
        if not owners or time.monotonic() - self._asked < self._pause:
            return set()
        self._asked, self._pause = time.monotonic(), min(2 * self._pause, ASK_AT_LEAST)
        states = scheduler.states_of(owners, jobs.user())
        before = self._ended
        self._ended = {each for each in owners if each not in states or not states[each].active}
        if self._ended - before:  # the report may take a moment to be seen from here
            self._pause = ASK_EVERY
        return self._ended & before

    def _one_waits(self, sent: list[Job]) -> bool:
        """True if an evaluation of the newest checkpoint was sent along with the training and is still to come."""
        states = scheduler.states_of({job.job: job.user for job in sent if job.step is None}, jobs.user())
        return any(state.active for state in states.values())

    def _send(self, checkpoint: Checkpoint) -> None:
        identity, submission = _identity(checkpoint), self._submission
        if self._refused[identity] >= SENDS:
            return
        from slurm.submit.submit import send_all  # submitit takes a while to import
        from slurm.submit.submitit_backend import cancel_unknown

        try:
            if self._refused[identity]:  # it may have been accepted all the same
                cancel_unknown(self._run)
            planned = job_plan.eval_job(self._config, submission.site, checkpoint.step, backend=submission.where)
            (job,) = send_all(self._run, self._config, submission.site, [planned], submission.where, submission.code)
        except Exception as error:
            self._refused[identity] += 1
            self._warn(error)
            return
        self._sent[identity][job.job] = job
        self._pause = ASK_EVERY
        say(self._console, f"job {job.job} evaluates step {checkpoint.step}")

    def _warn(self, error: Exception) -> None:
        """Once for each cause; what a command of SLURM says is one, whatever job it says it of."""
        cause = error.output if isinstance(error, scheduler.SchedulerError) else f"{type(error).__name__}: {error}"
        if cause not in self._warned:
            self._warned.add(cause)
            text = str(error) or type(error).__name__
            warn(self._console, f"checkpoints cannot be evaluated: {text}; training continues")


def _identity(checkpoint: Checkpoint) -> _Identity:
    return checkpoint.path.name, (checkpoint.path / COMMIT).stat().st_mtime_ns
