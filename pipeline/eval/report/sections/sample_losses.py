"""Recorded losses of the samples of a run: by source and epoch, and the samples far above the others of their steps.

Memory is bounded whatever the length of the run. Losses by source and epoch are of a sample of pieces at equal
distances where there are more than `_MOST`. The highest are searched among all, two bytes each, up to `_MOST_SEARCHED`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline.common.page.html import Table
from pipeline.common.page.words import NONE
from pipeline.common.run_files import RunFiles
from pipeline.data.order.journal import Journal
from pipeline.data.order.journal_file import read_journal
from pipeline.data.order.sampler import Sampler
from pipeline.data.provenance.loss_file import LossFile, losses, recorded
from pipeline.data.provenance.loss_stream import LossBlock, located_documents, loss_blocks, recorded_steps
from pipeline.data.provenance.run import Range, RunView, open_view

_MOST = 5_000_000
"""Samples that are read with their sources, which takes some seconds."""
_MOST_SEARCHED = 200_000_000
"""Samples among which the highest are searched: the newest ones."""
_PIECES = 250
_MOST_QUANTILES = 128
"""Groups of a source and an epoch whose quantiles are known; a group takes 250 kB."""
_CODES = 0x7C00
"""Finite fp16 numbers from 0 on."""
_QUANTILES = (0.05, 0.5, 0.95)
_MOST_ROWS = 100
"""Rows of the table of a run."""
_HIGHEST = 12
_NEIGHBOURS = 16
"""Samples of neighbouring steps, at least, whose mean a sample is compared with."""
_SEARCHED_AT_ONCE = 2**20


@dataclass(frozen=True)
class EpochLoss:
    """The samples of an epoch of a source."""

    source: str
    epoch: int
    samples: int
    """That have a loss and were read."""
    loss: float
    """Mean over them."""
    quantiles: tuple[float, ...]
    """By `_QUANTILES`; empty where they were not counted."""


@dataclass(frozen=True)
class HighLoss:
    """A sample whose loss is far above those of its neighbours."""

    step: int
    """From 1."""
    sample: int
    source: str
    epoch: int
    loss: float
    mean: float
    """Of the neighbours, it included."""
    documents: int | None
    """Documents that it has pieces of; None where the datasets cannot be opened."""
    place: str
    """Place of the document with most targets in it."""


@dataclass(frozen=True)
class LossSummary:
    """Recorded losses of a run."""

    recorded: int = 0
    """Samples that the file has places for."""
    read: int = 0
    """Those of them that `epochs` are of."""
    epochs: list[EpochLoss] = field(default_factory=list)
    highest: list[HighLoss] = field(default_factory=list)
    searched: int = 0
    """Samples among which the highest are."""
    unplaced: str = ""
    """Why no document is named."""


def sample_losses(folder: Path) -> LossSummary:
    """The recorded losses of a run; empty where nothing is recorded.

    Raises:
        UserError: the file or the journal is damaged.
    """
    path = RunFiles(folder).losses
    if not path.exists() or not RunFiles(folder).journal.exists():
        return LossSummary()
    journal = read_journal(folder)
    sampler = Sampler(journal)
    with LossFile(path) as file:
        steps = recorded_steps(sampler, file)
        if steps[0] >= steps[1]:
            return LossSummary()
        pieces = list(_pieces(journal, steps))
        epochs = _epochs(sampler, file, pieces)
        found, searched = _search(journal, file, steps)
        highest, unplaced = _placed(folder, sampler, file, found)
    first, end = (journal.samples(step).start for step in steps)
    read = sum(journal.samples(end).start - journal.samples(begin).start for begin, end in pieces)
    return LossSummary(end - first, read, epochs, highest, searched, unplaced)


def _pieces(journal: Journal, steps: Range) -> Iterator[Range]:
    """Steps that are read: all of them, or pieces at equal distances."""
    first, end = (journal.samples(step).start for step in steps)
    if end - first <= _MOST:
        yield steps
        return
    length, done = _MOST // _PIECES, steps[0]
    for piece in range(_PIECES):
        begin = first + piece * (end - first) // _PIECES
        step = max(done, journal.step_of(begin))
        done = max(step + 1, min(steps[1], journal.step_of(begin + length)))
        if step < steps[1]:
            yield step, done


def _epochs(sampler: Sampler, file: LossFile, pieces: Sequence[Range]) -> list[EpochLoss]:
    sums = dict[tuple[int, int], list[float]]()
    counts = dict[tuple[int, int], npt.NDArray[np.int64]]()
    for piece in pieces:
        for block in loss_blocks(sampler, file, piece):
            known = block.only(block.known)
            groups, place = np.unique(known.source * 2**32 + known.epoch, return_inverse=True)
            codes = known.loss.astype("<f2").view("<u2")
            for number, group in enumerate(groups.tolist()):
                key, mine = divmod(group, 2**32), place == number
                of_group = sums.setdefault(key, [0, 0.0])
                of_group[0] += int(mine.sum())
                of_group[1] += float(known.loss[mine].sum(dtype=np.float64))
                if key in counts or len(counts) < _MOST_QUANTILES:
                    counts.setdefault(key, np.zeros(_CODES, np.int64))
                    counts[key] += np.bincount(codes[mine], minlength=_CODES)
    names = sampler.journal.names
    return [
        EpochLoss(
            names[source],
            epoch,
            int(count),
            loss / count,
            _quantiles(counts[source, epoch]) if (source, epoch) in counts else (),
        )
        for (source, epoch), (count, loss) in sorted(sums.items())
    ]


def _quantiles(counts: npt.NDArray[np.int64]) -> tuple[float, ...]:
    """The smallest losses that at least these fractions of samples do not exceed."""
    until = np.cumsum(counts)
    codes = np.searchsorted(until, [np.ceil(fraction * until[-1]) for fraction in _QUANTILES])
    return tuple(codes.astype("<u2").view("<f2").astype(float).tolist())


def _search(journal: Journal, file: LossFile, steps: Range) -> tuple[list[tuple[int, float, float]], int]:
    """Samples that are furthest above the mean of their neighbours, each with its loss and that mean; those searched.

    Only the losses are read: which source a sample is of does not matter here.
    """
    end = journal.samples(steps[1]).start
    step = steps[0]
    if end - journal.samples(step).start > _MOST_SEARCHED:
        step = journal.step_of(end - _MOST_SEARCHED)
    searched = end - journal.samples(step).start
    best: list[tuple[float, int, float, float]] = []
    while step < steps[1]:
        number = journal.segment_number(step)
        size = journal.segments[number].batch_size
        together = -(-_NEIGHBOURS // size)  # steps that are compared
        last = step + together * max(1, _SEARCHED_AT_ONCE // (together * size))
        last = min([last, steps[1], *(each.first_step for each in journal.segments[number + 1 : number + 2])])
        first = journal.samples(step).start
        codes = file.read(first, journal.samples(last).start)
        values = losses(codes).astype(np.float64)
        known = recorded(codes) & np.isfinite(values)
        group = np.arange(len(codes)) // (together * size)
        counts = np.bincount(group, known)
        with np.errstate(invalid="ignore"):
            means = np.bincount(group, np.where(known, values, 0.0)) / counts
        above = np.where(known, values - means[group], -np.inf)
        most = min(_HIGHEST, int(known.sum()))
        for place in np.argsort(-above, kind="stable")[:most].tolist():
            best.append((-float(above[place]), first + place, float(values[place]), float(means[group[place]])))
        best = sorted(best)[:_HIGHEST]
        step = last
    return [(sample, loss, mean) for above, sample, loss, mean in best if above < 0], searched


def _placed(
    folder: Path, sampler: Sampler, file: LossFile, found: Sequence[tuple[int, float, float]]
) -> tuple[list[HighLoss], str]:
    """The samples with their sources and documents; and why no document is named."""
    journal, unplaced = sampler.journal, ""
    run: RunView | None = None
    if found:
        try:
            view = open_view(folder)
            run = view.trained or view
        except (OSError, ValueError, KeyError) as error:
            unplaced = str(error) or type(error).__name__
    rows = []
    for sample, loss, mean in found:
        step = journal.step_of(sample)
        (block,) = loss_blocks(sampler, file, (step, step + 1))
        mine = block.only(block.sample == sample)
        (source,), (epoch,) = mine.source.tolist(), mine.epoch.tolist()
        documents, place = None, NONE
        if run is not None:
            try:
                documents, place = _document(run, mine, source)
            except (OSError, ValueError, KeyError) as error:
                run, unplaced = None, str(error) or type(error).__name__
        rows.append(HighLoss(step + 1, sample, journal.names[source], epoch, loss, mean, documents, place))
    return rows, unplaced


def _document(run: RunView, block: LossBlock, source: int) -> tuple[int, str]:
    """Documents of a sample, and the place of the one with most targets in it."""
    found = located_documents(run, block, source)
    if not len(found.document):
        return 0, NONE
    largest = int(found.document[int(np.argmax(found.targets))])
    name = run.journal.names[source]
    described = run.describe(name, [largest], False, lambda line: None)[largest]
    return len(np.unique(found.document)), f"document {largest:,}: {described}"


def epoch_table(recorded: Sequence[tuple[str, LossSummary]]) -> tuple[Table, str]:
    """A table of the losses of runs by source and epoch, by the names of the runs, and a note."""
    several = len(recorded) > 1
    head = ("source", "epoch", "samples", "mean loss", "5 %", "median", "95 %")
    rows = tuple(
        (name, *cells) if several else cells
        for name, found in recorded
        for cells in map(_epoch_cells, _some(found.epochs))
    )
    note = "Mean and quantiles over samples; `pipeline data losses` weights them by their targets."
    for name, found in recorded:
        if len(found.epochs) > _MOST_ROWS:
            of = f" of {name}" if several else ""
            note += f" Shown{of}: {_MOST_ROWS} of {len(found.epochs):,} epochs, at equal distances."
        if found.read < found.recorded:
            of = f" of {name}" if several else ""
            note += f" Read{of}: {found.read:,} of {found.recorded:,} samples, in pieces at equal distances."
    return Table(("run", *head) if several else head, rows, 2 if several else 1), note


def _some(epochs: Sequence[EpochLoss]) -> Sequence[EpochLoss]:
    if len(epochs) <= _MOST_ROWS:
        return epochs
    return [epochs[place] for place in np.linspace(0, len(epochs) - 1, _MOST_ROWS).round().astype(int).tolist()]


def _epoch_cells(row: EpochLoss) -> tuple[str, ...]:
    quantiles = row.quantiles or (None,) * len(_QUANTILES)
    shown = (NONE if value is None else f"{value:.4f}" for value in quantiles)
    return row.source, f"{row.epoch:,}", f"{row.samples:,}", f"{row.loss:.4f}", *shown


def highest_table(recorded: Sequence[tuple[str, LossSummary]]) -> tuple[Table, str]:
    """A table of the samples furthest above their neighbours, by the names of the runs, and a note."""
    several = len(recorded) > 1
    head = ("source", "step", "sample", "epoch", "loss", "mean around it", "documents", "most of it from")
    rows = []
    note = f"Furthest above the mean of the samples of their steps (at least {_NEIGHBOURS} samples)."
    for name, found in recorded:
        for row in found.highest:
            documents = NONE if row.documents is None else f"{row.documents:,}"
            numbers = (f"{row.step:,}", f"{row.sample:,}", f"{row.epoch:,}", f"{row.loss:.4f}", f"{row.mean:.4f}")
            cells = (row.source, *numbers, documents, row.place)
            rows.append((name, *cells) if several else cells)
        of = f" of {name}" if several else ""
        if found.searched < found.recorded:
            note += f" Searched{of}: the newest {found.searched:,} of {found.recorded:,} samples."
        if found.unplaced:
            note += f" Documents{of} are not named: {found.unplaced}."
    note += " `pipeline data where RUN --step N` shows all documents of a step."
    return Table(("run", *head) if several else head, tuple(rows), 2 if several else 1, last_words=True), note
