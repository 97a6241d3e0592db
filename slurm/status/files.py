"""State of a run by the files of its folder, whatever the scheduler knows.

Nothing is written, and nothing is too damaged to be looked at: what cannot be read is told, and the rest is read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pipeline.common import process_identity, storage
from pipeline.common.errors import UserError
from pipeline.common.format import listed
from pipeline.common.run_files import RunFiles
from pipeline.config import Config
from pipeline.config.load import load_written
from pipeline.data.order.journal_file import read_journal
from pipeline.data.order.run_length import run_length
from pipeline.data.order.sampler import Sampler
from pipeline.data.preprocess.run_tokenizer import tokenizer_folder
from pipeline.data.work.leases import read_workers
from pipeline.eval.reports import report_files
from pipeline.train.run.lock import holder
from slurm import jobs
from slurm.job.folder_watch import LostFolderNote, read_note
from slurm.jobs import Job, Stage
from slurm.record.job_log import own_error
from slurm.record.launch_log import LAST, Launch, launches
from slurm.record.submission import Submission, find_submission
from slurm.submit.permissions import private_folder

_ROWS = 20_000
"""Rows of the metrics that are looked at, from the last one on."""
_RECENT = 200
"""Steps that rates are taken from."""

T = TypeVar("T")


@dataclass(frozen=True)
class StageRun:
    """A start of a stage in the ledger, and its end if it has one."""

    stage: str
    host: str
    pid: int
    start: float
    """In seconds since 1970, like `end`."""
    end: float | None = None
    code: int | None = None
    reason: str = ""
    """Why it did not end well, in a line."""


@dataclass(frozen=True)
class MetricRows:
    """The last rows of the metrics; rows of the newest step come first."""

    steps: list[dict[str, Any]]
    """Of the last steps, all of one attempt."""
    trained: dict[str, Any] | None
    """The last one with a loss."""
    validated: dict[str, Any] | None
    sets: dict[str, dict[str, Any]]
    """Newest row in which a set of `heldout_sets` was scored, by its name."""
    newest: dict[str, Any] | None
    """The last one of a step, also of one that was skipped."""


class RunSnapshot:
    """The files of a run.

    Args:
        run: its folder.
        config: its run file, where that was named; what the run was started with goes before it.
    """

    def __init__(self, run: Path, config: Config | None = None) -> None:
        self.run = run
        self.now = time.time()
        self.problems: list[str] = []
        """Messages about what could not be read."""
        self.files = RunFiles(run)
        self.sent: list[Job] = self.read(RunFiles.jobs, lambda: jobs.sent(run), [])
        self.refusal = self.read(RunFiles.jobs, lambda: jobs.refusal(run), None)
        """Refusal of the newest submission."""
        self.launches: list[Launch] = self.read(RunFiles.ledger, lambda: launches(run), [])
        self.stages: list[StageRun] = self.read(RunFiles.ledger, lambda: _stages(self.files), [])
        self.exit_state: dict[str, Any] = self.read(RunFiles.exit, self.files.read_exit, {})
        self.lost: set[tuple[str, int, int]] = set()
        """Launches without an end that are over, by what the scheduler says."""
        self.hidden: str | None = None
        """Job that holds the run's lock, where the scheduler does not show it to this user."""
        self.cancelled = jobs.cancelled(run)
        self.holder = self.read(RunFiles.lock, lambda: holder(run), None)
        self.config = self._config(config)
        self.lost_folder = self.read(RunFiles.folder_id, self._lost_folder, None)
        """The note of a job that has not found the run folder."""

    def read(self, what: str, get: Callable[[], T], default: T) -> T:
        """The result of `get`; where it fails, the default, and `problems` has a line more."""
        try:
            return get()
        except Exception as error:  # damaged in whatever way: the other files still have something to say
            text = f"{what} cannot be read: {str(error) or type(error).__name__}"
            if text not in self.problems:
                self.problems.append(text)
            return default

    def launches_of(self, job: Job) -> list[Launch]:
        """Launches of a job, of all its tasks, in order."""
        numbers = set(job.numbers)
        return [launch for launch in self.launches if launch.job in numbers]

    def is_over(self, job: Job) -> bool:
        """True if the ledger says that nothing more comes of a job, so that nobody needs to be asked.

        A local job may have further stages before it, and to look whether its process lives costs nothing.
        """
        if job.where == "local":
            return False
        last = {launch.job: launch for launch in self.launches_of(job)}
        ends = [last[number].end if number in last else None for number in job.numbers]
        return all(end is not None and end.next in LAST for end in ends)

    def own_error(self, job: Job) -> str:
        """The error with which a job ended outside of its launches, from its own log, in a line; "" without one."""
        found = own_error(self.run, job, self.launches_of(job))
        return listed(" ".join(found[0].split())) if found is not None else ""

    def open_jobs(self) -> list[Job]:
        """Jobs of which more may come, in the order in which they were sent."""
        return [job for job in self.sent if not self.is_over(job)]

    def questions(self) -> list[str]:
        """Numbers of jobs that the scheduler knows more of than the files, arrays task by task."""
        found = [number for job in self.open_jobs() if job.where == "slurm" for number in job.numbers]
        if self.holder is not None and (number := self.holder.get("job")) and str(number) not in found:
            found.append(str(number))
        return found

    def last_job(self, stage: Stage) -> Job | None:
        """The job that was sent last for a stage."""
        return next((job for job in reversed(self.sent) if job.stage == stage), None)

    def submission(self, job: Job | None) -> Submission | None:
        """Submission of a job; None if it is not known."""
        return None if job is None else find_submission(self.run / job.submission)

    def total_steps(self) -> int | None:
        """Steps of the whole run, by its plan where there is one already; None if nobody can know yet."""
        if self.config is None:
            return None
        config, duration = self.config, self.config.train.duration
        counted = duration.count if duration.unit == "steps" else None
        if not self.files.journal.exists():
            return counted
        return self.read(RunFiles.journal, lambda: run_length(config, Sampler(read_journal(self.run))).steps, counted)

    def rows(self, step: int | None) -> MetricRows:
        """The end of the metrics; of steps after `step`, which were lost, nothing."""
        wanted = {} if self.config is None else self.config.heldout_sets
        names = {name for name, each in wanted.items() if each.samples}
        return self.read(RunFiles.metrics, lambda: _rows(self.files, step, names), MetricRows([], None, None, {}, None))

    def evaluations(self) -> list[tuple[float, dict[str, Any]]]:
        """Results of evaluations and when they were written, in seconds since 1970; the newest last."""
        files: list[Path] = self.read(RunFiles.evaluations, lambda: report_files(self.run), [])
        found = [self.read(f"{RunFiles.evaluations}/{file.name}", partial(_result, file), None) for file in files]
        return sorted((each for each in found if each is not None), key=lambda each: each[0])

    def last_goodput(self) -> dict[str, float] | None:
        """The goodput that the last attempt which ended in peace has noted."""
        lines: list[dict[str, Any]] = self.read(RunFiles.ledger, self.files.ledger_lines, [])
        return next((line["goodput"] for line in reversed(lines) if isinstance(line.get("goodput"), dict)), None)

    def by_hand(self) -> StageRun | None:
        """A stage that runs, or may, without a job and without an attempt at training."""
        last = {each.stage: each for each in self.stages if each.end is None}
        for each in reversed(last.values()):
            alive = process_identity.ran_at(each.host, each.pid, each.start)
            if alive or (alive is None and each.stage == "preprocess" and self._preprocesses()):
                return each
        return None

    def _preprocesses(self) -> bool:
        """True if a process of preprocessing gives signs of life, on whatever machine."""
        if (config := self.config) is None or config.data_url is not None:
            return False
        folders = [tokenizer_folder(config), *(config.data_dir / source.name for source in config.data.inputs.values())]
        return self.read(
            "leases",
            lambda: any(each.state == "works" for folder in folders for each in read_workers(folder, self.now)),
            False,
        )

    def _lost_folder(self) -> LostFolderNote | None:
        newest = self.submission(self.sent[-1] if self.sent else None)
        private = newest.run_file.parent.parent if newest else None
        if private is None and self.config is not None:
            private = private_folder(self.config, self.run)
        return None if private is None else read_note(private)

    def _config(self, given: Config | None) -> Config | None:
        """Config of the training, else that of the newest job, else the one that was given."""
        newest = self.submission(self.sent[-1] if self.sent else None)
        for file in (self.files.config, newest.run_file if newest else None):
            if file is not None and file.is_file():
                try:
                    return load_written(file, (), {"run.dir": os.path.abspath(self.run)})
                except (UserError, OSError) as error:
                    first = str(error).partition("\n")[0]
                    self.problems.append(f"{file} cannot be read: {first}")
        return given


