"""`train.objective:` and `blend.phases.N.objective:`: what a model is asked to predict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from pipeline.config.base import DATA, Section, Text
from pipeline.config.plugins import NamedPlugin, ObjectiveOptions, find_plugin, is_plugin

FIM_SENTINELS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
SPAN_SENTINELS = "<extra_id_{}>"
PAPER_DENOISERS = ((3.0, 0.15), (8.0, 0.15), (None, 0.25), (3.0, 0.5), (8.0, 0.5), (64.0, 0.15), (64.0, 0.5))
"""Mean spans and rates of UL2's denoisers: two of short spans (R), one of prefixes (S), four of much noise (X)."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveKind:
    """A type of objective: the keys that it reads, the models that it trains, and what of a window it predicts."""

    keys: tuple[str, ...] = ()
    """Keys of the section besides `type`. A resume compares these alone."""
    rate: float = 0.0
    """Default of `rate`."""
    direction: Literal["causal", "both"] = "causal"
    """`model.direction` of its models."""
    encoder: bool = False
    """Its models have `model.encoder`."""
    packs: bool = True
    """It also takes packs of whole documents."""
    chooses: bool = True
    """It chooses which tokens are predicted; if not, each token of a window is."""
    masks_start: bool = False
    """`train.loss.mask_document_start` has an effect: a document's first token would be a target."""
    note: str | None = None
    """Meaning of `predicted` in answers of `pipeline data`."""


_SPANS_NOTE = (
    "the encoder reads a sentinel in place of each range of predicted tokens; the decoder predicts them, and an "
    "end-of-document token for each document"
)
KINDS: dict[str, ObjectiveKind] = {
    "causal": ObjectiveKind(chooses=False, masks_start=True),
    "fim": ObjectiveKind(
        keys=("rate", "spm_rate", "sentinels"),
        rate=0.5,
        chooses=False,
        masks_start=True,
        note=(
            "the model sees some pieces rearranged; the first three tokens of each of these make room for the sentinels"
        ),
    ),
    "masked": ObjectiveKind(
        keys=("rate", "mask_token", "random_share", "keep_share", "whole_words"),
        rate=0.15,
        direction="both",
        note="predicted tokens are masked, random, or as they are in the model's input",
    ),
    "prefix": ObjectiveKind(
        masks_start=True,
        note="the tokens of a document before the predicted ones are its prefix",
    ),
    "spans": ObjectiveKind(
        keys=("rate", "mean_span", "sentinels", "start_token"),
        rate=0.15,
        encoder=True,
        packs=False,
        note=_SPANS_NOTE,
    ),
    "ul2": ObjectiveKind(keys=("denoisers", "sentinels", "start_token"), encoder=True, packs=False, note=_SPANS_NOTE),
}
"""By `train.objective.type`."""


class DenoiserConfig(Section):
    """A denoiser of the mixture of UL2."""

    rate: float = Field(gt=0, lt=1)
    """Share of the tokens that the decoder predicts."""
    mean_span: float | None = Field(default=3.0, ge=1)
    """Mean length of the spans. `null`: one span at the end of each document, a prefix language model."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the samples, relative to the other denoisers."""
    mode: Text | None = None
    """Special token at the beginning of the encoder's text of each document, for example `[NLU]`, `[NLG]`, `[S2S]`."""


