"""What a run has drawn from each source at any step, in closed form: tokens, epochs, unique tokens, what is left.

The targets of a lap are a circular interval of the source's tokens, cut into windows, and a partial lap has drawn those
at the first positions of its permutation. So what was seen is known from the laps, without going through the steps.
`docs/sampler.md` has the mathematics of windows and laps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations, pairwise

import numpy as np
import numpy.typing as npt

from pipeline.config.root import Config
from pipeline.data.blend import UNIT
from pipeline.data.hashing import key
from pipeline.data.journal import Journal, Skip, SourceState
from pipeline.data.permutation import IntArray, Permutation
from pipeline.data.phases import label, phase_at
from pipeline.data.sampler import Sampler
from pipeline.errors import UserError

Documents = tuple[int, int] | None
"""A slice: documents [first, end) of the dataset; None for all of them."""
_SHOWN = 10
"""Warnings of one kind."""


@dataclass(frozen=True)
class SliceAccount:
    """What was drawn from one slice of a source. Tokens are targets; masked ones and those of skipped steps count."""

    documents: Documents
    """The slice."""
    tokens: int
    """Tokens of the slice."""
    drawn: int
    """Tokens drawn."""
    lap: int
    """The lap that the next window is in."""
    lap_share: float
    """Share of that lap's windows that were drawn."""
    unique: int
    """Tokens that were drawn at least once."""
    exact: bool
    """Whether `unique` is exact. With several partial laps and no complete one it is the expected value."""
    unseen: int
    """Tokens not drawn in laps that ended early, because the sequence length or the slice changed."""
    remaining: int | None
    """Tokens in whole windows until `max_epochs`; None without a limit."""
    exhausted: int | None
    """Segment with the last window that `max_epochs` allows; None if there are more, or were none at all."""

    @property
    def epochs(self) -> float:
        """How often the slice was read."""
        return self.drawn / self.tokens


@dataclass(frozen=True)
class Account:
    """What was drawn from a source: sums over its slices. Where slices overlap, a token is one of each of them."""

    slices: tuple[SliceAccount, ...]
    """In the order in which they were first drawn from."""
    current: SliceAccount
    """The one drawn from last, or to be drawn from first."""

    @property
    def tokens(self) -> int:
        """Tokens of the slices."""
        return sum(part.tokens for part in self.slices)

    @property
    def drawn(self) -> int:
        """Tokens drawn."""
        return sum(part.drawn for part in self.slices)

    @property
    def epochs(self) -> float:
        """How often the source was read: tokens drawn over tokens of the slices."""
        return self.drawn / self.tokens

    @property
    def unique(self) -> int:
        """Tokens that were drawn at least once."""
        return sum(part.unique for part in self.slices)

    @property
    def exact(self) -> bool:
        """Whether `unique` is exact."""
        return all(part.exact for part in self.slices)

    @property
    def unseen(self) -> int:
        """Tokens not drawn in laps that ended early."""
        return sum(part.unseen for part in self.slices)


@dataclass(frozen=True)
class RunLength:
    """How long a run is."""

    steps: int
    """Steps in all."""
    reason: str
    """What ends it there."""


@dataclass
class _Stretch:
    """Laps of one slice with one sequence length, one after the other, the last of them perhaps partial."""

    state: SourceState
    length: int
    windows: int = 0  # drawn, from the first position of the first lap on
    closed: int | None = None  # the segment that ended the last lap early
    limit: int | None = None  # windows that its last segment can still give
    exhausted: int | None = None  # the segment that gave the last one
    first_lap: int = field(init=False)
    lap_windows: int = field(init=False)

    def __post_init__(self) -> None:
        assert self.state.cursor == 0, "a stretch begins with a lap"
        self.first_lap = self.state.lap
        self.lap_windows = self.state.tokens // self.length

    @property
    def full(self) -> int:
        """Complete laps."""
        return self.windows // self.lap_windows

    @property
    def rest(self) -> int:
        """Windows drawn of the lap after them."""
        return self.windows % self.lap_windows

    @property
    def unseen(self) -> int:
        """Tokens not drawn in the lap that ended early."""
        missing = self.lap_windows - self.rest
        return missing * self.length if self.closed is not None and self.rest else 0

    def goes_on_with(self, state: SourceState, length: int) -> bool:
        """Whether a later segment of the source goes on where this ends."""
        return (state.documents, state.tokens, length) == (self.state.documents, self.state.tokens, self.length)


