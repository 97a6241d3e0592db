"""Losses of documents, estimated from those of the samples that they are in.

What is recorded is the mean over a whole sample, which mostly holds pieces of several documents. The loss of a document
is estimated as the mean of the losses of the samples that hold it, each weighted by the document's targets in it. So
documents of one sample have one estimate if they are in no other, and a short one has that of its neighbours.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.data.order.permutation import IntArray
from pipeline.data.provenance.loss_stream import LossView, located_documents, sources_of

_IN_MEMORY = 2**28
"""Bytes of sums that are kept in memory; larger ones are in a temporary file."""
_BLOCK = 2**20
"""Documents that are looked at at a time."""

FloatArray = npt.NDArray[np.float64]


class DocumentSums:
    """Sums over the targets of each document of a source: 16 bytes per document of the dataset.

    Args:
        documents: of the dataset.
    """

    def __init__(self, documents: int) -> None:
        shape = (documents, 2)
        if 16 * documents <= _IN_MEMORY:
            self._sums: FloatArray = np.zeros(shape)
        else:  # a sparse file: what is not touched takes no room
            with tempfile.TemporaryFile(prefix="losses-") as file:
                self._sums = np.memmap(file, np.float64, "w+", shape=shape)

    def add(self, documents: IntArray, targets: IntArray, losses: FloatArray) -> None:
        """Add pieces of documents: their targets, and the losses of their samples."""
        numbers, place = np.unique(documents, return_inverse=True)
        self._sums[numbers, 0] += np.bincount(place, targets * losses)
        self._sums[numbers, 1] += np.bincount(place, targets)

    def blocks(self) -> Iterator[tuple[int, FloatArray, FloatArray]]:
        """First document, summed losses and targets of neighbouring documents, block by block."""
        for first in range(0, len(self._sums), _BLOCK):
            block = self._sums[first : first + _BLOCK]
            yield first, block[:, 0], block[:, 1]


class Found:
    """Losses of the documents that are in samples with a loss, by source, and of those in two epochs what they gained.

    Args:
        view: the samples that are asked for.
        epochs: two of them whose losses are compared, in place of all together.
    """

    def __init__(self, view: LossView, epochs: tuple[int, int] | None = None) -> None:
        run = view.run
        self._sums: dict[str, list[DocumentSums]] = {}
        for block in view.blocks():
            for source, mine in sources_of(block, run.journal.names):
                name = run.journal.names[source]
                if name not in self._sums:
                    # A later phase may read documents that were added after the run began.
                    documents = run.datasets[name].whole.documents
                    self._sums[name] = [DocumentSums(documents) for _ in epochs or (0,)]
                for sums, epoch in zip(self._sums[name], epochs or (None,), strict=True):
                    part = mine if epoch is None else mine.only(mine.epoch == epoch)
                    if len(part.step):
                        found = located_documents(run, part, source)
                        sums.add(found.document, found.targets, part.loss[found.row].astype(np.float64))

    def blocks(self, name: str) -> Iterator[tuple[IntArray, FloatArray, FloatArray]]:
        """Documents of a source with their losses, or gains, and targets; those of the second epoch for gains."""
        for each in zip(*(sums.blocks() for sums in self._sums[name]), strict=True):
            firsts, nats, targets = zip(*each, strict=True)
            seen = np.flatnonzero(np.logical_and.reduce([some > 0 for some in targets]))
            means = [one[seen] / count[seen] for one, count in zip(nats, targets, strict=True)]
            yield seen + firsts[0], means[0] if len(means) == 1 else means[0] - means[1], targets[-1][seen]

    @property
    def sources(self) -> list[str]:
        """Sources that have such documents."""
        return list(self._sums)

    def ranked(self, count: int, *, highest: bool) -> list[Ranked]:
        """The documents with the highest or the lowest values; of equal ones those with more targets first."""
        best: list[Ranked] = []
        for name in self.sources:
            for documents, values, targets in self.blocks(name):
                order = np.lexsort((documents, -targets, -values if highest else values))[:count]
                some = zip(*(array[order].tolist() for array in (documents, values, targets)), strict=True)
                best += [Ranked(name, document, value, int(number)) for document, value, number in some]
                best.sort(key=lambda one: (-one.value if highest else one.value, -one.targets, one.source))
                del best[count:]
        return best


@dataclass(frozen=True)
class Ranked:
    """A document with its loss, or what it gained."""

    source: str
    document: int
    value: float
    targets: int


@dataclass
class DocumentGroups:
    """Losses of documents by what they have in common.

    Attributes:
        sums: by source and value: documents, targets, and summed losses.
    """

    sums: dict[tuple[str, Any], list[float]] = field(default_factory=dict)

    def add(self, group: tuple[str, Any], targets: float, loss: float) -> None:
        """Add a document."""
        mine = self.sums.setdefault(group, [0, 0.0, 0.0])
        mine[0] += 1
        mine[1] += targets
        mine[2] += targets * loss
