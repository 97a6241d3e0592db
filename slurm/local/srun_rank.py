"""A task of plain srun as a rank: `srun pipeline train RUN.yaml` in an allocation that exists already."""

from __future__ import annotations

import os
import zlib
from datetime import datetime

from pipeline.common.console import Console, warn
from pipeline.train.distributed.rank import is_rank

_PORTS = (10_000, 20_000)
"""The first port of a rendezvous, and how many there are: below those that systems give to outgoing connections."""
_END = "SLURM_JOB_END_TIME"
"""Variable with the end of the allocation, in seconds since 1970."""


def join_step() -> None:
    """Take the place among the ranks that `srun` has given this process, if it is one of several tasks of a step.

    Nothing changes under another launcher, which sets WORLD_SIZE, or where the process is alone: in an interactive
    shell of srun, for example. What a shell still has of an earlier launcher does not count. MASTER_PORT alone does: it
    is the same for all tasks, and a user sets it where the port of the step is taken.
    """
    given = os.environ
    tasks = given.get("SLURM_STEP_NUM_TASKS", "")
    if is_rank() or "SLURM_STEP_ID" not in given or not tasks.isdecimal() or int(tasks) < 2:
        return
    from slurm.job.srun_task import first_node, ranks_environment

    place = ranks_environment(dict(given))
    first, other = first_node(given["SLURM_STEP_NODELIST"]), given.get("MASTER_ADDR")
    if other not in (None, first) and place["RANK"] == "0":
        warn(
            Console(),
            f"MASTER_ADDR={other} of the environment is not used: rank 0 of this step is on {first}. To choose "
            "the address, set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE of each task, too",
        )
    step = f"{given['SLURM_JOB_ID']}.{given['SLURM_STEP_ID']}"
    lowest, count = _PORTS
    given.update(place, MASTER_ADDR=first)
    # All tasks have to know it without asking one another.
    given.setdefault("MASTER_PORT", str(lowest + zlib.crc32(step.encode()) % count))
    if _END not in given and (end := _end_time(given["SLURM_JOB_ID"])):
        given[_END] = end


def _end_time(job: str) -> str | None:
    from slurm import scheduler

    try:
        return str(int(datetime.fromisoformat(scheduler.details(job)["EndTime"]).timestamp()))
    except (scheduler.SchedulerError, KeyError, ValueError):  # "Unknown": no limit
        return None
