"""The processes that have leases, as anybody sees them who can read the folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.data.work.leases import PATIENCE_S, read_leases


@dataclass(frozen=True)
class WorkerProgress:
    """A process that has a lease.

    Attributes:
        host: its machine.
        pid: its number there.
        what: unit, or the name of other work.
        began: when it began with its first unit, by its clock.
        since: when it took this lease, by its clock.
        beat_s: seconds since its last sign of life.
        done: bytes of the unit's files that it has done.
        state: `works`, `silent` (on another machine, for long), `stopped` (by SIGSTOP) or `gone`.
    """

    host: str
    pid: int
    what: int | str
    began: float
    since: float
    beat_s: float
    done: int
    state: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def read_workers(folder: Path, now: float) -> list[WorkerProgress]:
    """Processes that have a lease in the folder of a source or of the tokenizer."""
    workers = []
    for what, record, beat in read_leases(folder):
        running, age = record.is_running(), max(now - beat, 0.0)
        alive = age < PATIENCE_S if running is None else running
        state = "works" if alive else "silent" if running is None else "gone"
        if record.is_stopped():
            state = "stopped"
        workers.append(
            WorkerProgress(record.host, record.pid, what, record.began, record.since, age, record.done, state),
        )
    return workers
