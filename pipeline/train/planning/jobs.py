"""Jobs that follow one another until a run has made its steps."""

from __future__ import annotations

from math import ceil


def jobs_needed(seconds: float, job_seconds: float) -> int | None:
    """Jobs that some seconds of steps take; None if a job has no time for steps.

    Args:
        seconds: of steps.
        job_seconds: what a job has for steps.
    """
    return ceil(seconds / job_seconds) if job_seconds > 0 else None
