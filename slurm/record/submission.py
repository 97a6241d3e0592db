"""Submission of a job: all that its batch process needs to know, in a file of the run folder.

A job may start days after it was sent, on another machine, and again after each requeue. So its script has the
path and the digest of this file, which names the resolved run file and the snapshot of the code it was sent with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.common.run_files import RunFiles
from pipeline.config import Config
from pipeline.config.load import load_written
from pipeline.config.slurm import ResourcesConfig, SiteConfig
from slurm import jobs
from slurm.jobs import Backend
from slurm.record import integrity
from slurm.record.planned_job import JobShape


@dataclass(frozen=True, kw_only=True)
class Submission(JobShape):
    """A job of one stage of a run. Paths are absolute; `run` may not be moved while jobs of it wait."""

    run: Path
    """Run folder."""
    where: Backend
    run_file: Path
    """The resolved config that the stage reads, in the run folder."""
    code: Path | None
    """Snapshot of the packages, which the job puts before all others; None: those that are installed."""
    site: SiteConfig
    max_restarts: int = 0
    doctor: bool = False
    every_checkpoint: bool = False
    """Evaluation jobs are sent for permanent checkpoints while this one trains."""
    then: tuple[str, ...] = ()
    """Files of submissions that the same job runs after a good end of this one, in this order."""
    others: tuple[str, ...] = ()
    """Files of submissions that the same job runs after all that, however it ended: the next runs of a sweep, on a
    machine without a queue."""
    beside: tuple[str, ...] = ()
    """Files of submissions of the runs of a sweep that share this job, all at the same time; nothing else is run."""
    packed: bool = False
    """It is one of those: its processes are started on this node, and the job asks the queue for all of them."""
    folder_id: str | None = None
    """Id of the run folder that it was sent for; see `pipeline.common.run_identity`. None: of an older version."""
    sha256: Mapping[str, str] = field(default_factory=dict)
    """Digests of the files that are named here, by path, as they were when it was saved."""

    def config(self) -> Config:
        """Config of the stage."""
        return load_written(self.run_file)

    def save(self, file: Path) -> None:
        """Write it down, with the digests of the files that it names, so that only their owner may change it.

        What is elsewhere than in the run folder is also put there, where members of the run's group can read it.
        """
        named = (str(self.run_file), *self.then, *self.others, *self.beside)
        sealed = replace(self, sha256={name: integrity.sha256(Path(name).read_bytes()) for name in named})
        values = asdict(sealed) | {"site": self.site.model_dump(), "resources": self.resources.model_dump()}
        values = {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}
        with integrity.for_owner_alone():
            storage.put_json(file, values)
        integrity.others_cannot_write(file, self.run_file)
        for each in (file, self.run_file):
            if (kept := record(self.run, each)) != each:
                storage.make_below(self.run, kept.parent)
                storage.put(kept, each.read_bytes())

    def refuse_changed(self) -> None:
        """A `UserError` where a file that is named here is not what it was."""
        for name, digest in self.sha256.items():
            integrity.read_checked(Path(name), digest)


def record(run: Path, file: Path) -> Path:
    """Path of a submission's file in the run folder, whether jobs read it there or not."""
    return RunFiles(run).slurm / jobs.SUBMISSIONS / file.name


def find_submission(file: Path) -> Submission | None:
    """A saved submission; None where it cannot be read."""
    try:
        return read_submission(file)
    except UserError:
        return None


def read_submission(file: Path, digest: str | None = None) -> Submission:
    """A saved submission.

    Args:
        file: of it.
        digest: that the file must have.

    Raises:
        UserError: the file is not there, damaged, or another one.
    """
    data = integrity.read_checked(file, digest)
    try:
        values: dict[str, Any] = orjson.loads(data)
        values |= {key: tuple(values.get(key, ())) for key in ("command", "then", "others", "beside")}
        values |= {
            "run": Path(values["run"]),
            "run_file": Path(values["run_file"]),
            "code": Path(values["code"]) if values["code"] else None,
            "site": SiteConfig(**values["site"]),
            "resources": ResourcesConfig(**values["resources"]),
        }
        return Submission(**values)
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{file} does not say what to run ({error}); submit the run again") from error
