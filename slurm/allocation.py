"""The nodes that a job has, and which of them can be used."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import datetime

from slurm import scheduler
from slurm.scheduler import SchedulerError

_PATIENCE = 300.0
"""Seconds for which a controller that does not answer is asked again: it may just be started anew."""
_AGAIN = 5.0


class Allocation:
    """What the scheduler has given to this job.

    Args:
        job: its number.
        nodes: their names in the scheduler's order.
        say: for what the user should know.
    """

    def __init__(self, job: str, nodes: Sequence[str], say: Callable[[str], None]) -> None:
        self.job = job
        self.nodes = list(nodes)
        self.unhealthy: set[str] = set()
        """Found so since the job began."""
        self._taken: set[str] = set()
        """Nodes that the scheduler has taken from the job."""
        self.end = self._end_time()
        """When its time is over, in seconds since 1970; None without a limit."""
        self._say = say

    @classmethod
    def of_environment(cls, job: str, say: Callable[[str], None]) -> Allocation:
        """This job's."""
        return cls(job, scheduler.hostnames(os.environ["SLURM_JOB_NODELIST"]), say)

    def down(self) -> list[str]:
        """Nodes that are lost, as far as the controller knows, or unhealthy."""
        try:
            states = scheduler.node_states(self.nodes)
            left = self._left()
        except SchedulerError as error:
            self._say(f"warning: {error}")
            states, left = {}, self.nodes
        self._taken |= set(self.nodes) - set(left)
        lost = {node for node, state in states.items() if state.endswith("*") or state.startswith(("down", "fail"))}
        return [node for node in self.nodes if node in lost | self._taken | self.unhealthy]

    def _left(self) -> list[str]:
        """Nodes that the job still has: one that was lost is taken from it for good, also when it comes back."""
        details = scheduler.details(self.job)
        if details.get("JobState") != "RUNNING":  # of a job that ends the nodes leave one by one
            return self.nodes
        return scheduler.hostnames(details.get("NodeList", "").replace("(null)", "")) or self.nodes

    def is_running(self) -> bool:
        """Whether the scheduler counts the job as running, and not as one that it is about to end."""
        until = time.monotonic() + _PATIENCE
        while True:
            try:
                return scheduler.details(self.job).get("JobState") == "RUNNING"
            except SchedulerError as error:
                if time.monotonic() > until:
                    return True
                self._say(f"warning: {error}; asking again")
                time.sleep(_AGAIN)

    def is_over_time(self) -> bool:
        """Whether the scheduler ends the job because its time limit is reached."""
        try:
            return scheduler.details(self.job).get("Reason") == "TimeLimit"
        except SchedulerError:
            return False

    def keep_from(self, job: str, nodes: Sequence[str]) -> None:
        """A waiting job is to run on none of these nodes, and may on those that it was kept from before."""
        try:
            have = scheduler.details(job).get("ExcNodeList", "(null)").replace("(null)", "")
            if set(scheduler.hostnames(have)) != set(nodes):
                scheduler.update(job, {"ExcNodeList": ",".join(nodes)})
        except SchedulerError as error:
            self._say(f"warning: {error}")

    def _end_time(self) -> float | None:
        try:
            return datetime.fromisoformat(scheduler.details(self.job)["EndTime"]).timestamp()
        except (SchedulerError, KeyError, ValueError):  # "Unknown": no limit
            return None
