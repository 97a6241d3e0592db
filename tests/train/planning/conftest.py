from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.cli.main import main
from pipeline.train.distributed.process_group import destroy
from tests.config.runfile import write


@pytest.fixture(autouse=True)
def no_group() -> None:
    """Tests of a whole run may have come before."""
    destroy()


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return write(tmp_path)


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs the command; returns exit code, output and error output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("slurm.forecast.visible_gpus", lambda: 1)

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pipeline", "plan", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            main()
        assert isinstance(left.value.code, int)
        return (left.value.code, *capfd.readouterr())

    return run
