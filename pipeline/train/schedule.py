"""Learning rate as a pure function of the tokens trained on. Nothing to save, nothing to restore."""

from __future__ import annotations

import math

from pipeline.config.train import ScheduleConfig
from pipeline.errors import UserError


class Schedule:
    """Warm-up from zero to 1, then the configured shape down to `min_ratio`.

    Positions are target tokens at the *end* of a step: the first step already learns, and the last one has exactly
    `min_ratio`. `wsd` is from MiniCPM (2404.06395), with a linear decay.
    """

    def __init__(self, config: ScheduleConfig, total_tokens: int, tokens_per_step: int) -> None:
        self._config = config
        self._total = total_tokens
        self._warmup = config.warmup.in_tokens(tokens_per_step)
        self._decay = config.decay.in_tokens(tokens_per_step) if config.decay else 0
        if self._warmup + self._decay > total_tokens:
            raise UserError(
                f"train.schedule: warmup {config.warmup._text()}"
                + (f" and decay {config.decay._text()} together last" if config.decay else " lasts")
                + f" {self._warmup + self._decay:,} tokens, but train.duration has {total_tokens:,}"
            )

    def factor(self, tokens: int) -> float:
        """Learning rate over its peak for the step that ends at `tokens`."""
        if tokens < self._warmup:
            return tokens / self._warmup
        low = self._config.min_ratio
        if self._config.type == "constant":
            return 1.0
        start = self._total - self._decay if self._config.type == "wsd" else self._warmup
        if tokens <= start or start >= self._total:
            return 1.0
        done = min(1.0, (tokens - start) / (self._total - start))
        if self._config.type == "cosine":
            return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done))
        return low + (1 - low) * (1 - done)