class ObjectiveConfig(Section):
    """Objective of the training."""

    type: Annotated[
        Literal["causal", "fim", "masked", "prefix", "spans", "ul2"] | str, NamedPlugin("objectives"), DATA
    ] = "causal"
    """`causal`: each token from those before it. `fim`: fill-in-the-middle, for code (Bavarian et al. 2022). `masked`:
    masked tokens (BERT). `prefix`: tokens after a prefix that attends in both directions. `spans`: spans that the
    encoder's text lacks (T5). `ul2`: spans by one of several denoisers per window (UL2). A name with a dot: an
    installed plug-in, see `docs/plugins.md`."""
    options: ObjectiveOptions = None
    """Options of the plug-in that `type` names."""
    rate: float | None = Field(default=None, ge=0, le=1)
    """fim: share of rearranged documents, by default 0.5. masked, spans: share of predicted tokens, by default 0.15; up
    to 0.4 for masked (Wettig et al. 2023)."""
    spm_rate: float = Field(default=0.5, ge=0, le=1)
    """fim: share of the rearranged documents in the order suffix, prefix, middle; the others have prefix, suffix,
    middle."""
    sentinels: Annotated[Text, Field(min_length=1)] | list[Text] | None = None
    """Special tokens. fim: those before prefix, suffix and middle; by default <|fim_prefix|>, <|fim_suffix|>,
    <|fim_middle|>. spans, ul2: those in place of the spans of a document, as a list, or a pattern in which {} counts
    from 0; by default <extra_id_{}>."""
    mask_token: Text = "[MASK]"
    """masked: special token in place of masked ones."""
    random_share: float = Field(default=0.1, ge=0, le=1)
    """masked: share of the masked tokens that become a random token."""
    keep_share: float = Field(default=0.1, ge=0, le=1)
    """masked: share of the masked tokens that stay unchanged."""
    whole_words: bool = False
    """masked: mask whole words; one word per window may be masked only in part, to keep the number of masked tokens."""
    mean_span: float = Field(default=3.0, ge=1)
    """spans: mean length of the spans."""
    start_token: Text | None = None
    """spans, ul2: first token of the decoder in each document; by default the end-of-document token."""
    denoisers: list[DenoiserConfig] = Field(default_factory=list)
    """ul2: the mixture, one of which is drawn per window. Default, as in the paper: spans of mean 3, 8 and 64 at rates
    of 0.15 and 0.5, and prefixes with 0.25 after them; no mode tokens."""

    @property
    def share(self) -> float:
        """`rate` with its default."""
        return objective_kind(self.type).rate if self.rate is None else self.rate

    @property
    def chooses(self) -> bool:
        """True if it chooses which tokens are predicted, False if each token of a window is."""
        return objective_kind(self.type).chooses

    @property
    def sentinel_tokens(self) -> str | list[str]:
        """`sentinels` with its default."""
        if self.sentinels is None:
            return list(FIM_SENTINELS) if self.type == "fim" else SPAN_SENTINELS
        return self.sentinels

    @property
    def mixture(self) -> list[DenoiserConfig]:
        """`denoisers` with its default."""
        return self.denoisers or [DenoiserConfig(rate=rate, mean_span=mean) for mean, rate in PAPER_DENOISERS]

    @model_validator(mode="after")
    def _fits_type(self) -> ObjectiveConfig:
        if self.type == "fim" and (isinstance(self.sentinel_tokens, str) or len(self.sentinel_tokens) != 3):
            raise ValueError("sentinels: `type: fim` needs a list of three, those of prefix, suffix and middle")
        if self.type in ("spans", "ul2"):
            if isinstance(self.sentinel_tokens, str) and self.sentinel_tokens.count("{}") != 1:
                raise ValueError(f"sentinels: {self.sentinels!r} needs one {{}}, in whose place numbers from 0 stand")
            if not self.sentinel_tokens:
                raise ValueError("sentinels: give at least one, or leave the key out")
        if self.type == "masked" and not self.share > 0:
            raise ValueError("rate: 0 predicts nothing; `type: masked` needs more than 0, 0.15 as BERT")
        if self.type == "spans" and not 0 < self.share < 1:
            raise ValueError(f"rate: {self.rate:g} leaves nothing to predict, or to predict it from; 0.15 is T5's")
        if self.random_share + self.keep_share > 1:
            raise ValueError(
                f"random_share {self.random_share:g} and keep_share {self.keep_share:g} are more than 1 together"
            )
        return self


class MixedObjectiveConfig(ObjectiveConfig):
    """Objective of the training; some sources may have another one."""

    by_source: dict[str, ObjectiveConfig] = Field(default_factory=dict)
    """By source: its objective in place of this one, with all its keys. All objectives must make windows of the same
    shape for the same kind of model."""

    def of(self, source: str) -> ObjectiveConfig:
        """The objective of a source."""
        return self.by_source.get(source, self)

    @property
    def all(self) -> list[ObjectiveConfig]:
        """This one and those of sources."""
        return [self, *self.by_source.values()]


def objective_values(objective: ObjectiveConfig) -> dict[str, Any]:
    """The keys that an objective reads, with their defaults."""
    if is_plugin(objective.type):
        options = None if objective.options is None else objective.options.model_dump(mode="json")
        found = find_plugin("objectives", objective.type)
        return {"type": objective.type, "options": options, "plugin": found.identity}
    values = objective.model_dump(mode="json", include={"type", *KINDS[objective.type].keys})
    defaults = {
        "rate": objective.share,
        "sentinels": objective.sentinel_tokens,
        "denoisers": [one.model_dump(mode="json") for one in objective.mixture],
    }
    return values | {key: value for key, value in defaults.items() if key in values}


def mixed_values(objective: MixedObjectiveConfig) -> dict[str, Any]:
    """Keys of `objective_values`, with those of single sources if there are any."""
    values = objective_values(objective)
    if objective.by_source:
        values["by_source"] = {name: objective_values(each) for name, each in objective.by_source.items()}
    return values


def objective_class(type: str) -> Any:
    """The class of an objective's plug-in, whose attributes say what it needs.

    Raises:
        UserError: It cannot be imported.
    """
    return find_plugin("objectives", type).load()


def objective_kind(type: str) -> ObjectiveKind:
    """The kind of objective that a name stands for, also that of a plug-in."""
    if not is_plugin(type):
        return KINDS[type]
    found = objective_class(type)
    return ObjectiveKind(
        direction=found.direction,
        encoder=bool(found.encoder),
        packs=bool(found.packs),
        chooses=bool(found.chooses),
        masks_start=False,
    )
