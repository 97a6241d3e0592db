"""The factor on the loss that keeps fp16 gradients within the format's range."""

from __future__ import annotations

import torch

from pipeline.config.train import LossScaleConfig


class LossScale:
    """Dynamic loss scaling (Micikevicius et al. 2018): halved at an overflow, doubled after a time without one.

    It lives on the device and is never read by the host, except for metrics and checkpoints. All ranks have the same.
    """

    def __init__(self, config: LossScaleConfig, device: torch.device) -> None:
        self._growth_steps = config.growth_steps
        self.scale = torch.tensor(config.initial, dtype=torch.float32, device=device)
        """Factor, fp32 scalar."""
        self._good = torch.zeros((), dtype=torch.int64, device=device)

    def update(self, finite: torch.Tensor) -> None:
        """Adapt to a step whose gradients were `finite` (bool scalar), or were not."""
        # No numbers where a tensor is wanted: each would be copied to the device, which waits for it.
        self._good = (self._good + 1).masked_fill(~finite, 0)
        grows = self._good >= self._growth_steps
        # Powers of two only change the exponent, so that scaling alone never rounds; below 1 it would not help.
        factor = torch.ones_like(self.scale).masked_fill(grows, 2.0).masked_fill(~finite, 0.5)
        self.scale = (self.scale * factor).clamp(min=1.0)
        self._good = self._good.masked_fill(grows, 0)

    def state(self) -> dict[str, float]:
        """Scale and counter, for the checkpoint."""
        return {"scale": self.scale.item(), "good_steps": self._good.item()}

    def load(self, state: dict[str, float]) -> None:
        """Take over what `state` gave."""
        self.scale = torch.full_like(self.scale, state["scale"])
        self._good = torch.full_like(self._good, int(state["good_steps"]))
