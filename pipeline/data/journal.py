"""The run's plan as it is written down: which samples each step is made of, and where each source stands.

Steps, samples and tokens are three counters that only the journal relates. Step s, counted from 0, is made of the
samples [first_sample + (s - first_step) * batch_size, + batch_size) of its segment. Past segments are frozen: the
journal of a run is a prefix of every later journal of that run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pipeline.config import Config
from pipeline.data.blend import UNIT, Order, integer_weights, keyed_offset
from pipeline.data.hashing import value_hash
from pipeline.data.permutation import IntArray
from pipeline.errors import UserError

_BLOCK = 1024
"""Least number of positions looked up at once, and that for each 64 sources."""


class Sized(Protocol):
    """Something with a number of tokens, like a dataset."""

    @property
    def tokens(self) -> int:
        """Tokens in all."""
        ...


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SourceState(_Record):
    """A source in a segment."""

    tokens: int = Field(ge=1)
    """Tokens of one lap's circular text: of the slice, if there is one."""
    documents: tuple[int, int] | None = None
    """The slice: documents [first, end) of the dataset; None for all of them."""
    weight: int = Field(ge=1, le=UNIT)
    """Share of the blend in units of 2**-32."""
    offset: int = Field(ge=0)
    """v: how far from due its first sample of the segment is."""
    lap: int = Field(ge=0)
    """Lap of its first sample of the segment."""
    cursor: int = Field(ge=0)
    """Position in that lap of its first sample of the segment."""
    cap: int | None = Field(default=None, ge=0)
    """Samples that it can give in this segment; None for no limit."""
    stops: bool = False
    """Whether the run ends when more than `cap` samples would be needed; else the other sources take its place."""


class Segment(_Record):
    """A stretch of the run with one batch size, one sequence length and one blend."""

    first_step: int = Field(ge=0)
    """First step, counted from 0."""
    first_sample: int = Field(ge=0)
    """Global index of its first sample."""
    batch_size: int = Field(ge=1)
    """Samples of a step, over all ranks and micro-batches."""
    sequence_length: int = Field(ge=1)
    """Targets of a sample."""
    sources: dict[str, SourceState] = Field(min_length=1)
    """By name."""

    @model_validator(mode="after")
    def _weights(self) -> Segment:
        total = sum(source.weight for source in self.sources.values())
        if total != UNIT:
            raise ValueError(f"weights must sum to {UNIT}, got {total}")
        return self


class Skip(_Record):
    """Something that is not trained on: steps, samples, a source, or documents of it. Half-open ranges, from 0."""

    steps: tuple[int, int] | None = None
    """Steps [first, end), numbered from 0."""
    samples: tuple[int, int] | None = None
    """Global indices [first, end)."""
    source: str | None = None
    """Name of a source."""
    documents: tuple[tuple[int, int], ...] = ()
    """Ranges [first, end) of documents of the source's dataset; none for all of them."""
    first_step: int = Field(ge=0)
    """Holds from this step on."""
    end_step: int | None = None
    """Holds up to this step, not included; None for ever."""


