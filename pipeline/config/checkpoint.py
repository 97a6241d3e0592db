"""`train.checkpoint:`: when a run saves, what it keeps, and what it exports meanwhile."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipeline.config.base import Bytes, FolderUrl, Section, Steps, Text


class ExportConfig(Section):
    """Folders in Hugging Face's format that are written while training, in `hf/` of the run folder."""

    every_steps: int = Field(ge=1)
    """Write one every N steps, and at the end; a checkpoint is written at each of these steps."""
    keep: int | None = Field(default=None, ge=1)
    """Number of latest folders to keep; by default all."""
    weights: Literal["model", "ema"] = "model"
    """The weights that were trained, or their moving average (`train.ema`)."""
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Type of the weights in the files; by default as they are stored (fp32)."""


class MirrorConfig(Section):
    """Copies of checkpoints in object storage, uploaded in the background."""

    to: FolderUrl
    """URL of a folder in a bucket, for this run alone: `s3://BUCKET/RUN`, `gs://...` or `az://...`. Credentials come
    from the environment."""
    every_steps: int | None = Field(default=None, ge=1)
    """Upload the checkpoint of every N-th step, and the last one; a checkpoint is written at each of these steps. By
    default every checkpoint that is written."""
    keep: int = Field(default=3, ge=1)
    """Number of latest checkpoints to keep there."""
    keep_every: Steps | None = Field(default=None, ge=1)
    """Also upload the checkpoint of every N-th step (`1000`, `1000 steps`), and never remove it."""
    max_bytes_per_second: Bytes | None = Field(default=None, ge=2**16)
    """Most bytes that each process sends per second; by default no limit."""
    patience_seconds: float = Field(default=1800, ge=0, lt=10**9)
    """Seconds for which an upload that fails is tried again. Then the next checkpoint is uploaded in its place. At the
    end of the run the last upload is waited for as long."""


class CheckpointConfig(Section):
    """Times of saves, and numbers of checkpoints to keep."""

    every_steps: int = Field(default=500, ge=1)
    """Save every N steps, and at the end."""
    every_minutes: float | None = Field(default=None, gt=0)
    """Also save when the last save is N minutes ago."""
    keep: int = Field(default=2, ge=1)
    """Number of latest checkpoints to keep."""
    keep_every: Steps | None = Field(default=None, ge=1)
    """Write a permanent checkpoint every N steps (`1000`, `1000 steps`), which retention never removes."""
    keep_best: int | None = Field(default=None, ge=1)
    """Number of best checkpoints to keep besides: those with the lowest validation loss."""
    best_of: Text | None = None
    """keep_best: the set of `heldout_sets` whose loss decides; by default the loss of `train.validation`."""
    async_save: bool = True
    """Write while training continues: a step waits only until model and optimizer are copied to the memory of the host,
    which needs room for that copy."""
    retries: int = Field(default=2, ge=0, le=10**9)
    """Number of times that a failed save is tried again."""
    max_unsaved_minutes: float = Field(default=120, gt=0, lt=10**9)
    """When two saves have failed and the newest checkpoint is older than this, one last save is tried. If that fails,
    too, the run ends with code 79. One failed save is enough if no other one follows within this time."""
    export: ExportConfig | None = None
    """Exports in Hugging Face's format, written in the background from checkpoints. Off by default."""
    mirror: MirrorConfig | None = None
    """Copies of checkpoints in object storage, uploaded in the background. Off by default."""
