"""The order of a run by enumeration: every sample of every phase, one after the other, by exact due times.

Written from `docs/sampler.md` and slow on purpose. Nothing of the code that it is compared with is used here, not even
for weights and keys.
"""

import heapq
import json
from dataclasses import dataclass, field
from fractions import Fraction

import xxhash

from tests.data.datasets.packing import made as packing

UNIT = 2**32


def key(*parts):
    return xxhash.xxh3_64_intdigest(json.dumps(parts, separators=(",", ":")).encode())


def mix_one(row, key):
    """`mix` of one row: the finalizer of SplitMix64 as it is published."""
    z = (row + key) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


@dataclass
class Source:
    lengths: list[int]
    """Of the documents, end-of-document tokens included."""
    weight: float | None = None
    slice: tuple[int, int] | None = None
    max_epochs: float | None = None
    on_exhausted: str = "renormalize"


@dataclass
class Phase:
    until: tuple[int, str] | None = None
    weights: dict[str, float] | str | None = None
    sources: list[str] | None = None
    slices: dict[str, tuple[int, int]] = field(default_factory=dict)
    length: int = 8
    batch: int = 4
    packed: bool = False


@dataclass
class Run:
    seed: int
    sources: dict[str, Source]
    phases: list[Phase]
    ramp: tuple[int, int, int, int] | None = None
    """start, increment, tokens, and train.batch_size, which it leads to."""


@dataclass(frozen=True)
class Sample:
    step: int
    index: int
    source: str
    lap: int
    position: int
    first_of_segment: bool


@dataclass
class Standing:
    offset: int | None = None
    lap: int = 0
    cursor: int = 0
    text: tuple | None = None


def whole_weights(weights):
    """Largest remainder: the units that are left go to the largest remainders, ties to the first name."""
    exact = {name: Fraction(str(weight)) * UNIT for name, weight in weights.items()}
    total = sum(Fraction(str(weight)) for weight in weights.values())
    whole = {name: weight // total for name, weight in exact.items()}
    while sum(whole.values()) < UNIT:
        # Nobody gets two, so whoever has one drops to the end of the line.
        name = min(whole, key=lambda name: (whole[name] - exact[name] / total, name))
        whole[name] += 1
    return whole


def batch_size(run, phase, tokens):
    if run.ramp is None:
        return phase.batch
    start, increment, length, full = run.ramp
    if tokens >= length:
        return phase.batch
    levels = range(start, full, increment)
    reached = [size for j, size in enumerate(levels) if tokens * len(levels) >= j * length]
    return min(reached[-1], phase.batch)


def is_over(phase, step, tokens):
    if phase.until is None:
        return False
    count, unit = phase.until
    return (step if unit == "steps" else tokens) >= count


def enumerate_run(run, steps):
    """All samples of the first `steps` steps; and, if the order ends before, (kind, index of the missing sample)."""
    standing = {name: Standing() for name in run.sources}
    given = {}  # epochs by source and slice
    samples, step, index, tokens = [], 0, 0, 0
    phases = list(run.phases)
    while step < steps:
        phase = phases[0]
        texts = {}
        for name in phase.sources or (phase.weights if isinstance(phase.weights, dict) else run.sources):
            lengths = run.sources[name].lengths
            first, end = phase.slices.get(name, run.sources[name].slice) or (0, len(lengths))
            texts[name] = ((first, end), sum(lengths[first:end]))
        if isinstance(phase.weights, dict):
            weights = phase.weights
        elif phase.weights == "tokens" or all(run.sources[name].weight is None for name in texts):
            weights = {name: texts[name][1] for name in texts}
        else:
            weights = {name: run.sources[name].weight for name in texts}
        weights = whole_weights(weights)
        size = batch_size(run, phase, tokens)

        heap, offsets, caps, counts = [], {}, {}, dict.fromkeys(texts, 0)
        count, share = {}, {}  # samples of an epoch, and how much of an epoch one of them is
        for name, ((first, end), total) in texts.items():
            count[name], share[name] = total // phase.length, Fraction(phase.length, total)
            if phase.packed:
                packs = packing.reference(run.sources[name].lengths, phase.length, 10_000, first, end)
                count[name], share[name] = len(packs), Fraction(1, len(packs))
        for name, (documents, _) in texts.items():
            source, here = run.sources[name], standing[name]
            text = (documents, phase.length, phase.packed)
            if here.text is not None and here.text != text:
                here.lap += 1 if here.cursor else 0
                here.cursor = 0
            here.text = text
            offsets[name] = key("offset", run.seed, name) % UNIT if here.offset is None else here.offset
            caps[name] = None
            if source.max_epochs is not None and source.on_exhausted != "repeat":
                left = Fraction(str(source.max_epochs)) - given.get((name, documents), 0)
                caps[name] = left // share[name]
            if caps[name] is None or caps[name] > 0 or source.on_exhausted == "stop":
                heapq.heappush(heap, (Fraction(offsets[name], weights[name]), name))

        first_of_segment = True
        while True:  # a step
            drawn = []
            for _ in range(size):
                if not heap:
                    return samples, ("exhausted", index + len(drawn))
                _, name = heapq.heappop(heap)
                stops = run.sources[name].on_exhausted == "stop"
                if stops and counts[name] == caps[name]:
                    return samples, ("stop", index + len(drawn))
                place = standing[name].cursor + counts[name]
                lap, position = standing[name].lap + place // count[name], place % count[name]
                drawn.append(Sample(step, index + len(drawn), name, lap, position, first_of_segment))
                first_of_segment = False
                counts[name] += 1
                if stops or counts[name] != caps[name]:
                    due = Fraction(counts[name] * UNIT + offsets[name], weights[name])
                    heapq.heappush(heap, (due, name))
            samples += drawn
            step, index, tokens = step + 1, index + size, tokens + size * phase.length
            if is_over(phase, step, tokens) or batch_size(run, phase, tokens) != size or step == steps:
                break

        limits = {name: None if run.sources[name].on_exhausted == "stop" else caps[name] for name in texts}
        exhausted = {name for name in texts if counts[name] == limits[name]}
        time = whole_time(weights, offsets, limits, sum(counts.values())) if exhausted != texts.keys() else None
        for name, (documents, _) in texts.items():
            here = standing[name]
            place = here.cursor + counts[name]
            here.lap, here.cursor = here.lap + place // count[name], place % count[name]
            here.offset = None
            if name not in exhausted:
                here.offset = counts[name] * UNIT + offsets[name] - time * weights[name]
                assert here.offset >= 0
            given[name, documents] = given.get((name, documents), 0) + counts[name] * share[name]
        if is_over(phase, step, tokens):
            phases.pop(0)
    return samples, None


def whole_time(weights, offsets, caps, count):
    """The largest whole time before which at most `count` samples are due, by walking through time."""
    due = dict.fromkeys(weights, 0)
    time = 0
    while True:
        for name, weight in weights.items():
            while due[name] != caps[name] and due[name] * UNIT + offsets[name] < (time + 1) * weight:
                due[name] += 1
        if sum(due.values()) > count:
            return time
        time += 1
