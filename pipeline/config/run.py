"""`run:` and `launch:`: where a run lives, its seed, and the machine it uses."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipeline.config.base import AbsPath, Section


class RunConfig(Section):
    """Where the run lives and what its randomness starts from."""

    dir: AbsPath
    """Run folder: checkpoints, metrics, evaluations, the resolved config and, by default, the data."""
    seed: int = Field(default=1234, ge=0, lt=2**63)
    """Seed of the initial weights and of the order of the data."""


class LaunchConfig(Section):
    """What the processes of the run may use."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA where there is one."""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """CPU threads for torch; by default as many as there are cores for this process."""
