"""The files of a run folder: the name of each, and how those are read that several commands read.

A run folder may belong to somebody else, may lack any of its files, and may be written while it is read. So only
regular files are read, a line that is still being written is left out, and nothing is written here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import orjson

from pipeline.common import storage

CHECKPOINT_STATE = "state.json"
"""In the folder of a checkpoint: step, journal, fingerprints, resolved config, layout, parent."""

EXPORT_ORIGIN = "export.json"
"""In an export: which checkpoints it was made of."""
LAUNCHER_LOG = "launcher.log"
"""Beside the logs of ranks: what torch's agent says."""


class _Entry:
    """A file or folder: its name on the class `RunFiles`, its path on an instance."""

    def __init__(self, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, files: None, owner: object) -> str: ...
    @overload
    def __get__(self, files: RunFiles, owner: object) -> Path: ...
    def __get__(self, files: RunFiles | None, owner: object) -> str | Path:
        return self._name if files is None else files.folder / self._name


@dataclass(frozen=True)
class RunFiles:
    """The files of a run: `RunFiles(run).metrics` is the path of one, `RunFiles.metrics` its name."""

    folder: Path

    config = _Entry("config.yaml")
    """The resolved run file that training was started with last."""
    data = _Entry("data")
    """The datasets, unless `data.dir` is set."""
    ledger = _Entry("ledger.jsonl")
    """A line for each begin and end of a stage, an attempt and a launch."""
    metrics = _Entry("metrics.jsonl")
    """A line for each step, save and validation."""
    losses = _Entry("losses.bin")
    """The loss of each sample, if `train.metrics.windows` is on."""
    journal = _Entry("journal.json")
    """The plan of the data."""
    agreements = _Entry("agreements.jsonl")
    """A line for each question about the run that a person has answered with yes."""
    faults = _Entry("faults.jsonl")
    """A line for each step that went wrong."""
    saves = _Entry("saves.json")
    """Time since the run was saved, where saves fail."""
    mirror = _Entry("mirror.json")
    """Newest step in the mirror of the checkpoints; if it is behind, the time since when and the reason."""
    mirror_id = _Entry("mirror-id")
    """Id of the run in its mirror, where that is not the folder's: the run has come from another folder."""
    notified = _Entry("notified.json")
    """Events of the run that were told of (`notify`)."""
    exit = _Entry("exit.json")
    """End of the last attempt; absent while one runs."""
    exit_room = _Entry(".exit.json.reserved")
    """Room for `exit.json` on a full disk."""
    attempt = _Entry("attempt")
    """Number of the last attempt."""
    lock = _Entry("lock")
    """The process that writes to the run folder."""
    lock_guard = _Entry("lock.guard")
    """Locked while `lock` is looked at or replaced."""
    stop = _Entry("stop")
    """Touched to let the training save and stop."""
    save = _Entry("save")
    """Touched to let it save and train on."""
    heartbeats = _Entry("heartbeats")
    """A file for each node."""
    hardware = _Entry("hardware")
    """A file for each node with hardware errors, a line for each counter that rose; absent without any."""
    logs = _Entry("logs")
    """A folder for each launch."""
    tensorboard = _Entry("tensorboard")
    folder_id = _Entry("folder-id")
    """Id of the folder, by which jobs know it; see `pipeline.common.run_identity`."""
    run_id = _Entry("run-id")
    """Id of the run at trackers, if it has any."""
    wandb_id = _Entry("wandb-id")
    """The same of older runs."""
    profiles = _Entry("profile")
    """A folder for each attempt that was profiled."""
    checkpoints = _Entry("checkpoints")
    hf = _Entry("hf")
    """Folders in Hugging Face's format that were written while training (`train.checkpoint.export`)."""
    exports = _Entry("exports.jsonl")
    """A line for each of them, and for each that failed."""
    evaluations = _Entry("eval")
    """Reports of evaluations and what was measured beside them."""
    summary = _Entry("summary.json")
    """Figures at the end of `pipeline run`."""
    slurm = _Entry("slurm")
    """Files of the scheduler; `slurm.jobs` names what else is in it."""
    jobs = _Entry("slurm/jobs.jsonl")
    """A line for each job that was sent."""
    cancelled = _Entry("slurm/cancelled")
    """That the run was cancelled, by whom."""

    def read_exit(self) -> dict[str, Any]:
        """End of the last attempt, as `exit.json` has it; {} without one.

        Raises:
            OSError: it cannot be read.
            ValueError: it is not a JSON object.
        """
        try:
            return storage.read_object(self.exit)
        except FileNotFoundError:
            return {}

    def exit_state(self, since: float = 0.0) -> dict[str, Any]:
        """End of the last attempt, as `read_exit`; {} also if the file is damaged.

        Args:
            since: {} if the file was written before, in seconds since 1970.
        """
        # Opening it asks the server of a network file system, where `stat` may be answered from memory.
        with suppress(OSError, ValueError), storage.open_regular(self.exit) as file:
            value = orjson.loads(file.read(storage.SMALL_BYTES))
            if isinstance(value, dict) and os.fstat(file.fileno()).st_mtime >= since:
                return value
        return {}

    def ledger_lines(self) -> list[dict[str, Any]]:
        """The ledger, without damaged lines; raises as `storage.json_lines`."""
        return storage.read_json_lines(self.ledger)

    def newest_rows(self) -> Iterator[dict[str, Any]]:
        """The metrics from the last row on, without damaged lines; raises as `storage.json_lines`."""
        return storage.json_lines_backwards(self.metrics)

    def checkpoint_steps(self) -> dict[int, Path]:
        """The committed checkpoints by the steps they were saved after, ascending."""
        names = {path.name.removeprefix("step-"): path for path in self.checkpoints.glob("step-*")}
        return dict(sorted((int(number), path) for number, path in names.items() if number.isdecimal()))

    def newest_state(self) -> dict[str, Any]:
        """State of the newest checkpoint; empty without one."""
        steps = self.checkpoint_steps()
        try:
            return dict(storage.get_json(steps[max(steps)] / CHECKPOINT_STATE, "layout")) if steps else {}
        except FileNotFoundError:  # training has just removed it
            return {}
