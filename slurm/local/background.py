"""The processes of a job in the background of this machine: those that it has started for a stage of a run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pipeline.common.run_files import RunFiles
from slurm import jobs
from slurm.jobs import Job
from slurm.record.launch_log import launches
from slurm.record.submission import find_submission

_PATIENCE = 30.0
"""Seconds from SIGTERM to SIGKILL, as schedulers have it."""


class LocalSteps:
    """Ends what a local job has started for a run, not the job itself: it notes the end, and may have other runs to do.

    Args:
        run: folder.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._terminated_at: dict[int, float] = {}
        """Times at which processes were told to end, by process id."""

    def end(self, job: Job) -> None:
        """Let it end, at first by SIGTERM; call it again until the job is gone."""
        for pid in self._steps(int(job.job)):
            if pid not in self._terminated_at:
                self._terminated_at[pid] = time.monotonic()
                _send(pid, signal.SIGTERM)
            elif time.monotonic() > self._terminated_at[pid] + _PATIENCE:
                _send(pid, signal.SIGKILL)

    def stop_other_stages(self, job: Job) -> None:
        """End it where it is not training, which alone has something to save."""
        now = [launch for launch in launches(self._run) if launch.job == job.job][-1:]
        if now and now[0].end is None and now[0].stage != "train":
            self.end(job)

    def _steps(self, job: int) -> Iterator[int]:
        """Processes that a job has started for this run: they have its run file on their command line."""
        folders = tuple(os.fsencode(folder.resolve()) + b"/" for folder in self._submissions())
        for child in _descendants(job):
            with suppress(OSError):
                words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
                if any(os.path.realpath(word).startswith(folders) for word in words if word.endswith(b".yaml")):
                    yield child

    def _submissions(self) -> Iterator[Path]:
        """Folders with run files of jobs: that of the run, and where other users cannot write."""
        yield RunFiles(self._run).slurm / jobs.SUBMISSIONS
        for job in jobs.sent(self._run):
            if submission := find_submission(self._run / job.submission):
                yield submission.run_file.parent


def _send(pid: int, number: int) -> None:
    """To a process and what it has started, if it leads a group."""
    with suppress(ProcessLookupError, PermissionError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)


def _descendants(pid: int) -> Iterator[int]:
    """Children of a process and theirs."""
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield int(child)
                yield from _descendants(int(child))
