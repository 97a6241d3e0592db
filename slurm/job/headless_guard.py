"""Guard of a job that survives the loss of its first node: `python -m slurm.job.headless_guard JOB RUN`.

With spare nodes a job asks not to be killed when it loses a node (`--no-kill`). If that is the one of its batch
process, nobody is left to start anything, and the job would hold its other nodes until its time is over. So a small
step on another node asks the scheduler now and then, and puts the job back into the queue.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from pipeline.common.console import echo
from slurm import jobs, scheduler

_SECONDS = 20.0
"""Between looks."""


def is_headless(details: dict[str, str]) -> bool:
    """True if a job runs that has lost the node of its batch process.

    Args:
        details: what `scontrol show job` says of it.
    """
    host, nodes = details.get("BatchHost", ""), details.get("NodeList", "").replace("(null)", "")
    return details.get("JobState") == "RUNNING" and bool(host and nodes) and host not in scheduler.hostnames(nodes)


def watch(job: str, run: Path) -> None:
    """Look until the job has lost its batch process; then it starts anew, or ends if the run was cancelled."""
    while True:
        time.sleep(_SECONDS)
        try:
            if not is_headless(scheduler.details(job)):
                continue
            if jobs.cancelled(run, "train"):
                scheduler.cancel([job])
            else:
                scheduler.requeue(job)
            return
        except scheduler.SchedulerError as error:  # asked again, as long as the job lasts
            echo(error, flush=True)


if __name__ == "__main__":
    watch(sys.argv[1], Path(sys.argv[2]))
