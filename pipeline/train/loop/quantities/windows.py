"""Loss of every sample of a run: summed on the devices, sent to rank 0 with the numbers of the step, kept on disk."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.common import links
from pipeline.common.errors import SupersededError
from pipeline.common.run_files import RunFiles
from pipeline.common.storage import naming, put
from pipeline.config import Config
from pipeline.data.loading.batch import Batch, StepData
from pipeline.data.order.journal import Journal
from pipeline.data.provenance.loss_file import LossHead, cut_losses, encode, masked, read_head
from pipeline.train.loop.quantities.quantity import Quantity, QuantityNumbers, Update
from pipeline.train.model.loss import TokenLosses
from pipeline.train.monitor.loggers.base import Logger
from pipeline.train.monitor.loggers.retrying import RetryingLogger
from pipeline.train.run.folder import RunFolder


class WindowSums:
    """Sums over the targets of each sample of a step, on this rank's device.

    Args:
        samples: global numbers of the step's samples.
        device: of this rank.
    """

    def __init__(self, samples: range, device: torch.device) -> None:
        self._first = samples.start
        self._sums = torch.zeros(2, len(samples), dtype=torch.float64, device=device)

    def add(self, loss_BS: Tensor, batch: Batch) -> None:
        """Add what this rank has of a micro-batch: all of its samples, or with cp a share of each.

        Args:
            loss_BS: cross entropy of every token.
            batch: the same positions; one of weight 0 does not count, and others count as one target.
        """
        assert batch.samples is not None
        place = (batch.samples - self._first).clamp(min=0)  # padding adds nothing to the sample it is booked under
        counts_BS = batch.weight != 0
        nats_B = loss_BS.masked_fill(~counts_BS, 0).sum(dim=1, dtype=torch.float64)
        self._sums[0].index_add_(0, place, nats_B)
        self._sums[1].index_add_(0, place, counts_BS.sum(dim=1, dtype=torch.float64))

    def reduce(self) -> Tensor | None:
        """[2, samples] fp64 on rank 0, nats and targets over all ranks; None elsewhere. Every rank calls this.

        Apart from the sum of the step's other numbers, so that not a bit of those depends on it.
        """
        if dist.get_world_size() > 1:
            dist.reduce(self._sums, 0)
        return self._sums if dist.get_rank() == 0 else None


class LossWriter(Logger):
    """Writes the file of losses.

    A step is one write at its place, so that a kill loses no more than the step that is being written.

    Args:
        path: of the file.
        attempt: number of this attempt at the run.
    """

    def __init__(self, path: Path, attempt: int) -> None:
        self._path, self.attempt = path, attempt
        self._file: BinaryIO | None = None
        self._head: LossHead | None = None

    def write(self, row: dict[str, Any]) -> None:
        """Record a step: `step` is its number from 1, `first` that of its first sample, `codes` its losses.

        Raises:
            OSError: it cannot be written now.
            SupersededError: a later attempt writes the file, which has taken over the run.
        """
        first: int = row["first"]
        with naming(self._path):
            if self._file is None:
                self._file, self._head = self._open(row["step"] - 1, first)
            assert self._head is not None
            now = LossHead.read(self._file.fileno(), self._path)
            if now is not None and now.attempt > self.attempt:
                raise SupersededError(
                    f"{self._path} is written by attempt {now.attempt}, which has taken over the run; this is attempt "
                    f"{self.attempt}, and it ends here"
                )
            data, place = row["codes"].tobytes(), self._head.place(first)
            while data:
                count = os.pwrite(self._file.fileno(), data, place)
                data, place = data[count:], place + count

    def _open(self, steps: int, first: int) -> tuple[BinaryIO, LossHead]:
        """The file for samples from `first` on, before which there are `steps` steps."""
        head = read_head(self._path)
        if head is None or first < head.first_sample:
            head = LossHead(first, steps, self.attempt)
            put(self._path, head.packed())
        file = os.fdopen(links.open_to_write(self._path, os.O_RDWR), "r+b", buffering=0)
        head = replace(head, attempt=self.attempt)
        os.pwrite(file.fileno(), head.packed(), 0)
        return file, head

    def rewind(self, step: int) -> None:
        """Begin another attempt: what follows `step` comes again. What the file has of it is cut by `cut_losses`."""
        self.close()

    def sync(self) -> None:
        """Flush to disk what is written."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; writing opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


class WindowLosses(Quantity):
    """Losses of a run's samples, which rank 0 records if `train.metrics.windows` is on.

    Args:
        config: of the run.
        folder: of the run.
        device: of this rank.
    """

    def __init__(self, config: Config, folder: RunFolder, device: torch.device) -> None:
        self._wanted, self._device = config.train.metrics.windows, device
        self._sums: WindowSums | None = None
        self._step, self._samples = 0, range(0)
        self._folder, self._path = folder, RunFiles(folder.path).losses
        self._rank_0 = dist.get_rank() == 0
        self._writer = LossWriter(self._path, folder.attempt)
        self._logger = RetryingLogger(RunFiles.losses, self._writer)

    def resume(self, journal: Journal, step: int) -> None:
        """Forget the samples of the steps after this one, from which the run trains on; also where nothing is recorded.

        Args:
            journal: the plan of the run.
            step: steps that are done.
        """
        if not self._rank_0:
            return
        self._logger.rewind(step)
        self._writer.attempt = self._folder.attempt
        cut_losses(self._path, journal.samples(step).start)

    def begin(self, data: StepData) -> None:
        """Begin with no target."""
        if self._wanted:
            self._step, self._samples = data.step + 1, data.samples
            self._sums = WindowSums(data.samples, self._device)

    def book(self, losses: TokenLosses, batch: Batch) -> None:
        """Add the samples of a micro-batch."""
        if self._sums is not None:
            self._sums.add(losses.loss_BS, batch)

    def finish(self, sums: Sequence[Tensor], update: Update) -> QuantityNumbers | None:
        """Send the sums to rank 0, which records them once they are on its host."""
        found = None if self._sums is None else self._sums.reduce()
        return (
            None
            if found is None
            else QuantityNumbers({"sums": found}, partial(self._record, self._step, self._samples))
        )

    def skipped(self, data: StepData) -> None:
        """Record that no sample of a step was trained on."""
        self._record(data.step + 1, data.samples, None)

    def _record(self, step: int, samples: range, sums: Tensor | None) -> dict[str, Any]:
        if self._wanted and self._rank_0:
            codes = masked(len(samples)) if sums is None else encode(*sums.numpy())
            self._logger.write({"step": step, "first": samples.start, "codes": codes})
        return {}

    def sync(self) -> None:
        """Flush to disk what is recorded, before a checkpoint of these steps is committed."""
        try:
            self._writer.sync()
        except OSError as error:
            logging.getLogger(__name__).warning("warning: %s: %s", self._path, error.strerror or error)

    def __enter__(self) -> WindowLosses:
        return self

    def __exit__(self, *error: object) -> None:
        self._logger.close()
