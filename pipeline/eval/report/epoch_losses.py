"""Losses of the samples of a run by source and epoch, where they are recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.common.page.html import Table
from pipeline.common.run_files import RunFiles
from pipeline.data.order.journal_file import read_journal
from pipeline.data.order.sampler import Sampler
from pipeline.data.provenance.loss_file import LossFile
from pipeline.data.provenance.loss_stream import loss_blocks, recorded_steps

_MOST = 5_000_000
"""Samples that are read, which takes some seconds: the newest ones."""


@dataclass(frozen=True)
class EpochLoss:
    """The samples of an epoch of a source."""

    source: str
    epoch: int
    samples: int
    """That have a loss."""
    loss: float
    """Mean over them."""
    newest: bool
    """Only the newest samples of the run were read."""


def epoch_losses(folder: Path) -> list[EpochLoss]:
    """Losses by source and epoch; empty where nothing is recorded.

    Raises:
        UserError: the file or the journal is damaged.
    """
    path = RunFiles(folder).losses
    if not path.exists() or not RunFiles(folder).journal.exists():
        return []
    journal = read_journal(folder)
    sampler, sums = Sampler(journal), dict[tuple[int, int], list[float]]()
    with LossFile(path) as file:
        first, end = recorded_steps(sampler, file)
        start = max(first, journal.step_of(max(0, file.end - _MOST)))
        for block in loss_blocks(sampler, file, (start, end)):
            known = block.only(block.known)
            groups, place = np.unique(known.source * 2**32 + known.epoch, return_inverse=True)
            for group, count, loss in zip(
                groups.tolist(), np.bincount(place).tolist(), np.bincount(place, known.loss).tolist(), strict=True
            ):
                mine = sums.setdefault(divmod(group, 2**32), [0, 0.0])
                mine[0] += count
                mine[1] += loss
    return [
        EpochLoss(journal.names[source], epoch, int(count), loss / count, start > first)
        for (source, epoch), (count, loss) in sorted(sums.items())
    ]


def epoch_table(losses: Sequence[tuple[str, Sequence[EpochLoss]]]) -> tuple[Table, str]:
    """A table of the losses of runs, by their names, and a note."""
    several = len(losses) > 1
    head = ("source", "epoch", "samples", "mean loss")
    rows = tuple(row if several else row[1:] for name, found in losses for row in _rows(name, found))
    note = "Mean over samples; `pipeline data losses` weights them by their targets and names documents."
    if any(row.newest for _, found in losses for row in found):
        note = f"The newest {_MOST:,} samples. {note}"
    return Table(("run", *head) if several else head, rows, 2 if several else 1), note


def _rows(name: str, losses: Sequence[EpochLoss]) -> Iterator[tuple[str, ...]]:
    for row in losses:
        yield name, row.source, f"{row.epoch:,}", f"{row.samples:,}", f"{row.loss:.4f}"
