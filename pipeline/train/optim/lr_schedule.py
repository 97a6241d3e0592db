"""Learning rate as a pure function of the tokens trained on. Nothing to save, nothing to restore."""

from __future__ import annotations

import math
from collections.abc import Callable

from pipeline.common.errors import UserError
from pipeline.config.base import Duration
from pipeline.config.train import ScheduleConfig


class Schedule:
    """Warm-up from zero to 1, then the configured shape down to `min_ratio`.

    Positions are target tokens at the *end* of a step: the first step already learns, and the last one has exactly
    `min_ratio`. Durations in steps become tokens through the run's plan, so they mean the run's own steps whatever the
    batch size and sequence length are there. `wsd` is from MiniCPM (2404.06395), with a linear decay.

    Args:
        config: `train.schedule`.
        duration: `train.duration`.
        steps: Steps of the run, which may end before its duration.
        tokens: Target tokens of the first N steps, like `Journal.tokens`.
        before: Tokens of the schedule that an earlier run has trained on, `train.init_from.tokens`.

    Raises:
        UserError: The run is shorter than warm-up and decay.
    """

    def __init__(
        self,
        config: ScheduleConfig,
        duration: Duration,
        steps: int,
        tokens: Callable[[int], int],
        before: int = 0,
    ) -> None:
        self._config, self.before = config, before
        self._total = tokens(steps)
        if duration.unit == "tokens":
            # The last step may go beyond it.
            self._total = min(self._total, duration.count)
        self._total += before
        self._warmup = tokens(config.warmup.count) if config.warmup.unit == "steps" else config.warmup.count
        self._decay = self._tokens_of_decay(config.decay, steps, tokens) if config.decay else 0
        if self._warmup + self._decay > self._total:
            earlier = f", {before:,} of them before it (train.init_from.tokens)" if before else ""
            raise UserError(
                f"train.schedule: {_last(config)} {self._warmup + self._decay:,} tokens, but the run has "
                f"{self._total:,} in {steps:,} steps (train.duration: {duration._text()}){earlier}; {_ADVICE}"
            )

    @staticmethod
    def _tokens_of_decay(decay: Duration, steps: int, tokens: Callable[[int], int]) -> int:
        if decay.unit == "tokens":
            return decay.count
        return tokens(steps) - tokens(steps - decay.count) if decay.count <= steps else tokens(decay.count)

    def factor(self, tokens: int) -> float:
        """Factor on the peak learning rate at the end of a step, `tokens` after the start of the run."""
        tokens += self.before
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


_ADVICE = "lower train.schedule.warmup or train.schedule.decay, or raise train.duration"


def refuse_short_duration(config: ScheduleConfig, duration: Duration) -> None:
    """Refuse what `Schedule` would, as far as it can be told without the data: lengths in the unit of the run's.

    Args:
        config: `train.schedule`.
        duration: `train.duration`.

    Raises:
        UserError: The run is shorter than warm-up and decay.
    """
    parts = [part.count for part in (config.warmup, config.decay) if part and part.unit == duration.unit]
    if sum(parts) > duration.count:
        raise UserError(
            f"train.schedule: {_last(config)} longer than the run (train.duration: {duration._text()}); {_ADVICE}"
        )


def _last(config: ScheduleConfig) -> str:
    """The lengths, as the beginning of a sentence on how long they last."""
    warmup = f"warmup {config.warmup._text()}"
    return f"{warmup} and decay {config.decay._text()} together last" if config.decay else f"{warmup} lasts"
