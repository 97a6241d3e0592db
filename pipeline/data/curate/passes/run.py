"""Jobs of a pass on worker processes, shared with other commands by leases."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeline.common import storage
from pipeline.config.root import Config
from pipeline.data.curate.passes.jobs import CurationJob, SharedJob
from pipeline.data.work.job_run import Busy, JobRun
from pipeline.data.work.leases import Lease, LeaseWatch, take
from pipeline.data.work.progress import ProgressLine
from pipeline.data.work.worker_count import worker_count
from pipeline.data.work.worker_pool import Progress, Workers


@dataclass(frozen=True, eq=False)
class PassJob:
    """A job as workers take it. It is told from others by its folder and name, whatever else it has."""

    job: CurationJob

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PassJob) and (self.job.folder, self.job.name) == (other.job.folder, other.job.name)

    def __hash__(self) -> int:
        return hash((self.job.folder, self.job.name))

    def __str__(self) -> str:
        return str(self.job)


@dataclass(frozen=True)
class JobDone:
    """A job has a receipt."""

    made: bool
    """False if another command was faster."""


@dataclass(frozen=True)
class JobOutcome:
    """Outcome of the jobs of a pass.

    Attributes:
        made: jobs that this run did.
        failed: jobs that were given up, with how they failed last.
        held: jobs that were left to other commands, which have them.
        damaged: whether files of the input were found to be damaged.
    """

    made: int = 0
    failed: Sequence[tuple[object, str]] = ()
    held: int = 0
    damaged: bool = False


def make_run_job(shared: Any) -> Any:
    """In a worker process: returns the function that runs a `PassJob`."""
    watch = LeaseWatch()
    return lambda job, progress: run_job(job.job, shared, watch, progress)


def run_job(job: CurationJob, shared: Any, watch: LeaseWatch, progress: Progress) -> JobDone | Busy:
    """Do a job while its lease is held, if it is not done by then.

    Raises:
        OSError: the disk is full, say; nothing half-written stays.
    """
    try:
        lease = take(job.folder, job.name, watch)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES) or job.find() is None:
            raise
        return JobDone(False)
    if not isinstance(lease, Lease):
        return Busy(str(lease))
    with storage.naming(job.folder), lease, lease.beating():
        if job.find() is not None:
            return JobDone(False)
        if isinstance(job, SharedJob):
            job.run_with(shared, progress)
        else:
            job.run(progress)
        return JobDone(True)


class _PassRun(JobRun[PassJob, JobDone]):
    """Jobs of a pass on one pool of workers."""

    def finished(self, job: PassJob, result: JobDone, advanced: int) -> bool:
        self._line.advance(job.job.bytes - advanced)
        self._line.unit_done(0)
        return result.made

    def failures(self, job: PassJob) -> tuple[Path, dict[str, Any]]:
        return job.job.folder, {"job": job.job.name}


def run_jobs(
    config: Config, console: Console, name: str, jobs: Sequence[CurationJob], shared: Mapping[Path, Any], *, waits: bool
) -> JobOutcome:
    """Do jobs of passes.

    Args:
        config: the run.
        console: where progress goes.
        name: of the passes.
        jobs: that have no receipt.
        shared: by folder of a job, what `SharedJob` takes.
        waits: for jobs that other commands have; else they are left to them when no other is free.

    Raises:
        UserError: something in the config or the data has to be fixed first.
        OSError: the disk is full or read-only, say.
    """
    for folder in {job.folder for job in jobs}:
        storage.make_below(config.data_dir, folder)
    missing = [PassJob(job) for job in jobs]
    total = sum(each.job.bytes for each in missing)
    workers = Workers[PassJob, JobDone | Busy](make_run_job, (shared,), worker_count(config, len(missing)))
    with workers, ProgressLine(console, total, len(missing), 0, name, noun="job") as line:
        run = _PassRun(console, line, workers, waits=waits, noun="job")
        run.run_all(missing)
        return JobOutcome(run.made, run.failed, run.held)
