"""The folder of a sweep, and what is noted there of its runs; to look at one takes nothing but this."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.common import storage

SWEEP_FILE = "sweep.json"
"""In the folder of a sweep: its runs, what sets them apart, and their steps."""
SWEEPS = "sweeps"
"""In a run folder: the folders of its sweeps."""


def noted(folder: Path) -> dict[str, Any]:
    """Notes on each run of a sweep, by the name of its folder; {} if nothing was started.

    Raises:
        UserError: the file is damaged.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        file = folder / SWEEP_FILE
        return {
            storage.plain_name(name, file): run for name, run in storage.get_json(file, "members")["members"].items()
        }
    return {}


def runs_of(folder: Path) -> list[Path]:
    """The run folders of a sweep, those of which nothing is there yet included."""
    return [folder / name for name in noted(folder)]


def sweeps_of(run: Path) -> list[Path]:
    """The folders of the sweeps of a run."""
    return sorted(file.parent for file in (run / SWEEPS).glob(f"*/{SWEEP_FILE}"))
