"""The run folder of a job: it is waited for while it is not there, and never made anew.

Where code and submission are elsewhere (`slurm.private_dir`), a note beside them says that a job waits or has given up.
`pipeline status` reads it, since it has no run folder to read then.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Set
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pipeline.common import run_identity, storage
from pipeline.common.errors import UserError
from pipeline.common.format import duration
from pipeline.common.run_identity import LostRunFolder
from slurm import jobs
from slurm.jobs import Stage
from slurm.record.submission import Submission
from slurm.submit.batch_script import FOLDER_SECONDS

_LOOK = 2.0
_STOPS = {signal.SIGTERM, signal.SIGUSR2, signal.SIGINT}
_NOTE = "lost-run-folder.json"


@dataclass(frozen=True)
class LostFolderNote:
    """A job did not find its run folder."""

    job: str
    stage: Stage
    time: float
    """Time of the note, in seconds since 1970."""
    waits: bool
    """The job looks again until its time for that is over; False: it has ended."""
    reason: str

    @property
    def words(self) -> str:
        """The note in words."""
        does = f"waits {duration(FOLDER_SECONDS)} for its run folder" if self.waits else "has ended"
        return f"job {self.job} {does}: {self.reason}"


class FolderWatch:
    """Looks for the run folder of a job.

    Args:
        submission: of the job.
        job: its number.
        signals: that came to the batch process so far.
        say: tells a line in the log of the job.
    """

    def __init__(self, submission: Submission, job: str, signals: Set[int], say: Callable[[str], None]) -> None:
        self._submission, self._run, self._job = submission, submission.run, job
        self._signals, self._say = signals, say
        folder = submission.run_file.parent.parent
        self._private = None if folder.is_relative_to(self._run) else folder

    def is_lost(self) -> bool:
        """True if the run folder is not there now."""
        return run_identity.problem(self._run, self._submission.folder_id) is not None

    def wait(self) -> None:
        """Return when the run folder is there.

        Raises:
            LostRunFolder: it is not there after `FOLDER_SECONDS`, or the job is told to end.
        """
        why = run_identity.problem(self._run, self._submission.folder_id)
        if why is None:
            self._forget()
            return
        self._note(why, waits=True)
        self._say(f"warning: {why}. It is waited for, {duration(FOLDER_SECONDS)} at most")
        until = time.monotonic() + FOLDER_SECONDS
        while why := run_identity.problem(self._run, self._submission.folder_id):
            if self._signals & _STOPS or time.monotonic() > until:
                self._note(why, waits=False)
                raise LostRunFolder(why)
            time.sleep(_LOOK)
        self._forget()
        if self._private is not None and self._submission.where == "slurm":
            # What SLURM has opened for this process is beside the code.
            storage.log_to(jobs.jobs_folder(self._run) / f"{self._job}_0_log.out")
        self._say(f"{self._run} is there again")

    def _forget(self) -> None:
        if self._private is not None:
            with suppress(OSError):
                (self._private / _NOTE).unlink(missing_ok=True)

    def _note(self, why: str, *, waits: bool) -> None:
        if self._private is not None:
            note = LostFolderNote(self._job, self._submission.stage, time.time(), waits, why)
            with suppress(OSError):
                storage.put_json(self._private / _NOTE, asdict(note))


def read_note(private: Path) -> LostFolderNote | None:
    """The note of a job that does not find the run folder; None where none says so."""
    with suppress(OSError, ValueError, TypeError, UserError):
        note = LostFolderNote(**storage.read_object(private / _NOTE))
        # A job that was killed meanwhile could not say so.
        return note if time.time() < note.time + 2 * FOLDER_SECONDS else replace(note, waits=False)
    return None
