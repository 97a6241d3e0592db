"""State of a run, in a word and a sentence, by the files of its folder alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.common.errors import EXIT_OK, EXIT_REFUSED, EXIT_STOPPED
from pipeline.common.format import duration
from pipeline.common.page.words import moment
from pipeline.train.run.attempts import Attempt
from pipeline.train.run.heartbeat import ENDED, HUNG, Beat
from pipeline.train.run.lock import is_held

Kind = Literal["good", "busy", "paused", "bad"]
_ENDS: dict[str, tuple[str, Kind]] = {
    "done": ("done", "good"),
    "stopped": ("stopped", "paused"),
    "interrupted": ("interrupted", "paused"),
    "rewound": ("stopped", "paused"),
    "refused": ("refused", "bad"),
    "hung": ("failed: it hung", "bad"),
    "diverged": ("failed: it diverged", "bad"),
    "unsaved": ("failed: it could not save", "bad"),
    "killed": ("failed: it was killed", "bad"),
    "failed": ("failed", "bad"),
}


@dataclass(frozen=True)
class State:
    """State of a run."""

    word: str
    kind: Kind
    why: str

    @property
    def has_ended(self) -> bool:
        """True if no process is at the run any more; it may be started again."""
        return any(self.word == word for word, _ in _ENDS.values())


def judge(
    folder: Path,
    tries: Sequence[Attempt],
    exit_state: Mapping[str, Any],
    beats: Mapping[int, Beat],
    *,
    newest: float | None,
    step_seconds: float,
    heartbeat_seconds: float,
    now: float,
) -> State:
    """The state of a run.

    Args:
        folder: of the run.
        tries: attempts at it.
        exit_state: how the last one ended, as `exit.json` has it.
        beats: heartbeats by rank.
        newest: when the last step ended, in seconds since 1970.
        step_seconds: that a step lasts.
        heartbeat_seconds: from one sign of life to the next.
        now: in seconds since 1970.
    """
    last = tries[-1] if tries else None
    attempt, code = exit_state.get("attempt"), exit_state.get("code")
    reason = str(exit_state.get("reason") or "")
    if last is not None and last.end is None:
        return _runs(last, beats, newest, max(3 * heartbeat_seconds, 2 * step_seconds), now)
    if isinstance(code, int) and (last is None or (isinstance(attempt, int) and attempt > last.number)):
        # It was refused before it began, or ended before it could note in the ledger that it begins.
        word, kind = _ENDS[{EXIT_OK: "done", EXIT_STOPPED: "stopped", EXIT_REFUSED: "refused"}.get(code, "failed")]
        return State(word, kind, "" if code == EXIT_OK else reason)
    if last is None:
        if is_held(folder):
            return State("starting", "busy", "a process has locked the run folder; no attempt at training has begun")
        return State("not begun", "paused", "no attempt at training has begun")
    word, kind = _ENDS[last.outcome]
    return State(word, kind, "" if last.outcome == "done" else last.reason)


def _runs(last: Attempt, beats: Mapping[int, Beat], newest: float | None, patience: float, now: float) -> State:
    """State of an attempt that has not ended, as far as can be seen from here."""
    mine = [beat for beat in beats.values() if beat.attempt == last.number]
    for beat in mine:
        if beat.phase == HUNG:
            return State("hangs", "bad", f"rank {beat.rank} on {beat.host} hangs at {beat.place}")
    signs = [last.begin, *(beat.time for beat in mine), *([newest] if newest is not None else [])]
    silent = now - max(signs)
    if silent > patience:
        return State("no sign of life", "bad", f"since {moment(max(signs))}, which was {duration(silent)} ago")
    quiet = [beat for beat in mine if beat.phase != ENDED and now - beat.time > patience]
    if quiet:
        oldest = min(quiet, key=lambda beat: beat.time)
        return State(
            "running",
            "busy",
            f"rank {oldest.rank} on {oldest.host} has given no sign of life for {duration(now - oldest.time)}",
        )
    return State("running", "busy", "")
