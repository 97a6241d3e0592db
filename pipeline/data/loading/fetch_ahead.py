"""Tokens of the next steps, asked for while earlier steps are read, where datasets lie in a bucket.

The order of a run is known, so these are exactly the tokens that will be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from pipeline.data.datasets.dataset import Pieces
from pipeline.data.datasets.remote.dataset import RemoteDataset
from pipeline.data.order.balance import rank_rows
from pipeline.data.order.journal import Journal
from pipeline.data.order.locate import RankSamples
from pipeline.data.order.locate_packs import PackLookup
from pipeline.data.order.packs import PackChunks, PackInstances
from pipeline.data.order.permutation import IntArray
from pipeline.data.order.sampler import Sampler
from pipeline.data.order.windows import Instances, Windows


class StepPieces:
    """The pieces of parts that a rank reads in a step.

    Args:
        journal: The run's plan.
        sampler: Of that plan.
        instances: For each segment by source.
        rank_samples: The rank's samples, for each segment, before packs are balanced.
        ahead: Tokens behind each window that are read besides.
        balanced: Whether packs go to ranks by the work of attention within documents.
    """

    def __init__(
        self,
        journal: Journal,
        sampler: Sampler,
        instances: Sequence[Mapping[str, Instances]],
        rank_samples: Sequence[RankSamples],
        *,
        ahead: int = 0,
        balanced: bool = False,
    ) -> None:
        self._journal, self._sampler, self._instances = journal, sampler, instances
        self._rank_samples = rank_samples
        self._ahead, self._balanced = ahead, balanced
        # Of its own: the reader's keeps the groups of steps that it is at.
        self._packs = PackLookup(journal, sampler, instances)

    def of_step(self, step: int) -> Iterator[tuple[str, Pieces]]:
        """Name of the source and pieces; a source may come twice. A skipped step reads nothing."""
        if self._journal.is_skipped(step):
            return
        number = self._journal.segment_number(step)
        find = self._of_packs if self._journal.segments[number].packed else self._of_windows
        yield from find(step, number)

    def _of_windows(self, step: int, number: int) -> Iterator[tuple[str, Pieces]]:
        mine = self._rank_samples[number].samples
        source, epoch, position = (array[mine] for array in self._sampler.step(step))
        for name, chosen in self._by_source(source):
            windows = self._instances[number][name]
            assert isinstance(windows, Windows)
            yield name, windows.pieces(windows.places(epoch[chosen], position[chosen]), self._ahead)

    def _of_packs(self, step: int, number: int) -> Iterator[tuple[str, Pieces]]:
        located = self._packs.step(step)
        samples = self._rank_samples[number].first(len(located.samples))
        rows = np.concatenate(rank_rows(samples, located.costs() if self._balanced else None))
        which, place = located.chunks_of(rows)
        for name, mine in self._by_source(located.sources[rows][place]):
            chunks, packs = PackChunks(*(each[which[mine]] for each in located.chunks)), self._instances[number][name]
            assert isinstance(packs, PackInstances)
            yield name, packs.pieces(chunks)
            yield name, packs.pieces(PackChunks(*(each[chunks.first > 0] for each in chunks)), before=1)

    def _by_source(self, sources: IntArray) -> Iterator[tuple[str, IntArray]]:
        for source in np.unique(sources).tolist():
            yield self._journal.names[source], np.flatnonzero(sources == source)


class FetchAhead:
    """Asks for tokens of the next steps.

    Args:
        pieces: Of steps.
        datasets: Those of the sources that lie in a bucket, by name.
        steps: Behind the one that is read that are asked for.
    """

    def __init__(self, pieces: StepPieces, datasets: Mapping[str, RemoteDataset], steps: int) -> None:
        self._pieces, self._datasets, self._steps = pieces, datasets, steps
        self._next = self._expected = 0

    def before(self, step: int, last: int | None) -> None:
        """Ask for what a step that is about to be read needs, and those behind it.

        Args:
            step: Any; those that follow one another are asked for ahead.
            last: Nothing is asked for from this step on; None if it is not known which steps follow.
        """
        if step != self._expected:
            self._next = step
        for dataset in self._datasets.values():
            dataset.ranges.forget_before(step)
        end = step + 1 if last is None else max(step + 1, min(step + 1 + self._steps, last))
        for each in range(max(step, self._next), end):
            for name, pieces in self._pieces.of_step(each):
                if name in self._datasets:
                    wanted = (pieces.part, pieces.start, pieces.start + pieces.length)
                    self._datasets[name].want(zip(*(array.tolist() for array in wanted), strict=True), each)
        self._next, self._expected = end, step + 1

    def give_up(self) -> None:
        """Forget what was asked for; nobody waits for it."""
        for dataset in self._datasets.values():
            dataset.ranges.give_up()
        self._expected = -1
