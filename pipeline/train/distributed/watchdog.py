"""Ends a process that has not got on for too long, with the stacks of its threads and the last collectives.

Ranks wait for one another in every step: one that is stuck stops them all, without an error.
"""

from __future__ import annotations

import faulthandler
import io
import os
import signal
import sys
import sysconfig
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Literal

import orjson

from pipeline.common import links, storage
from pipeline.common.console import echo
from pipeline.common.errors import EXIT_HANG, HangError
from pipeline.common.run_files import RunFiles
from pipeline.config.run import TimeLimitsConfig
from pipeline.train.distributed.rank import NODE_ERRORS, Processes, log_folder, record_error
from pipeline.train.run.folder import RunFolder
from pipeline.train.run.heartbeat import HUNG, Heartbeat, blocking_ranks_text
from pipeline.train.torch_compat.flight_recorder import TORCH_FOLDER, last_collectives, waits_for_ranks

Phase = Literal["init", "first_step", "step", "save"]

STACKS_SIGNAL = signal.SIGUSR1
"""Lets a process write the stacks of its threads to its log, and continue."""
_PHASE_TEXT: dict[Phase, str] = {
    "init": "finding the other processes and building the model",
    "first_step": "the first step",
    "step": "a step",
    "save": "saving or loading a checkpoint",
}
_INTERVAL = 1.0
"""Seconds between two looks, at most."""
_OTHERS = 3.0
"""Seconds in which the other ranks should have noticed as well."""
_REPORT_SECONDS = 30.0
"""Seconds after which the process ends, whatever has been reported: the log may be on a disk that hangs itself."""
_STOPPED = 5.0
"""Seconds in which this thread was not run, besides an interval, from which on the process was stopped: it may also
wait for long calls of C code."""
_LIBRARIES = {name: sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "purelib")}


