"""Times of published runs over their plans, and the time of a run that follows from its plan."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from pipeline.common.format import duration
from pipeline.train.host.devices import Device

PUBLISHED = {
    "Llama 3 405B, 8,192 H100": 0.98,
    "Llama 3 405B, 16,384 H100": 0.93,
    "Llama 3 405B, 131,072 tokens": 1.13,
    "GPT 530B, 2,240 A100": 1.07,
    "Llama 3 8B, 8 H100": 1.38,
    "Llama 3 8B, 128 H100": 1.43,
    "Llama 3 8B, 64 H100, tp 8": 1.35,
    "Llama 3 70B, 256 H100, tp 8": 1.22,
    "GPT-2 124M, 8 A100": 1.71,
    "SmolLM3 3B, all 11.2T tokens": 1.24,
    "Llama 3 8B, all 15T tokens": 2.89,
}
"""Time that a run took, over that of its plan with assumed shares. docs/planning.md has both, and the sources."""
_TIMES = sorted(PUBLISHED.values())
TYPICAL = statistics.median(_TIMES)
LEAST, MOST = _TIMES[0], _TIMES[-2]
"""All but the slowest, which counts more than steps."""


@dataclass(frozen=True)
class TimeRange:
    """Time of the steps of a run, in seconds: the likely one, and bounds."""

    seconds: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{duration(self.seconds)} of steps ({duration(self.least)} to {duration(self.most)})"


def expected(planned: float, device: Device) -> TimeRange:
    """Time of steps that are planned to take `planned` seconds.

    On a device whose shares were measured, that is the likely time; on others, runs took longer.
    """
    typical = 1.0 if device.measured is not None else TYPICAL
    return TimeRange(planned * typical, planned * LEAST, planned * MOST)
