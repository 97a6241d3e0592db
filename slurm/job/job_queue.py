"""The queue, as a job uses it to continue: the same job goes back into it, or the next one of its chain follows."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Sequence

from slurm import jobs, scheduler
from slurm.job.allocation import Allocation
from slurm.job.restart_policy import suspects
from slurm.record.launch_log import LaunchEnd, launches
from slurm.record.submission import Submission


class JobQueue:
    """Requeues, and the chain of a job.

    Args:
        submission: of the job.
        job: its number; and that of earlier starts by the scheduler.
        allocation: None on this machine alone.
        signals: that came to this process so far.
        say: tells a line in the log of the job.
    """

    def __init__(
        self,
        submission: Submission,
        job: tuple[str, int],
        allocation: Allocation | None,
        signals: Collection[int],
        say: Callable[[str], None],
    ) -> None:
        self._submission, self._run, self._allocation = submission, submission.run, allocation
        self._job, self._restarts = job
        self._signals, self._say = signals, say

    def avoid(self, how: LaunchEnd) -> list[str]:
        """Nodes that the next job should not have, those first that are known to be bad."""
        return list(dict.fromkeys([*how.failed_nodes, *suspects(launches(self._run, "train"), how.checkpoint)]))

    def requeue(self, avoid: Sequence[str]) -> str | None:
        """Back into the queue. From then on the scheduler ends this process. Returns why not, if it is refused."""
        assert self._allocation is not None
        if signal.SIGTERM in self._signals and not self._allocation.is_over_time():
            return "the scheduler has just ended the job"
        # Where the scheduler ends this process already, there may be no time for any question before.
        hurried = signal.SIGTERM in self._signals
        exclude = None if hurried else self.exclude(self._job, avoid)
        seconds = scheduler.kill_wait() if exclude is not None else 0.0
        if refused := self._allocation.requeue():
            return refused
        # Only a job that waits can be told so. It does not start before this process is gone.
        if hurried:
            exclude = self.exclude(self._job, avoid)
        if exclude is not None:
            self._allocation.keep_from(self._job, exclude, seconds)
        return None

    def exclude(self, job: str, avoid: Sequence[str]) -> list[str] | None:
        """All nodes that a job is to be kept from: those that the user does not want, too. None: as it is."""
        assert self._allocation is not None
        try:
            unwanted = scheduler.hostnames(self._submission.resources.exclude or "")
        except scheduler.SchedulerError as error:
            self._warn(error)
            return None
        found = self._allocation.exclusion(job, avoid, unwanted)
        if found:
            self._say(f"job {job} excludes {', '.join(found)}")
        return [*unwanted, *found]

    def has_wrong_nodes(self) -> bool:
        """Requeue the job, once, if the start before wanted to avoid nodes that the job has again.

        The scheduler had not been told: it did not answer, or this process was killed first.
        """
        past = launches(self._run, self._submission.stage)
        before = past[-1] if past else None
        if self._allocation is None or before is None or before.end is None or before.end.next != "requeue":
            return False
        avoid = self.avoid(before.end)
        if before.key[:2] != (self._job, self._restarts - 1) or not set(avoid) & set(self._allocation.nodes):
            return False
        wrong = sorted({*(self.exclude(self._job, avoid) or [])} & {*self._allocation.nodes})
        if not wrong:
            return False
        self._say(f"job {self._job} was given {', '.join(wrong)} again; it goes back into the queue for other nodes")
        return self.requeue(avoid) is None

    def end_chain(self) -> None:
        """Remove waiting jobs of the chain from the queue: there is nothing for them to do."""
        waiting = self.waiting_chain_jobs()
        if not waiting:
            return
        self._say(f"the chain ends: {', '.join(waiting)} are cancelled")
        try:
            scheduler.cancel(waiting)
        except scheduler.SchedulerError as error:
            self._warn(f"{error}; they will find nothing to do")

    def waiting_chain_jobs(self) -> list[str]:
        """Jobs of the same chain that have not begun, the next one first."""
        if self._submission.chain not in ("singleton", "afterany") or self._submission.stage != "train":
            return []
        if self._submission.packed:  # others need them
            return []
        every = [job for job in jobs.sent(self._run) if job.stage == "train"]
        of = next((job.submission for job in every if job.job == self._job), None)
        # Not those of a later submission, which may have taken the run over from this one.
        sent = [job.job for job in every if job.job != self._job and job.submission == of]
        try:
            states = scheduler.jobs(sent, own=sent)
        except scheduler.SchedulerError as error:
            self._warn(error)
            return []
        return [job for job in sent if job in states and states[job].waits]

    def _warn(self, message: object) -> None:
        self._say(f"warning: {message}")