def is_run(folder: Path) -> bool:
    """True if something of a run is in a folder."""
    files = RunFiles(folder)
    marks = (files.ledger, files.metrics, files.jobs)
    try:
        return any(mark.exists() for mark in marks)
    except OSError:
        return False


def _stages(files: RunFiles) -> list[StageRun]:
    found: dict[tuple[str, int, float], StageRun] = {}
    for line in files.ledger_lines():
        if line.get("event") not in ("start", "end") or not line.keys() >= {"stage", "host", "pid", "start"}:
            continue
        key = line["host"], line["pid"], line["start"]
        end = line["start"] + line["seconds"] if line["event"] == "end" and "seconds" in line else None
        found[key] = StageRun(line["stage"], *key, end, line.get("exit"), str(line.get("reason", "")))
    return list(found.values())


def _rows(files: RunFiles, step: int | None, names: Set[str]) -> MetricRows:
    steps: list[dict[str, Any]] = []
    trained = validated = newest = None
    sets: dict[str, dict[str, Any]] = {}
    for number, row in enumerate(files.newest_rows()):
        enough = trained is not None and validated is not None and len(steps) >= _RECENT and sets.keys() >= names
        if number >= _ROWS or enough:
            break
        at = row.get("step")
        if not isinstance(at, int) or (step is not None and at > step):
            continue
        if "validation_loss" in row:
            validated = validated or row
        if isinstance(scored := row.get("validation"), dict):
            for name in (name for name, each in scored.items() if isinstance(each, dict)):
                sets.setdefault(name, row)
        if "tokens" in row:
            newest = newest or row
        if "loss" in row:
            trained = trained or row
            if row.get("attempt") == trained.get("attempt") and len(steps) < _RECENT:
                steps.append(row)
    return MetricRows(steps, trained, validated, sets, newest)


def _result(file: Path) -> tuple[float, dict[str, Any]]:
    return file.stat().st_mtime, {"step": (value := storage.read_object(file))["step"], **value["blended"]}
