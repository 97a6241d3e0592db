"""Notices of a job: the ends of its launches, and the starts that the scheduler made after it had ended the job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pipeline.common.errors import EXIT_OK, EXIT_OTHER, EXIT_STOPPED
from pipeline.config import Config
from pipeline.train.checkpoint.manager import Checkpoints
from slurm.jobs import ARRAYS, Stage
from slurm.notify.notices import Notices, end_of, harmless, tell_end
from slurm.record.launch_log import Launch, LaunchEnd, launches

_HURRY = 5.0
"""Seconds that a job waits at most for its notices before it goes back into the queue, or where it is told to end."""
_UNRECORDED = "no end was recorded (killed, or its node was lost)"


class JobNotices:
    """Notices of a start of a job for a stage; nothing is told before `begin`.

    Of other stages than training only failures are told of, and of arrays nothing: a job makes what their tasks have
    lost.

    Args:
        run: folder.
        stage: of the submission.
        warn: gets the failures of notifications.
        job: as the scheduler names it.
        restarts: number of earlier starts of the job.
    """

    def __init__(self, run: Path, stage: Stage, warn: Callable[[str], None], *, job: str, restarts: int) -> None:
        self._run, self._stage, self._warn = run, stage, warn
        self._job, self._restarts = job, restarts
        self._notices: Notices | None = None

    def begin(self, config: Config, chain_job: int, *, continues: bool = True) -> None:
        """Begin, and tell that the training was interrupted, if nobody could tell when the scheduler ended it.

        Args:
            config: of the run.
            chain_job: number within the chain, from 1.
            continues: the job has something to do.
        """
        with harmless(self._warn):
            self._begin(config, chain_job, continues)

    def _begin(self, config: Config, chain_job: int, continues: bool) -> None:
        if not config.notify or self._stage in ARRAYS:
            return
        self._notices = Notices(config, self._stage, self._warn, job=self._job, restarts=self._restarts)
        self._notices.remember()
        last = self._last_launch()
        if not continues or self._stage != "train" or last is None:
            return
        if last.end is not None and last.end.next in ("done", "end"):
            return
        if (last.job == self._job and last.restarts < self._restarts) or last.link < chain_job:
            why = _UNRECORDED if last.end is None else last.end.reason
            newest = Checkpoints.of_run(self._run).latest()
            step = newest.step if newest else 0
            reason = f"job {self._job} has started; the launch before: {why}"
            self._notices.send("requeued", reason=reason, key=_key(last), step=step, next="scheduler")

    def look(self, before: int, *, running: bool) -> None:
        """See `Notices.look`."""
        if self._notices is not None:
            self._notices.look(before, running=running)

    def ended(self, how: LaunchEnd, before: int, *, continued: bool, hurried: bool = False) -> None:
        """Tell of the end of the last launch, unless the scheduler decides whether it starts again.

        Args:
            how: its end, and what follows.
            before: number of the last attempt before it.
            continued: the stage continues.
            hurried: the scheduler ends the job, so that a requeue must not wait for the notice of it.
        """
        if self._notices is None or how.next == "scheduler":
            return
        with harmless(self._warn):
            self._tell(how, before, continued, hurried)

    def _tell(self, how: LaunchEnd, before: int, continued: bool, hurried: bool) -> None:
        assert self._notices is not None
        end = {**end_of(self._run, how.code, how.reason, before), "next": how.next}
        if self._stage != "train":
            if how.code not in (EXIT_OK, EXIT_STOPPED) and not continued:
                self.failed(how)
        elif continued and (last := self._last_launch()) is not None:
            self._notices.send("requeued", key=_key(last), **{**end, "step": how.checkpoint})
            if how.next == "requeue" and not hurried:  # after which the scheduler ends what is being sent, too
                self._notices.wait(_HURRY)
        else:
            tell_end(self._notices, end)

    def failed(self, how: LaunchEnd) -> None:
        """Tell that the stage has failed."""
        if self._notices is not None:
            with harmless(self._warn):
                self._notices.send("failed", reason=how.reason, code=how.code, next="end")

    def lost_folder(self, config: Config, chain_job: int, reason: str) -> None:
        """Tell that the stage has ended since its run folder is not there, though nothing of it can be read."""
        if self._notices is None:
            self.begin(config, chain_job, continues=False)
        if self._notices is not None:
            with harmless(self._warn):
                self._notices.send("failed", reason=reason, code=EXIT_OTHER, next="end")

    def close(self, *, hurried: bool) -> None:
        """Wait for what was sent, and end what still runs then; `hurried` if the scheduler ends the job."""
        if self._notices is not None:
            self._notices.close(_HURRY if hurried else None)

    def _last_launch(self) -> Launch | None:
        found = launches(self._run, "train")
        return found[-1] if found else None


def _key(launch: Launch) -> str:
    return ".".join(map(str, launch.key))
