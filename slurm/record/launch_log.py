"""Launches: each start of a stage's processes by a job, with nodes, logs, end, and what follows.

A job may launch several times: again on other nodes after a crash, and again after each requeue. A launch has a line in
`ledger.jsonl` when it begins and one when it ends; an attempt (see `pipeline.train.run.attempts`) is what the training
itself knows of it.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from pipeline.common.errors import EXIT_OK, EXIT_OTHER, EXIT_STOPPED, EXIT_SUPERSEDED
from pipeline.common.run_files import RunFiles
from pipeline.train.run.attempts import LAUNCH, LAUNCH_END, append_entry
from slurm.jobs import Stage
from slurm.record.drill_record import read_drill

_KILLED = "batch killed"
"""Event that the script of the job writes (`slurm.submit.batch_script`)."""
Next = Literal["done", "relaunch", "requeue", "next link", "scheduler", "end"]
"""The next action: none, since all is done; another launch in the same job; the job again; the next job of the chain;
what the scheduler decides (it ended the job); nothing, for the reason that is given."""
LAST: tuple[Next, ...] = ("done", "end", "next link")
"""Values of `next` after which nothing comes of the job."""


@dataclass(frozen=True)
class LaunchEnd:
    """The end of a launch."""

    code: int
    """As in `pipeline.common.errors`, whatever the processes left with."""
    reason: str
    next: Next
    checkpoint: int
    """Steps of the newest checkpoint then; 0 without one, and of other stages than training."""
    time: float
    """In seconds since 1970."""
    rank: int | None = None
    """The process that failed first, where one did."""
    node: str | None = None
    """Node that it ran on."""
    failed_nodes: tuple[str, ...] = ()
    """Nodes that were lost or found unhealthy."""


@dataclass(frozen=True)
class Launch:
    """A launch, and its end if it has one."""

    stage: Stage
    job: str
    """As the scheduler names it: `77`, or `77_3`; of a local job its process id."""
    restarts: int
    """Number of earlier starts of the job by the scheduler."""
    number: int
    """Within this start of the job, from 1."""
    link: int
    """Number in the chain, from 1."""
    nodes: tuple[str, ...]
    processes_per_node: int
    logs: str
    """Folder of the logs of its ranks (`rank-0000.log` ...), relative to the run folder."""
    checkpoint: int
    """Steps of the newest checkpoint when it began."""
    host: str
    """Host of the process that watches it."""
    pid: int
    time: float
    """Time of its start, in seconds since 1970."""
    end: LaunchEnd | None = field(default=None, compare=False)

    @property
    def key(self) -> tuple[str, int, int]:
        """Key that no other launch of the run has."""
        return self.job, self.restarts, self.number

    @property
    def crashed(self) -> bool:
        """True if it ended neither well, nor by a stop that was asked for, nor because another start took its place."""
        return self.end is not None and self.end.code not in (EXIT_OK, EXIT_STOPPED, EXIT_SUPERSEDED)

    def node_of(self, rank: int) -> str | None:
        """Node of a rank."""
        place = rank // self.processes_per_node
        return self.nodes[place] if place < len(self.nodes) else None


def next_words(following: str) -> str:
    """Words for what follows on an end; `next link` is the name in files."""
    return "next job" if following == "next link" else following


def begin(run: Path, stage: Stage, job: str, **values: Any) -> Launch:
    """Note that a launch begins."""
    launch = Launch(stage, job, host=socket.gethostname(), pid=os.getpid(), time=time.time(), **values)
    line = asdict(launch)
    del line["end"]
    append_entry(run, {"event": LAUNCH, **line})
    return launch


def end(run: Path, launch: Launch, how: LaunchEnd) -> None:
    """Note how a launch ended."""
    job, restarts, number = launch.key
    append_entry(run, {"event": LAUNCH_END, "job": job, "restarts": restarts, "number": number, **asdict(how)})


def launches(run: Path, stage: Stage | None = None) -> list[Launch]:
    """All launches of a run, or those of a stage, in the order in which they began."""
    found: dict[tuple[str, int, int], Launch] = {}
    for line in RunFiles(run).ledger_lines():
        try:
            if line.get("event") == LAUNCH:
                values = {each.name: line[each.name] for each in fields(Launch) if each.name != "end"}
                launch = Launch(**values | {"nodes": tuple(values["nodes"])})
                found[launch.key] = launch
            elif line.get("event") == LAUNCH_END:
                key = line["job"], line["restarts"], line["number"]
                values = {each.name: line[each.name] for each in fields(LaunchEnd)}
                how = LaunchEnd(**values | {"failed_nodes": tuple(values["failed_nodes"])})
                found[key] = replace(found[key], end=how)
            elif line.get("event") == _KILLED:
                launch = [each for each in found.values() if each.key[:2] == (line["job"], line["restarts"])][-1]
                if launch.end is None or line["next"] == "end":  # a requeue may have been refused
                    found[launch.key] = replace(launch, end=_killed_end(run, launch, line))
        except (KeyError, TypeError, IndexError):  # of another version, or damaged
            continue
    return [launch for launch in found.values() if stage is None or launch.stage == stage]


def _killed_end(run: Path, launch: Launch, line: dict[str, Any]) -> LaunchEnd:
    """End of a launch whose batch process was killed, by the line that bash could write."""
    node, following = str(line["node"]), line["next"]
    drill = read_drill(run / launch.logs)
    how = f"was killed (signal {line['signal']}), as where the memory of a node runs out"
    reason = f"the batch process on {node} {drill.words if drill is not None and drill.part == 'batch' else how}"
    return LaunchEnd(
        EXIT_OTHER, f"{reason}; {next_words(following)}", following, launch.checkpoint, line["time"], node=node
    )


def is_all(past: Sequence[Launch], stages: int | None) -> bool:
    """True if a job in the background of this machine has nothing more to do for a run, though it may have for others.

    Args:
        past: launches of the job for the run, in order.
        stages: that it does one after the other; None where that is not known.
    """
    last = past[-1].end if past else None
    if last is None:
        return False
    done = {launch.stage for launch in past if launch.end is not None and launch.end.next == "done"}
    return last.next == "end" or (stages is not None and len(done) >= stages)
