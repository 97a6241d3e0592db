"""Jobs of a run in its folder: `slurm/jobs.jsonl`, a line for each that was sent; and the requests to cancel them.

These files are what `status`, `logs` and `cancel` go by; the scheduler is asked for what only it knows.
"""

from __future__ import annotations

import getpass
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from pipeline.common import links, storage
from pipeline.common.run_files import RunFiles
from pipeline.config import Config

Stage = Literal["curate", "decide", "preprocess", "finish", "train", "eval"]
"""`decide` is the job that ends curation after its arrays, `finish` the one that ends preprocessing after its array."""
LAST_OF_ARRAYS: tuple[Stage, ...] = ("decide", "finish")
ARRAYS: tuple[Stage, ...] = ("curate", "preprocess")
"""Stages of arrays, whose tasks share the work."""
StageName = Literal["curate", "preprocess", "train", "eval"]
"""Stages that a user names; curation becomes a job for each pass and one more, preprocessing two jobs."""
_STAGE_NAMES: dict[Stage, StageName] = {
    "curate": "curate",
    "decide": "curate",
    "preprocess": "preprocess",
    "finish": "preprocess",
    "train": "train",
    "eval": "eval",
}
Backend = Literal["slurm", "local"]
SUBMISSIONS = "submissions"
"""Folder of what jobs read when they start: in `RunFiles.slurm`, or where other users cannot write."""
LOGS = "jobs"
"""Folder of scripts and logs of jobs, in the form that submitit writes them, in the same places."""
CODE = "code"
"""Folder of code snapshots, in the same places."""


def stages_of_run(config: Config) -> list[StageName]:
    """Stages of a whole run, in their order. Datasets in a bucket are there already."""
    if config.data_url is not None:
        return ["train", "eval"]
    stages: list[StageName] = ["preprocess", "train", "eval"]
    return stages if config.data.curate is None else ["curate", *stages]


def stage_name(stage: Stage) -> str:
    """The name of a stage for users; of one that another version has noted, that name."""
    return _STAGE_NAMES.get(stage, stage)


def stage_words(stage: Stage) -> str:
    """The name of a job's stage in logs and lists: `end of preprocess` of the job after an array."""
    return f"end of {stage_name(stage)}" if stage in LAST_OF_ARRAYS else stage


def resources_key(stage: Stage) -> str:
    """Key of the resources of a stage in `slurm` and in a profile: curation needs what preprocessing does."""
    name = stage_name(stage)
    return "preprocess" if name == "curate" else name


@dataclass(frozen=True)
class Job:
    """A job, or an array of them, that was sent for a run."""

    stage: Stage
    job: str
    """Its number; of an array without the tasks; of a local one its process id."""
    where: Backend
    time: float
    """Time of sending, in seconds since 1970."""
    name: str
    user: str
    host: str
    """Host that it was sent from, on which it runs if it is local."""
    submission: str
    """File of the `Submission`, relative to the run folder."""
    link: int = 1
    """Number in a chain, from 1."""
    tasks: int = 1
    """Tasks of an array."""
    step: int | None = None
    """Step of the checkpoint that it evaluates."""
    after: tuple[str, ...] = ()
    """Jobs that it waits for."""
    shared: bool = False
    """Other runs of a sweep are in it (`--per-node`), so it is never cancelled for one of them."""

    @property
    def numbers(self) -> list[str]:
        """Numbers of the tasks, as the scheduler names them."""
        return [self.job] if self.tasks == 1 else [f"{self.job}_{task}" for task in range(self.tasks)]

    def log(self, run: Path, task: int = 0) -> Path:
        """Log of its batch process."""
        number = self.job if self.tasks == 1 else f"{self.job}_{task}"
        return jobs_folder(run) / f"{number}_0_log.out"


@dataclass(frozen=True)
class Cancelled:
    """Request to end a run and not to start it again."""

    by: str
    time: float
    """In seconds since 1970."""
    now: bool = False
    """Without saving first."""
    stages: tuple[Stage, ...] = ()
    """Stages that are meant; empty: all of the run."""


