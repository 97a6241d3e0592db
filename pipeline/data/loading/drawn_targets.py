"""Targets that a run has drawn from each of its sources."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pipeline.data.order.journal import Journal
from pipeline.data.order.permutation import IntArray
from pipeline.data.order.sampler import Sampler

_NOTED = 2**14
"""Steps that were read and not asked for, at most."""


class DrawnTargets:
    """Targets drawn from each source before a step: of windows in closed form, of packs counted step by step.

    What was counted is saved with the run, so that nothing is counted again when it resumes.

    Args:
        journal: The run's plan.
        sampler: Of that plan.
        targets: Counts a step of packs, by source.
    """

    def __init__(self, journal: Journal, sampler: Sampler, targets: Callable[[int], IntArray]) -> None:
        self._journal = journal
        self._sampler = sampler
        self._targets = targets
        self._noted: dict[int, IntArray] = {}
        self._step = 0
        self._drawn = np.zeros(len(journal.names), np.int64)
        """Before that step."""

    def note(self, step: int, drawn: dict[str, int]) -> None:
        """Note what a step draws, as it has been read."""
        self._noted[step] = np.array([drawn[name] for name in self._journal.names])
        self._noted.pop(step - _NOTED, None)

    def before(self, step: int) -> dict[str, int]:
        """Targets drawn by all steps before `step`, masked ones included."""
        segments = self._journal.segments
        if not any(segment.packed and segment.first_step < step for segment in segments):
            return self._sampler.slots(step)
        if step < self._step:
            self.load({})
        while self._step < step:
            number = self._journal.segment_number(self._step)
            if segments[number].packed:
                noted = self._noted.pop(self._step, None)
                self._drawn = self._drawn + (self._targets(self._step) if noted is None else noted)
                self._step += 1
                continue
            end = min(step, segments[number + 1].first_step) if number + 1 < len(segments) else step
            before, after = self._sampler.slots(self._step), self._sampler.slots(end)
            self._drawn = self._drawn + np.array([after[name] - before[name] for name in self._journal.names])
            self._step = end
        return dict(zip(self._journal.names, self._drawn.tolist(), strict=True))

    def state(self) -> dict[str, Any]:
        """For the checkpoint: what was counted, and before which step."""
        return {"step": self._step, "by_source": dict(zip(self._journal.names, self._drawn.tolist(), strict=True))}

    def load(self, state: dict[str, Any]) -> None:
        """Load the result of `state`; nothing to count from the beginning."""
        by_source = state.get("by_source", {})
        self._step = int(state.get("step", 0))
        self._drawn = np.array([int(by_source.get(name, 0)) for name in self._journal.names], np.int64)
