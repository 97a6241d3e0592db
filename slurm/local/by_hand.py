"""A start by hand of a run that is submitted: training is refused, and preprocessing shares its units with the jobs."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path

from rich.console import Console

from pipeline.common.console import warn
from pipeline.common.errors import UserError
from pipeline.train.distributed.rank import is_rank, of_environment
from pipeline.train.run import lock
from slurm import jobs
from slurm.job.srun_task import LOGS
from slurm.jobs import Job, Stage
from slurm.record import active_jobs
from slurm.record.live_jobs import live_jobs

_SHARED: dict[str, tuple[Stage, ...]] = {"curate": ("curate", "decide"), "preprocess": ("preprocess", "finish")}
"""Jobs that share work with a stage that is started by hand."""
_NUMBERS = ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SUBMITIT_LOCAL_JOB_ID")
"""Variables with the number of the job that this process is part of."""


def check(run: Path, stages: Collection[str], console: Console, *, take_over: bool = False) -> None:
    """Refuse to train beside a job that does or will, before either has the run's lock.

    Nothing is asked where the run was never submitted or all its jobs are known to have ended, nor in its jobs.

    Args:
        run: folder.
        stages: that are to run here and now.
        console: for warnings.
        take_over: jobs that the scheduler does not show to this user are taken to be gone.

    Raises:
        UserError: a job that trains the run waits or runs.
    """
    sent = jobs.sent(run)
    if not sent or is_rank() or _is_in_job(sent, os.environ):
        return
    found = live_jobs(run)
    if found.unknown is not None:
        warn(console, f"the run was submitted, and its jobs may wait or run: {found.unknown}")
    present = [each for each in found.active if not (take_over and active_jobs.is_hidden(each))]
    active = {each: {*active_jobs.stages(run, each.job)} for each in present}
    folder = shlex.quote(str(run))
    if "train" in stages and (training := [each for each, does in active.items() if "train" in does]):
        listed = "\n".join(f"  {active_jobs.describe(run, each)}" for each in training)
        raise UserError(
            f"the run is already submitted, so nothing was started:\n{listed}\nnext: pipeline status {folder}, "
            f"pipeline logs {folder} -f; to train here instead, `pipeline cancel {folder}`, and start again when its "
            "jobs have ended"
        )
    shared = {job for stage in stages if stage in _SHARED for job in _SHARED[stage]}
    if shared:
        for each in (each for each, does in active.items() if does & shared):
            warn(console, f"the run is already submitted; units are shared with {active_jobs.describe(run, each)}")


def take_over(run: Path, console: Console) -> None:
    """Free the lock of a run folder from a holder of whom it is unknown whether it runs; see `lock.take_over`.

    Raises:
        UserError: the holder runs, or has given a sign of life lately.
    """
    if is_rank() and of_environment().rank != 0:
        return
    if (before := lock.take_over(run)) is not None:
        warn(console, f"the run is taken over from {before}; if that still runs, its next save fails and it ends")


def _is_in_job(sent: Collection[Job], environment: Mapping[str, str]) -> bool:
    """True in a job of the run, and in what any job has started for a stage."""
    return LOGS in environment or not {job.job for job in sent}.isdisjoint(map(environment.get, _NUMBERS))
