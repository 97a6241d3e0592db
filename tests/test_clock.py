"""Tests that move the clock move it for this project's code alone."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from pipeline.common import file_lock
from tests.clock import set_time


def test_the_clock_of_other_packages_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    before = time.monotonic()
    with monkeypatch.context() as patch:
        set_time(patch, monotonic=lambda: -1.0)
        clock = vars(file_lock)["time"]
        assert clock.monotonic() == -1.0 and clock.sleep is time.sleep
        assert time.monotonic() >= before
    assert vars(file_lock)["time"] is time


def test_no_test_replaces_a_function_of_time_itself() -> None:
    """Servers that tests share run in the same process, and their event loops count on the clock."""
    replaces = re.compile(r"""setattr\(\s*(?:[\w.]*\btime,|"(?:[\w.]+\.)?time\.)""")
    for file in Path(__file__).parent.rglob("*.py"):
        assert not replaces.search(file.read_text()), file
