"""`heldout_sets:`: named sets of held-out documents, scored while training and by `pipeline eval`."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from pipeline.config.base import MAX_SAMPLES, MAX_SEQUENCE, Section, Text
from pipeline.config.objective import ObjectiveConfig

_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_-]*$")


def _is_name(name: str) -> str:
    if not _NAME.match(name):
        raise ValueError(f"{name!r} is not a valid name of a set; use letters, digits, - and _")
    return name


SetName = Annotated[str, AfterValidator(_is_name)]
"""Name of a set, part of the names of metrics."""


class HeldOutSetConfig(Section):
    """A named set of held-out documents, scored while training and by `pipeline eval`.

    It is scored in addition to the split of `train.validation` and `eval`.
    """

    sources: list[Text] = Field(min_length=1)
    """Names of the sources of the set: from `data.sources`, of which `split` is taken, and from
    `data.heldout_sources`."""
    split: Text = "heldout"
    """Split of those of `data.sources`, one of `data.splits`."""
    sequence_length: int | None = Field(default=None, ge=1, le=MAX_SEQUENCE)
    """Tokens of a window; by default train.sequence_length."""
    every_steps: int | None = Field(default=None, ge=1)
    """Score the set every N steps while training, and at the end; by default train.validation.every_steps."""
    samples: int = Field(default=64, ge=0, le=MAX_SAMPLES)
    """Windows that are scored while training, the same ones each time, with each source in proportion; 0: only
    `pipeline eval` scores the set, with `eval.samples` windows (by default all)."""
    objective: ObjectiveConfig | None = None
    """Objective by which windows are scored; by default that of the training."""

    @model_validator(mode="after")
    def _together(self) -> HeldOutSetConfig:
        if twice := [name for number, name in enumerate(self.sources) if name in self.sources[:number]]:
            raise ValueError(f"sources: {twice[0]!r} is there twice; remove one of them")
        if self.objective is not None and not (self.objective.chooses or self.objective.type == "causal"):
            raise ValueError(
                f"objective.type: {self.objective.type} only rearranges documents for training; remove it to score "
                "text as it is"
            )
        return self
