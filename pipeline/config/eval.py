"""`eval:` and `generate:`: what is measured on a checkpoint, and how text is continued."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipeline.config.base import Section


class EvalConfig(Section):
    """Held-out evaluation."""

    split: str = "heldout"
    """Which of `data.splits` is evaluated."""
    batch_size: int = Field(default=8, ge=1)
    """Windows of one forward pass."""
    every_checkpoint: bool = False
    """On SLURM: send an evaluation job for each permanent checkpoint (`train.checkpoint.keep_every`) while training
    goes on."""
    weights: Literal["model", "ema"] = "model"
    """Which weights of a checkpoint are evaluated, and continue prompts: those that were trained, or their moving
    average (`train.ema`)."""


class GenerateConfig(Section):
    """How `pipeline generate`, and the sample at the end of `pipeline run`, continue a prompt."""

    prompt: str = "def "
    """Text to continue."""
    max_tokens: int = Field(default=64, ge=1)
    """Tokens to add at most; generation ends earlier at the end of the document."""
    temperature: float = Field(default=0.8, ge=0, le=1000)
    """Divides the logits; 0 takes the most probable token each time (greedy)."""
    top_k: int | None = Field(default=None, ge=1)
    """Draw from the k most probable tokens only."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Draw from the smallest set of tokens whose probability reaches this (nucleus)."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the draws."""