def jobs_folder(run: Path) -> Path:
    """Scripts and logs of jobs."""
    return RunFiles(run).slurm / LOGS


def note(run: Path, job: Job) -> None:
    """Write down that a job was sent."""
    storage.add_json_line(RunFiles(run).jobs, asdict(job))


def note_withdrawn(run: Path, job: Job) -> None:
    """Write down that a job was taken back at once, because one that belongs to it was refused."""
    storage.add_json_line(RunFiles(run).jobs, {"withdrawn": job.job, "time": time.time()})


@dataclass(frozen=True)
class RefusedSubmission:
    """A submission that the scheduler refused, so that nothing of it was sent."""

    stage: Stage
    """The first stage of it."""
    why: str
    time: float
    """In seconds since 1970."""


def note_refused(run: Path, stage: Stage, why: str) -> None:
    """Write down that a submission was refused."""
    storage.add_json_line(RunFiles(run).jobs, {"refused": why, "stage": stage, "time": time.time()})


def refusal(run: Path) -> RefusedSubmission | None:
    """The refusal of the newest submission; None if it was accepted, or if there is none."""
    lines = storage.read_json_lines(RunFiles(run).jobs)
    last: dict[str, Any] = next((line for line in reversed(lines) if "withdrawn" not in line), {})
    with suppress(KeyError):
        return RefusedSubmission(last["stage"], str(last["refused"]), float(last["time"]))
    return None


def sent(run: Path) -> list[Job]:
    """All jobs of a run in the order in which they were sent, but those that were taken back at once."""
    known = {field.name for field in fields(Job)}
    found: list[Job] = []
    for line in storage.read_json_lines(RunFiles(run).jobs):
        if "withdrawn" in line:
            found = [job for job in found if job.job != line["withdrawn"]]
            continue
        with suppress(TypeError):
            values = {key: value for key, value in line.items() if key in known}
            found.append(Job(**{**values, "after": tuple(values.get("after", ()))}))
    return found


def new_job(stage: Stage, job: str, backend: Backend, name: str, submission: str, **more: Any) -> Job:
    """A job that this process has just sent."""
    return Job(stage, job, backend, time.time(), name, user(), socket.gethostname(), submission, **more)


def this_job(backend: Backend) -> tuple[str, int]:
    """Number of the job of this process, as the scheduler wants it, and how often it was started before."""
    if backend == "local":
        return os.environ["SUBMITIT_LOCAL_JOB_ID"], 0
    job = os.environ["SLURM_JOB_ID"]
    if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
        # Of one task alone; its own SLURM_JOB_ID may be the array's.
        job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return job, int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def user() -> str:
    """Name of the user of this process."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def cancelled(run: Path, stage: Stage | None = None) -> Cancelled | None:
    """The request to cancel the run, or a stage of it, if there is one."""
    with suppress(OSError, ValueError, TypeError):
        values = storage.read_object(RunFiles(run).cancelled)
        found = Cancelled(**{**values, "stages": tuple(values.get("stages", ()))})
        return found if stage is None or not found.stages or stage in found.stages else None
    return None


def note_cancelled(run: Path, *, now: bool, stages: tuple[Stage, ...] = ()) -> None:
    """From now on no job of the run, or of these stages of it, starts again."""
    file = RunFiles(run).cancelled
    storage.make_below(run, file.parent)
    storage.put_json(file, asdict(Cancelled(user(), time.time(), now, stages)))


def forget_cancelled(run: Path) -> None:
    """It was submitted again."""
    links.remove(RunFiles(run).cancelled, missing_ok=True)


def is_alive(run: Path, job: Job) -> bool:
    """True if the process of a local job of this machine runs."""
    try:
        words = Path(f"/proc/{job.job}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    folder = jobs_folder(run)  # of a sweep's run, a link to that of the sweep
    names = {os.fsencode(folder.absolute()), os.fsencode(folder.resolve())}
    return not names.isdisjoint(words)  # else another process has its number by now
