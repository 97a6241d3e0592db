"""Times for people."""

import pytest

from pipeline.common.format import duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0 s"),
        (0.25, "0.25 s"),
        (59.9, "60 s"),
        (91, "2 min"),
        (3500, "58 min"),
        (7500, "2 h 05 min"),
        (370800, "4 d 7 h"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text
