"""State of the mirror of a run's checkpoints: what was uploaded last, and since when and why it is behind.

Rank 0 keeps it in `mirror.json` in the run folder, for `pipeline status`, notifications and the job.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pipeline.common import storage
from pipeline.common.format import duration
from pipeline.common.run_files import RunFiles
from pipeline.train.run.folder import RunFolder

_LONGEST = 2000
"""Characters of a reason that are kept."""
_END = 1e12
"""Number that every number in the file is below."""


@dataclass(frozen=True)
class MirrorState:
    """The mirror in an attempt, as `mirror.json` has it."""

    attempt: int
    to: str
    """URL of the mirror."""
    step: int = 0
    """Step of the newest checkpoint that this attempt has found or uploaded there; 0 for none."""
    time: float = 0.0
    """Time of that, in seconds since 1970."""
    waiting: int = 0
    """Step of the newest checkpoint that should be there; 0 for none."""
    behind: int = 0
    """Checkpoints since `step` that should be there and are not."""
    failed: int = 0
    """Tries that have failed since the last upload."""
    since: float = 0.0
    """Time of the first of them, in seconds since 1970."""
    reason: str = ""
    """Why the last one failed."""
    is_lost: bool = False
    """Another start of the run has taken the mirror over; nothing more is uploaded."""

    def words(self, now: float) -> str:
        """Since when and why the mirror is behind, in words; "" if nothing has failed.

        Args:
            now: seconds since 1970.
        """
        if not self.failed:
            return ""
        newest = f"its newest checkpoint is of step {self.step:,}" if self.step else "it has no checkpoint of this run"
        behind = f"; {self.behind:,} are missing, up to step {self.waiting:,}" if self.behind else ""
        state = "is not written to any more" if self.is_lost else "has been failing for"
        since = "" if self.is_lost else f" {duration(max(0.0, now - self.since))}"
        return f"the mirror {self.to} {state}{since}: {newest}{behind}; {self.reason}"

    def summary(self, now: float) -> str:
        """The newest checkpoint in the mirror, in words."""
        if not self.step:
            return f"nothing yet in {self.to}"
        behind = f"; step {self.waiting:,} is being uploaded" if self.behind else ""
        return f"step {self.step:,} in {self.to}, {duration(max(0.0, now - self.time))} ago{behind}"


def read_mirror_state(run: Path) -> MirrorState | None:
    """The mirror in the last attempt; None without one, or if the file is being written or damaged."""
    try:
        values = storage.read_object(RunFiles(run).mirror)
        found = MirrorState(**{name: values[name] for name in MirrorState.__dataclass_fields__})
    except (OSError, ValueError, KeyError, TypeError):
        return None
    whole = (found.attempt, found.step, found.waiting, found.behind, found.failed)
    if not all(type(each) is int and 0 <= each < _END for each in whole):
        return None
    if not all(type(each) in (int, float) and 0 <= each < _END for each in (found.time, found.since)):
        return None
    if not (isinstance(found.reason, str) and isinstance(found.to, str) and isinstance(found.is_lost, bool)):
        return None
    return replace(found, reason=found.reason[:_LONGEST], to=found.to[:_LONGEST])


class MirrorRecord:
    """Keeps `mirror.json`, on rank 0.

    Args:
        folder: of the run.
        to: URL of the mirror.
    """

    def __init__(self, folder: RunFolder, to: str) -> None:
        self._folder = folder
        self._file = storage.Reserved(RunFiles(folder.path).mirror)
        self._due: list[int] = []
        self.state = MirrorState(folder.attempt, to)
        self._note(self.state)

    def committed(self, step: int) -> None:
        """A checkpoint is there that should be in the mirror."""
        self._due = [*(each for each in self._due if each < step), step]
        self._note(self.state)

    def mirrored(self, step: int, when: float) -> None:
        """A checkpoint is in the mirror, since a time in seconds since 1970."""
        self._due = [each for each in self._due if each > step]
        self._note(replace(self.state, step=step, time=when, failed=0, since=0.0, reason="", is_lost=False))

    def reached(self) -> None:
        """The store answers; if nothing is missing there, what has failed before is over."""
        if self.state.failed and not self._due:
            self.mirrored(self.state.step, self.state.time)

    def failed(self, reason: str, *, is_lost: bool = False) -> bool:
        """A try has failed; returns True if it is the first one, or for good."""
        before = self.state
        since = before.since if before.failed else time.time()
        self._note(replace(before, failed=before.failed + 1, since=since, reason=reason[:_LONGEST], is_lost=is_lost))
        return not before.failed or (is_lost and not before.is_lost)

    def rewound(self) -> None:
        """The next attempt goes back to an older checkpoint."""
        self._due = [each for each in self._due if each <= self._folder.step]
        self._note(self.state)

    def _note(self, state: MirrorState) -> None:
        waiting = self._due[-1] if self._due else state.step
        self.state = replace(state, attempt=self._folder.attempt, waiting=waiting, behind=len(self._due))
        with suppress(OSError):  # the log has it
            self._file.write(storage.json_bytes(asdict(self.state)))
