"""Times of jobs as people write them."""

from __future__ import annotations

import pytest

from pipeline.config.slurm import parse_minutes


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        *(("90", 90), ("90min", 90), ("12h", 720), ("2d", 2880), ("1.5h", 90), ("0.1h", 6), ("0.7d", 1008)),
        *(("90s", 2), ("60s", 1), ("1s", 1), ("1-12:00:00", 2160), ("12:00:00", 720), ("30:00", 30), ("1-6", 1800)),
    ],
)
def test_times_are_whole_minutes_rounded_up(text: str, minutes: int) -> None:
    assert parse_minutes(text) == minutes


@pytest.mark.parametrize("text", ["UNLIMITED", "infinite", "soon", "1.h", "-5", "1e3", ".5h"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a time"):
        parse_minutes(text)
