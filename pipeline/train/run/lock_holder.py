"""The holder of a run's lock: who it is, whether it runs, and its last sign of life.

There are three answers: it runs, it has ended, or that is unknown. Unknown never frees a lock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.common import process_identity, storage
from pipeline.common.errors import UserError
from pipeline.common.format import duration
from pipeline.common.run_files import RunFiles
from pipeline.common.slurm_commands import JobAnswer, JobIdentity, own_uid, whether_runs

Holder = dict[str, Any]
"""Content of the file: host, pid, start time of the process and so on."""
AskForJob = Callable[[JobIdentity], JobAnswer]
STALE_SECONDS = 300.0
"""Age of the last sign of life from which a holder may be taken over, if nobody can say whether it runs: ten heartbeats
of the default `launch.heartbeat_seconds`."""
WATCH_SECONDS = 60.0
"""Seconds for which it is watched before that: some file systems date files by the clocks of their clients."""
_POLL = 1.0


def identity() -> Holder:
    """The identity of this process, which no other one has, also not a later one with the same pid."""
    return {**process_identity.identity(), **job(), "since": time.time()}


def job() -> dict[str, Any]:
    """The job, its user and the step of this process, and the job's number of restarts; {} outside of SLURM."""
    number = os.environ.get("SLURM_JOB_ID", "")
    if not number:
        return {}
    if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
        number = f"{array}_{os.environ.get('SLURM_ARRAY_TASK_ID', '')}"  # as people and commands name it
    cluster = os.environ.get("SLURM_CLUSTER_NAME")
    starts = {"restarts": _number("SLURM_RESTART_COUNT"), "step": _number("SLURM_STEP_ID")}
    return {"job": number, **starts, "cluster": cluster, "uid": own_uid()}


def _number(variable: str) -> int:
    """A number in the environment, 0 where it is not set."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else 0


def job_identity(held: Holder) -> JobIdentity | None:
    """The job of a holder; None for a process without one."""
    if held.get("job") is None:
        return None
    return JobIdentity(str(held["job"]), held.get("uid"), held.get("cluster"), held.get("since"), _start(held)[0])


def whether_holds(held: Holder, mine: Holder, ask: AskForJob | None = None) -> JobAnswer:
    """Answer whether the holder of a lock runs, as far as `mine` can find out.

    Args:
        held: the holder.
        mine: this process.
        ask: for what the scheduler says of a job; by default it is asked now.
    """
    alive = lives_here(held, mine)
    if alive is not None:
        return JobAnswer("running", "it runs") if alive else JobAnswer("ended", "it does not run")
    of_job = job_identity(held)
    if of_job is None or of_job.cluster != mine.get("cluster", of_job.cluster):
        return JobAnswer("unknown", "this machine cannot tell whether it runs")
    if of_job.number == mine.get("job"):
        # A job starts again only when its last start is over, and its next step when the last one is. What lives on,
        # on a node that was lost, finds out at its next commit.
        if _start(held) < _start(mine):
            return JobAnswer("ended", "its job was started again")
        return JobAnswer("running", f"job {of_job.number} is this process's own")
    return (ask or whether_runs)(of_job)


def _start(of: Holder) -> tuple[int, int]:
    """Numbers that grow with each start of the training in a job."""
    return of.get("restarts", 0), of.get("step", 0)


def lives_here(held: Holder, mine: Holder) -> bool | None:
    """True if the holder runs, None if that cannot be looked up from here."""
    if held["host"] != mine["host"]:
        return None
    boot, space = held.get("boot") or mine["boot"], held.get("namespace") or mine["namespace"]
    if boot != mine["boot"]:
        # The machine was started anew since; the scheduler knows better whether it is the same machine.
        return None if "job" in held else False
    if space != mine["namespace"]:
        return None  # in another container, whose processes have other numbers
    return bool(process_identity.start_time(held["pid"]) == held["started"])


def why_not_taken_over(run: Path) -> str | None:
    """The reason why a holder of whom nothing is known is taken to be alive; None if it may be taken over.

    It waits `WATCH_SECONDS` for a sign of life. A holder that is only suspended gives none either, and learns at its
    next write that it was taken over.
    """
    age = _silent_seconds(run)
    if age < STALE_SECONDS:
        return (
            f"its last sign of life was {duration(age)} ago by the clock of the disk; it may be taken over after "
            f"{duration(STALE_SECONDS)} of silence"
        )
    before, until = _signs(run), time.monotonic() + WATCH_SECONDS
    while time.monotonic() < until:
        time.sleep(min(_POLL, WATCH_SECONDS))
        if _signs(run) != before:
            return "it gave a sign of life just now"
    return None


def _silent_seconds(run: Path) -> float:
    """Seconds since the last sign of life, by the clock that dates the files on this disk."""
    probe = storage.temporary(RunFiles(run).lock)
    try:
        probe.write_bytes(b"now")
        storage.sync(probe)
        now = probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)
    return max(0.0, now - max(changed for _, changed, _ in _signs(run)))


def _signs(run: Path) -> list[tuple[str, float, bytes]]:
    """Name, time of change and content of what the processes of a run write again and again, and of the lock."""
    found = []
    for file in [RunFiles(run).lock, *sorted(RunFiles(run).heartbeats.glob("*.json*"))]:
        with (
            suppress(OSError, UserError),
            storage.open_regular(file) as opened,
        ):  # opened: a network disk then looks anew
            found.append((file.name, os.fstat(opened.fileno()).st_mtime, opened.read(storage.SMALL_BYTES)))
    return found
