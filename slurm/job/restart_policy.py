"""The decision after the processes of a job have ended: pure functions of what is known then.

At a time limit: `slurm.submit.stop_lead_time` says how long before it SLURM signals the job, `slurm.job.batch_main`
gets the signal, `pipeline.train.run.stop_requests` lets training save and stop, and this decides what follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.common.errors import (
    EXIT_INTERRUPTED,
    EXIT_NUMERICAL,
    EXIT_OK,
    EXIT_REFUSED,
    EXIT_STOPPED,
    EXIT_SUPERSEDED,
    EXIT_UNSAVED,
)
from slurm.jobs import Stage, resources_key
from slurm.record.launch_log import Launch, Next
from slurm.record.planned_job import Chain

_FINAL = {
    EXIT_REFUSED: "another start would be refused for the same reason",
    EXIT_NUMERICAL: "the training diverged, and another start would only repeat that",
    EXIT_UNSAVED: "no checkpoint can be written, so another start would lose its work, too",
    EXIT_SUPERSEDED: "a later attempt has taken the run over",
    EXIT_INTERRUPTED: "it was interrupted by hand",
}


_MOST_STOPS = 20
"""Starts in a row that were stopped without a newer checkpoint. Each may be a preemption, but not for ever."""


@dataclass(frozen=True)
class Situation:
    """The end of a launch, and where the job stands."""

    stage: Stage
    code: int
    """As in `pipeline.common.errors`."""
    chain: Chain
    cancelled: bool
    """Somebody has cancelled the run."""
    asked_to_stop: bool
    """It stopped because of the run's `stop` file: a person wants it to."""
    terminated: bool
    """The scheduler has told the job itself to end: `scancel`, or a node that was lost."""
    running: bool
    """The scheduler says that the job runs."""
    over_time: bool
    """Its time limit is reached, which is why the scheduler ends it, if it does."""
    crashes: int
    """Ends in a row, this one included, that were none of the run's will, without a newer checkpoint."""
    max_restarts: int
    nodes: int
    """Nodes of the allocation that can be used."""
    needed: int
    """Nodes that the stage needs."""
    stops: int = 0
    """Starts in a row, this one included, that were stopped without a newer checkpoint."""


def decide(now: Situation) -> tuple[Next, str]:
    """The next action, and the reason in words."""
    if now.code == EXIT_OK:
        return "done", "it is done"
    if now.cancelled:
        return "end", "the run was cancelled"
    if now.asked_to_stop:
        return "end", "the run was asked to stop (stop file)"
    if now.code in _FINAL:
        return "end", _FINAL[now.code]
    if (now.terminated or not now.running) and not now.over_time:
        return "scheduler", "the scheduler ends this job and decides whether it starts again"
    if now.chain == "none":
        return "end", "jobs of this stage are not started again"
    if now.code == EXIT_STOPPED:
        if now.stops >= _MOST_STOPS:
            return "end", (
                f"{now.stops} starts in a row were stopped before they could save a newer checkpoint; the logs say "
                f"what takes so long, and slurm.{resources_key(now.stage)}.time is their time"
            )
        return _continue_chain(now)
    if now.stage != "train":
        more = f"its time limit was reached, raise slurm.{resources_key(now.stage)}.time; " if now.over_time else ""
        return "end", f"{more}only training is started again after a failure"
    if now.crashes > now.max_restarts:
        return "end", (
            f"{now.crashes} failures in a row without a newer checkpoint (slurm.max_restarts={now.max_restarts})"
        )
    if now.nodes >= now.needed and not now.over_time:
        return "relaunch", f"start {now.crashes} of {now.max_restarts} without a newer checkpoint"
    return _continue_chain(now)


def _continue_chain(now: Situation) -> tuple[Next, str]:
    if now.chain == "requeue":
        return "requeue", "the same job goes back into the queue"
    return "next link", "the next job of the chain continues"


def crashes_in_a_row(launches: Sequence[Launch], checkpoint: int) -> int:
    """Number of the last launches that crashed with this checkpoint as the newest one.

    Args:
        launches: of the training, in order. One without an end was lost with its node, which is nobody's fault but may
            be a node's: it counts.
        checkpoint: steps of the newest checkpoint now.
    """
    return len(_crash_streak(launches, checkpoint))


def stops_in_a_row(launches: Sequence[Launch], checkpoint: int) -> int:
    """Number of the last launches that were stopped with this checkpoint as the newest one."""
    count = 0
    for launch in reversed(launches):
        if launch.end is None or launch.end.checkpoint < checkpoint or launch.end.code not in (EXIT_STOPPED, EXIT_OK):
            break
        count += launch.end.code == EXIT_STOPPED and launch.end.next in ("requeue", "next link")
    return count


def suspects(launches: Sequence[Launch], checkpoint: int) -> list[str]:
    """Nodes that the last two or more crashed launches have in common, if others did not share them all.

    A launch that knows which node failed first accuses this one alone, another one all that it had.
    """
    accused = [_accused(launch) for launch in _crash_streak(launches, checkpoint)]
    if len(accused) < 2:
        return []
    common = set.intersection(*accused)
    everywhere = all(common >= set(launch.nodes) for launch in _crash_streak(launches, checkpoint))
    return [] if everywhere else sorted(common)


def choose_nodes(nodes: Sequence[str], needed: int, down: Sequence[str], avoid: Sequence[str]) -> list[str]:
    """The nodes of an allocation to use, in its order: none that is down, and suspects only where there is no other."""
    usable = [node for node in nodes if node not in down]
    better = [node for node in usable if node not in avoid]
    taken = set((better + [node for node in usable if node in avoid])[:needed])
    return [node for node in nodes if node in taken]


def _accused(launch: Launch) -> set[str]:
    end = launch.end
    if end is not None and end.failed_nodes:
        return set(end.failed_nodes)
    return {end.node} if end is not None and end.node else set(launch.nodes)


def _crash_streak(launches: Sequence[Launch], checkpoint: int) -> list[Launch]:
    """The last launches, newest first, that crashed with this checkpoint as the newest one."""
    found: list[Launch] = []
    for launch in reversed(launches):
        end = launch.end
        newest = launch.checkpoint if end is None else end.checkpoint
        ended_by_scheduler = end is not None and end.next == "scheduler"
        ended_well = end is not None and not launch.crashed and not ended_by_scheduler
        if newest < checkpoint or ended_well:
            break
        if not ended_by_scheduler:  # else nobody's fault, though it left nothing newer
            found.append(launch)
    return found
