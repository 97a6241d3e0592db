"""Time between the stop signal and the end of a job's time limit."""

from __future__ import annotations

import math
import statistics
from itertools import islice

from pipeline.common.run_files import RunFiles
from pipeline.config import Config

_ROWS = 2_000
"""Newest rows of the metrics from which the time for a save is estimated."""
_UNMEASURED, _LEAST = 120, 60
"""Seconds where nothing was measured, and at least."""


def signal_seconds(config: Config, minutes: int) -> int:
    """Seconds before the end of its time at which a job is told, enough for the step that runs and a save.

    Those of `launch.stop_before_end_seconds`, but never more than half of the time, which training needs more than
    twice of anyway. Without the key, twice what a step and a save have taken in this run so far, at least a minute and
    at most a quarter of the time.

    Args:
        config: of the run.
        minutes: the job's time.
    """
    given = config.launch.stop_before_end_seconds
    if given is not None:
        return min(max(1, math.ceil(given)), minutes * 60 // 2)
    steps, saves = [], [0.0]
    for row in islice(RunFiles(config.run.dir).newest_rows(), _ROWS):
        steps += [float(row["step_seconds"])] if "step_seconds" in row else []
        saves += [float(row["save_seconds"])] if "save_seconds" in row else []
    # Not the longest step: the first one of an attempt may have compiled for minutes.
    needed = 2 * (statistics.median(steps) + max(saves)) if steps else float(_UNMEASURED)
    return min(max(_LEAST, math.ceil(needed)), minutes * 60 // 4)
