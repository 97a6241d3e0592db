"""Exports beside a training: checkpoints that were committed become folders in Hugging Face's format, one at a time.

A process of the lowest priority on the node of rank 0 writes them, by the same code as `pipeline convert to-hf`. No
step waits for it. Whatever becomes of it, the training continues; what is not done is made at the next start.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pipeline.common import storage
from pipeline.common.console import Console, detail, say, warn
from pipeline.common.errors import UserError
from pipeline.common.format import duration
from pipeline.common.imports import module_command
from pipeline.common.run_files import RunFiles
from pipeline.config import Config
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.checkpoint.policy import exports_to_prune, is_exported, is_permanent, to_export
from pipeline.train.distributed import process_group
from pipeline.train.distributed.rank import LAUNCHER
from pipeline.train.export.folders import ExportFolders
from pipeline.train.run.folder import RunFolder

_MODULE = "pipeline.train.export.process"
_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", LAUNCHER)
"""Variables of a rank, which the process is not."""
_SMALL = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
"""Variables that keep it off the devices and the cores of the training."""
_POLL = 0.2
"""Seconds between looks at whether the run is to stop while its last export is written."""
_MOST_HELD = 2
"""Checkpoints that stay for exports alone, the one that is being read among them."""

Stopped = Callable[[], str | None]
"""Why the run is to stop now, or None."""


@dataclass(frozen=True)
class ExportReport:
    """The end of an export."""

    step: int
    seconds: float
    words: str
    """Files that were written, or the reason why there are none."""
    failed: bool


class Exporter:
    """The exports of a run; on ranks other than 0, and without `train.checkpoint.export`, it does nothing.

    Args:
        config: of the run.
        folder: of the run, locked.
        total: steps of the run.
    """

    def __init__(self, config: Config, folder: RunFolder, total: int) -> None:
        self._rules, self._folder, self._total = config.train.checkpoint, folder, total
        self._folders = ExportFolders.of_run(folder.path)
        self._checkpoints = Checkpoints.of_run(folder.path)
        self._wanted = self._rules.export is not None
        self._is_first = not dist.is_initialized() or dist.get_rank() == 0
        self._writes = self._wanted and self._is_first
        self._lock = threading.Lock()
        self._queue: list[int] = []
        """Steps to export; of the first one the process runs."""
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None
        self._reports: deque[ExportReport] = deque()
        self.failures = 0
        """Exports that failed in this attempt."""

    def begin(self, console: Console) -> None:
        """Begin at the step of the run folder: later exports are abandoned, and missing ones are made."""
        if not self._is_first:
            return
        self.close()
        self._folders.clean()
        try:  # also without exports in this attempt: a later one would take them for those of its checkpoints
            for path in self._folders.abandon_after(self._folder.step):
                warn(console, f"an export of a later step was moved to {path}")
        except OSError as error:
            warn(console, f"exports of later steps cannot be moved ({error}); this attempt exports nothing")
            self._writes = False
        if not self._writes:
            return
        self._add(each.step for each in self._checkpoints.all() if each.step <= self._folder.step)

    def add(self, step: int) -> None:
        """Export the checkpoint of a step, which was committed, if its turn is by the policy."""
        if self._writes and is_exported(self._rules, step, self._total):
            self._add([step])

    def _add(self, steps: Iterable[int]) -> None:
        with self._lock:
            exported = self._folders.steps()
            first, wanted = self._queue[:1], {*self._queue, *steps}
            self._queue = first + [
                step for step in to_export(self._rules, wanted, exported, self._total) if step not in first
            ]
            held = [step for step in self._queue[1:] if not is_permanent(self._rules, step)]
            for step in held[: 1 - _MOST_HELD]:
                self._queue.remove(step)
                why = "exports take longer than the steps between them; raise train.checkpoint.export.every_steps"
                self._end(ExportReport(step, 0.0, why, failed=True))
            if self._queue and self._thread is None:
                self._thread = threading.Thread(target=self._work, name="exporter", daemon=True)
                self._thread.start()

    @property
    def held(self) -> list[int]:
        """Steps whose checkpoints must stay, since they are being exported or will be."""
        with self._lock:
            return list(self._queue)

    def reports(self) -> list[ExportReport]:
        """Exports that have ended since this was asked last; waits for nothing."""
        return [self._reports.popleft() for _ in range(len(self._reports))]

    def report(self, write: Callable[[int, dict[str, Any]], None], console: Console) -> None:
        """Note the exports that have ended since this was called last: those that failed with a warning.

        Args:
            write: gets the step of the run and metrics.
            console: for what the user should know.
        """
        for report in self.reports():
            if report.failed:
                self.failures += 1
                warn(console, f"step {report.step} was not exported: {report.words}; training continues")
                write(self._folder.step, {"exports_failed": self.failures})
            else:
                detail(console, f"step {report.step} was exported in {duration(report.seconds)}: {report.words}")
                write(self._folder.step, {"exported_step": report.step, "export_seconds": report.seconds})

    def finish(self, stopped: Stopped, write: Callable[[int, dict[str, Any]], None], console: Console) -> None:
        """Wait for what is left at the end of the run, or until it is to stop; every rank calls this.

        Args:
            stopped: see `Stopped`.
            write: as for `report`.
            console: as for `report`.
        """
        if self.held:
            say(console, f"train: waiting for the export of step {self.held[-1]} ({self._folders.folder})")
        while (left := self.held) and stopped() is None:
            time.sleep(_POLL)
        self.close()
        self.report(write, console)
        if left:
            steps = ", ".join(map(str, left))
            warn(console, f"step {steps} is not exported yet ({stopped()}); the same command exports it")
        if self._wanted:
            # A launcher ends those that are left some minutes after the first one that leaves.
            process_group.wait_for_all()

    def close(self) -> None:
        """End the process, if there is one; what it has not finished leaves no trace."""
        with self._lock:
            self._queue.clear()
            process, thread = self._process, self._thread
            if process is not None:
                process.kill()
        if thread is not None:
            thread.join()
            self._folders.clean()

    def _work(self) -> None:
        """Body of the thread: one process after the other, until the queue is empty.

        The kernel ends a process with the thread that has started it, and that with this process.
        """
        while True:
            with self._lock:
                if not self._queue:
                    self._thread = None
                    return
                step, begin = self._queue[0], time.monotonic()
                try:
                    process: subprocess.Popen[str] | None = self._start(step)
                except (OSError, UserError) as error:  # the checkpoint may have been removed meanwhile
                    process, words = None, f"its process cannot be started ({error})"
                self._process = process
            if process is not None:
                words = process.communicate()[0].strip()
            with self._lock:
                self._process = None
                if step not in self._queue:  # it was closed
                    continue
                self._queue.remove(step)
                failed = process is None or process.returncode != 0
                if process is not None and process.returncode < 0:
                    words = f"its process was killed by signal {-process.returncode}"
                self._end(ExportReport(step, time.monotonic() - begin, words, failed))
                if failed:
                    self._folders.clean()  # as one that was killed has not done
                else:
                    with suppress(OSError):  # an old one stays
                        self._folders.remove(exports_to_prune(self._rules, self._folders.steps()))

    def _start(self, step: int) -> subprocess.Popen[str]:
        rules = self._rules.export
        assert rules is not None, "nothing is exported without"
        checkpoint = Path(os.path.abspath(self._checkpoints.find(step).path))
        words = [str(checkpoint), os.path.abspath(self._folders.path(step)), rules.weights, rules.dtype or ""]
        environment = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
        return subprocess.Popen(
            [*module_command(_MODULE), *words, str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**environment, **_SMALL},
            # Ctrl-C and the signals of a scheduler are for the training, which ends this process when it leaves.
            start_new_session=True,
        )

    def _end(self, report: ExportReport) -> None:
        self._reports.append(report)
        row = {"step": report.step, "attempt": self._folder.attempt, "time": time.time(), "seconds": report.seconds}
        with suppress(OSError):  # the log has it
            storage.add_json_line(
                RunFiles(self._folder.path).exports, {**row, "failed": report.words if report.failed else None}
            )


def export_missing(config: Config, folder: RunFolder, console: Console) -> None:
    """Export what an earlier attempt at a run that is done has left; every rank calls this, and waits."""
    exporter = Exporter(config, folder, folder.step)
    try:
        exporter.begin(console)
        exporter.finish(lambda: None, lambda step, row: None, console)
    finally:
        exporter.close()