class Journal(_Record):
    """Everything that decides the order of the data, but for the tokens themselves."""

    order_version: Literal[1] = 1
    """Version of the mathematics in `docs/sampler.md`."""
    seed: int = Field(ge=0)
    """Seed of offsets, permutations and phases."""
    segments: list[Segment] = Field(min_length=1)
    """In the order of the run, without gaps."""
    skips: tuple[Skip, ...] = ()
    """What is not trained on. It moves no sample."""

    @model_validator(mode="after")
    def _contiguous(self) -> Journal:
        if self.segments[0].first_step or self.segments[0].first_sample:
            raise ValueError("the first segment must start at step 0 and sample 0")
        for one, two in zip(self.segments, self.segments[1:], strict=False):
            steps = two.first_step - one.first_step
            if steps < 1 or two.first_sample != one.first_sample + steps * one.batch_size:
                raise ValueError(f"the segment at step {two.first_step} does not start where the one before it ends")
        return self

    @classmethod
    def plan(cls, config: Config, datasets: Mapping[str, Sized]) -> Journal:
        """The journal of a run that starts now.

        Args:
            config: The run file.
            datasets: The training split of every source by name. Without weights, shares are proportional to tokens.

        Raises:
            UserError: A source's share is too small for the blend.
        """
        given = {source.name: source.weight for source in config.data.sources}
        weights = integer_weights({name: given[name] or dataset.tokens for name, dataset in datasets.items()})
        seed = config.run.seed
        sources = {
            name: SourceState(
                tokens=datasets[name].tokens, weight=weight, offset=keyed_offset(seed, name), lap=0, cursor=0
            )
            for name, weight in weights.items()
        }
        segment = Segment(
            first_step=0,
            first_sample=0,
            batch_size=config.train.batch_size,
            sequence_length=config.train.sequence_length,
            sources=sources,
        )
        return cls(seed=seed, segments=[segment])

    def to_json(self) -> dict[str, Any]:
        """As JSON types; equal journals give equal JSON with sorted keys."""
        return self.model_dump(mode="json")

    @classmethod
    def from_json(cls, value: Any) -> Journal:
        """The inverse of `to_json`.

        Raises:
            UserError: `value` is no journal that this version of the code understands.
        """
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise UserError(f"the journal of the run cannot be used: {error}") from error

    @property
    def fingerprint(self) -> str:
        """A hash of the whole journal, 32 hexadecimal digits."""
        return value_hash(self.to_json())

    @property
    def names(self) -> list[str]:
        """All sources of all segments, sorted."""
        return sorted({name for segment in self.segments for name in segment.sources})

    def segment_number(self, step: int) -> int:
        """Index in `segments` of the one that `step` is in."""
        assert step >= 0
        return bisect_right([segment.first_step for segment in self.segments], step) - 1

    def samples(self, step: int) -> range:
        """Global indices of the samples of `step`."""
        segment = self.segments[self.segment_number(step)]
        first = segment.first_sample + (step - segment.first_step) * segment.batch_size
        return range(first, first + segment.batch_size)

    def tokens(self, step: int) -> int:
        """Targets drawn by all steps before `step`, masked ones included."""
        total = 0
        for segment, samples in self.drawn(step):
            total += samples * segment.sequence_length
        return total

    def drawn(self, step: int) -> list[tuple[Segment, int]]:
        """The segments that begin before `step`, each with its number of samples before `step`."""
        ends = [segment.first_step for segment in self.segments[1:]] + [step]
        return [
            (segment, (min(end, step) - segment.first_step) * segment.batch_size)
            for segment, end in zip(self.segments, ends, strict=True)
            if segment.first_step < step
        ]


class Draws(NamedTuple):
    """What samples are made of; three arrays of one length."""

    source: IntArray
    """Index into `Journal.names`."""
    lap: IntArray
    """Lap of the source."""
    position: IntArray
    """Position in the lap."""


class Sampler:
    """The order of the run: global sample index -> (source, lap, position). A pure function of the journal.

    Args:
        journal: The plan.
        counts: Instances in a lap, for each segment by source name.
    """

    def __init__(self, journal: Journal, counts: Sequence[Mapping[str, int]]) -> None:
        self.journal = journal
        self._counts = counts
        self._orders = [
            Order(
                list(segment.sources),
                [source.weight for source in segment.sources.values()],
                [source.offset for source in segment.sources.values()],
            )
            for segment in journal.segments
        ]
        # Steps are smaller than what a look-up costs least for, so blocks are kept and shared by neighbouring steps.
        self._block = lru_cache(maxsize=8)(self._block_at)

    def step(self, step: int) -> Draws:
        """The samples of a step."""
        number = self.journal.segment_number(step)
        segment = self.journal.segments[number]
        samples = self.journal.samples(step)
        start, stop = samples.start - segment.first_sample, samples.stop - segment.first_sample
        size = self._block_size(segment)
        blocks = [self._block(number, block) for block in range(start // size, (stop - 1) // size + 1)]
        joined = (np.concatenate(arrays) for arrays in zip(*blocks, strict=True))
        offset = start - start // size * size
        return Draws(*(array[offset : offset + len(samples)] for array in joined))

    def targets(self, step: int) -> dict[str, int]:
        """Targets drawn from each source by all steps before `step`, in closed form."""
        total = dict.fromkeys(self.journal.names, 0)
        for (segment, samples), order in zip(self.journal.drawn(step), self._orders, strict=False):
            for name, count in zip(order.names, order.counts(samples), strict=True):
                total[name] += count * segment.sequence_length
        return total

    @staticmethod
    def _block_size(segment: Segment) -> int:
        return max(segment.batch_size, _BLOCK * (1 + len(segment.sources) // 64))

    def _block_at(self, number: int, block: int) -> Draws:
        segment, order, counts = self.journal.segments[number], self._orders[number], self._counts[number]
        size = self._block_size(segment)
        source, draw = order.at(block * size, size)
        states = list(segment.sources.values())
        place = np.array([state.cursor for state in states])[source] + draw
        in_lap = np.array([counts[name] for name in order.names])[source]
        lap = np.array([state.lap for state in states])[source] + place // in_lap
        names = {name: index for index, name in enumerate(self.journal.names)}
        return Draws(np.array([names[name] for name in order.names])[source], lap, place % in_lap)
