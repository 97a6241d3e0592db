"""Sections that name weights outside of the run: those that it starts from, a teacher's, and a reference's."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipeline.config.base import Count, DataPath, Section
from pipeline.config.layers.mixers import MAX_LAYERS


class WeightsConfig(Section):
    """Weights outside of the run: those of another run, exported ones, or a Hugging Face model's."""

    path: DataPath | None = None
    """A run folder, a checkpoint's folder, or one that `pipeline checkpoint export` or `average`, or `pipeline convert
    from-hf` wrote."""
    hf: DataPath | None = None
    """Instead of `path`: the folder of a downloaded Hugging Face model."""
    step: int | None = Field(default=None, ge=0)
    """Checkpoint of a run folder, by its step; by default the newest one."""
    weights: Literal["model", "ema"] = "model"
    """The weights that were trained, or their moving average."""

    @model_validator(mode="after")
    def _one_place(self) -> WeightsConfig:
        if (self.path is None) == (self.hf is None):
            raise ValueError("give exactly one of path and hf (a Hugging Face model's folder)")
        if self.hf is not None and (self.step is not None or self.weights != "model"):
            raise ValueError("a Hugging Face model has one set of weights: remove step and weights")
        return self


class InitFromConfig(WeightsConfig):
    """Weights that a new run starts from. Steps and data begin anew, and so do moments and schedule by default."""

    optimizer: bool = False
    """Load AdamW's moments and count of steps, too, from a folder that `pipeline convert from-megatron --optimizer`
    wrote."""
    tokens: Count | None = None
    """Tokens that `train.schedule` has behind it at the first step: it continues there, and a warm-up of fewer tokens
    is not repeated. By default those of the folder with `optimizer: true`, else 0."""
    layers: list[Annotated[int, Field(ge=0, lt=MAX_LAYERS)]] | None = Field(
        default=None, min_length=1, max_length=MAX_LAYERS
    )
    """Depth pruning: numbers of the source's layers, from 0, ascending, that become the layers of `model`. By default
    all of them."""
    dims: DataPath | None = None
    """Width pruning: a file of `pipeline eval --importance` on these weights. Where `model` has fewer channels (`dim`),
    heads, mlp channels or experts than the source, the most important ones are kept."""

    @property
    def prunes(self) -> bool:
        """True if the run's model is a part of the source."""
        return self.layers is not None or self.dims is not None

    @model_validator(mode="after")
    def _is_pruning(self) -> InitFromConfig:
        if self.layers is not None and sorted(set(self.layers)) != self.layers:
            raise ValueError(f"layers {self.layers}: each layer may be named once, in ascending order")
        if self.prunes and self.optimizer:
            raise ValueError("optimizer: true needs the whole model: leave out layers and dims, or optimizer")
        if self.dims is not None and self.hf is not None:
            raise ValueError(
                "dims needs path: importance is measured on the folder that `pipeline convert from-hf` writes; convert "
                "the model, run `pipeline eval --weights FOLDER --importance`, and name FOLDER as path"
            )
        return self

    @model_validator(mode="after")
    def _has_moments(self) -> InitFromConfig:
        if self.optimizer and (self.hf is not None or self.weights != "model"):
            raise ValueError("optimizer: true needs path and weights: model; other weights have no moments")
        return self


class DistillConfig(Section):
    """Distillation: the model learns the predictions of a frozen teacher for every token, besides the text.

    The loss is (1 - weight) times the cross entropy, plus weight times temperature^2 times KL(teacher || model) over
    the whole vocabulary.
    """

    teacher: WeightsConfig
    """The teacher. It has the run's tokenizer; its size, and the kinds of its layers, may be others."""
    weight: float = Field(default=0.9, ge=0, le=1)
    """Share of the divergence in the loss. With 0 the teacher is not loaded."""
    temperature: float = Field(default=1.0, gt=0, le=1000)
    """Divisor of the logits of both models in the divergence: above 1 rare tokens count more."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Format of the teacher's weights, and of what it computes."""


class PreferenceConfig(Section):
    """Direct preference optimization (DPO) on datasets of pairs, `chat.format: preference`.

    The reference is the model that the run starts from, `train.init_from`. Its log-probabilities of all pairs are
    computed before the first step, and kept.
    """

    beta: float = Field(default=0.1, gt=0, le=1000)
    """Factor of the log-probability ratios of model and reference. The smaller it is, the further the model may move
    away from the reference."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of pairs that are taken to be in the wrong order."""
    reference_dir: DataPath | None = None
    """Folder for the log-probabilities that the reference gives; runs from the same weights may share it. By default
    `_reference` in `data.dir`."""
