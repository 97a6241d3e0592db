"""The time since the last save of a run, where saves fail.

Rank 0 keeps it in `saves.json` in the run folder, which has its room from the start: on a full disk it tells `pipeline
status` and the job what the logs may have no room for.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pipeline.common import storage
from pipeline.common.errors import MachineError
from pipeline.common.format import duration
from pipeline.common.run_files import RunFiles
from pipeline.train.run.folder import RunFolder

_clock = time.monotonic
_LONGEST = 4000
"""Characters of a reason that are kept."""
_END = 1e12
"""Number that every number in the file is below."""


@dataclass(frozen=True)
class Saves:
    """The saves of an attempt, as `saves.json` has them."""

    attempt: int
    limit_minutes: float
    """`train.checkpoint.max_unsaved_minutes`."""
    since: float
    """Time at which the newest checkpoint was committed, or the attempt began to train, in seconds since 1970."""
    step: int
    """Step of the checkpoint that the run would resume from; 0 for none."""
    failed: int = 0
    """Saves that have failed since then."""
    failed_step: int | None = None
    """The last of them."""
    failed_at: float | None = None
    """Time of that failure, in seconds since 1970."""
    reason: str = ""
    """Why."""

    def words(self, now: float) -> str:
        """Failed saves and the time since the last good one, in words; "" if none has failed.

        Args:
            now: seconds since 1970.
        """
        if not self.failed:
            return ""
        saves = "1 save has" if self.failed == 1 else f"{self.failed:,} saves have"
        before = f"since step {self.step:,} was saved" if self.step else "and there is no checkpoint"
        since, limit = duration(max(0.0, now - self.since)), duration(60 * self.limit_minutes)
        return (
            f"{saves} failed {before}; {since} of work are unsaved (train.checkpoint.max_unsaved_minutes allows "
            f"{limit}); the last failure: {self.reason}"
        )


def read_saves(run: Path) -> Saves | None:
    """The saves of the last attempt; None if nothing is known of them, or the file is being written or damaged."""
    try:
        values = storage.read_object(RunFiles(run).saves)
        found = Saves(**{name: values[name] for name in Saves.__dataclass_fields__})
    except (OSError, ValueError, KeyError, TypeError):
        return None
    whole = (found.attempt, found.step, found.failed, 0 if found.failed_step is None else found.failed_step)
    seconds = (found.limit_minutes, found.since, 0.0 if found.failed_at is None else found.failed_at)
    if not all(_is_number(value, int) for value in whole) or not all(
        _is_number(value, int, float) for value in seconds
    ):
        return None
    return replace(found, reason=found.reason[:_LONGEST]) if isinstance(found.reason, str) else None


def _is_number(value: object, *types: type) -> bool:
    # True is an int for Python, and type() tells them apart.
    return type(value) in types and 0 <= value < _END  # type: ignore[operator]


def too_late(failed: int, unsaved: float, failing: float, limit: float) -> bool:
    """Tell whether one last save is due, after which the run ends.

    One failed save is not enough, or it would be all that a run may have whose saves are further apart than the limit.
    Such a run waits for the next one no longer than the limit.

    Args:
        failed: saves since the last commit.
        unsaved: seconds since then.
        failing: seconds since the first of those saves.
        limit: seconds that are allowed.
    """
    return (failed >= 2 and unsaved > limit) or (failed > 0 and failing > limit)


class Unsaved:
    """Counts the saves that fail, and knows when it is too late; of rank 0, the others learn it with the step.

    Args:
        folder: of the run; its step is that of the checkpoint which the run has been resumed from, 0 for none.
        limit_minutes: `train.checkpoint.max_unsaved_minutes`.
        write: whether to keep the file, on rank 0.
    """

    def __init__(self, folder: RunFolder, limit_minutes: float, *, write: bool) -> None:
        self._folder = folder
        self._file = storage.Reserved(RunFiles(folder.path).saves) if write else None
        self._limit = limit_minutes
        self.committed(folder.step)

    def committed(self, step: int) -> None:
        """A checkpoint has been committed."""
        self._since = self._first = _clock()
        self._note(Saves(self._folder.attempt, self._limit, time.time(), step))

    def rewound(self) -> None:
        """The next attempt goes back to an older checkpoint; the saves that have failed count on."""
        self._note(replace(self._saves, attempt=self._folder.attempt, step=self._folder.step))

    def failed(self, step: int, failure: MachineError) -> str:
        """Note a save that was given up; returns the message about it."""
        reason = str(failure).partition(". ")[0][:_LONGEST]  # what follows is for the log of that moment
        if not self._saves.failed:
            self._first = _clock()
        count, attempt = self._saves.failed + 1, self._folder.attempt
        self._note(
            replace(self._saves, attempt=attempt, failed=count, failed_step=step, failed_at=time.time(), reason=reason)
        )
        return f"{failure}. Nothing was saved for {duration(_clock() - self._since)}"

    @property
    def saves(self) -> Saves:
        """The saves of now, as the file has them on rank 0."""
        return self._saves

    @property
    def overdue(self) -> bool:
        """True if saves have failed for too long."""
        return too_late(self._saves.failed, _clock() - self._since, _clock() - self._first, 60 * self._limit)

    @property
    def why(self) -> str:
        """The reason why the run ends, if the last save fails, too."""
        limit = f"train.checkpoint.max_unsaved_minutes ({self._limit:g})"
        if not self._saves.failed:  # of another rank
            return f"no checkpoint could be written for longer than {limit}"
        return f"no checkpoint could be written for {duration(_clock() - self._since)}, longer than {limit}"

    def _note(self, saves: Saves) -> None:
        self._saves = saves
        if self._file is not None:
            with suppress(OSError):  # the log has it
                self._file.write(storage.json_bytes(asdict(saves)))
