"""The kill of a drill: a process of a training, all of them on a node, or the batch process of the job."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.common.errors import UserError
from slurm import scheduler
from slurm.jobs import Job

Part = Literal["rank", "node", "batch"]
_SECONDS = 60.0
"""For a step beside those that run."""
_KILL = """
job=$1; shift
for process; do
  given=$(tr '\\0' '\\n' < "/proc/${process#*:}/environ") &&
    grep -qx "SLURM_JOB_ID=$job" <<< "$given" && grep -qx "SLURM_PROCID=${process%:*}" <<< "$given" && continue
  echo "process ${process#*:} is not rank ${process%:*} of job $job any more; run the command again" >&2
  exit 3
done
for process; do kill -KILL "${process#*:}"; done
"""
"""Kills RANK:PID..., if all of them are still these processes of the job. bash, as nodes may have no other Python."""


@dataclass(frozen=True)
class Target:
    """Processes to kill.

    Attributes:
        part: of the training.
        job: that runs it.
        host: on which they are.
        ranks: their ranks; of the batch process (0,).
        pids: of each.
    """

    part: Part
    job: Job
    host: str
    ranks: Sequence[int]
    pids: Sequence[int]

    def __str__(self) -> str:
        what = {
            "rank": f"rank {self.ranks[0]} (process {self.pids[0]})",
            "node": f"all processes of the training (ranks {', '.join(map(str, self.ranks))})",
            "batch": f"the batch process ({self.pids[0]})",
        }[self.part]
        return f"{what} on {self.host}, job {self.job.job}"

    def kill(self) -> None:
        """Kill them with SIGKILL.

        Raises:
            UserError: a process of this machine is not any more what it was.
            SchedulerError: one of a job is not, or the scheduler refuses the step that kills.
        """
        named = [f"{rank}:{pid}" for rank, pid in zip(self.ranks, self.pids, strict=True)]
        if self.job.where == "slurm":
            number = scheduler.details(self.job.job).get("JobId", self.job.job)  # of a task of an array its own
            scheduler.run_beside(number, self.host, ["bash", "-c", _KILL, "drill", number, *named], seconds=_SECONDS)
            return
        if not all(map(_is_rank, self.ranks, self.pids)):
            raise UserError(f"{self}: it is not there any more; run the command again")
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _is_rank(rank: int, pid: int) -> bool:
    """True if a process of this machine is the rank, by the environment that it was started with."""
    try:
        given = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"RANK={rank}".encode() in given or (rank == 0 and not any(line.startswith(b"RANK=") for line in given))