class Watchdog:
    """A context manager in which every phase of a run has its time limit; over it, the process ends with code 76.

    The clock starts in the phase "init". Time in which the whole process is stopped (Ctrl-Z, a suspended machine) does
    not count. `STACKS_SIGNAL` writes the stacks of all threads at any time, also of a process that hangs in C code.
    """

    def __init__(self, limits: TimeLimitsConfig) -> None:
        self._limits: dict[Phase, float] = {
            "init": limits.init_seconds,
            "first_step": limits.first_step_seconds,
            "step": limits.step_seconds,
            "save": limits.save_seconds,
        }
        self._main = threading.get_ident()
        self._lock = threading.Lock()
        self._phase: Phase | None = "init"
        self._step: int | None = None
        self._elapsed = 0.0
        self._interval = min(_INTERVAL, *(limit / 4 for limit in self._limits.values()))
        self._looked = time.monotonic()
        self._stopped = 0.0
        self._heartbeat: Heartbeat | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        with suppress(RuntimeError, OSError, ValueError):  # a stderr that is closed: the rest works without
            faulthandler.register(STACKS_SIGNAL, file=_descriptor(), all_threads=True, chain=False)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        faulthandler.unregister(STACKS_SIGNAL)

    def phase(self, phase: Phase, step: int | None = None) -> None:
        """Begin a phase, at a step (for the message); starts the clock anew."""
        with self._lock:
            self._phase, self._step, self._elapsed = phase, step, 0.0

    def beat(self) -> None:
        """Note progress within the phase: starts the clock anew."""
        with self._lock:
            self._elapsed = 0.0

    def pause(self) -> None:
        """Suspend the limit until the next `phase`: for work without a bound of time, like copying data."""
        with self._lock:
            self._phase = None

    def place(self) -> tuple[str, int | None]:
        """Phase ("pause" where there is no limit) and step of now."""
        with self._lock:
            return self._phase or "pause", self._step

    def stopped(self) -> float:
        """Seconds in which the whole process was stopped so far (SIGSTOP, as by `scontrol suspend`)."""
        with self._lock:
            return self._stopped + self._gap(time.monotonic())

    def _gap(self, now: float) -> float:
        """Seconds since the last look in which the process was stopped."""
        gap = now - self._looked - self._interval
        return gap if gap > _STOPPED else 0.0

    def heartbeats(self, folder: RunFolder, ranks: Processes, seconds: float) -> Heartbeat:
        """The heartbeat of this rank, to be entered with the lock of the run folder held.

        A hang is reported with what the others have written in theirs, so there are several within the shortest limit.
        """
        self._heartbeat = Heartbeat(
            folder.path,
            rank=ranks.rank,
            world=ranks.world_size,
            per_node=ranks.local_world_size,
            attempt=lambda: folder.attempt,
            seconds=min(seconds, *(limit / 4 for limit in self._limits.values())),
            place=self.place,
        )
        return self._heartbeat

    def _watch(self) -> None:
        while not self._ended.wait(self._interval):
            with self._lock:
                now = time.monotonic()
                self._stopped += self._gap(now)
                # If this thread was not run either, nothing was.
                gap, self._looked = min(now - self._looked, 2 * self._interval), now
                self._elapsed += gap
                phase, step, elapsed = self._phase, self._step, self._elapsed
            if phase is not None and elapsed > self._limits[phase]:
                self._end(phase, step, elapsed)

    def _end(self, phase: Phase, step: int | None, elapsed: float) -> None:
        """Tell what is known, within limits, and end the process."""
        with suppress(Exception):  # whatever happens to the reporting, the process ends
            # Also where the reporting never gives Python back; that needs no Python, but has another exit code.
            faulthandler.dump_traceback_later(2 * _REPORT_SECONDS, exit=True, file=_descriptor())
            reporting = threading.Thread(target=self._report, args=(phase, step, elapsed), name="hang", daemon=True)
            reporting.start()
            reporting.join(_REPORT_SECONDS)
        os._exit(EXIT_HANG)

    def _report(self, phase: Phase, step: int | None, elapsed: float) -> None:
        rank, world = os.environ.get("RANK", "0"), int(os.environ.get("WORLD_SIZE", "1"))
        with suppress(Exception):
            echo(f"hang: stacks of all threads of rank {rank} of {world}:", error=True, flush=True)
            faulthandler.dump_traceback(_descriptor(), all_threads=True)
        frame = sys._current_frames().get(self._main)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        evidence = self._evidence()
        with suppress(Exception):
            if evidence is not None:
                for folder in (evidence.parent, evidence):  # not the run folder, if that is gone
                    folder.mkdir(exist_ok=True)
                if os.environ.get(NODE_ERRORS):  # on a cluster: few files, however many ranks
                    node = int(rank) // int(os.environ["LOCAL_WORLD_SIZE"])
                    line = orjson.dumps({"rank": int(rank), **last_collectives()})
                    storage.append_line(evidence / f"flight-recorder-node-{node:04d}.jsonl", line)
                else:
                    file = evidence / f"flight-recorder-rank-{int(rank):04d}.json"
                    with links.create(file) as output:
                        output.write(orjson.dumps(last_collectives(), option=orjson.OPT_INDENT_2))
        what = _PHASE_TEXT[phase] if step is None else f"{_PHASE_TEXT[phase]} (step {step})"
        message = (
            f"no progress for {elapsed:.0f} s in {what}{self._blocking_ranks(frame, step)}; if it only needs longer, "
            f"raise launch.time_limits.{phase}_seconds ({self._limits[phase]:g})"
        )
        if world > 1:
            stacks = "The stacks of each rank are in its log"
            message += f". {stacks}" + (f", its last collectives in {evidence}" if evidence is not None else "")
        with suppress(Exception):
            record_error(HangError(message), f"Where the main thread was (most recent call last):\n{stack}")
        with suppress(Exception):
            echo(f"hang: rank {rank} of {world}: {message}", error=True, flush=True)
            sys.stdout.flush()

    def _evidence(self) -> Path | None:
        """The folder of the flight recorder: beside the logs of our launcher, or one of the run."""
        beside = log_folder()
        if beside is not None or self._heartbeat is None:
            return beside
        return RunFiles(self._heartbeat.run).logs / f"hang-{self._heartbeat.attempt():04d}"

    def _blocking_ranks(self, frame: FrameType | None, step: int | None) -> str:
        """The ranks that the others wait for, by their heartbeats, as a clause of the message."""
        beat = self._heartbeat
        if beat is None:
            return ""
        with suppress(Exception):
            # Also where there are no others: the next attempt reads how this one ended.
            beat.write(HUNG, step, place=_place(frame), waits=waits_for_ranks(frame), last=True)
            if beat.world == 1:
                return ""
            beats = beat.others_have_noticed(_OTHERS)
            return f": {blocking_ranks_text(beats, beat.world, beat.silent(beats))}"
        return ""


def _place(frame: FrameType | None) -> str | None:
    """File, line and function at which a thread is, leaving out torch and Python's own library."""
    innermost = frame
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or innermost
    return None if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


def _is_library(file: str) -> bool:
    python = file.startswith(_LIBRARIES["stdlib"]) and not file.startswith(_LIBRARIES["purelib"])
    return python or file.startswith((TORCH_FOLDER, "<"))


def _descriptor() -> int:
    """stderr, or the descriptor that it has where somebody has put an object without one in its place."""
    try:
        return sys.stderr.fileno()
    except (io.UnsupportedOperation, AttributeError, ValueError):
        return 2
