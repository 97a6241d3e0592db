"""`blend:` and `stage:`: phases of the run, what is skipped, and where parts are read from."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    Field,
    GetJsonSchemaHandler,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from pipeline.config.base import MAX_SAMPLES, MAX_SEQUENCE, Bytes, DataPath, Section, Share, StepsOrTokens, Text, Value
from pipeline.config.objective import MixedObjectiveConfig

Packing = Literal["windows", "best_fit"]
"""Samples of training: pieces of one long text, or packs of documents."""

_RANGE = re.compile(r"^([0-9][0-9_]*)(?:\s*-\s*([0-9][0-9_]*))?$")


class Range(Value):
    """Whole numbers: `7`, or `7-9` for 7, 8 and 9."""

    first: int
    last: int

    @model_validator(mode="before")
    @classmethod
    def _parse(cls, value: Any) -> Any:
        if isinstance(value, (dict, Range)):
            return value
        found = _RANGE.match(str(value).strip()) if not isinstance(value, bool) else None
        if found is None:
            raise ValueError("must be a whole number or a range like '7-9', both ends included")
        first = int(found[1])
        return {"first": first, "last": int(found[2]) if found[2] else first}

    @model_validator(mode="after")
    def _ascending(self) -> Range:
        if self.last < self.first:
            raise ValueError(f"the range ends ({self.last}) before it begins ({self.first})")
        return self

    @model_serializer
    def _text(self) -> int | str:
        return self.first if self.first == self.last else f"{self.first}-{self.last}"

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": _RANGE.pattern, "examples": ["7-9"]}]}

    def __str__(self) -> str:
        return str(self._text())


class Bound(Share):
    """A place among the documents of a dataset: a share from 0 to 1 of them, or `500 documents` from the first."""

    may_be_all: ClassVar[bool] = True

    def __str__(self) -> str:
        # As it was written: 0 and 1, not 0.0 and 1.0.
        return str(int(self.share) if self.documents is None and self.share.is_integer() else self._text())

    def of(self, documents: int) -> int:
        """Index of the document at this place, of `documents`."""
        if self.documents is not None:
            return self.documents
        # Floats stand for the shortest decimal that denotes them, as in the weights of a blend.
        return int(Fraction(repr(self.share)) * documents)


def _in_order(bounds: tuple[Bound, Bound]) -> tuple[Bound, Bound]:
    first, end = bounds
    # A share and a number can be compared only when the dataset is there; that is left to the plan.
    comparable = (first.documents is None) == (end.documents is None)
    if comparable and (first.documents or 0, first.share) >= (end.documents or 0, end.share):
        raise ValueError(f"[{first}, {end}] has no documents: the end must be greater than the start")
    return bounds


Slice = Annotated[tuple[Bound, Bound], AfterValidator(_in_order)]
"""The documents from the first place up to the second, which is not included."""


LEAST_LOSS_WEIGHT, MOST_LOSS_WEIGHT = 1e-6, 1e6
"""Bounds of loss weights: a product of two of them, and a sum of many, are exact enough in fp32 and fp64."""
LossWeight = Annotated[float, Field(ge=LEAST_LOSS_WEIGHT, le=MOST_LOSS_WEIGHT)]
"""Weight of tokens in the training loss."""


class PhaseConfig(Section):
    """A part of the run with weights, sources, sequence length or batch size of its own."""

    name: Text = ""
    """For tables and messages."""
    until: StepsOrTokens | None = None
    """End of the phase, counted from the start of the run, in steps or target tokens, rounded up to a step. All phases
    but the last need it; the last one lasts to the end of the run."""
    weights: Literal["tokens"] | dict[str, float] | None = None
    """By source; or `tokens` for shares that are proportional to tokens. By default the sources' own."""
    sources: list[Text] | None = None
    """The sources that take part; by default those of `weights`, or all."""
    temperature: float | None = Field(default=None, gt=0)
    """In place of blend.temperature."""
    loss_weights: dict[str, LossWeight] = Field(default_factory=dict)
    """By source: in place of its `loss_weight`."""
    slices: dict[str, Slice] = Field(default_factory=dict)
    """By source: read only the documents from the first place up to the second, in place of the source's `slice`."""
    sequence_length: int | None = Field(default=None, ge=1, le=MAX_SEQUENCE)
    """In place of train.sequence_length."""
    batch_size: int | None = Field(default=None, ge=1, le=MAX_SAMPLES)
    """In place of train.batch_size."""
    micro_batch_size: int | None = Field(default=None, ge=1, le=MAX_SAMPLES)
    """In place of train.micro_batch_size."""
    objective: MixedObjectiveConfig | None = None
    """In place of train.objective."""
    packing: Packing | None = None
    """In place of data.loader.packing."""

    @field_validator("weights", mode="before")
    @classmethod
    def _weights(cls, value: Any) -> Any:
        # As a union it would tell what is wrong once for each of its types, and not with which source.
        if value is None or value == "tokens":
            return value
        if not isinstance(value, dict) or not value:
            raise ValueError("must be 'tokens', or a weight for each source of the phase, like {web: 7, code: 3}")
        for name, weight in value.items():
            try:
                good = not isinstance(weight, bool) and 0 < float(weight) < math.inf
            except (TypeError, ValueError):
                good = False
            if not good:
                raise ValueError(f"{name}: {weight} is not a number > 0; omit a source to exclude it")
        return value

    @model_validator(mode="after")
    def _once(self) -> PhaseConfig:
        if self.sources is not None and (not self.sources or len(set(self.sources)) != len(self.sources)):
            raise ValueError(f"sources: give at least one, each only once; got {self.sources}")
        return self


