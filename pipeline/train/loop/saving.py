"""Saving a run: a step waits for the copy, a thread writes it, rank 0 commits it, and all learn whether it worked."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from pipeline.common import links
from pipeline.common.console import Console, warn
from pipeline.common.errors import MachineError, NumericalError, RankFailed, Stopped, UnsavedError
from pipeline.common.format import size
from pipeline.common.versions import versions
from pipeline.config import Config
from pipeline.data.chat.kept_template import keep_template
from pipeline.data.order.journal import Journal
from pipeline.train.checkpoint import dcp_storage
from pipeline.train.checkpoint.committed import UNREADABLE
from pipeline.train.checkpoint.host_snapshot import Staging
from pipeline.train.checkpoint.manager import Checkpoints, Files, NotRemoved, record_of
from pipeline.train.checkpoint.mirror.mirroring import Mirroring
from pipeline.train.distributed.process_group import background_group, broadcast_from_rank0, gather
from pipeline.train.distributed.watchdog import Watchdog
from pipeline.train.export.exporter import Exporter, export_missing
from pipeline.train.optim.ema import Ema
from pipeline.train.optim.optimizers import Optimizers
from pipeline.train.parallel.footprint import checkpoint_bytes
from pipeline.train.parallel.parallelize import ParallelModel
from pipeline.train.parallel.setup import Setup
from pipeline.train.run.folder import RunFolder
from pipeline.train.run.unsaved import Unsaved
from pipeline.train.start.run_plan import RunPlan

_PAUSE = 0.5
"""Seconds before a save that failed is tried again."""
_GROWTH = 3.0
"""Factor of each further pause."""
_LONGEST_PAUSE = 60.0
_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
_PATIENCE = 5.0
"""Seconds that a rank which fails waits for the save in flight. The others may never come to its end."""


def _room(each: int, free: int | None, *, full: bool) -> str:
    """The room that a checkpoint needs and that there is, in words.

    Args:
        each: bytes of a checkpoint.
        free: bytes, without what the failed save has given back; None where the file system does not say.
        full: the disk was full.
    """
    needs = f"A checkpoint needs about {size(each)}"
    if free is None:
        return f"{needs}; how much is free cannot be seen"
    if free < each:
        return f"{needs}, {size(free)} are free: {size(each - free)} are missing"
    if full:
        return f"{needs}, {size(free)} are free now, but there was less while it was written (other files, or a quota)"
    return f"{needs}, {size(free)} are free"


@dataclass(frozen=True)
class SaveReport:
    """The end of a save."""

    step: int
    seconds: float
    """From the copy to the commit, or until it was given up."""
    waited: float = 0.0
    """Seconds that the loop waited for the save before this one."""
    failure: MachineError | None = None
    """Why there is no checkpoint of this step."""


@dataclass(frozen=True)
class _Job:
    """A save: all that is written, as it was at the time of the copy."""

    step: int
    attempt: int
    tensors: dcp_storage.State
    state: dict[str, Any]
    """State of rank 0, which alone writes it."""
    last: bool
    overdue: str
    prune: bool
    start: float
    waited: float


class Saver:
    """Writes the checkpoints of a run, and removes old ones. A context manager: nothing is in flight after it.

    One save is in flight at most. A thread writes it, and alone uses the process group that it has; every rank calls
    the methods in the same order.
    """

    def __init__(
        self,
        config: Config,
        setup: Setup,
        plan: RunPlan,
        folder: RunFolder,
        watchdog: Watchdog,
        model: ParallelModel,
        optimizers: Optimizers,
        ema: Ema | None,
        console: Console,
    ) -> None:
        self._config = config
        self._plan = plan
        self._folder = folder
        self._watchdog = watchdog
        self._checkpoints = Checkpoints.of_run(folder.path)
        self._layout = setup.mesh.layout
        self._model = model
        self._optimizers = optimizers
        self._ema = ema
        self._console = console
        self._rank = dist.get_rank()
        self._group = background_group()
        self._device = setup.device
        self._staging = Staging(pin=self._device.type == "cuda")
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._reports: deque[SaveReport] = deque()
        self.longest = 0.0
        """Seconds of the longest save of which rank 0 has a report."""
        self._not_removed: frozenset[str] = frozenset()
        """Why old checkpoints stay, as it was said last."""
        self.exporter = Exporter(config, folder, plan.length.steps)
        self.mirroring = Mirroring(config, folder, plan.length.steps)
        self._written: Files = {}
        """Files of the last save that this rank has written."""
        self.unsaved = Unsaved(folder, config.train.checkpoint.max_unsaved_minutes, write=self._rank == 0)

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._leave(error)
        finally:
            self.close_copies()

    def begin_copies(self) -> None:
        """Begin to export and mirror checkpoints, from the step of the run folder on; every rank calls this."""
        self.exporter.begin(self._console)
        self.mirroring.begin()

    def close_copies(self) -> None:
        """Give up what is being exported and mirrored; the next start does it."""
        self.exporter.close()
        self.mirroring.close()

    def finish_copies(self, stopped: Callable[[], str | None], write: Callable[[int, dict[str, Any]], None]) -> None:
        """Wait at the end of the run for what is being exported and mirrored; every rank calls this.

        Args:
            stopped: why the run is to stop now, or None.
            write: gets the step of the run and metrics.
        """
        self.exporter.finish(stopped, write, self._console)
        self.mirroring.finish(stopped, write, self._console)

    def _leave(self, error: BaseException | None) -> None:
        """Wait for the save in flight, as far as the end of the loop allows."""
        if error is None:
            self.wait()
            return
        # Ends that all ranks come to, and a process without others, can wait for what is being written.
        together = dist.get_world_size() == 1 or isinstance(error, (Stopped, NumericalError))
        if self._thread is not None and not isinstance(error, KeyboardInterrupt):
            self._thread.join(None if together else _PATIENCE)
        for report in self._reports:
            self._count(report)
        # What goes up is the error that ended the loop; nobody asks for these any more.
        for line in [self._error, *(report.failure for report in self._reports)]:
            if line is not None and line is not error:
                logging.getLogger(__name__).warning("warning: %s", line)

    def save(
        self,
        step: int,
        journal: Journal,
        more: dict[str, Any],
        *,
        last: bool,
        overdue: bool = False,
        prune: bool,
    ) -> None:
        """Save after `step` steps: copy the state as it is now, and write it while training continues.

        Waits for the save before it. A save that fails is tried again, then reported and given up.

        Args:
            step: steps trained.
            journal: the plan of the order as it is now.
            more: goes to state.json, besides what belongs to the run.
            last: write before this returns, since nothing comes after it.
            overdue: the run ends if this last save fails, since none has been written for too long.
            prune: remove what the policy does not keep, when this one is committed.

        Raises:
            UnsavedError: an overdue save failed.
            MachineError: the last save failed, or the run folder is no longer this run's. Nothing half-written stays.
        """
        start = time.monotonic()
        waits = self._thread is not None and self._thread.is_alive()
        self.wait()
        self._watchdog.beat()
        waited = time.monotonic() - start if waits else 0.0
        tensors = dcp_storage.tensors(self._model, self._optimizers, self._ema)
        in_background = self._config.train.checkpoint.async_save and not last
        if in_background:
            tensors = self._staging.copy(tensors)
        state = {**self._state(step, journal), **more} if self._rank == 0 else {}
        why = self.unsaved.why if overdue else ""
        job = _Job(step, self._folder.attempt, tensors, state, last, why, prune, start + waited, waited)
        if in_background:
            self._thread = threading.Thread(target=self._work, args=(job,), name="saver", daemon=True)
            self._thread.start()
            return
        failure = self._write(job)
        if failure is not None and last:
            code = failure.exit_code
            if self._rank == 0:
                self._reports.append(SaveReport(step, time.monotonic() - job.start, waited, failure))
            raise failure if self._rank == 0 else RankFailed("rank 0 has failed; its message says why", code)
        self._end(job, failure)

    def wait(self) -> None:
        """Until no save is being written; every rank calls this.

        Raises:
            MachineError: the run folder is no longer this run's.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    def reports(self) -> list[SaveReport]:
        """Saves that have ended since this was asked last, on rank 0; asks nobody and waits for nothing.

        Raises:
            MachineError: on rank 0, the run folder is no longer this run's.
        """
        # The other ranks come to know it from rank 0, whose message says what it is.
        if self._error is not None and self._rank == 0:
            raise self._error
        reports = []
        while self._reports:
            report = self._reports.popleft()
            self.longest = max(self.longest, report.seconds)
            reports.append(report)
        return reports

    def report(self, write: Callable[[int, dict[str, Any]], None]) -> None:
        """Note the saves that have ended since this was called last: those that failed with a warning.

        Args:
            write: gets step and metrics of each that was committed.
        """
        for report in self.reports():
            failed = self._count(report)
            if failed:
                warn(self._console, failed)
            else:
                waited = {"save_waited": report.waited} if report.waited else {}
                write(report.step, {"save_seconds": report.seconds, **waited})
        self.exporter.report(write, self._console)
        self.mirroring.report(write, self._console)

    def _count(self, report: SaveReport) -> str:
        """Note for `pipeline status` how a save ended; returns what to say of one that failed, else ""."""
        if report.failure is not None:
            return self.unsaved.failed(report.step, report.failure)
        self.unsaved.committed(report.step)
        return ""

    def finish(self) -> None:
        """`wait` with the time limit of a save; every rank calls this."""
        self._watchdog.phase("save")
        self.wait()

    def saved_steps(self) -> list[int]:
        """Steps of the checkpoints, ascending, also of one that was still being written; every rank calls this."""
        self.finish()
        return broadcast_from_rank0(lambda: [checkpoint.step for checkpoint in self._checkpoints.all()])

    def last_saved(self) -> str:
        """`last_good` when the save in flight has ended; every rank calls this."""
        self.finish()
        return self.last_good()

    def last_good(self) -> str:
        """The checkpoint that the run would resume from, for messages."""
        latest = self._checkpoints.latest()
        return latest.path.name if latest else "The start of the run (there is no checkpoint yet)"

    def _work(self, job: _Job) -> None:
        """Body of the thread: write a save and report it."""
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # each thread has a device of its own, at first the first one
            self._end(job, self._write(job))
        except BaseException as error:
            self._error = error

    def _end(self, job: _Job, failure: MachineError | None) -> None:
        """Tell how it went, export it, and remove old ones if a new one is there."""
        if failure is None:
            self.exporter.add(job.step)
            self.mirroring.add(job.step, self._written)
        if self._rank == 0:
            self._reports.append(SaveReport(job.step, time.monotonic() - job.start, job.waited, failure))
        if failure is None and job.prune:
            self._on_rank_0(self._prune)

    def _prune(self) -> None:
        """Remove what the policy does not keep. Why that fails is said once, not at each save."""
        held = [*self.exporter.held, *self.mirroring.held]
        try:
            if self._checkpoints.prune(self._config.train.checkpoint, held):
                self._not_removed = frozenset()
            return
        except NotRemoved as error:
            reasons, message = error.reasons, str(error)
        except OSError as error:
            message = f"they cannot be looked at ({error.strerror or error})"
            reasons = frozenset([message])
        if not reasons <= self._not_removed:
            logging.getLogger(__name__).warning("warning: old checkpoints: %s", message)
        self._not_removed = reasons

    def _write(self, job: _Job) -> MachineError | None:
        """Write and commit, again where it fails; the same on all ranks. Returns why it was given up."""
        pause = _PAUSE
        for left in reversed(range(self._config.train.checkpoint.retries + 1)):
            problem = self._try(job)
            if problem is None:
                return None
            if left:
                time.sleep(pause)
                pause = min(pause * _GROWTH, _LONGEST_PAUSE)
        kind, why = (UnsavedError, f"{job.overdue}: ") if job.overdue else (MachineError, "")
        if self._rank > 0:  # which tells nobody
            return kind(f"step {job.step} could not be saved: {problem}")
        good, prune, free = "What was committed before", "", None
        each = checkpoint_bytes(self._config, self._model.spec)
        rules = self._config.train.checkpoint
        with suppress(OSError):  # a file system that says no more than that it fails
            free = shutil.disk_usage(self._folder.path).free
            good = self.last_good()
            with suppress(*UNREADABLE):  # of one that is damaged
                newest = self._checkpoints.latest()
                each = newest.size if newest else each
            if problem in _FULL and self._checkpoints.prune(rules.model_copy(update={"keep": 1}), dry_run=True):
                prune = f"`pipeline checkpoint prune {self._folder.path} --keep 1`"
        if job.last:
            todo = f"make room{f', for example with {prune},' if prune else ''} and run the same command to resume"
        else:
            todo = f"training continues, and saves again later{f'; {prune} makes room' if prune else ''}"
        if prune and rules.keep > 1:
            todo += f"; lower train.checkpoint.keep ({rules.keep}), too, or the next saves fill the disk again"
        room = _room(each, free, full=problem in _FULL)
        return kind(
            f"{why}step {job.step} could not be saved in {self._checkpoints.folder}: {problem}. {room}. {good} is "
            f"still good; {todo}"
        )

    def _try(self, job: _Job) -> str | None:
        """Write and commit once. Returns what went wrong with the files of any rank, to all ranks."""
        tmp: Path | None = None
        try:
            problem, name = self._on_rank_0(lambda: str(self._checkpoints.begin(job.step, job.attempt)))
            if problem is None:
                tmp = Path(name)
                try:
                    self._written = dcp_storage.write(tmp, job.tensors, self._group)
                    written = gather(self._written, self._group)
                except OSError as error:  # the same one on all ranks
                    problem = error.strerror or str(error)
                else:
                    problem, _ = self._on_rank_0(lambda: self._commit(Path(name), job, written))
        except BaseException:
            self._remove(tmp)
            raise
        if problem is not None:
            self._remove(tmp)
        return problem

    def _on_rank_0(self, make: Callable[[], Any]) -> tuple[str | None, Any]:
        """An error of files on rank 0, which can be tried again, or else the result of `make`; all ranks get both."""

        def attempt() -> tuple[str | None, Any]:
            try:
                return None, make()
            except OSError as error:
                return error.strerror or str(error), None

        problem, value = broadcast_from_rank0(attempt, self._group)
        return problem, value

    def _remove(self, tmp: Path | None) -> None:
        # Rank 0 alone: another one may fail while rank 0 commits, from under which it would take the files.
        if self._rank == 0 and tmp is not None:
            links.remove_tree(tmp, ignore_errors=True)

    def _commit(self, tmp: Path, job: _Job, written: list[Files] | None) -> None:
        assert written is not None, "only rank 0 commits"
        files = {name: record for by_rank in written for name, record in by_rank.items()}
        self._plan.tokenizer.save(tmp)
        keep_template(tmp, self._plan.chat_template)
        files |= {path.name: record_of(path) for path in tmp.iterdir() if path.name not in files}
        self._checkpoints.commit(tmp, job.step, files, job.state, self._folder.assert_mine)

    def _state(self, step: int, journal: Journal) -> dict[str, Any]:
        return {
            "attempt": self._folder.attempt,
            "fingerprints": self._plan.fingerprints,
            "journal": journal.to_json(),
            "config": self._config.model_dump(mode="json"),
            "tokens": journal.tokens(step),
            "layout": self._layout.to_json(),
            "versions": versions(),
        }


def copy_missing(config: Config, folder: RunFolder, console: Console) -> None:
    """Export and mirror what an earlier attempt at a run that is done has left; every rank calls this, and waits."""
    export_missing(config, folder, console)
    mirroring = Mirroring(config, folder, folder.step)
    try:
        mirroring.begin()
        mirroring.finish(lambda: None, lambda step, row: None, console)
    finally:
        mirroring.close()
