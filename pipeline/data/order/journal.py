"""The run's plan as it is written down: which samples each step is made of, and where each source stands.

Steps, samples and tokens are three counters that only the journal relates. Step s, counted from 0, is made of the
samples [first_sample + (s - first_step) * batch_size, + batch_size) of its segment. The last segment has no end: a
journal does not know how long the run is. What decided the steps that a run has made is frozen (`Journal.going_on`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from pipeline.common.errors import UserError
from pipeline.common.hashing import value_hash
from pipeline.data.order.journal_diff import changed_past
from pipeline.data.order.segments import DecidedSteps, Interval, Record, Segment, Skip, Stretch, What


class Journal(Record):
    """Everything that decides the order of the data, but for the tokens themselves.

    Look-ups are cached in the object, so change a journal by making another one, not by `model_copy`.
    """

    order_version: Literal[1, 2] = 1
    """Version of the mathematics in `docs/sampler.md`: 2 where a segment has packs, so that a program that does not
    know them refuses the journal."""
    seed: int = Field(ge=0)
    """Seed of offsets, permutations and phases."""
    segments: list[Segment] = Field(min_length=1)
    """In the order of the run, without gaps."""
    skips: tuple[Skip, ...] = ()
    """Steps, samples and documents that are not trained on. A skip moves no sample."""
    fork_step: int = Field(default=0, ge=0)
    """Steps taken over from the run that this one was forked from: the run file plans those after them."""
    end_sample: int | None = Field(default=None, ge=1)
    """Samples of a run of whole epochs: places of its last step beyond them are padding. None: the run has no end."""

    @model_validator(mode="after")
    def _contiguous(self) -> Journal:
        if self.segments[0].first_step or self.segments[0].first_sample:
            raise ValueError("the first segment must start at step 0 and sample 0")
        for one, two in zip(self.segments, self.segments[1:], strict=False):
            steps = two.first_step - one.first_step
            if steps < 1 or two.first_sample != one.first_sample + steps * one.batch_size:
                raise ValueError(f"the segment at step {two.first_step} does not start where the one before it ends")
        if self.order_version != version_of(self.segments):
            raise ValueError(f"order_version is {self.order_version}, but that of its segments is not")
        return self

    def to_json(self) -> dict[str, Any]:
        """The journal as JSON types; equal journals give equal JSON with sorted keys."""
        value = self.model_dump(mode="json")
        # What most runs do not have is not there, as in those that were written before there was such a thing.
        if not self.fork_step:
            del value["fork_step"]
        if self.end_sample is None:
            del value["end_sample"]
        for skip in value["skips"]:
            if not skip["fault"]:
                del skip["fault"]
        for source in (source for segment in value["segments"] for source in segment["sources"].values()):
            if source["packs"] is None:
                del source["packs"]
            if source["loss_weight"] == 1:
                del source["loss_weight"]
            if not source["document_weights"]:
                del source["document_weights"]
            if not source["target_mask"]:
                del source["target_mask"]
        return value

    @classmethod
    def from_json(cls, value: Any) -> Journal:
        """The inverse of `to_json`.

        Raises:
            UserError: `value` is not a journal that this version of the code understands.
        """
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'it'}: {e['msg']}" for e in error.errors()[:5])
            raise UserError(
                f"the journal of the run is damaged, or was written by another version of this program: {problems}"
            ) from None

    @property
    def fingerprint(self) -> str:
        """A hash of the whole journal, 32 hexadecimal digits."""
        return value_hash(self.to_json())

    @cached_property
    def names(self) -> list[str]:
        """All sources of all segments, sorted."""
        return sorted({name for segment in self.segments for name in segment.sources})

    # Counters

    @cached_property
    def _first_steps(self) -> list[int]:
        return [segment.first_step for segment in self.segments]

    @cached_property
    def _first_samples(self) -> list[int]:
        return [segment.first_sample for segment in self.segments]

    @cached_property
    def _first_tokens(self) -> list[int]:
        """Slots drawn before each segment."""
        samples = self._first_samples
        drawn = [(b - a) * s.sequence_length for a, b, s in zip(samples, samples[1:], self.segments, strict=False)]
        return list(accumulate(drawn, initial=0))

    def segment_number(self, step: int) -> int:
        """Index in `segments` of the one that `step` is in."""
        assert step >= 0
        return bisect_right(self._first_steps, step) - 1

    def samples(self, step: int) -> range:
        """Global indices of the samples of `step`; fewer than the batch size where the run ends in it."""
        segment = self.segments[self.segment_number(step)]
        first = segment.first_sample + (step - segment.first_step) * segment.batch_size
        return range(self._within(first), self._within(first + segment.batch_size))

    def is_padded(self, steps: int) -> bool:
        """True if the last of the first `steps` steps has fewer samples than the batch size."""
        return steps > 0 and len(self.samples(steps - 1)) < self.segments[self.segment_number(steps - 1)].batch_size

    def _within(self, sample: int) -> int:
        """The sample, or the end of the run before it."""
        return sample if self.end_sample is None else min(sample, self.end_sample)

    @property
    def end_step(self) -> int | None:
        """Steps of a run of whole epochs; None: the run has no end."""
        return None if self.end_sample is None else self.step_of(self.end_sample - 1) + 1

    def tokens(self, step: int) -> int:
        """Slots drawn by all steps before `step`, L per sample; masked and skipped ones included.

        Of windows these are the targets. Packs have a few less, which are known from their files alone.
        """
        number = self.segment_number(step)
        segment = self.segments[number]
        samples = self._within(segment.first_sample + (step - segment.first_step) * segment.batch_size)
        return self._first_tokens[number] + (samples - segment.first_sample) * segment.sequence_length

    def step_of(self, sample: int) -> int:
        """The step that a global sample index belongs to."""
        assert sample >= 0
        segment = self.segments[bisect_right(self._first_samples, sample) - 1]
        return segment.first_step + (sample - segment.first_sample) // segment.batch_size

    def step_at(self, tokens: int) -> int:
        """The first step boundary at or after a number of slots: the smallest step s with tokens(s) >= tokens."""
        if tokens <= 0:
            return 0
        number = bisect_left(self._first_tokens, tokens) - 1
        segment = self.segments[number]
        missing = tokens - self._first_tokens[number]
        return segment.first_step - (-missing // (segment.batch_size * segment.sequence_length))

    def drawn(self, step: int) -> list[tuple[Segment, int]]:
        """The segments that begin before `step`, each with its number of samples before `step`."""
        return [
            (segment, self.samples_of(segment, min(end, step)))
            for segment, end in zip(self.segments, [*self._first_steps[1:], step], strict=True)
            if segment.first_step < step
        ]

    def samples_of(self, segment: Segment, step: int) -> int:
        """Samples of a segment before `step`, which is not behind its end."""
        samples = self._within(segment.first_sample + (step - segment.first_step) * segment.batch_size)
        return samples - segment.first_sample

    # Skips

    @cached_property
    def _skipped_steps(self) -> list[Skip]:
        return [skip for skip in self.skips if skip.steps is not None]

    @cached_property
    def _masking(self) -> list[Skip]:
        return [skip for skip in self.skips if skip.steps is None]

    def is_skipped(self, step: int) -> bool:
        """True if the whole step is skipped."""
        return self.why_skipped(step) is not None

    def why_skipped(self, step: int) -> Skip | None:
        """The skip of the whole step; those of the run file come first. None for a step that is made."""
        if not self._skipped_steps:
            return None
        found = [skip for skip in self._skipped_steps if skip.holds(step) and _contains(skip.steps, step)]
        return min(found, key=lambda skip: skip.fault, default=None)

    def masks(self, step: int) -> list[Skip]:
        """The skips of samples, documents and sources that hold in this step."""
        if not self._masking:
            return []
        samples = self.samples(step)
        return [
            skip
            for skip in self._masking
            if skip.holds(step)
            and (skip.samples is None or (skip.samples[0] < samples.stop and samples.start < skip.samples[1]))
        ]

    # Going on

    def seen(self, step: int) -> DecidedSteps:
        """All that decided the steps before `step`.

        The end of the last segment is not part of it, nor is a limit that no source had reached, nor the way in which
        equal steps are written down.
        """
        stretches: list[Stretch] = []
        for segment, samples in self.drawn(step):
            order = segment.order()
            reached = samples if order.capacity is None else min(samples, order.capacity)
            counts = dict(zip(order.names, order.counts(reached), strict=True))
            first, sources, drawn = segment.first_step, segment.sources, counts
            if stretches and _goes_on(stretches[-1], segment):
                before = stretches.pop()
                first, sources = before.first_step, before.sources
                drawn = {name: before.drawn[name] + count for name, count in counts.items()}
            caps = {name: drawn[name] if s.exhausted(counts[name]) else None for name, s in segment.sources.items()}
            sources = {
                name: source.model_copy(update={"cap": caps[name], "stops": False}) for name, source in sources.items()
            }
            stretches.append(Stretch(first, segment.batch_size, segment.sequence_length, sources, drawn))
        return DecidedSteps(self.seed, stretches, self._skipped_before(step))

    def _skipped_before(self, step: int) -> dict[What, list[Interval]]:
        found: dict[What, list[Interval]] = {}
        for skip in self.skips:
            first, end = skip.first_step, step if skip.end_step is None else min(skip.end_step, step)
            if first >= end:
                continue
            what: What = (skip.source, skip.documents)
            if skip.steps is not None:
                what, first, end = "steps", max(first, skip.steps[0]), min(end, skip.steps[1])
            elif skip.samples is not None:
                first, end = self.samples(first).start, self.samples(end).start
                what, first, end = "samples", max(first, skip.samples[0]), min(end, skip.samples[1])
            if first < end:
                found.setdefault(what, []).append((first, end))
        return {what: _union(intervals) for what, intervals in found.items()}

    def passing_over(self, steps: Interval, step: int) -> Journal:
        """This plan with further steps that are skipped, up to one that went wrong. It lasts whatever is resumed.

        Args:
            steps: [first, end), from 0; the last one is the one that went wrong.
            step: Steps that are done, from when on it holds.
        """
        return self._with_skips((*self.skips, Skip(steps=steps, first_step=step, fault=True)))

    def with_faults(self, other: Journal, step: int) -> Journal:
        """This plan of a run that has made `step` steps, with what another one skips because of faults.

        Args:
            other: One of the same run, which may have been written after this one.
            step: Steps that are done and so do not change.
        """
        mine = {(skip.steps, skip.first_step) for skip in self.skips if skip.fault}
        more = [
            skip.model_copy(update={"first_step": max(skip.first_step, step)})
            for skip in other.skips
            if skip.fault and (skip.steps, skip.first_step) not in mine
        ]
        return self._with_skips((*self.skips, *more)) if more else self

    def forked(self, step: int) -> Journal:
        """This plan as the past of a new run, which plans what follows the first `step` steps itself."""
        return self._with(self.skips, step)

    def _with_skips(self, skips: tuple[Skip, ...]) -> Journal:
        return self._with(skips, self.fork_step)

    def _with(self, skips: tuple[Skip, ...], fork_step: int) -> Journal:
        return Journal(
            order_version=self.order_version,
            seed=self.seed,
            segments=self.segments,
            skips=skips,
            fork_step=fork_step,
            end_sample=self.end_sample,
        )

    def going_on(self, saved: Journal, step: int) -> Journal:
        """This plan, made now, as the continuation of a run that has made `step` steps.

        Skips of the run file hold from when they held before, or, if they are new, from `step` on; those that left the
        run file have held until `step`. What is skipped because of a fault stays so.

        Args:
            saved: The journal that the run has had so far.
            step: Steps that are done.

        Raises:
            UserError: This plan gives other steps before `step`; the message says where and what differs.
        """
        journal = self._with_skips(self._merged_skips(saved, step))
        if journal.seen(step) != saved.seen(step):
            raise UserError(changed_past(saved, journal, step))
        return journal

    def _merged_skips(self, saved: Journal, step: int) -> tuple[Skip, ...]:
        before = [skip for skip in saved.skips if not skip.fault]
        faults = [skip for skip in saved.skips if skip.fault]
        now = []
        for skip in self.skips:
            same = next((old for old in before if old.what == skip.what and old.holds(max(step, old.first_step))), None)
            first = skip.first_step
            if same is not None:
                before.remove(same)
                first = skip.first_step if skip.given else same.first_step
            elif not skip.given:
                first = step
            now.append(skip.model_copy(update={"first_step": first, "given": False}))
        ended = [
            old.model_copy(update={"end_step": step if old.end_step is None else min(old.end_step, step)})
            for old in before
            if old.first_step < step
        ]
        return (*ended, *now, *faults)


def version_of(segments: Sequence[Segment]) -> Literal[1, 2]:
    """The `order_version` of a journal of these segments."""
    return 2 if any(segment.packed for segment in segments) else 1


def _contains(interval: Interval | None, number: int) -> bool:
    return interval is not None and interval[0] <= number < interval[1]


def _union(intervals: list[Interval]) -> list[Interval]:
    """Union of intervals as intervals that do not touch, ascending."""
    result: list[Interval] = []
    for first, end in sorted(intervals):
        if result and first <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((first, end))
    return result


_PLACE = {"offset", "lap", "cursor", "cap", "stops"}
"""Fields that the steps before decide, and the limit that is left."""


def _goes_on(stretch: Stretch, segment: Segment) -> bool:
    """True if a segment gives the samples that the stretch before it would have given without an end."""
    return (stretch.batch_size, stretch.sequence_length) == (segment.batch_size, segment.sequence_length) and (
        {name: source.model_dump(exclude=_PLACE) for name, source in stretch.sources.items()}
        == {name: source.model_dump(exclude=_PLACE) for name, source in segment.sources.items()}
    )
