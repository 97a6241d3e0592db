"""Packs of documents as samples of a run; an `Instances` beside windows.

An epoch has every pack once, so every token of the source is a target exactly once. Position j of epoch e is pack
pi(j), with pi the bijection of [0, packs) that windows have as well. What packs are made of is in `datasets/packing`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from pipeline.data.datasets.dataset import Dataset, Pieces, Slice, TokenSource
from pipeline.data.datasets.packing.packs import Packs
from pipeline.data.order.journal import Journal
from pipeline.data.order.permutation import IntArray
from pipeline.data.order.segments import Interval, Sized, SourceState
from pipeline.data.order.windows import EpochOrder, Instances, Span, Windows


class PackChunks(NamedTuple):
    """Chunks of some packs, pack after pack, in the order that a pack has them; arrays of one length."""

    row: IntArray
    """Number of the pack among those asked for."""
    document: IntArray
    """Number of the document in its dataset."""
    first: IntArray
    """First token, counted in the document: above 0 where the chunk continues a document."""
    tokens: IntArray
    """Tokens of the chunk."""

    def offsets(self, rows: int) -> IntArray:
        """Targets of the pack before each chunk.

        Args:
            rows: packs that were asked for.
        """
        before = np.cumsum(self.tokens) - self.tokens
        firsts = self.row.searchsorted(np.arange(rows))
        offsets: IntArray = before - np.append(before, 0)[firsts][self.row]
        return offsets


class PackInstances:
    """Packs of one source; an `Instances`. The place of a pack is its number.

    Packs are opened when one is asked for: those of steps that are done need not be there any more.

    Args:
        dataset: The source's documents, all of them.
        state: Of the source in a segment, with packs.
        length: L.
        seed: Seed of the run.
        source: Name of the source.
    """

    packed = True

    def __init__(self, dataset: TokenSource, state: SourceState, length: int, seed: int, source: str) -> None:
        assert state.packs is not None, source
        self.count, self.tokens, self.masked = state.packs, state.tokens, state.target_mask
        self.dtype, self.folder = dataset.dtype, dataset.folder
        self.part_view = dataset.part_view
        self._dataset, self._length, self._documents = dataset, length, state.documents
        self._order = EpochOrder(seed, source, self.count)

    @cached_property
    def _packs(self) -> Packs:
        packs = open_packs(self._dataset, self._length, self._documents)
        assert (packs.count, packs.tokens) == (self.count, self.tokens), (self.folder, packs.count, packs.tokens)
        return packs

    def at(self, epoch: int, position: int, ahead: int = 0) -> list[Span]:
        """The chunks of the pack, whose tokens are its targets."""
        _, *chunks = self._packs.chunks(np.array([self._order.number(epoch, position)]))
        return [Span(*chunk) for chunk in zip(*(each.tolist() for each in chunks), strict=True)]

    def containing(self, epoch: int, document: int, *, shifts: bool = True) -> IntArray:
        """Positions of the epoch's packs that have chunks of `document`, in the document's order, each once."""
        packs = self._packs.packs_of(document)
        _, index = np.unique(packs, return_index=True)
        return self._order.positions(epoch, packs[np.sort(index)])

    def places(self, epoch: IntArray, position: IntArray) -> IntArray:
        """Number of each pack."""
        return self._order.numbers(epoch, position)

    def chunks(self, places: IntArray) -> PackChunks:
        """The chunks of packs."""
        return PackChunks(*self._packs.chunks(places))

    def weights(self, chunks: PackChunks) -> npt.NDArray[np.float32]:
        """Loss weights of the documents of chunks."""
        found = np.empty(len(chunks.document), np.float32)
        starts = self._dataset.starts_of(chunks.document) + chunks.first
        pieces = self._dataset.pieces(starts, np.ones_like(starts))
        for row, part, start in zip(pieces.row.tolist(), pieces.part.tolist(), pieces.start.tolist(), strict=True):
            self._dataset.fill_weights(part, start, found[row : row + 1])
        return found

    def trained(self, chunks: PackChunks) -> IntArray:
        """Targets of chunks that are trained on, where chunks are whole documents; known without reading masks."""
        return self._dataset.trained_targets(chunks.document)

    def fill_mask(self, chunks: PackChunks, firsts: IntArray, flat: npt.NDArray[np.uint8]) -> None:
        """Copy which tokens of chunks are trained on as targets, 1 or 0 each.

        Args:
            chunks: From `chunks`.
            firsts: Place in `flat` of the first token of each.
            flat: Where they are written.
        """
        pieces = self.pieces(chunks)
        columns = firsts[pieces.row] + pieces.column
        places = (pieces.part, pieces.start, pieces.length, columns)
        for part, start, length, first in zip(*(each.tolist() for each in places), strict=True):
            self._dataset.fill_mask(part, start, flat[first : first + length])

    def pieces(self, chunks: PackChunks, before: int = 0) -> Pieces:
        """The tokens of chunks, cut where parts of the dataset end; `Pieces.row` is an index into the chunks.

        Args:
            chunks: From `chunks`.
            before: 1 for the single token before each chunk in its document, in place of its own.
        """
        starts = self._dataset.starts_of(chunks.document) + chunks.first
        return self._dataset.pieces(starts - before, np.ones_like(starts) if before else chunks.tokens)

    def end_documents(self, chunks: PackChunks) -> npt.NDArray[np.bool_]:
        """For each chunk whether it ends its document: all that do not fill a pack do."""
        ends = chunks.tokens < self._length
        full = np.flatnonzero(~ends)
        document = chunks.document[full]
        lengths = self._dataset.starts_of(document + 1) - self._dataset.starts_of(document)
        ends[full] = chunks.first[full] + chunks.tokens[full] == lengths
        return ends


def open_packs(dataset: TokenSource, length: int, documents: Interval | None) -> Packs:
    """The packs of a dataset, or of documents [first, end) of it.

    Raises:
        UserError: They were not made, or are damaged; the message names the command.
    """
    if isinstance(dataset, Dataset):
        return Packs.open(dataset, length, documents)
    return Packs.made(dataset if documents is None else Slice(dataset, *documents), length)


def count_packs(dataset: Sized, length: int, documents: Interval | None) -> int:
    """Packs of a dataset, or of documents [first, end) of it; without tokens, those that an assumed one would fill.

    Raises:
        UserError: They were not made, or are damaged.
    """
    if hasattr(dataset, "part_view"):
        return open_packs(cast(TokenSource, dataset), length, documents).count
    first, end = documents or (0, dataset.documents)
    return -(-(dataset.document_start(end) - dataset.document_start(first)) // length)


def instances_of(journal: Journal, datasets: Mapping[str, TokenSource]) -> list[dict[str, Instances]]:
    """The samples of a run, windows or packs, for each segment by source.

    Segments in which a source has the same documents and the same sequence length share them.

    Args:
        journal: The run's plan.
        datasets: The training split of each source of the journal.

    Raises:
        UserError: A source has fewer tokens than a window.
    """
    made: dict[tuple[str, Interval | None, int, bool], Instances] = {}
    result = []
    for segment in journal.segments:
        by_source = {}
        for name, state in segment.sources.items():
            what = name, state.documents, segment.sequence_length, segment.packed
            if what not in made:
                made[what] = open_instances(datasets[name], state, segment.sequence_length, journal.seed, name)
            by_source[name] = made[what]
        result.append(by_source)
    return result


def open_instances(dataset: TokenSource, state: SourceState, length: int, seed: int, source: str) -> Instances:
    """The samples of a source.

    Args:
        dataset: Its training split.
        state: Of the source in a segment.
        length: L.
        seed: Seed of the run.
        source: Name of the source.

    Raises:
        UserError: It has fewer tokens than a window.
    """
    if state.packs is None:
        text = dataset if state.documents is None else Slice(dataset, *state.documents)
        assert text.tokens == state.tokens, (source, text.tokens, state.tokens)
        return Windows(text, length, seed, source)
    return PackInstances(dataset, state, length, seed, source)
