"""Segments: the records that a journal consists of, and what they have decided by some step."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pipeline.data.order.blend import UNIT, Order

Interval = tuple[int, int]
"""[first, end)"""
What = str | tuple[str | None, tuple[Interval, ...]]
"""Things that are skipped: "steps", "samples", or documents of a source."""


class Sized(Protocol):
    """A dataset as a plan needs it: its sizes."""

    @property
    def tokens(self) -> int:
        """Tokens in all."""

    @property
    def documents(self) -> int:
        """Documents in all."""

    def document_start(self, document: int) -> int:
        """Offset of a document's first token; of the document after the last one, the number of tokens."""


class Record(BaseModel):
    """A frozen record of the journal; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SourceState(Record):
    """A source in a segment."""

    tokens: int = Field(ge=1)
    """Tokens of one epoch's circular text: of the slice, if there is one."""
    documents: tuple[int, int] | None = None
    """The slice: documents [first, end) of the dataset; None for all of them."""
    packs: int | None = Field(default=None, ge=1)
    """Packs of one epoch, if its samples are packs; None for windows."""
    weight: int = Field(ge=1, le=UNIT)
    """Share of the blend in units of 2**-32."""
    offset: int = Field(ge=0)
    """v: how far from due its first sample of the segment is."""
    lap: int = Field(ge=0)
    """Epoch of its first sample of the segment."""
    cursor: int = Field(ge=0)
    """Position in that epoch of its first sample of the segment."""
    cap: int | None = Field(default=None, ge=0)
    """Samples that it can give in this segment; None for no limit."""
    stops: bool = False
    """True if the run ends when more than `cap` samples would be needed; else the other sources take its place."""

    loss_weight: float = Field(default=1.0, gt=0)
    """Weight of its targets in the training loss."""
    document_weights: bool = False
    """True if the weights of its documents, which the dataset has, are factors besides."""
    target_mask: bool = False
    """True if the dataset says of each token whether it is trained on as a target."""

    @property
    def text(self) -> tuple[int, Interval | None, int | None]:
        """Contents of an epoch: tokens, slice and packs."""
        return self.tokens, self.documents, self.packs

    def epoch_samples(self, length: int) -> int:
        """Samples of an epoch with L = `length`: windows, or packs."""
        return self.tokens // length if self.packs is None else self.packs

    @property
    def weighs(self) -> bool:
        """True if its targets may weigh other than 1."""
        return self.document_weights or self.loss_weight != 1

    def exhausted(self, samples: int) -> bool:
        """True if it has dropped out of the blend after that many samples of the segment."""
        return not self.stops and samples == self.cap


class Segment(Record):
    """A stretch of the run with one batch size, one sequence length and one blend."""

    first_step: int = Field(ge=0)
    """First step, counted from 0."""
    first_sample: int = Field(ge=0)
    """Global index of its first sample."""
    batch_size: int = Field(ge=1)
    """Samples of a step, over all ranks and micro-batches."""
    sequence_length: int = Field(ge=1)
    """Slots of a sample: targets of a window, or places for targets in a pack."""
    sources: dict[str, SourceState] = Field(min_length=1)
    """By name."""

    @model_validator(mode="after")
    def _weights(self) -> Segment:
        total = sum(source.weight for source in self.sources.values())
        if total != UNIT:
            raise ValueError(f"weights must sum to {UNIT}, got {total}")
        if len({source.packs is None for source in self.sources.values()}) > 1:
            raise ValueError("either all sources of a segment have packs, or none")
        return self

    @property
    def packed(self) -> bool:
        """True if samples are packs, False if they are windows."""
        return any(source.packs is not None for source in self.sources.values())

    @property
    def packing(self) -> str:
        """`data.loader.packing` of the segment."""
        return "best_fit" if self.packed else "windows"

    @property
    def epoch_samples(self) -> dict[str, int]:
        """Samples in an epoch of each source: windows, or packs."""
        return {name: source.epoch_samples(self.sequence_length) for name, source in self.sources.items()}

    @property
    def weighs(self) -> bool:
        """True if targets may weigh other than 1 in the training loss."""
        return any(source.weighs for source in self.sources.values())

    def order(self) -> Order:
        """Whose turn it is at each position of the segment."""
        sources = self.sources.values()
        return Order(
            list(self.sources),
            [source.weight for source in sources],
            [source.offset for source in sources],
            [None if source.stops else source.cap for source in sources],
        )


class Skip(Record):
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
    fault: bool = False
    """True if the run decided it, going back from a fault in its last step: the run file need not name it."""
    given: bool = Field(default=False, exclude=True)
    """True if the run file says `from_step`; not written down, since it matters only where a run resumes."""

    @property
    def what(self) -> Hashable:
        """The data that is skipped, whenever that is."""
        return self.steps, self.samples, self.source, self.documents

    def holds(self, step: int) -> bool:
        """True if it is in force in this step."""
        return self.first_step <= step and (self.end_step is None or step < self.end_step)


class Stretch(NamedTuple):
    """Steps of the past that one rule decided, however many segments it was written in."""

    first_step: int
    batch_size: int
    sequence_length: int
    sources: dict[str, SourceState]
    """As at the first step; `cap` is what an exhausted source gave, and None for all others."""
    drawn: dict[str, int]
    """Samples by source."""

    @property
    def packing(self) -> str:
        """`data.loader.packing` of the steps."""
        return "windows" if all(source.packs is None for source in self.sources.values()) else "best_fit"


class DecidedSteps(NamedTuple):
    """All that decided the steps before some step: equal for two journals that agree on those steps."""

    seed: int
    stretches: list[Stretch]
    skips: dict[What, list[Interval]]
    """Skipped steps, samples, and documents with the steps in which they are."""
