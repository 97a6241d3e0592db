"""Preview of a run: how long it is, where sources drop out, and what somebody should know before paying for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import NamedTuple

import numpy as np

from pipeline.common.errors import UserError
from pipeline.common.format import percent
from pipeline.config.root import Config
from pipeline.data.order.blend import UNIT
from pipeline.data.order.consumption import Account, Documents, SliceStretch, accounts_of, stretches_of
from pipeline.data.order.journal import Journal
from pipeline.data.order.phases import label, phase_at
from pipeline.data.order.sampler import Sampler
from pipeline.data.order.segments import Skip

_SHOWN = 10
"""Warnings of one kind."""
_NAMED = 3
"""Sources in one warning."""


@dataclass(frozen=True)
class RunLength:
    """Length of a run."""

    steps: int
    """Steps in all."""
    reason: str
    """Reason why the run ends there."""


def run_length(config: Config, sampler: Sampler) -> RunLength:
    """Steps of the whole run: `train.duration`, or fewer where a source with `on_exhausted: stop` ends it.

    Raises:
        UserError: All sources are exhausted before the end of `train.duration`; or it is in epochs, and was not when
            the run was planned.
    """
    duration = config.train.duration
    journal = sampler.journal
    reason = f"train.duration: {duration.count:,} {duration.unit}"
    if duration.unit == "epochs":
        if journal.end_step is None:
            raise UserError(f"{reason}: the run was planned with another duration; its next start plans it anew")
        steps = journal.end_step
        if journal.is_padded(steps):
            reason += f"; the last step has {len(journal.samples(steps - 1)):,} packs"
    else:
        steps = duration.count if duration.unit == "steps" else journal.step_at(duration.count)
    end = sampler.end()
    if end is None or end.step >= steps:
        return RunLength(steps, reason)
    if end.kind == "stop":
        return RunLength(end.step, end.reason)
    raise UserError(
        f"train.duration of {duration.count:,} {duration.unit} is {steps:,} steps, but {end.reason} at step "
        f"{end.step + 1:,} (sample {end.sample:,}, after {end.tokens:,} tokens): shorten train.duration, add sources, "
        "raise max_epochs, or set on_exhausted: stop or repeat"
    )


def check_end(sampler: Sampler, done: int) -> None:
    """A run that has gone on beyond the end that its run file gives it now must not count as finished.

    Args:
        sampler: The order that the run file plans, before it is compared with the one that the run has had: what lies
            behind an end is not planned.
        done: Steps done.

    Raises:
        UserError: There are more of them than a source with `on_exhausted: stop` allows.
    """
    end = sampler.end()
    if end is not None and end.kind == "stop" and end.step < done:
        raise UserError(
            f"{done:,} steps are done, but the run file now ends the run after {end.step:,}: {end.reason}. Raise its "
            "max_epochs, or undo other changes: on_exhausted, weights or phases"
        )


def exhaustions(sampler: Sampler, steps: int) -> list[tuple[int, str]]:
    """Exhaustions of sources that reach their max_epochs and drop out of the blend, in the order of the run.

    Args:
        sampler: The order of the run.
        steps: Of the whole run.

    Returns:
        For each the step, counted from 0, in which it gives its last window; and what happens there.
    """
    return [
        (found.step, f"source {found.name!r} reaches its max_epochs; the others take its place")
        for found in _exhaustions(sampler, stretches_of(sampler.journal, steps))
    ]


def warnings(config: Config, journal: Journal, sampler: Sampler, last_step: int, first_step: int = 0) -> list[str]:
    """Warnings about the blend, a line each.

    Args:
        config: The run file.
        journal: The plan.
        sampler: Its order.
        last_step: Steps of the whole run.
        first_step: Steps done: what they have had already is left out.
    """
    stretches = stretches_of(journal, last_step)
    found = accounts_of(journal, stretches)
    kinds = (
        _repeated(config, found),
        _reached(config, sampler, stretches, last_step, first_step),
        _dropped(config, journal, found, last_step, first_step),
        _overlaps(config, journal, last_step, first_step),
        _closed(config, journal, stretches, first_step),
        _late_phases(config, journal, last_step),
        _idle_skips(journal, last_step, first_step),
        _all_skipped(journal, last_step),
    )
    lines: list[str] = []
    for kind in map(list, kinds):
        more = len(kind) - _SHOWN
        lines += kind[:_SHOWN] + ([f"and {more:,} more like the last one"] if more > 0 else [])
    return lines


class _Exhaustion(NamedTuple):
    """The exhaustion of a source."""

    step: int
    """The step with its last window, from 0."""
    name: str
    segment: int
    documents: Documents


def _exhaustions(sampler: Sampler, stretches: Mapping[str, list[SliceStretch]]) -> list[_Exhaustion]:
    """Exhaustions of sources, in the order of the run."""
    return sorted(
        _Exhaustion(last_window_step(sampler, name, segment), name, segment, stretch.state.documents)
        for name, row in stretches.items()
        for stretch in row
        if (segment := stretch.exhausted) is not None and not stretch.state.stops
    )


def last_window_step(sampler: Sampler, name: str, segment: int) -> int:
    """The step, from 0, with the last window that `max_epochs` allows a source, which is in this segment."""
    journal = sampler.journal
    state = journal.segments[segment].sources[name]
    assert state.cap
    epochs, position = divmod(state.cursor + state.cap - 1, journal.segments[segment].epoch_samples[name])
    (sample,) = sampler.find(name, segment, state.lap + epochs, np.array([position]))
    return journal.step_of(int(sample))


def _reached(
    config: Config, sampler: Sampler, stretches: Mapping[str, list[SliceStretch]], last_step: int, first_step: int
) -> Iterator[str]:
    """Sources that drop out."""
    limits = {source.name: source.max_epochs for source in config.data.sources}
    for found in _exhaustions(sampler, stretches):
        if found.step >= first_step:
            what = f" ({documents_text(found.documents)})" if found.documents else ""
            yield (
                f"source {found.name!r}{what} reaches max_epochs {limits[found.name]:g} at step {found.step + 1:,} of "
                f"{last_step:,} (phase {label(config, sampler.journal, found.segment)}); the others take its place"
            )


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
                why = f"max_epochs {source.max_epochs:g} of its {account.current.tokens:,} tokens is less than a sample"
            yield f"source {source.name!r} does not give a single sample in the whole run: {why}"
        for found_slice in account.slices:
            documents, epochs = found_slice.documents, found_slice.epochs
            text = f"source {source.name!r}" + (f" ({documents_text(documents)})" if documents else "")
            limit = source.max_epochs if source.on_exhausted == "repeat" else None
            if limit is not None and epochs > limit:
                yield f"{text} is read {epochs:.2f} times, beyond max_epochs {limit:g} (on_exhausted: repeat)"
            elif epochs > config.blend.warn_epochs:
                yield (
                    f"{text} is read {epochs:.2f} times, more than blend.warn_epochs "
                    f"{config.blend.warn_epochs:g}: lower its weight, give it more documents, set a lower max_epochs, "
                    "or raise warn_epochs"
                )


def _dropped(
    config: Config, journal: Journal, found: Mapping[str, Account], last_step: int, first_step: int
) -> Iterator[str]:
    """Sources that have a share in a phase and nothing left for it."""
    warned = set()
    for number, (segment, _) in enumerate(journal.drawn(last_step)):
        if segment.first_step < first_step:
            continue
        for name, state in segment.sources.items():
            if state.cap == 0 and not state.stops and found[name].drawn and name not in warned:
                warned.add(name)
                yield (
                    f"source {name!r} has nothing left for phase {label(config, journal, number)}, since it has "
                    f"reached max_epochs: the others share its {percent(state.weight / UNIT)}"
                )


def _overlaps(config: Config, journal: Journal, last_step: int, first_step: int) -> Iterator[str]:
    """Slices with common documents, of one source or of sources that share a dataset."""
    folders = {source.name: str(source.dataset or source.name) for source in config.data.sources}
    used: dict[str, dict[tuple[str, Documents], int]] = {}
    for number, (segment, _) in enumerate(journal.drawn(last_step)):
        for name, state in segment.sources.items():
            used.setdefault(folders.get(name, name), {}).setdefault((name, state.documents), number)
    for uses in used.values():
        for ((one, first), number), ((two, second), other) in combinations(uses.items(), 2):
            common = _common(first, second)
            if common[0] < common[1] and journal.segments[other].first_step >= first_step:
                what = documents_text(None if first is None and second is None else common)
                yield (
                    f"source {one!r} in phase {label(config, journal, number)} and source {two!r} in phase "
                    f"{label(config, journal, other)} both read {what} of one dataset, as separate texts: epochs and "
                    "max_epochs count for each of them alone"
                )


def _common(one: Documents, two: Documents) -> tuple[int, int]:
    """The documents of both; (0, 1) where both are the whole dataset."""
    if one is None or two is None:
        return one or two or (0, 1)
    return max(one[0], two[0]), min(one[1], two[1])


def _closed(
    config: Config, journal: Journal, stretches: Mapping[str, list[SliceStretch]], first_step: int
) -> Iterator[str]:
    """Epochs that a change of the sequence length or the packing ended early, a line for each phase that does so."""
    ended: dict[tuple[int, str], list[tuple[str, SliceStretch]]] = {}
    for name, row in stretches.items():
        for stretch, after in pairwise(row):
            number = stretch.closed
            if stretch.unseen and stretch.state.documents == after.state.documents and number is not None:
                change = f"the sequence length from {stretch.length:,} to {after.length:,}"
                if stretch.length == after.length:
                    change = f"the packing to {'best_fit' if after.packed else 'windows'}"
                ended.setdefault((number, change), []).append((name, stretch))
    for (number, change), sources in sorted(ended.items()):
        if journal.segments[number].first_step < first_step:
            continue
        sources.sort(key=lambda entry: -entry[1].unseen)
        shown = [
            f"{stretch.unseen:,} of {name!r} ({percent(1 - stretch.rest / stretch.epoch_samples)} of the epoch)"
            for name, stretch in sources[:_NAMED]
        ]
        if more := sum(stretch.unseen for _, stretch in sources[_NAMED:]):
            shown.append(f"{more:,} of {len(sources) - _NAMED:,} other sources")
        yield (
            f"phase {label(config, journal, number)} changes {change} and so ends epochs early; tokens that are not "
            f"drawn in them: {', '.join(shown)}"
        )


def _late_phases(config: Config, journal: Journal, last_step: int) -> Iterator[str]:
    """Phases that begin when the run is over."""
    last = phase_at(config, journal, max(last_step - 1, 0))
    for number, phase in enumerate(config.blend.phases[last + 1 :], start=last + 1):
        name = f" ({phase.name})" if phase.name else ""
        yield f"blend.phases.{number}{name} never begins: the run ends with step {last_step:,}"


def _idle_skips(journal: Journal, last_step: int, first_step: int) -> Iterator[str]:
    """Entries of the run file that leave the whole run as it is."""
    for skip in journal.skips:
        if skip.end_step is not None or skip.fault:  # or no entry of the run file
            continue
        entry, holds = f"blend.skip: {skip_text(skip)}", skip.first_step
        first, end = _steps_of(journal, skip, last_step)
        if first >= last_step:
            yield f"{entry}, but the run ends with step {last_step:,}"
        elif holds >= last_step:
            yield f"{entry}, but takes effect only after the end of the run, step {last_step:,}"
        elif end <= holds <= first_step:
            what = _several("step", first, end, 1)
            yield f"{entry}, but {what} already trained on; go back to a checkpoint before that"
        elif end <= holds:
            yield f"{entry}, but takes effect only after that; lower its from_step"
        elif skip.source is not None and not _is_read(journal, skip, last_step):
            what = "these documents" if skip.documents else "the source"
            yield f"{entry}, but {what} would not be read from there on anyway"


def _steps_of(journal: Journal, skip: Skip, last_step: int) -> tuple[int, int]:
    """The steps [first, end) that an entry means, whenever it holds."""
    if skip.steps is not None:
        return skip.steps
    if skip.samples is not None:
        return journal.step_of(skip.samples[0]), journal.step_of(skip.samples[1] - 1) + 1
    return 0, last_step


def _is_read(journal: Journal, skip: Skip, last_step: int) -> bool:
    """True if a segment that ends after an entry begins to hold reads any of its documents."""
    for segment, samples in journal.drawn(last_step):
        state = segment.sources.get(skip.source or "")
        if state is not None and segment.first_step + -(-samples // segment.batch_size) > skip.first_step:
            first, end = state.documents or (0, None)
            if not skip.documents or any(a < (b if end is None else end) and first < b for a, b in skip.documents):
                return True
    return False


def _all_skipped(journal: Journal, last_step: int) -> Iterator[str]:
    """A warning if from some step to the end of the run no source is trained on."""
    begin = last_step
    whole: dict[str, int] = {}
    for skip in journal.skips:
        if skip.source is not None and not skip.documents and skip.end_step is None:
            whole[skip.source] = min(skip.first_step, whole.get(skip.source, skip.first_step))
    for segment, samples in reversed(journal.drawn(last_step)):
        counts = zip(segment.sources, segment.order().counts(samples), strict=True)
        since = max(whole.get(name, last_step) for name, count in counts if count)
        begin = min(begin, max(since, segment.first_step))
        if since > segment.first_step:
            break
    if begin < last_step:
        yield (
            f"blend.skip: from step {begin + 1:,} to the end, step {last_step:,}, all sources are skipped and nothing "
            "is trained on: shorten train.duration, or skip less"
        )


def skip_text(skip: Skip) -> str:
    """A skip for people, steps counted from 1: `samples 5 to 9 are not trained on (from step 1 on)`."""
    if skip.steps is not None:
        fault = f", because of the fault at step {skip.steps[1]:,}" if skip.fault else ""
        what = f"{_several('step', *skip.steps, 1)} skipped{fault}"
    elif skip.samples is not None:
        what = f"{_several('sample', *skip.samples)} not trained on"
    else:
        ranges = ", ".join(range_text(first, end) for first, end in skip.documents)
        what = f"source {skip.source!r} is not trained on" + (f": documents {ranges}" if ranges else "")
    until = "" if skip.end_step is None else f" up to step {skip.end_step:,}"
    return f"{what} (from step {skip.first_step + 1:,} on{until})"


def _several(what: str, begin: int, end: int, base: int = 0) -> str:
    """[begin, end), shown as counted from `base`: `step 5 is`, or `steps 5 to 9 are`."""
    text = range_text(begin + base, end + base)
    return f"{what} {text} is" if end - begin == 1 else f"{what}s {text} are"


def range_text(first: int, end: int) -> str:
    """[first, end) for people: `7`, or `7 to 9`."""
    return f"{first:,}" if end - first == 1 else f"{first:,} to {end - 1:,}"


def documents_text(documents: Documents) -> str:
    """A slice for people: `documents 0 to 99`."""
    if documents is None:
        return "all documents"
    return f"document{'s' if documents[1] - documents[0] > 1 else ''} {range_text(*documents)}"
