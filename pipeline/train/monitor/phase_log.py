"""The course of a run in words: what its steps are made of, and what changes on the way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from pipeline.config import Config
from pipeline.data.order.blend import UNIT
from pipeline.data.order.journal import Journal
from pipeline.data.order.phases import label
from pipeline.data.order.run_length import documents_text
from pipeline.data.order.segments import Segment

_MOST_VALUES = 4
_MOST_SOURCES = 6


def describe_run(config: Config, journal: Journal, first: int, last: int) -> str:
    """Steps [first, last): `steps 1 to 300 in 2 phases, 64 -> 512 windows of 2,048 tokens`."""
    numbers = range(journal.segment_number(first), journal.segment_number(last - 1) + 1)
    segments = [journal.segments[number] for number in numbers]
    phases = len({label(config, journal, number) for number in numbers})
    samples = dict.fromkeys("packs" if segment.packed else "windows" for segment in segments)
    return (
        f"steps {first + 1:,} to {last:,}"
        + (f" in {phases} phases" if phases > 1 else "")
        + f", {_course(segment.batch_size for segment in segments)} {' and '.join(samples)} of "
        + f"{_course(segment.sequence_length for segment in segments)} tokens"
    )


def loss_weight_lines(config: Config) -> Iterator[str]:
    """A line about loss weights, if the run file has any: `loss weights: code 2, web 1 x quality`."""
    phases = config.blend.phases
    if all(s.loss_weight == 1 and s.weight_key is None for s in config.data.sources) and not any(
        phase.loss_weights for phase in phases
    ):
        return
    found = []
    for source in config.data.sources:
        weights = [phase.loss_weights.get(source.name, source.loss_weight) for phase in phases] or [source.loss_weight]
        course = " -> ".join(f"{weight:g}" for weight, _ in groupby(weights))
        found.append(f"{source.name} {course}" + (f" x {source.weight_key}" if source.weight_key else ""))
    yield f"loss weights: {', '.join(found)}; weighted_loss of the metrics is minimized, loss is without them"


def describe_change(config: Config, journal: Journal, number: int) -> str:
    """The differences of a segment, not the first one, from the one before it, in words."""
    before, after = journal.segments[number - 1], journal.segments[number]
    phase = label(config, journal, number)
    changes = [
        f"{name} {old:,} -> {new:,}"
        for name, old, new in (
            ("batch size", before.batch_size, after.batch_size),
            ("sequence length", before.sequence_length, after.sequence_length),
        )
        if old != new
    ]
    if before.packing != after.packing:
        changes.append(f"packing {before.packing} -> {after.packing}")
    sources = list(_changed_sources(before, after))
    changes += sources[:_MOST_SOURCES]
    if len(sources) > _MOST_SOURCES:
        changes.append(f"{len(sources) - _MOST_SOURCES} more sources")
    begins = f"phase {phase} begins" if phase != label(config, journal, number - 1) else ""
    return ": ".join(filter(None, [begins, ", ".join(changes)]))


def _course(values: Iterable[int]) -> str:
    """`64 -> 128`; of many values the first and the last."""
    different = [f"{value:,}" for value, _ in groupby(values)]
    if len(different) > _MOST_VALUES:
        different[1:-1] = ["..."]
    return " -> ".join(different)


def _changed_sources(before: Segment, after: Segment) -> Iterator[str]:
    for name in sorted(before.sources.keys() | after.sources.keys()):
        old, new = before.sources.get(name), after.sources.get(name)
        shares = [state.weight / UNIT if state is not None else 0.0 for state in (old, new)]
        if shares[0] != shares[1]:
            yield f"share of {name} {shares[0]:.4g} -> {shares[1]:.4g}"
        if old is not None and new is not None and old.loss_weight != new.loss_weight:
            yield f"loss weight of {name} {old.loss_weight:g} -> {new.loss_weight:g}"
        if new is not None and new.documents != (old.documents if old is not None else None):
            yield f"{name} reads {documents_text(new.documents)}"