def accounts(sampler: Sampler, step: int) -> dict[str, Account]:
    """What the steps before `step` have drawn from each source of the journal, by name.

    The time it takes does not depend on the step or on the size of the sources.

    Args:
        sampler: The order of the run.
        step: Steps done.
    """
    return _accounts(sampler.journal, _stretches(sampler.journal, step))


def _accounts(journal: Journal, stretches: Mapping[str, list[_Stretch]]) -> dict[str, Account]:
    result = {}
    for name in journal.names:
        row = stretches.get(name) or [_first_stretch(journal, name)]
        by_slice: dict[Documents, list[_Stretch]] = {}
        for stretch in row:
            by_slice.setdefault(stretch.state.documents, []).append(stretch)
        parts = {documents: _account(journal.seed, name, found) for documents, found in by_slice.items()}
        result[name] = Account(tuple(parts.values()), parts[row[-1].state.documents])
    return result


def _stretches(journal: Journal, step: int) -> dict[str, list[_Stretch]]:
    """By source, in the order of the run."""
    found: dict[str, list[_Stretch]] = {}
    for number, (segment, samples) in enumerate(journal.drawn(step)):
        length = segment.sequence_length
        counts = dict(zip(segment.sources, segment.order().counts(samples), strict=True))
        for name, state in segment.sources.items():
            row = found.setdefault(name, [])
            if row and row[-1].goes_on_with(state, length):
                stretch = row[-1]
                assert stretch.first_lap + stretch.full == state.lap and stretch.rest == state.cursor, name
            else:
                if row:
                    row[-1].closed = number
                stretch = _Stretch(state, length)
                row.append(stretch)
            stretch.windows += counts[name]
            stretch.limit = None if state.cap is None else state.cap - counts[name]
            if state.cap and stretch.limit == 0:
                stretch.exhausted = number
    return found


def _first_stretch(journal: Journal, name: str) -> _Stretch:
    """Of a source that has not begun."""
    segment = next(segment for segment in journal.segments if name in segment.sources)
    state = segment.sources[name]
    return _Stretch(state, segment.sequence_length, limit=state.cap)


def _account(seed: int, name: str, stretches: list[_Stretch]) -> SliceAccount:
    """Of one slice."""
    last = stretches[-1]
    unique, exact = _unique(seed, name, stretches)
    return SliceAccount(
        documents=last.state.documents,
        tokens=last.state.tokens,
        drawn=sum(stretch.windows * stretch.length for stretch in stretches),
        lap=last.first_lap + last.full,
        lap_share=last.rest / last.lap_windows,
        unique=unique,
        exact=exact,
        unseen=sum(stretch.unseen for stretch in stretches),
        remaining=None if last.limit is None else last.limit * last.length,
        exhausted=next((stretch.exhausted for stretch in stretches if stretch.exhausted is not None), None),
    )


def _unique(seed: int, name: str, stretches: list[_Stretch]) -> tuple[int, bool]:
    """Tokens that were a target, and whether that is exact."""
    tokens = stretches[0].state.tokens
    complete = [stretch for stretch in stretches if stretch.full]
    partial = [stretch for stretch in stretches if stretch.rest]
    if complete:
        # Fewer tokens than a window has are left to be looked at, one by one.
        unseen = _left_by_laps(seed, name, complete[0])
        for stretch in complete[1:]:
            unseen = np.intersect1d(unseen, _left_by_laps(seed, name, stretch), assume_unique=True)
        for stretch in partial:
            unseen = unseen[~_seen_in_last_lap(seed, name, stretch, unseen)]
        return tokens - unseen.size, True
    if len(partial) <= 1:
        return sum(stretch.rest * stretch.length for stretch in partial), True
    # Each lap has drawn its windows independently of the others.
    missed = 1.0
    for stretch in partial:
        missed *= 1 - stretch.rest * stretch.length / tokens
    return round(tokens * (1 - missed)), False


def _left_by_laps(seed: int, name: str, stretch: _Stretch) -> IntArray:
    """The tokens that no complete lap of the stretch has among its targets, fewer than a window."""
    tokens, length = stretch.state.tokens, stretch.length
    rest = tokens % length
    # A lap with phase p leaves [p + 1 - rest, p + 1). All of these lie within [1 - rest, length + 1), at most once
    # around the circle, so their intersection is that of intervals on a line.
    low, high = length, 0
    for lap in range(stretch.first_lap, stretch.first_lap + stretch.full):
        phase = _phase(seed, name, lap, length)
        low, high = min(low, phase), max(high, phase)
        if high - low >= rest:
            break
    return np.arange(high + 1 - rest, low + 1) % tokens