class SkipConfig(Section):
    """Data not to train on. It moves no other sample. Set `steps`, `samples` or `source`."""

    steps: Range | None = None
    """Steps to skip, numbered from 1 as in the metrics: their data is not used and the weights do not change."""
    samples: Range | None = None
    """Global indices of samples, from 0, whose targets get no weight."""
    source: Text | None = None
    """A source whose targets get no weight; with `documents`, only theirs."""
    documents: list[Range] = Field(default_factory=list)
    """Documents of `source`, numbered as `pipeline data where` and `when` do."""
    from_step: int | None = Field(default=None, ge=1)
    """First step to which the entry applies; by default the first one that is trained with the entry in the run
    file."""

    @model_validator(mode="after")
    def _one(self) -> SkipConfig:
        if [self.steps, self.samples, self.source].count(None) != 2:
            raise ValueError("give exactly one of steps, samples and source")
        if self.documents and self.source is None:
            raise ValueError("documents needs `source`, the source that has them")
        if self.steps is not None and self.steps.first == 0:
            raise ValueError("steps are numbered from 1")
        return self


class BlendConfig(Section):
    """Shares of the sources in each step of the run. `docs/blend.md` is a guide."""

    temperature: float = Field(default=1.0, gt=0)
    """Shares are proportional to weight ** (1 / temperature): 1 leaves the weights unchanged, a higher value evens them
    out."""
    warn_epochs: float = Field(default=4.0, gt=0)
    """Warn when the run reads a source more often than this."""
    phases: list[PhaseConfig] = Field(default_factory=list)
    """Phases in the order of the run. More can be appended while the run is under way; trained steps cannot change."""
    skip: list[SkipConfig] = Field(default_factory=list)
    """Steps, samples and sources not to train on."""

    @model_validator(mode="after")
    def _ends(self) -> BlendConfig:
        for number, phase in enumerate(self.phases):
            last = number == len(self.phases) - 1
            if last and phase.until is not None:
                raise ValueError(f"phases.{number}: the last phase lasts to the end of the run; leave `until` out")
            if not last and phase.until is None:
                raise ValueError(
                    f"phases.{number}: `until` is missing; only the last phase lasts to the end of the run"
                )
        # Steps with tokens are compared when the plan is made.
        ends = {"steps": 0, "tokens": 0}
        for number, phase in enumerate(self.phases[:-1]):
            assert phase.until is not None
            count, unit = phase.until.count, phase.until.unit
            if count <= ends[unit]:
                raise ValueError(
                    f"phases.{number}: `until` counts from the start of the run, so {count:,} {unit} must be more than "
                    f"{ends[unit]:,} here"
                )
            ends[unit] = count
        return self


class StageConfig(Section):
    """Node-local copy of the data. Datasets on a disk are copied before training, those in a bucket while it runs."""

    data: Literal["shared", "local"] = "shared"
    """`local` copies the parts that the run needs to `dir`, checks their hashes, and reads them there. `shared` reads
    them where they are; of a dataset in a bucket, ranges of them."""
    dir: DataPath | None = None
    """Node-local folder for the copies, which stay for the next start; by default TMPDIR or /tmp. Of datasets in a
    bucket the indices are there, whatever `data` says."""
    size: Bytes | None = Field(default=None, ge=1, lt=2**63)
    """Most bytes of tokens in `dir` that are copied from buckets; by default all that fits while 5 % of the disk stay
    free. What has no room is read by ranges."""
    ahead: int = Field(default=16, ge=1, le=10_000)
    """Steps whose tokens are asked for ahead, where they are read by ranges from a bucket."""
