"""The notices of a run: its files are looked at for what is new, and each event is told of once, also across requeues.

What was told is in `notified.json` in the run folder, written before a notice is sent: a process that is killed in
between has told nothing, and nothing is told twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.common import storage
from pipeline.common.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_STOPPED
from pipeline.common.format import counted, duration
from pipeline.common.redaction import masked
from pipeline.common.run_files import RunFiles
from pipeline.config import Config
from pipeline.config.notify import NotifyEvent
from pipeline.train.monitor.hardware import read_rises, rises_text
from pipeline.train.run.heartbeat import ENDED, HUNG, read_beat
from pipeline.train.run.mirror_state import read_mirror_state
from pipeline.train.run.unsaved import read_saves
from slurm.notify.notice import Notice
from slurm.notify.outbox import Outbox

_BEATS = 3
"""Heartbeats that are missed before a training counts as stalled."""
_SKEW = 60.0
"""Seconds in addition: the clocks of two nodes differ."""
_MIRROR = 300.0
"""Seconds for which uploads fail before it is told of."""
_SPIKES = 600.0
"""Seconds from one notice of steps that went wrong to the next; what comes between is summed up in that."""
_KEPT = 200
"""Events in `notified.json`, at most: the newest."""
_ACTIONS = {
    "skip": "its update was withheld",
    "rewind": "the run goes back to a checkpoint from before it",
    "stop": "the run ends",
}


@dataclass(frozen=True)
class Notified:
    """Events that were told of, as `notified.json` has them."""

    told: list[str]
    """Events that may be met again, the newest last."""
    faults: int
    """Bytes of `faults.jsonl` that were told of."""
    hardware: list[str] = field(default_factory=list)
    """Hardware counters that were told of."""


class Notices:
    """Notices of a stage of a run; does nothing, and leaves no file, where `notify` is empty.

    Args:
        config: of the run.
        stage: what is told of.
        warn: gets the failures of notifications.
        job: as the scheduler names it.
        restarts: number of earlier starts of the job.
    """

    def __init__(
        self, config: Config, stage: str, warn: Callable[[str], None], *, job: str | None = None, restarts: int = 0
    ) -> None:
        self._outbox, self._warn, self._warned = Outbox(config.notify, warn), warn, False
        self._files = RunFiles(config.run.dir)
        self._like = Notice("done", config.run.dir, stage, "", job=job, restarts=restarts)
        self._patience = _BEATS * config.launch.heartbeat_seconds + _SKEW
        self._looks = bool(config.notify) and stage == "train"
        known = self._read() if self._looks else None
        self._known = known or Notified([], 0)
        if known is None or not self._outbox.wants("spike"):
            # What happened before anybody was to be told is not news.
            self._known = replace(self._known, faults=self._size_of_faults())
        self._spikes_at = -_SPIKES
        self._silent: float | None = None
        """Time of the heartbeat that was found too old at the last look."""

    def remember(self) -> None:
        """Note what is known from now on, so that a start after this one knows what it missed."""
        if self._looks:
            self._write()

    def send(self, event: NotifyEvent, *, reason: str, key: str | None = None, **values: Any) -> None:
        """Tell of an event, in the background.

        Args:
            event: it.
            reason: in words.
            key: of the fact, if it may be met again and is not to be told of twice.
            values: other fields of the `Notice`.
        """
        if not self._outbox.wants(event):
            return
        if key is not None:
            name = f"{event}: {key}"
            if name in self._known.told:
                return
            self._known = replace(self._known, told=[*self._known.told[1 - _KEPT :], name])
            self._write()
        self._outbox.send(replace(self._like, event=event, reason=reason, time=time.time(), **values))

    def look(self, before: int, *, running: bool) -> None:
        """Tell of what went wrong: steps, saves, exports, mirror, hardware, a stalled training. Raises nothing.

        Args:
            before: number of the last attempt before this training: what is older is not news.
            running: the processes of the training run; else this is the last look.
        """
        if not self._looks:
            return
        try:
            self._look_at_faults(last=not running)
            self._look_at_saves(before)
            self._look_at_exports(before)
            self._look_at_mirror(before)
            self._look_at_hardware(before)
            if running:
                self._look_at_heartbeat(before)
        except OSError:  # a disk that is gone for a while
            pass
        except Exception as error:  # training must not suffer from whatever it is
            if not self._warned:
                self._warned = True
                self._warn(f"notify: the files of the run cannot be looked at ({type(error).__name__}: {error})")

    def wait(self, seconds: float) -> None:
        """Give what was sent some time to arrive."""
        self._outbox.wait(seconds)

    def close(self, seconds: float | None = None) -> None:
        """Wait for what was sent, within the limits of the notifications, and end what still runs.

        Args:
            seconds: to wait at most.
        """
        self._outbox.close(seconds)

    def _look_at_faults(self, *, last: bool) -> None:
        if not self._outbox.wants("spike") or (size := self._size_of_faults()) == self._known.faults:
            return
        begin = self._known.faults if size > self._known.faults else 0  # a file that is shorter is another one
        with storage.open_regular(self._files.faults) as file:
            file.seek(begin)
            data = file.read()
        end = data.rfind(b"\n") + 1
        faults = [fault for line in data[:end].splitlines() if (fault := storage.json_object(line)) is not None]
        urgent = last or any(fault.get("action") != "skip" for fault in faults)
        if not faults or not (urgent or time.monotonic() - self._spikes_at >= _SPIKES):
            return
        self._known, self._spikes_at = replace(self._known, faults=begin + end), time.monotonic()
        self._write()
        fault = faults[-1]
        what = "a spike" if fault.get("kind") == "spike" else "a loss or gradient that is not finite"
        reason = f"{what}, and {_ACTIONS.get(str(fault.get('action')), 'it was recorded')}"
        if len(faults) > 1:
            reason = f"{counted(len(faults), 'step')} went wrong; the last one: {reason}"
        step, attempt = (value if isinstance(value := fault.get(key), int) else None for key in ("step", "attempt"))
        self.send("spike", reason=f"{reason} ({self._files.faults} has its samples)", step=step, attempt=attempt)

    def _look_at_saves(self, before: int) -> None:
        found = read_saves(self._files.folder) if self._outbox.wants("saves_failing") else None
        if found is not None and found.failed and found.attempt > before:
            words, at = found.words(time.time()), found.failed_step
            # The same trouble until a newer checkpoint is there, in the next job, too.
            self.send("saves_failing", reason=words, key=f"after step {found.step}", step=at, attempt=found.attempt)

    def _look_at_exports(self, before: int) -> None:
        if not self._outbox.wants("export_failed") or not self._files.exports.is_file():
            return
        last = next(storage.json_lines_backwards(self._files.exports), {})
        step, attempt, why = last.get("step"), last.get("attempt"), last.get("failed")
        if why and isinstance(step, int) and isinstance(attempt, int) and attempt > before:
            self.send("export_failed", reason=str(why), key=f"{step} in attempt {attempt}", step=step, attempt=attempt)

    def _look_at_mirror(self, before: int) -> None:
        found = read_mirror_state(self._files.folder) if self._outbox.wants("mirror_failing") else None
        if found is None or not found.failed or found.attempt <= before:
            return
        now = time.time()
        if found.is_lost or now - found.since >= _MIRROR:
            key = f"lost in attempt {found.attempt}" if found.is_lost else f"after step {found.step}"
            self.send("mirror_failing", reason=found.words(now), key=key, step=found.step, attempt=found.attempt)

    def _look_at_hardware(self, before: int) -> None:
        if not self._outbox.wants("hardware") or not self._files.hardware.is_dir():
            return
        rises = [rise for rise in read_rises(self._files.folder) if rise.attempt > before and not rise.minor]
        # A counter that keeps rising is told of once per attempt.
        counters = {f"{rise.host} {rise.counter} in attempt {rise.attempt}": rise for rise in reversed(rises)}
        if new := {name: rise for name, rise in counters.items() if name not in self._known.hardware}:
            self._known = replace(self._known, hardware=list(counters))
            self._write()
            told = list(new.values())[::-1]
            self.send("hardware", reason=rises_text(told), attempt=told[-1].attempt)

    def _look_at_heartbeat(self, before: int) -> None:
        beat = read_beat(self._files.folder) if self._outbox.wants("stalled") else None
        if beat is None or beat.attempt <= before or beat.phase in (ENDED, HUNG):
            return
        silent = time.time() - beat.time
        seen, self._silent = self._silent, None
        if silent <= self._patience:
            return
        self._silent = beat.time
        # Twice: a job that was suspended as a whole looks before its ranks have had the time to say that they live.
        if seen == beat.time:
            reason = f"the last heartbeat of rank 0 on {beat.host} is {duration(silent)} old (phase {beat.phase})"
            key = f"attempt {beat.attempt} since {beat.time}"
            self.send("stalled", reason=reason, key=key, step=beat.step, attempt=beat.attempt)

    def _size_of_faults(self) -> int:
        try:
            return self._files.faults.stat().st_size
        except OSError:
            return 0

    def _read(self) -> Notified | None:
        """Events that were told of; None where the file is missing or damaged."""
        with suppress(OSError, ValueError, KeyError):
            values = storage.read_object(self._files.notified)
            told, faults = values["told"], values["faults"]
            hardware = values.get("hardware", [])
            if isinstance(told, list) and isinstance(faults, int) and isinstance(hardware, list):
                return Notified([str(each) for each in told], faults, [str(each) for each in hardware])
        return None

    def _write(self) -> None:
        with suppress(OSError):  # on a full disk this process still knows it
            storage.put_json(self._files.notified, asdict(self._known))


@contextmanager
def harmless(warn: Callable[[str], None]) -> Iterator[None]:
    """Make a warning of whatever goes wrong inside: neither training nor a job ends because of a notification."""
    try:
        yield
    except Exception as error:
        with suppress(Exception):
            warn(f"notify: an event may not have been told ({type(error).__name__}: {masked(str(error))})")


def end_of(run: Path, code: int, reason: str, before: int) -> dict[str, Any]:
    """Reason, code, attempt and step of the end of a training, by `exit.json` where it is of this training.

    Args:
        run: folder.
        code: exit code, as the one that watches knows it.
        reason: in words, as it knows it.
        before: number of the last attempt before this training.
    """
    state, found = RunFiles(run).exit_state(), {"reason": reason, "code": code}
    attempt, step = state.get("attempt"), state.get("step")
    if isinstance(attempt, int) and attempt > before:
        return {**found, "attempt": attempt, "step": step if isinstance(step, int) else None}
    return found


def tell_end(notices: Notices, end: dict[str, Any]) -> None:
    """Tell of the end of a training, after which nothing continues it."""
    code, step = end["code"], end.get("step")
    if code == EXIT_OK:
        notices.send("done", key=None if step is None else f"step {step}", **end)
    else:
        notices.send("stopped" if code in (EXIT_STOPPED, EXIT_INTERRUPTED) else "failed", **end)