def _seen_in_last_lap(seed: int, name: str, stretch: _Stretch, tokens: IntArray) -> npt.NDArray[np.bool_]:
    """Which of these tokens were targets in the partial lap at the end of the stretch."""
    lap = stretch.first_lap + stretch.full
    window = (tokens - _phase(seed, name, lap, stretch.length) - 1) % stretch.state.tokens // stretch.length
    inside = window < stretch.lap_windows
    numbers, inverse = np.unique(window[inside], return_inverse=True)
    permutation = Permutation(stretch.lap_windows, key("permutation", seed, name, lap))
    seen = np.zeros(tokens.size, bool)
    seen[inside] = (permutation.inverse(numbers) < stretch.rest)[inverse]
    return seen


def _phase(seed: int, name: str, lap: int, length: int) -> int:
    return key("phase", seed, name, lap) % length if lap else 0


def run_length(config: Config, sampler: Sampler) -> RunLength:
    """Steps of the whole run: `train.duration`, or fewer where a source with `on_exhausted: stop` ends it.

    Raises:
        UserError: All sources are exhausted before the end of `train.duration`.
    """
    duration = config.train.duration
    journal = sampler.journal
    steps = duration.count if duration.unit == "steps" else journal.step_at(duration.count)
    end = sampler.end()
    if end is None or end.step >= steps:
        return RunLength(steps, f"train.duration: {duration.count:,} {duration.unit}")
    if end.kind == "stop":
        return RunLength(end.step, end.reason)
    raise UserError(
        f"train.duration of {duration.count:,} {duration.unit} is {steps:,} steps, but {end.reason} at step "
        f"{end.step + 1:,} (sample {end.sample:,}, after {end.tokens:,} tokens): shorten train.duration, add sources, "
        "raise max_epochs, or set on_exhausted: stop or repeat"
    )


def warnings(config: Config, journal: Journal, sampler: Sampler, last_step: int) -> list[str]:
    """What somebody should know about the blend before paying for it, a line each.

    Args:
        config: The run file.
        journal: The plan.
        sampler: Its order.
        last_step: Steps of the whole run.
    """
    stretches = _stretches(journal, last_step)
    found_accounts = _accounts(journal, stretches)
    kinds = (
        _repeated(config, found_accounts),
        _dropped(config, journal, found_accounts, last_step),
        _overlaps(config, journal, last_step),
        _closed(config, journal, stretches),
        _late_phases(config, journal, last_step),
        _idle_skips(journal, last_step),
    )
    lines = []
    for found in map(list, kinds):
        more = len(found) - _SHOWN
        lines += found[:_SHOWN] + ([f"and {more:,} more like the last one"] if more > 0 else [])
    return lines


def _repeated(config: Config, found: Mapping[str, Account]) -> Iterator[str]:
    """Sources that are read often, or not at all."""
    for source in config.data.sources:
        if source.name not in found:
            yield f"source {source.name!r} is in data.sources, but no phase reads it"
            continue
        account = found[source.name]
        if account.drawn == 0:
            why = "its weight is too small for the duration"
            if account.current.remaining == 0:
                why = f"max_epochs {source.max_epochs:g} of its {account.current.tokens:,} tokens is less than a window"
            yield f"source {source.name!r} gives no window in the whole run: {why}"
        for part in account.slices:
            where = f"source {source.name!r}" + (f" ({documents_text(part.documents)})" if part.documents else "")
            limit = source.max_epochs if source.on_exhausted == "repeat" else None
            if limit is not None and part.epochs > limit:
                yield f"{where} is read {part.epochs:.2f} times, beyond max_epochs {limit:g} (on_exhausted: repeat)"
            elif part.epochs > config.blend.warn_epochs:
                yield (
                    f"{where} is read {part.epochs:.2f} times, more than blend.warn_epochs "
                    f"{config.blend.warn_epochs:g}: lower its weight, give it more documents, set a lower max_epochs, "
                    "or raise warn_epochs"
                )


def _dropped(config: Config, journal: Journal, found: Mapping[str, Account], last_step: int) -> Iterator[str]:
    """Sources that have a share in a phase and nothing left for it."""
    told = set()
    for number, (segment, _) in enumerate(journal.drawn(last_step)):
        for name, state in segment.sources.items():
            if state.cap == 0 and not state.stops and found[name].drawn and name not in told:
                told.add(name)
                yield (
                    f"source {name!r} has nothing left for phase {label(config, journal, number)}, since it has "
                    f"reached max_epochs: the others share its {state.weight / UNIT:.1%}"
                )


