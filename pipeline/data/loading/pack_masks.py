"""Targets of packs that are trained on: those that the masks of their datasets name.

A pack of a masked dataset has whole documents, so that how many of its targets are trained on is known from the count
of each document. Every rank knows the sums of a step without asking the others, and reads masks of its own packs alone.

The input before the first token of a document, the end-of-document token, is a document of its own: a conversation is
predicted from its own tokens alone, as a template has rendered them.

Shapes: R packs of a step, L slots of a pack, C chunks of the step, N depths of multi-token prediction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from pipeline.data.datasets.dataset import TokenSource
from pipeline.data.loading.objectives.base import BoolArray
from pipeline.data.order.journal import Journal
from pipeline.data.order.locate_packs import LocatedPacks
from pipeline.data.order.packs import PackChunks, PackInstances
from pipeline.data.order.permutation import IntArray
from pipeline.data.order.windows import Instances

MaskArray = npt.NDArray[np.uint8]
"""A byte for each target, see `target_mask`."""


def mask_of(dataset: TokenSource, start: int, count: int) -> MaskArray:
    """The mask of some tokens of a dataset that has one.

    Args:
        dataset: Which.
        start: First token.
        count: How many.
    """
    mask = np.empty(count, np.uint8)
    pieces = dataset.pieces(np.array([start]), np.array([count]))
    places = (pieces.part, pieces.start, pieces.column, pieces.length)
    for part, first, column, length in zip(*(each.tolist() for each in places), strict=True):
        dataset.fill_mask(part, first, mask[column : column + length])
    return mask


class PackMasks:
    """Masks of the steps of a run.

    Args:
        journal: The run's plan.
        instances: For each segment by source.
    """

    def __init__(self, journal: Journal, instances: Sequence[Mapping[str, Instances]]) -> None:
        self._names, self._instances = journal.names, instances
        # By segment and index in the journal's names.
        self._masked = [
            np.array([name in s.sources and s.sources[name].target_mask for name in journal.names])
            for s in journal.segments
        ]

    def has(self, number: int) -> bool:
        """True if a source of a segment has masks."""
        return bool(self._masked[number].any())

    def chunks(self, number: int, located: LocatedPacks) -> BoolArray:
        """Chunks of a step whose sources have masks, [C]."""
        found: BoolArray = self._masked[number][located.sources[located.chunks.row]]
        return found

    def trained(self, number: int, located: LocatedPacks) -> IntArray:
        """Targets of each chunk that are trained on, [C]; all of those without a mask."""
        counts = located.chunks.tokens.copy()
        for instances, mine, chunks in self._by_source(number, located, np.arange(len(counts))):
            assert not chunks.first.any(), "packs of masked datasets have whole documents"
            counts[mine] = instances.trained(chunks)
        return counts

    def trained_ahead(self, number: int, located: LocatedPacks, ahead: int) -> IntArray:
        """Targets of each chunk that are trained on, by depth, [N, C]: that of depth d is d places behind the next.

        Of a masked document they are those from token d + 1 on, since its first token is the first input of it.
        """
        counts: IntArray = np.maximum(located.chunks.tokens - np.arange(1, ahead + 1)[:, None], 0)
        for instances, mine, chunks in self._by_source(number, located, np.arange(counts.shape[1])) if ahead else ():
            heads = np.zeros((len(mine), 1 + ahead), np.uint8)
            first = chunks._replace(tokens=np.minimum(chunks.tokens, 1 + ahead))
            instances.fill_mask(first, np.arange(len(mine)) * (1 + ahead), heads.reshape(-1))
            counts[:, mine] = instances.trained(chunks) - np.cumsum(heads, axis=1, dtype=np.int64).T[1:]
        return counts

    def begins(self, number: int, located: LocatedPacks, which: IntArray) -> IntArray:
        """Places in `which` of the chunks whose documents begin behind their first input."""
        masked = self.chunks(number, located)[which] & (located.chunks.tokens[which] > 1)
        return np.flatnonzero(masked)

    def rows(self, number: int, located: LocatedPacks, rows: IntArray, length: int) -> MaskArray:
        """Masks of some packs, [rows, L]; 1 where there is none, and for padding."""
        which, place = located.chunks_of(rows)
        flat = np.ones(len(rows) * length, np.uint8)
        firsts = place * length + located.offsets[which]
        for instances, mine, chunks in self._by_source(number, located, which):
            instances.fill_mask(chunks, firsts[mine], flat)
        return flat.reshape(len(rows), length)

    def _by_source(
        self, number: int, located: LocatedPacks, which: IntArray
    ) -> Iterator[tuple[PackInstances, IntArray, PackChunks]]:
        """Sources with masks: their packs, places in `which` of their chunks, and these."""
        sources = located.sources[located.chunks.row[which]]
        for source in np.flatnonzero(self._masked[number]).tolist():
            mine = np.flatnonzero(sources == source)
            if mine.size:
                instances = self._instances[number][self._names[source]]
                assert isinstance(instances, PackInstances)
                yield instances, mine, PackChunks(*(each[which[mine]] for each in located.chunks))
