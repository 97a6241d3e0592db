"""The end of a training, as its job reads it."""

from __future__ import annotations

import io
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.console import Console
from pipeline.data import store
from slurm.link import Ending, Link


def noted(run: Path, reason: str) -> None:
    end = {"attempt": 1, "code": 79, "reason": reason, "agreed": True, "step": 3}
    store.put_json(run / "exit.json", end)


@pytest.mark.parametrize("cached", [False, True])
def test_the_end_of_a_launch_is_told_from_that_of_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    """Also where a file system of the network answers `stat` from memory, and times are coarse."""
    monkeypatch.setenv("SUBMITIT_LOCAL_JOB_ID", "7")
    submission: Any = SimpleNamespace(run=tmp_path, stage="train", where="local", every_checkpoint=False)
    link = Link(submission, 1, Console(file=io.StringIO()))
    file = tmp_path / "exit.json"
    assert link._exit_state(link._exit_file()) is None
    noted(tmp_path, "before")
    before, stat = link._exit_file(), file.stat()
    assert link._exit_state(before) is None
    if cached:
        noted(tmp_path, "new")
        monkeypatch.setattr(Path, "stat", lambda self, **keys: stat)
    else:
        file.write_bytes(file.read_bytes().replace(b"before", b"behind"))
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert link._exit_state(before) == Ending(79, "new" if cached else "behind", agreed=True)