def _overlaps(config: Config, journal: Journal, last_step: int) -> Iterator[str]:
    """Slices with common documents, of one source or of sources that share a dataset."""
    folders = {source.name: str(source.dataset or source.name) for source in config.data.sources}
    used: dict[str, dict[tuple[str, Documents], int]] = {}
    for number, (segment, _) in enumerate(journal.drawn(last_step)):
        for name, state in segment.sources.items():
            used.setdefault(folders.get(name, name), {}).setdefault((name, state.documents), number)
    for uses in used.values():
        for ((one, first), number), ((two, second), other) in combinations(uses.items(), 2):
            common = _common(first, second)
            if common is not None and common[0] < common[1]:
                what = documents_text(None if first is None and second is None else common)
                yield (
                    f"source {one!r} in phase {label(config, journal, number)} and source {two!r} in phase "
                    f"{label(config, journal, other)} both read {what} of one dataset, as texts of their own: epochs "
                    "and max_epochs count for each by itself"
                )


def _common(one: Documents, two: Documents) -> tuple[int, int] | None:
    """The documents of both; (0, 1) where both are the whole dataset."""
    if one is None or two is None:
        return one or two or (0, 1)
    return max(one[0], two[0]), min(one[1], two[1])


def _closed(config: Config, journal: Journal, stretches: Mapping[str, list[_Stretch]]) -> Iterator[str]:
    """Laps that a change of the sequence length ended early."""
    for name, row in stretches.items():
        for stretch, after in pairwise(row):
            if stretch.unseen and stretch.state.documents == after.state.documents and stretch.closed is not None:
                share = 1 - stretch.rest / stretch.lap_windows
                yield (
                    f"source {name!r}: phase {label(config, journal, stretch.closed)} changes the sequence length from "
                    f"{stretch.length:,} to {after.length:,} and ends lap {stretch.first_lap + stretch.full} early: "
                    f"{stretch.unseen:,} tokens ({share:.1%} of the lap) are not drawn in it"
                )


def _late_phases(config: Config, journal: Journal, last_step: int) -> Iterator[str]:
    """Phases that begin when the run is over."""
    last = phase_at(config, journal, max(last_step - 1, 0))
    for number, phase in enumerate(config.blend.phases[last + 1 :], start=last + 1):
        name = f" ({phase.name})" if phase.name else ""
        yield f"blend.phases.{number}{name} never begins: the run ends with step {last_step:,}"


def _idle_skips(journal: Journal, last_step: int) -> Iterator[str]:
    """Entries of the run file that leave the whole run as it is."""
    used = {name for segment, _ in journal.drawn(last_step) for name in segment.sources}
    for skip in journal.skips:
        first, end = skip.first_step, last_step
        if skip.steps is not None:
            first, end = max(first, skip.steps[0]), min(end, skip.steps[1])
        elif skip.samples is not None:
            first, end = (
                max(first, journal.step_of(skip.samples[0])),
                min(end, journal.step_of(skip.samples[1] - 1) + 1),
            )
        if skip.end_step is None and (first >= end or (skip.source is not None and skip.source not in used)):
            yield f"blend.skip: {skip_text(skip)}, but the run has nothing of that from there on"


def skip_text(skip: Skip) -> str:
    """A skip for people, steps counted from 1: `steps 5 to 9 are passed over (from step 1 on)`."""
    if skip.steps is not None:
        what = f"steps {skip.steps[0] + 1:,} to {skip.steps[1]:,} are passed over"
    elif skip.samples is not None:
        what = f"samples {skip.samples[0]:,} to {skip.samples[1] - 1:,} are not trained on"
    else:
        ranges = ", ".join(f"{first:,} to {end - 1:,}" for first, end in skip.documents)
        what = f"source {skip.source!r} is not trained on" + (f": documents {ranges}" if ranges else "")
    until = "" if skip.end_step is None else f" up to step {skip.end_step:,}"
    return f"{what} (from step {skip.first_step + 1:,} on{until})"


def documents_text(documents: Documents) -> str:
    """A slice for people: `documents 0 to 99`."""
    return "all documents" if documents is None else f"documents {documents[0]:,} to {documents[1] - 1:,}"
