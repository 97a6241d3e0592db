"""Runs commands in the folder of what was kept."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.cli.main import main

Call = Callable[..., str]


@pytest.fixture
def call(root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """Runs the command line in this process, in the folder of what was kept; what it printed, and how it failed."""
    monkeypatch.chdir(root)

    def run(*words: str, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["pipeline", *words])
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capfd.readouterr()
        assert left.value.code == code, out + err
        return out if code == 0 else out + err

    return run
