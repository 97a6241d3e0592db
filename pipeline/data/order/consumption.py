"""Consumption of each source at any step of a run, in closed form: tokens, epochs, unique tokens, what is left.

The targets of an epoch are a circular interval of the source's tokens, cut into windows, and a partial epoch has drawn
those at the first positions of its permutation. So what was seen is known from the epochs, without going through the
steps. An epoch of packs has every token once; how many the packs of a partial epoch have is known from their files
alone, so here it is their share of the epoch.
`docs/sampler.md` has the mathematics of windows and epochs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pipeline.data.order.journal import Journal
from pipeline.data.order.permutation import IntArray
from pipeline.data.order.sampler import Sampler
from pipeline.data.order.segments import SourceState
from pipeline.data.order.windows import epoch_permutation, epoch_phase

Documents = tuple[int, int] | None
"""A slice: documents [first, end) of the dataset; None for all of them."""


@dataclass(frozen=True)
class SliceAccount:
    """Consumption of one slice of a source. Tokens are targets; masked ones and those of skipped steps count.

    Of packs, those of a partial epoch are its share of the tokens.
    """

    documents: Documents
    """The slice."""
    tokens: int
    """Tokens of the slice."""
    drawn: int
    """Tokens drawn."""
    slots: int
    """L for each sample drawn: the tokens of windows, and of packs a few more, for their padding."""
    lap: int
    """The epoch that the next sample is in."""
    lap_share: float
    """Share of that epoch's samples that were drawn."""
    unique: int
    """Tokens that were drawn at least once."""
    exact: bool
    """True if `unique` is exact. With several partial epochs and no complete one it is the expected value, and with
    partial epochs of packs close to it."""
    unseen: int
    """Tokens not drawn in epochs that ended early, because the sequence length, the slice or the packing changed."""
    remaining: int | None
    """Tokens in whole samples until `max_epochs`; None without a limit."""
    exhausted: int | None
    """Segment with the last sample that `max_epochs` allows; None if there are more, or were none at all."""

    @property
    def epochs(self) -> float:
        """Epochs of the slice: tokens drawn over its tokens."""
        return self.drawn / self.tokens


@dataclass(frozen=True)
class Account:
    """Consumption of a source: sums over its slices. Where slices overlap, a token is one of each of them."""

    slices: tuple[SliceAccount, ...]
    """In the order in which they were first drawn from."""
    current: SliceAccount
    """The one drawn from last, or to be drawn from first."""

    @property
    def tokens(self) -> int:
        """Tokens of the slices."""
        return sum(each.tokens for each in self.slices)

    @property
    def drawn(self) -> int:
        """Tokens drawn."""
        return sum(each.drawn for each in self.slices)

    @property
    def slots(self) -> int:
        """L for each sample drawn."""
        return sum(each.slots for each in self.slices)

    @property
    def epochs(self) -> float:
        """Epochs of the source: tokens drawn over tokens of the slices."""
        return self.drawn / self.tokens

    @property
    def unique(self) -> int:
        """Tokens that were drawn at least once."""
        return sum(each.unique for each in self.slices)

    @property
    def exact(self) -> bool:
        """True if `unique` is exact."""
        return all(each.exact for each in self.slices)

    @property
    def unseen(self) -> int:
        """Tokens not drawn in epochs that ended early."""
        return sum(each.unseen for each in self.slices)


@dataclass
class SliceStretch:
    """Epochs of one slice with one sequence length, one after the other, the last of them perhaps partial."""

    state: SourceState
    """State of the source where the stretch begins."""
    length: int
    """Sequence length."""
    samples: int = 0
    """Windows or packs drawn, from the first position of the first epoch on."""
    closed: int | None = None
    """The segment that ended the last epoch early."""
    limit: int | None = None
    """Samples that its last segment can still give; None for no limit."""
    exhausted: int | None = None
    """The segment with the last sample that `max_epochs` allows."""
    first_epoch: int = field(init=False)
    epoch_samples: int = field(init=False)
    """Samples of an epoch."""

    def __post_init__(self) -> None:
        assert self.state.cursor == 0, "a stretch begins with a lap"
        self.first_epoch = self.state.lap
        self.epoch_samples = self.state.epoch_samples(self.length)

    @property
    def packed(self) -> bool:
        """True if samples are packs."""
        return self.state.packs is not None

    @property
    def full(self) -> int:
        """Complete epochs."""
        return self.samples // self.epoch_samples

    @property
    def rest(self) -> int:
        """Samples drawn of the epoch after them."""
        return self.samples % self.epoch_samples

    def targets(self, samples: int) -> int:
        """Tokens of some samples from the beginning of an epoch on."""
        if not self.packed:
            return samples * self.length
        epochs, rest = divmod(samples, self.epoch_samples)
        return epochs * self.state.tokens + rest * self.state.tokens // self.epoch_samples

    @property
    def unseen(self) -> int:
        """Tokens not drawn in the epoch that ended early."""
        if self.closed is None or not self.rest:
            return 0
        return self.targets(self.epoch_samples) - self.targets(self.rest)

    def is_continued_by(self, state: SourceState, length: int) -> bool:
        """True if a later segment of the source continues this stretch."""
        return (state.text, length) == (self.state.text, self.length)


def accounts(sampler: Sampler, step: int) -> dict[str, Account]:
    """Consumption of each source of the journal by the steps before `step`, by name.

    The time it takes does not depend on the step or on the size of the sources.

    Args:
        sampler: The order of the run.
        step: Steps done.
    """
    return accounts_of(sampler.journal, stretches_of(sampler.journal, step))


