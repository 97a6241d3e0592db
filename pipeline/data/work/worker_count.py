"""Number of worker processes."""

from __future__ import annotations

import os

from pipeline.config.root import Config


def worker_count(config: Config, jobs: int) -> int:
    """Number of worker processes for a number of jobs."""
    return min(config.data.preprocess.workers or len(os.sched_getaffinity(0)), jobs)
