"""The nodes that a job has, and which of them can be used."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import datetime

from slurm import scheduler
from slurm.scheduler import SchedulerError

_PATIENCE = 300.0
"""Seconds for which is asked again what the controller refuses to tell. One that is away is waited for."""
_AGAIN = 5.0
_SOON = 0.5
_NEAR = 60.0
"""Seconds before the end of its time in which a job is about to end, by the clock of this machine."""
_SAY = 600.0
"""Seconds between two lines that say that it is waited for."""


class Allocation:
    """The allocation of this job.

    Args:
        job: its number.
        nodes: their names in the scheduler's order.
        say: for what the user should know.
    """

    def __init__(self, job: str, nodes: Sequence[str], say: Callable[[str], None]) -> None:
        self.job = job
        self.nodes = list(nodes)
        self.unhealthy: dict[str, list[str]] = {}
        """Nodes that were found so since the job began, with the reasons."""
        self._taken: set[str] = set()
        """Nodes that the scheduler has taken from the job."""
        self.end = self._end_time()
        """End of its time, in seconds since 1970; None without a limit."""
        self._say = say

    @classmethod
    def of_environment(cls, job: str, say: Callable[[str], None]) -> Allocation:
        """The allocation of this process's job."""
        return cls(job, scheduler.hostnames(os.environ["SLURM_JOB_NODELIST"]), say)

    def _warn(self, message: object) -> None:
        self._say(f"warning: {message}")

    def down(self) -> list[str]:
        """Nodes that are lost, as far as the controller knows, or unhealthy."""
        try:
            states = scheduler.node_states(self.nodes)
            left = self._left()
        except SchedulerError as error:
            self._warn(error)
            states, left = {}, self.nodes
        self._taken |= set(self.nodes) - set(left)
        lost = {node for node, state in states.items() if state.endswith("*") or state.startswith(("down", "fail"))}
        return [node for node in self.nodes if node in lost | self._taken | self.unhealthy.keys()]

    def _left(self) -> list[str]:
        """Nodes that the job still has: one that was lost is taken from it for good, also when it comes back."""
        details = scheduler.details(self.job)
        if details.get("JobState") != "RUNNING":  # of a job that ends the nodes leave one by one
            return self.nodes
        return scheduler.hostnames(details.get("NodeList", "").replace("(null)", "")) or self.nodes

    def is_running(self) -> bool:
        """True if the scheduler counts the job as running, and not as one that it is about to end.

        A controller that is away is waited for as long as the job lives: the job can do nothing without it.
        """
        began = time.monotonic()
        last_warning = -_SAY
        while True:
            try:
                return scheduler.details(self.job).get("JobState") == "RUNNING"
            except SchedulerError as error:
                passed = time.monotonic() - began
                if not error.away and passed > _PATIENCE:
                    return True
                if passed - last_warning >= _SAY:
                    last_warning = passed
                    self._warn(f"{error}; trying again until it answers")
                time.sleep(_AGAIN)

    def is_ending(self) -> bool:
        """True if the scheduler ends the job now. One that does not answer does not say so."""
        if self.end is not None and time.time() > self.end - _NEAR:
            return True
        try:
            return scheduler.details(self.job).get("JobState") != "RUNNING"
        except SchedulerError:
            return False

    def is_over_time(self) -> bool:
        """True if the scheduler ends the job because its time limit is reached."""
        try:
            return scheduler.details(self.job).get("Reason") == "TimeLimit"
        except SchedulerError:
            return False

    def requeue(self) -> str | None:
        """Put the job back into the queue; the scheduler then ends its processes. Returns why not, if it refuses."""
        while True:
            try:
                scheduler.requeue(self.job)
                return None
            except SchedulerError as error:
                if not self.is_running():  # it was done, though the answer got lost, or somebody ends the job
                    return None
                if not error.away:
                    return str(error)

    def exclusion(self, job: str, nodes: Sequence[str], unwanted: Sequence[str]) -> list[str]:
        """Those of some nodes that a job can be kept from, so that it still has enough to start on.

        Args:
            job: its number.
            nodes: the worst ones first.
            unwanted: that the user does not want, whatever follows.
        """
        found = [node for node in nodes if node not in unwanted]
        try:
            while found and not scheduler.can_start(job, [*unwanted, *found]):
                fewer = found[: len(found) // 2]
                left = ", ".join(found[len(fewer) :])
                self._say(f"job {job} does not exclude {left}: too few nodes would be left for it to start on")
                found = fewer
        except SchedulerError as error:
            self._warn(error)
            return []  # it is better to start on a bad node than never
        return found

    def excluded(self, job: str) -> set[str]:
        """Nodes that a job is kept from now.

        Raises:
            SchedulerError: the scheduler does not answer.
        """
        return set(scheduler.hostnames(scheduler.details(job).get("ExcNodeList", "").replace("(null)", "")))

    def keep_from(self, job: str, nodes: Sequence[str], seconds: float) -> bool:
        """A waiting job is to run on none of these nodes, and may on those that it was kept from before.

        Args:
            job: its number.
            nodes: which.
            seconds: for which it is tried again.

        Returns:
            Whether the scheduler says so, too.
        """
        until = time.monotonic() + seconds
        problem = ""
        while True:
            try:
                if (have := self.excluded(job)) == set(nodes):
                    return True
                scheduler.update(job, {"ExcNodeList": ",".join(nodes)})
                if not problem:
                    problem = f"job {job} still excludes {', '.join(sorted(have)) or 'no node'}, despite a request"
                    continue  # it is read back at once
            except SchedulerError as error:
                problem = str(error)
            if time.monotonic() > until:
                self._warn(problem)
                return False
            time.sleep(_SOON)

    def _end_time(self) -> float | None:
        try:
            return datetime.fromisoformat(scheduler.details(self.job)["EndTime"]).timestamp()
        except (SchedulerError, KeyError, ValueError):  # "Unknown": no limit
            return None