def accounts_of(journal: Journal, stretches: Mapping[str, list[SliceStretch]]) -> dict[str, Account]:
    """`accounts`, from `stretches_of` the journal."""
    result = {}
    for name in journal.names:
        row = stretches.get(name) or [_first_stretch(journal, name)]
        by_slice: dict[Documents, list[SliceStretch]] = {}
        for stretch in row:
            by_slice.setdefault(stretch.state.documents, []).append(stretch)
        slices = {documents: _account(journal.seed, name, found) for documents, found in by_slice.items()}
        result[name] = Account(tuple(slices.values()), slices[row[-1].state.documents])
    return result


def stretches_of(journal: Journal, step: int) -> dict[str, list[SliceStretch]]:
    """Stretches that the steps before `step` have drawn, by source, in the order of the run."""
    found: dict[str, list[SliceStretch]] = {}
    for number, (segment, samples) in enumerate(journal.drawn(step)):
        length = segment.sequence_length
        counts = dict(zip(segment.sources, segment.order().counts(samples), strict=True))
        for name, state in segment.sources.items():
            row = found.setdefault(name, [])
            if row and row[-1].is_continued_by(state, length):
                stretch = row[-1]
                assert stretch.first_epoch + stretch.full == state.lap and stretch.rest == state.cursor, name
            else:
                if row:
                    row[-1].closed = number
                stretch = SliceStretch(state, length)
                row.append(stretch)
            stretch.samples += counts[name]
            stretch.limit = None if state.cap is None else state.cap - counts[name]
            if state.cap and stretch.limit == 0:
                stretch.exhausted = number
    return found


def _first_stretch(journal: Journal, name: str) -> SliceStretch:
    """The stretch of a source that has not begun."""
    segment = next(segment for segment in journal.segments if name in segment.sources)
    state = segment.sources[name]
    return SliceStretch(state, segment.sequence_length, limit=state.cap)


def _account(seed: int, name: str, stretches: list[SliceStretch]) -> SliceAccount:
    """The account of one slice."""
    last = stretches[-1]
    unique, exact = _unique(seed, name, stretches)
    return SliceAccount(
        documents=last.state.documents,
        tokens=last.state.tokens,
        drawn=sum(stretch.targets(stretch.samples) for stretch in stretches),
        slots=sum(stretch.samples * stretch.length for stretch in stretches),
        lap=last.first_epoch + last.full,
        lap_share=last.rest / last.epoch_samples,
        unique=unique,
        exact=exact,
        unseen=sum(stretch.unseen for stretch in stretches),
        remaining=None if last.limit is None else last.targets(last.limit),
        exhausted=next((stretch.exhausted for stretch in stretches if stretch.exhausted is not None), None),
    )


def _unique(seed: int, name: str, stretches: list[SliceStretch]) -> tuple[int, bool]:
    """Tokens that were a target, and whether that is exact."""
    tokens = stretches[0].state.tokens
    complete = [stretch for stretch in stretches if stretch.full]
    partial = [stretch for stretch in stretches if stretch.rest]
    if any(stretch.packed for stretch in complete):
        return tokens, True
    if complete:
        # Fewer tokens than a window has are left to be looked at, one by one.
        unseen = _left_by_epochs(seed, name, complete[0])
        for stretch in complete[1:]:
            unseen = np.intersect1d(unseen, _left_by_epochs(seed, name, stretch), assume_unique=True)
        for stretch in partial:
            if not stretch.packed:
                unseen = unseen[~_seen_in_last_epoch(seed, name, stretch, unseen)]
        return tokens - unseen.size, not (unseen.size and any(stretch.packed for stretch in partial))
    if len(partial) <= 1:
        return sum(stretch.targets(stretch.rest) for stretch in partial), not any(stretch.packed for stretch in partial)
    # Each epoch has drawn its samples independently of the others.
    missed = 1.0
    for stretch in partial:
        missed *= 1 - stretch.targets(stretch.rest) / tokens
    return round(tokens * (1 - missed)), False


def _left_by_epochs(seed: int, name: str, stretch: SliceStretch) -> IntArray:
    """The tokens that no complete epoch of the stretch has among its targets, fewer than a window."""
    tokens, length = stretch.state.tokens, stretch.length
    rest = tokens % length
    # An epoch with phase p leaves [p + 1 - rest, p + 1). All of these lie within [1 - rest, length + 1), at most once
    # around the circle, so their intersection is that of intervals on a line.
    low, high = length, 0
    for epoch in range(stretch.first_epoch, stretch.first_epoch + stretch.full):
        phase = epoch_phase(seed, name, epoch, length)
        low, high = min(low, phase), max(high, phase)
        if high - low >= rest:
            break
    return np.arange(high + 1 - rest, low + 1) % tokens


def _seen_in_last_epoch(seed: int, name: str, stretch: SliceStretch, tokens: IntArray) -> npt.NDArray[np.bool_]:
    """Mask of those of the tokens that were targets in the partial epoch at the end of the stretch."""
    epoch = stretch.first_epoch + stretch.full
    window = (tokens - epoch_phase(seed, name, epoch, stretch.length) - 1) % stretch.state.tokens // stretch.length
    inside = window < stretch.epoch_samples
    numbers, inverse = np.unique(window[inside], return_inverse=True)
    permutation = epoch_permutation(seed, name, epoch, stretch.epoch_samples)
    seen = np.zeros(tokens.size, bool)
    seen[inside] = (permutation.inverse(numbers) < stretch.rest)[inverse]
    return seen
