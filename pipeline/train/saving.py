"""Saving a run: every rank writes what it has, rank 0 commits it, and all learn whether it worked."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pipeline import __version__
from pipeline.config import Config
from pipeline.errors import MachineError
from pipeline.train.checkpoint import storage
from pipeline.train.checkpoint.manager import Checkpoints, Files, record_of
from pipeline.train.model.flops import num_parameters
from pipeline.train.optim import Optimizers
from pipeline.train.parallel.footprint import MASTER_BYTES, MOMENTS_BYTES
from pipeline.train.parallel.layout import Layout
from pipeline.train.parallel.parallelize import ParallelModel
from pipeline.train.parallel.processes import gather, share
from pipeline.train.plan import RunPlan
from pipeline.train.run_folder import RunFolder


class Saver:
    """Writes the checkpoints of a run, and removes old ones."""

    def __init__(
        self,
        config: Config,
        plan: RunPlan,
        folder: RunFolder,
        checkpoints: Checkpoints,
        layout: Layout,
        model: ParallelModel,
        optimizers: Optimizers,
    ) -> None:
        self._config = config
        self._plan = plan
        self._folder = folder
        self._checkpoints = checkpoints
        self._layout = layout
        self._model = model
        self._optimizers = optimizers

    def save(self, step: int, more: dict[str, Any]) -> None:
        """Save after `step` steps; every rank calls this.

        Args:
            step: steps trained.
            more: goes to state.json, besides what belongs to the run.

        Raises:
            MachineError: a disk is full or failed. Nothing half-written stays.
        """
        try:
            tmp = Path(share(lambda: str(self._checkpoints.begin(step, self._folder.attempt))))
            try:
                written = gather(storage.write(tmp, self._model, self._optimizers))
                share(lambda: self._commit(tmp, step, written, more))
            except BaseException:
                # Rank 0 alone: another one may fail while rank 0 commits, from under which it would take the files.
                if dist.get_rank() == 0:
                    shutil.rmtree(tmp, ignore_errors=True)
                raise
        except OSError as error:
            free = shutil.disk_usage(self._folder.path).free
            size = num_parameters(self._model.spec) * (MASTER_BYTES + MOMENTS_BYTES)
            raise MachineError(
                f"step {step} could not be saved in {self._checkpoints.folder}: {error.strerror or error}. "
                f"A checkpoint needs about {size / 2**20:,.1f} MiB, {free / 2**20:,.1f} MiB are free. "
                f"{self.last_good()} is still good; make room and run the same command to go on"
            ) from error

    def prune(self) -> None:
        """Remove what is older than `train.checkpoint.keep` says; every rank calls this."""
        share(lambda: len(self._checkpoints.prune(self._config.train.checkpoint.keep)))

    def last_good(self) -> str:
        """What the run would go on from, for messages."""
        latest = self._checkpoints.latest()
        return latest.path.name if latest else "The start of the run (there is no checkpoint yet)"

    def _commit(self, tmp: Path, step: int, written: list[Files] | None, more: dict[str, Any]) -> None:
        assert written is not None, "only rank 0 commits"
        files = {name: record for by_rank in written for name, record in by_rank.items()}
        self._plan.tokenizer.save(tmp)
        files |= {path.name: record_of(path) for path in tmp.iterdir() if path.name not in files}
        self._checkpoints.commit(tmp, step, files, {**self._state(step), **more}, self._folder.assert_mine)

    def _state(self, step: int) -> dict[str, Any]:
        return {
            "attempt": self._folder.attempt,
            "fingerprints": self._plan.fingerprints,
            "journal": self._plan.journal.to_json(),
            "config": self._config.model_dump(mode="json"),
            "tokens": self._plan.journal.tokens(step),
            "layout": {**self._layout.degrees, "dp": self._layout.dp, "world_size": self._layout.world_size},
            "versions": {
                "pipeline": __version__,
                "torch": torch.__version__,
                "numpy": np.__version__,
                "python": platform.python_version(),
            },
        }
