"""The log of a job's own process, which has the reason where a job ended before it could note one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slurm.jobs import Job
from slurm.record.launch_log import LAST, Launch
from slurm.record.tail import last_lines

_ERROR = "error: "
"""Begin of the line with which the batch process ends (`slurm.job.batch_entry`)."""
_LINES = 30
"""Last lines of a log that are looked at."""


def own_error(run: Path, job: Job, launches: Sequence[Launch]) -> tuple[str, Path] | None:
    """The error with which a job ended outside of its launches, as one that was refused, and its log.

    Args:
        run: folder.
        job: of the run.
        launches: of this job, in order.

    Returns:
        None where its log has none, or where the end of a launch says how it ended.
    """
    last = {launch.job: launch for launch in launches}
    for task, number in enumerate(job.numbers):
        before = last.get(number)
        log = job.log(run, task)
        if before is not None and (before.end is None or before.end.next in LAST or _older(log, before.end.time)):
            continue
        lines = last_lines(log, _LINES)
        begin = max((place for place, line in enumerate(lines) if line.startswith(_ERROR)), default=None)
        if begin is not None:
            return "\n".join(lines[begin:]).removeprefix(_ERROR).rstrip(), log
    return None


def _older(log: Path, moment: float) -> bool:
    """True if nothing was written into a log after a moment."""
    try:
        return log.stat().st_mtime <= moment
    except OSError:
        return True
