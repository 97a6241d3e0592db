"""The recorded losses of a run's samples beside what the samples are, some thousand at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.common.errors import UserError
from pipeline.common.format import numbered
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.loading.pack_reader import PackReader
from pipeline.data.loading.skip_masks import Masks
from pipeline.data.order.locate import Lookup, RankSamples
from pipeline.data.order.packs import PackInstances
from pipeline.data.order.permutation import IntArray
from pipeline.data.order.sampler import Sampler
from pipeline.data.order.windows import Instances, Windows
from pipeline.data.provenance.loss_file import LossFile, losses, recorded
from pipeline.data.provenance.run import Range, RunView

_SAMPLES = 2**16
"""Samples of a block at most, or one step."""


class LossBlock(NamedTuple):
    """Samples of neighbouring steps of one segment; arrays of one length, in the order of the run."""

    segment: int
    """Number of the segment."""
    step: IntArray
    """From 1."""
    sample: IntArray
    source: IntArray
    """Index in `Journal.names`."""
    epoch: IntArray
    position: IntArray
    recorded: npt.NDArray[np.bool_]
    """False where the file has nothing of a sample."""
    loss: npt.NDArray[np.float32]
    """NaN where no target counted, inf where the loss was not finite; 0 where nothing is recorded."""

    @property
    def known(self) -> npt.NDArray[np.bool_]:
        """True where there is a finite loss."""
        return self.recorded & np.isfinite(self.loss)

    def only(self, chosen: npt.NDArray[np.bool_]) -> LossBlock:
        """Some of the samples."""
        arrays: list[Any] = [array[chosen] for array in self[1:]]
        return LossBlock(self.segment, *arrays)


def loss_blocks(sampler: Sampler, file: LossFile, steps: Range) -> Iterator[LossBlock]:
    """The samples of steps with what is recorded of them, block by block.

    Args:
        sampler: the order of the run.
        file: of its losses.
        steps: [first, end), from 0.
    """
    journal, (step, last) = sampler.journal, steps
    while step < last:
        number = journal.segment_number(step)
        segment = journal.segments[number]
        ends = [each.first_step for each in journal.segments[number + 1 : number + 2]]
        end = min(last, step + max(1, _SAMPLES // segment.batch_size), *ends)
        draws = sampler.steps(step, end)
        first = journal.samples(step).start
        codes = file.read(first, first + len(draws.source))
        number_of = np.repeat(np.arange(step + 1, end + 1), segment.batch_size)[: len(draws.source)]
        samples = np.arange(first, first + len(codes))
        yield LossBlock(number, number_of, samples, *draws, recorded(codes), losses(codes))
        step = end


def recorded_steps(sampler: Sampler, file: LossFile) -> Range:
    """Steps [first, end) that a file has places for, from 0."""
    first, end = file.head.first_step, file.end
    return first, max(first, sampler.journal.step_of(end - 1) + 1 if end else 0)


@dataclass
class LossView:
    """A run and its file of losses.

    Attributes:
        run: as it was trained.
        file: of its losses.
        steps: [first, end) that are asked for, from 0.
        source: only samples of this one.
    """

    run: RunView
    file: LossFile
    steps: Range
    source: str | None = None

    def blocks(self) -> Iterator[LossBlock]:
        """The samples of the steps, block by block."""
        only = None if self.source is None else self.index(self.source)
        for block in loss_blocks(self.run.sampler, self.file, self.steps):
            yield block if only is None else block.only(block.source == only)

    def index(self, source: str) -> int:
        """Place of a source in `Journal.names`."""
        return self.run.journal.names.index(source)


class TargetCounts:
    """Targets that counted in the samples of a run.

    Args:
        run: the run.
    """

    def __init__(self, run: RunView) -> None:
        journal = self._journal = run.journal
        sizes = [RankSamples(segment.batch_size, segment.batch_size, 0, 1) for segment in journal.segments]
        self._lookup = Lookup(journal, run.sampler, run.instances, sizes, everything=True)
        self._masks = Masks(journal, run.instances, run.objectives)
        self._packs = PackReader(
            journal,
            run.sampler,
            run.instances,
            run.objectives,
            shapes=(),
            rank_samples=sizes,
            end_of_document=next(iter(run.datasets.values())).manifest.tokenizer.end_of_document,
            vocab_size=None,
            balanced=False,
            ahead=0,
        )
        # By segment and source; -1 where they differ between windows, or the segment does not have the source.
        self._fixed = np.full((len(journal.segments), len(journal.names)), -1)
        for number, (segment, objectives) in enumerate(zip(journal.segments, run.objectives, strict=True)):
            for place, name in enumerate(journal.names):
                if name in objectives and not segment.packed:
                    fixed = objectives[name].fixed_valid(segment.sequence_length)
                    self._fixed[number, place] = -1 if fixed is None else fixed
        self._any_masks = any(skip.steps is None for skip in journal.skips)

    def of(self, block: LossBlock) -> IntArray:
        """Targets that counted in each sample; 0 where there is no loss."""
        counts = self._fixed[block.segment, block.source]
        if self._any_masks or (counts < 0).any():
            for step in np.unique(block.step[block.known]).tolist():
                mine = block.step == step
                if (counts[mine] < 0).any() or self._journal.masks(step - 1):
                    counts[mine] = self._of_step(step - 1)[block.sample[mine] - self._journal.samples(step - 1).start]
        return np.where(block.known, counts, 0)

    def _of_step(self, step: int) -> IntArray:
        if self._journal.segments[self._journal.segment_number(step)].packed:
            return self._packs.counts(step)
        located = self._lookup.step(step, None)
        assert located is not None, "a step that is skipped has no loss"
        return self._masks.valid_by_row(step, located, self._masks.masked(step, located, 0))


class DocumentTargets(NamedTuple):
    """Pieces of documents in instances of one source; arrays of one length."""

    row: IntArray
    """Number of the instance."""
    document: IntArray
    targets: IntArray
    """Tokens of the document that are targets in it."""


def document_targets(instances: Instances, dataset: Dataset, places: IntArray, shifts: bool) -> DocumentTargets:
    """The documents in instances, each piece with its targets.

    Args:
        instances: of the source.
        dataset: its documents.
        places: of the instances, from `Instances.places`.
        shifts: see `Objective.shifts`.
    """
    if isinstance(instances, PackInstances):
        chunks = instances.chunks(places)
        targets = instances.trained(chunks) if instances.masked else chunks.tokens
        return DocumentTargets(chunks.row, chunks.document, targets)
    assert isinstance(instances, Windows)
    pieces = instances.pieces(places)
    number, token = dataset.starts_in(pieces)
    inner = token > pieces.start[number]
    order = np.lexsort((token[inner], number[inner]))
    number, token = number[inner][order], token[inner][order]
    # A piece is cut where documents begin in it: one cut more than there are such places.
    cuts = 1 + np.bincount(number, minlength=len(pieces.row))
    firsts = np.cumsum(cuts) - cuts
    begin = np.empty(int(cuts.sum()), np.int64)
    is_first = np.zeros(len(begin), np.bool_)
    is_first[firsts] = True
    begin[firsts], begin[~is_first] = pieces.start, token
    end = np.append(begin[1:], 0)
    end[firsts + cuts - 1] = pieces.start + pieces.length
    piece = np.repeat(np.arange(len(cuts)), cuts)
    document = dataset.documents_at(pieces)[piece] + np.arange(len(begin)) - firsts[piece]
    column = pieces.column[piece] + begin - pieces.start[piece]
    sizes = np.bincount(pieces.row, pieces.length, len(places)).astype(np.int64)
    row = pieces.row[piece]
    # The first token of an instance is an input only, or its last no part of it.
    edge = column == 0 if shifts else column + end - begin == sizes[row]
    return DocumentTargets(row, document, end - begin - (edge & (end > begin)))


def located_documents(run: RunView, block: LossBlock, source: int) -> DocumentTargets:
    """Documents of the samples of a block that are of one source, without those that are skipped.

    Args:
        run: the run.
        block: with samples of this source alone.
        source: its place in `Journal.names`.
    """
    name = run.journal.names[source]
    instances, objective = run.instances[block.segment][name], run.objectives[block.segment][name]
    places = instances.places(block.epoch, block.position)
    found = document_targets(instances, run.datasets[name], places, objective.shifts)
    targets = found.targets
    for skip in run.journal.skips:
        if skip.source == name and skip.documents:
            step = block.step[found.row] - 1
            holds = (skip.first_step <= step) & (True if skip.end_step is None else step < skip.end_step)
            for first, end in skip.documents:
                targets = np.where(holds & (first <= found.document) & (found.document < end), 0, targets)
    return found._replace(targets=targets)


def chosen_steps(run: RunView, file: LossFile, text: str | None) -> Range:
    """Steps [first, end) from 0 that `--steps` names: `A:B`, `A:`, `:B` or `A`, from 1 with both ends.

    Raises:
        UserError: they are not steps that the file has losses of.
    """
    first, end = recorded_steps(run.sampler, file)
    if text is None:
        return first, end
    parts = text.replace(",", "").split(":")
    if len(parts) > 2 or not all(part == "" or part.isdecimal() for part in parts) or text in ("", ":"):
        raise UserError(f"--steps: {text!r}: give a step, or the first and the last one with a colon, like 2000:2100")
    low = int(parts[0]) - 1 if parts[0] else first
    high = int(parts[-1]) if parts[-1] else end
    if not first <= low < high <= end:
        have = numbered("step", first + 1, end) if first < end else "no step"
        raise UserError(f"--steps: {text}: give the first and the last step; {file.path} has the losses of {have}")
    return low, high


def sources_of(block: LossBlock, names: Sequence[str]) -> Iterator[tuple[int, LossBlock]]:
    """The samples of a block with a finite loss, by source."""
    block = block.only(block.known)
    for source in range(len(names)):
        chosen = block.source == source
        if chosen.any():
            yield source, block.only(chosen)
